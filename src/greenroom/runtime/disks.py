"""The layers of a running VM's disk: a new empty one on top freezes those below (QMP, QEMU 7.2).

What QEMU has open is the truth, not a note of ours: node `disk<n>` over node `file<n>` over descriptor set `<n>`,
the highest on top, as `command.qemu` begins it. So a VM that was adopted from a dead node is read like any other,
and each layer's file is found below `/proc/PID/fd`, even when its name is gone.

A frozen layer is to be no VM's to write any more, also not the one's that wrote it: QEMU reopens it read-only and
gives the writable descriptor up (`retire`), and `writable` looks from outside whether it did.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from greenroom.errors import RuntimeFailure
from greenroom.runtime.command import GOLDEN_DISKS
from greenroom.runtime.vm import QemuVm

LAYERS_MAX = 8
"""Layers above the golden's disk with which a capture begins; of more, `flatten` makes one first."""
STATES = 1 << 20
"""Descriptor sets from this number on are for saved states; a paused QEMU keeps them although they were removed."""
_NODE = re.compile(r"disk([0-9]+)")
_JOB = "flatten"


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a VM's layers above its golden's disk, the lowest first, and QEMU's descriptor of each."""

    layers: tuple[int, ...]
    fds: dict[int, int]
    strays: tuple[int, ...] = ()
    """Numbers of nodes that are no part of the disk: a capture that was broken off had added them."""
    free: int = 0
    """A number that no node and no set has."""

    @property
    def top(self) -> int:
        return self.layers[-1]


def read(blocks: Any, nodes: Any, fdsets: Any) -> Chain:
    """The chain from the answers of `query-block`, `query-named-block-nodes` and `query-fdsets`; pure.

    Raises RuntimeFailure when the VM's disk is not one of ours.
    """
    tops = [name for block in blocks if (name := block.get("inserted", {}).get("node-name"))]
    top = _NODE.fullmatch(tops[0]) if len(tops) == 1 else None
    if top is None:
        raise RuntimeFailure("the VM's disk is not made of layers that Greenroom put there")
    number = int(top[1])
    numbers = sorted(int(match[1]) for node in nodes if (match := _NODE.fullmatch(node["node-name"])))
    sets = {entry["fdset-id"]: [each["fd"] for each in entry["fds"]] for entry in fdsets}
    layers = tuple(each for each in numbers if GOLDEN_DISKS < each <= number)
    if missing := [each for each in layers if not sets.get(each)]:
        raise RuntimeFailure(f"the descriptors of the VM's disk layers {missing} are gone")
    return Chain(
        layers=layers,
        fds={each: sets[each][0] for each in layers},
        strays=tuple(each for each in numbers if each > number),
        free=max([*numbers, *(each for each in sets if each < STATES), number]) + 1,
    )


async def chain(vm: QemuVm) -> Chain:
    """The layers that the VM's disk has now."""
    blocks = await vm.execute("query-block")
    nodes = await vm.execute("query-named-block-nodes", {"flat": True})
    return read(blocks, nodes, await vm.execute("query-fdsets"))


def name_of(number: int) -> str:
    """The file of a layer that was put on top later; the first one is `overlay.qcow2`."""
    return f"overlay-{number}.qcow2"


async def add(vm: QemuVm, number: int, blank: Path) -> None:
    """Give QEMU a new empty layer, which is no part of the disk until `freeze`."""
    path = vm.directory / name_of(number)
    fd = await asyncio.to_thread(_make, blank, path)
    try:
        await vm.give_to_set(number, fd)
    finally:
        os.close(fd)
    await vm.execute("blockdev-add", _file(number, read_only=False))
    await vm.execute(
        "blockdev-add",
        {"driver": "qcow2", "node-name": f"disk{number}", "file": f"file{number}", "backing": None},
    )


def _make(blank: Path, path: Path) -> int:
    shutil.copyfile(blank, path)
    path.chmod(0o600)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _file(number: int, *, read_only: bool) -> dict[str, Any]:
    return {
        "driver": "file",
        "node-name": f"file{number}",
        "filename": f"/dev/fdset/{number}",
        "locking": "off",
        "read-only": read_only,
        "auto-read-only": False,
        "cache": {"direct": False},
    }


async def freeze(vm: QemuVm, top: int, number: int) -> None:
    """Put the layer that was added on top of the disk: from here on nothing is written to `top`."""
    await vm.execute("blockdev-snapshot", {"node": f"disk{top}", "overlay": f"disk{number}"})


