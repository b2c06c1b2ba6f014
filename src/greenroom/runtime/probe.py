"""Is KVM usable here? Only a boot tells: `/dev/kvm` can open, make a VM and still never run a stock kernel.

The probe boots the guest kernel with an initramfs that says one line and powers off, with a deadline. The
verdict is remembered per QEMU version and kernel of the host, because neither changes while it is up.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import subprocess
from pathlib import Path

import msgspec

from greenroom.errors import SetupError
from greenroom.images.commands import find, run

_log = logging.getLogger(__name__)
BINARY = "qemu-system-x86_64"
_WORD = b"GREENROOM-PROBE-OK"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Which accelerator to use, and why."""

    accelerator: str
    reason: str
    asked_of: str = ""
    """Host kernel and QEMU version the verdict holds for."""


def qemu_version() -> str:
    """For example `7.2.22`. Raises SetupError when QEMU is not installed."""
    first = run([BINARY, "--version"], deadline=20).splitlines()[0]
    return first.split("version ", 1)[-1].split(" ", 1)[0]


def choose(wanted: str, boot_files: Path, deadline: float, memory: Path) -> Verdict:
    """The accelerator for `wanted` (`auto`, `kvm` or `tcg`). Blocks up to `deadline` seconds.

    `memory` is a file in which an `auto` verdict is remembered. Raises SetupError when `kvm` was demanded and
    the probe fails.
    """
    if wanted == "tcg":
        return Verdict(accelerator="tcg", reason="TCG was asked for")
    asked_of = f"{platform.release()} qemu-{qemu_version()}"
    try:
        remembered = msgspec.json.decode(memory.read_bytes(), type=Verdict)
        if wanted == "auto" and remembered.asked_of == asked_of:
            return remembered
    except (OSError, msgspec.DecodeError):
        pass
    failure = boots_on_kvm(boot_files, deadline)
    if failure is None:
        verdict = Verdict(accelerator="kvm", reason="a probe VM booted on KVM", asked_of=asked_of)
    elif wanted == "kvm":
        raise SetupError(f"KVM was asked for but is not usable: {failure}")
    else:
        verdict = Verdict(accelerator="tcg", reason=f"KVM is not usable: {failure}", asked_of=asked_of)
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_bytes(msgspec.json.encode(verdict))
    return verdict


def boots_on_kvm(boot_files: Path, deadline: float) -> str | None:
    """None when a VM boots on KVM, else the reason why not, in plain words."""
    if not os.path.exists("/dev/kvm"):
        return "there is no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm may not be opened by this user"
    argv = [
        find(BINARY), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-machine", "pc,accel=kvm", "-cpu", "host", "-m", "128M", "-serial", "stdio",
        "-kernel", str(boot_files / "vmlinuz"), "-initrd", str(boot_files / "initramfs"),
        "-append", "console=ttyS0 quiet greenroom.probe panic=1",
    ]  # fmt: skip
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"the device opens, but a stock kernel did not boot on it within {deadline:.0f} s"
    if _WORD in output:
        return None
    words = errors.decode(errors="replace").strip().splitlines()
    _log.info("the probe boot on KVM said: %s", words[-1] if words else "nothing")
    if process.returncode < 0:
        return f"the device opens, but QEMU dies on it ({signal.Signals(-process.returncode).name})"
    return f"QEMU ended with status {process.returncode} on it"
