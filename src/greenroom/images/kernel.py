"""The guest's kernel: Debian's cloud kernel, fetched and unpacked without installing it on the host.

virtio is modular in it, so an initramfs loads the modules in dependency order, mounts the disk and hands
over to the root file system's init. The same initramfs answers the KVM probe (`greenroom.probe`).
"""

from __future__ import annotations

import os
import re
import shutil
from importlib import resources
from pathlib import Path

from greenroom.errors import SetupError
from greenroom.images.cache import Progress
from greenroom.images.commands import run

META_PACKAGE = "linux-image-cloud-amd64"
MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "virtio_console", "overlay")
"""Modules that the guest needs; what they depend on is found by `modprobe --show-depends`."""


def build(target: Path, busybox: Path, progress: Progress) -> None:
    """Put `vmlinuz`, `initramfs` and `version` into `target`; `busybox` is a static one for the initramfs."""
    progress("fetching the guest kernel", None)
    package = _kernel_package()
    download = target / "download"
    download.mkdir()
    # apt drops privileges to _apt for downloads and warns when it cannot write here; the warning is harmless.
    run(["apt-get", "download", "-q", package], cwd=download, deadline=600)
    archives = list(download.glob("*.deb"))
    if len(archives) != 1:
        raise SetupError(f"apt-get download {package} left {len(archives)} files instead of one")
    unpacked = target / "unpacked"
    run(["dpkg-deb", "-x", str(archives[0]), str(unpacked)], deadline=300)
    kernels = list((unpacked / "boot").glob("vmlinuz-*"))
    if len(kernels) != 1:
        raise SetupError(f"{package} holds {len(kernels)} kernels instead of one")
    version = kernels[0].name.removeprefix("vmlinuz-")
    progress("building the initramfs", None)
    shutil.copyfile(kernels[0], target / "vmlinuz")
    _initramfs(target, unpacked, version, busybox)
    (target / "version").write_text(version + "\n", encoding="utf-8")
    shutil.rmtree(download)
    shutil.rmtree(unpacked)


def _kernel_package() -> str:
    """The real package behind the meta package, for example `linux-image-6.1.0-44-cloud-amd64`."""
    text = run(["apt-cache", "depends", META_PACKAGE], deadline=60)
    match = re.search(r"Depends: (linux-image-[0-9]\S+)", text)
    if match is None:
        raise SetupError(
            f"apt knows no {META_PACKAGE}; run `apt-get update` on Debian 12 (amd64) and try again"
        )
    return match[1]


def _initramfs(target: Path, unpacked: Path, version: str, busybox: Path) -> None:
    tree = target / "tree"
    for name in ("bin", "dev", "proc", "sys", "newroot", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copyfile(busybox, tree / "bin/busybox")
    (tree / "bin/busybox").chmod(0o755)
    for number, module in enumerate(_in_order(unpacked, version)):
        shutil.copyfile(module, tree / "modules" / f"{number:02d}-{module.name}")
    script = resources.files("greenroom.images").joinpath("files/initramfs-init").read_bytes()
    (tree / "init").write_bytes(script)
    (tree / "init").chmod(0o755)
    names = sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))
    archive = run_binary(
        ["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"], "\n".join([".", *names]).encode(), tree
    )
    (target / "initramfs").write_bytes(archive)
    shutil.rmtree(tree)


def run_binary(argv: list[str], stdin: bytes, cwd: Path) -> bytes:
    """`commands.run` for a tool whose output is not text."""
    output = cwd.parent / f".{argv[0]}.out"
    argv = [*argv, "-O", str(output)]
    run(argv, cwd=cwd, stdin=stdin, deadline=120)
    data = output.read_bytes()
    output.unlink()
    return data


def _in_order(unpacked: Path, version: str) -> list[Path]:
    """Module files in an order in which each finds what it depends on already loaded."""
    run(["depmod", "-b", str(unpacked), version], deadline=120)
    ordered: list[Path] = []
    for name in MODULES:
        listing = run(["modprobe", "-d", str(unpacked), "-S", version, "--show-depends", name], deadline=60)
        for line in listing.splitlines():
            kind, _, path = line.strip().partition(" ")
            if kind == "insmod":
                module = Path(os.path.normpath(path.strip()))
                if module not in ordered:
                    ordered.append(module)
    return ordered
