"""The base image: root file system + kernel + agent, as a disk that VMs read and none may write.

`ensure` returns it, building what is missing. Three cached parts, so that a change of the agent does not
fetch Debian again: `rootfs-<hash>`, `kernel-<hash>` and `image-<hash>`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec

from greenroom.errors import SetupError
from greenroom.images import kernel, rootfs
from greenroom.images.cache import Progress, publish, silent
from greenroom.images.commands import run

RECIPE = "1"
"""Raised when the recipe changes in a way that its inputs, hashed below, do not show."""
DISK_MIB = 4096
"""Size of the guest's root file system; the file is sparse."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A bootable image. `digest` names its content; the paths lie in the cache and are read-only."""

    digest: str
    disk: str
    disk_mib: int
    kernel: str
    initramfs: str
    kernel_version: str


def _hash(*parts: bytes | str) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:20]


def _guest_files() -> list[tuple[str, bytes, int]]:
    """(path in the guest, content, mode) of everything of ours in the image."""
    own = resources.files("greenroom.images").joinpath("files")
    files = [
        ("etc/inittab", own.joinpath("inittab").read_bytes(), 0o644),
        ("usr/lib/greenroom/setup", own.joinpath("setup").read_bytes(), 0o755),
        ("usr/lib/greenroom/start-agent", own.joinpath("start-agent").read_bytes(), 0o755),
        ("etc/hostname", b"greenroom\n", 0o644),
        ("etc/hosts", b"127.0.0.1 localhost\n127.0.1.1 greenroom\n", 0o644),
        # Its gateway, where the node answers; questions to any other server end there, too.
        ("etc/resolv.conf", b"nameserver 10.0.2.2\n", 0o644),
    ]
    agent = resources.files("greenroom.guest")
    sources = sorted(
        (entry for entry in agent.iterdir() if entry.name.endswith(".py")), key=lambda item: item.name
    )
    return files + [(f"usr/lib/greenroom/agent/{entry.name}", entry.read_bytes(), 0o644) for entry in sources]


def _manifest(files: Iterable[tuple[str, bytes, int]]) -> str:
    return _hash(*(part for path, data, mode in files for part in (path, data, oct(mode))))


def boot_files(cache: Path, progress: Progress = silent) -> Path:
    """The directory with `vmlinuz` and `initramfs`; enough for the probe boot."""
    root = _rootfs(cache, progress)
    script = resources.files("greenroom.images").joinpath("files/initramfs-init").read_bytes()
    key = _hash(RECIPE, kernel.META_PACKAGE, *kernel.MODULES, script)
    busybox = root / "root/bin/busybox"
    # The golden's QEMU opens kernel and initramfs by name, as an ordinary user.
    return publish(
        cache / f"kernel-{key}", lambda target: kernel.build(target, busybox, progress), progress, mode=0o755
    )


def _rootfs(cache: Path, progress: Progress) -> Path:
    key = _hash(RECIPE, rootfs.SUITE, *rootfs.PACKAGES)
    # It holds setuid programs and directories that all may write: nobody else may enter.
    return publish(
        cache / f"rootfs-{key}", lambda target: rootfs.build(target, progress), progress, checked=False
    )


def ensure(cache: Path, progress: Progress = silent) -> Image:
    """The base image, built when it is not in `cache` yet (about a minute, needs root and Debian's packages).

    Raises SetupError when a tool or package cannot be had.
    """
    cache.mkdir(parents=True, exist_ok=True)
    root = _rootfs(cache, progress)
    boot = boot_files(cache, progress)
    files = _guest_files()
    key = _hash(RECIPE, root.name, boot.name, str(DISK_MIB), _manifest(files))

    def build(target: Path) -> None:
        progress("making the guest's disk", None)
        tree = target / "tree"
        # cp keeps owners, modes, links and extended attributes, which shutil.copytree does not.
        run(["cp", "-a", "--reflink=auto", str(root / "root"), str(tree)], deadline=300)
        for path, data, mode in files:
            place = tree / path
            if place.is_symlink():
                place.unlink()
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            place.chmod(mode)
        # Bytecode for the agent, so that no clone compiles it under emulation.
        run(
            ["chroot", str(tree), "python3", "-m", "compileall", "-q", "/usr/lib/greenroom/agent"],
            deadline=120,
        )
        disk = target / "disk.raw"
        run(
            ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1,root_owner=0:0",
             "-m", "0", "-L", "greenroom", "-d", str(tree), str(disk), f"{DISK_MIB}M"],
            deadline=300,
        )  # fmt: skip
        shutil.rmtree(tree)
        disk.chmod(0o444)

    image = publish(cache / f"image-{key}", build, progress)
    if not (image / "disk.raw").is_file():
        raise SetupError(f"{image} is damaged; remove that directory and try again")
    return Image(
        digest=key,
        disk=str(image / "disk.raw"),
        disk_mib=DISK_MIB,
        kernel=str(boot / "vmlinuz"),
        initramfs=str(boot / "initramfs"),
        kernel_version=(boot / "version").read_text(encoding="utf-8").strip(),
    )