async def retire(vm: QemuVm, number: int, below: int) -> None:
    """Let QEMU go on with a frozen layer by a read-only descriptor alone."""
    before = {
        fd for entry in await vm.execute("query-fdsets") if entry["fdset-id"] == number for fd in _fds(entry)
    }
    fd = os.open(f"/proc/{vm.pid}/fd/{min(before)}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        await vm.give_to_set(number, fd)
    finally:
        os.close(fd)
    node = {"driver": "qcow2", "node-name": f"disk{number}", "file": f"file{number}", "read-only": True}
    await vm.execute("blockdev-reopen", {"options": [{**node, "backing": f"disk{below}"}]})
    await vm.execute("blockdev-reopen", {"options": [_file(number, read_only=True)]})
    for old in before:
        await vm.execute("remove-fd", {"fdset-id": number, "fd": old})


def _fds(entry: Any) -> list[int]:
    return [each["fd"] for each in entry["fds"]]


def writable(pid: int, file: os.stat_result) -> bool:
    """Whether a process holds the file in a way that would let it be written."""
    inode = (file.st_dev, file.st_ino)
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found = os.stat(f"/proc/{pid}/fd/{entry}")
            if (found.st_dev, found.st_ino) != inode:
                continue
            info = Path(f"/proc/{pid}/fdinfo/{entry}").read_text(encoding="ascii")
        except FileNotFoundError:  # closed meanwhile
            continue
        flags = int(info.partition("flags:")[2].split()[0], 8)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            return True
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    return any(
        line.split()[4] == str(file.st_ino) and line.split()[1][3] == "s" for line in maps.splitlines()
    )


async def drop(vm: QemuVm, number: int) -> None:
    """Remove a layer that is no part of the disk (any more) from QEMU and, if it was the VM's own, from the host."""
    names = {node["node-name"] for node in await vm.execute("query-named-block-nodes", {"flat": True})}
    for node in (f"disk{number}", f"file{number}"):
        if node in names:
            await vm.execute("blockdev-del", {"node-name": node})
    if any(entry["fdset-id"] == number for entry in await vm.execute("query-fdsets")):
        await vm.execute("remove-fd", {"fdset-id": number})
    (vm.directory / name_of(number)).unlink(missing_ok=True)


async def flatten(vm: QemuVm, present: Chain, deadline: float) -> None:
    """Copy what the layers below the top hold into the top, and do without them from then on; the guest runs on.

    Raises RuntimeFailure when the host's disk has no room for it or it takes longer than `deadline` seconds; the
    disk is then as it was.
    """
    await vm.execute(
        "block-stream",
        {
            "job-id": _JOB,
            "device": f"disk{present.top}",
            "base-node": f"disk{GOLDEN_DISKS}",
            "auto-dismiss": False,
        },
    )
    end = asyncio.get_running_loop().time() + deadline
    pause = 0.005
    while True:
        jobs = [job for job in await vm.execute("query-jobs") if job["id"] == _JOB]
        if jobs and jobs[0]["status"] == "concluded":
            break
        if asyncio.get_running_loop().time() > end:
            await vm.execute("job-cancel", {"id": _JOB})
            end += deadline
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.2)
    await vm.execute("job-dismiss", {"id": _JOB})
    if error := jobs[0].get("error"):
        raise RuntimeFailure(f"the layers of the VM's disk could not be made one: {error}", retry_after=5)
    for number in reversed(present.layers[:-1]):
        await drop(vm, number)
    await asyncio.to_thread(_tidy, vm.directory, vm.pid)


def _tidy(directory: Path, pid: int | None) -> None:
    """Remove the files of layers that QEMU has given up."""
    held = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found = os.stat(f"/proc/{pid}/fd/{entry}")
        except FileNotFoundError:
            continue
        held.add((found.st_dev, found.st_ino))
    for path in directory.glob("overlay*.qcow2"):
        file = path.stat()
        if (file.st_dev, file.st_ino) not in held:
            path.unlink()


def adopt_layers(directory: Path, layers: Sequence[int]) -> None:
    """Give the layers of a snapshot a name among the VM's own files too: the snapshot may be deleted before the VM.

    They can be linked into another snapshot then, and are counted as the VM's once they are only its.
    """
    for place, fd in enumerate(layers, start=1):
        link(f"/proc/self/fd/{fd}", directory / f"overlay-below-{place}.qcow2")


def link(source: str, target: Path) -> bool:
    """Hard-link the open file behind a link of /proc; False where that cannot be and it must be copied.

    So it is on another file system, or when its last name is gone.
    """
    here = os.open(target.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # By a directory's descriptor, since only linkat(2) can follow a link of /proc to the file itself.
        os.link(source, target.name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=True)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.ENOENT, errno.EMLINK, errno.EPERM):
            return False
        raise
    finally:
        os.close(here)
    return True


def own_bytes(directory: Path) -> int:
    """Bytes on the host's disk that removing the VM would free; a layer that a snapshot shares is not among them."""
    files = [path.stat() for path in directory.glob("overlay*.qcow2")]
    return sum(file.st_blocks * 512 for file in files if file.st_nlink == 1)
