"""The guest's root file system: Debian, made by mmdebstrap, with what E2B's users expect to find.

bash, python3 (also as `python`), pip, curl, git, procps, sudo without a password for the user `user`. The
guest has no service manager: busybox is init, it reaps orphans and restarts the agent.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from greenroom.images.cache import Progress
from greenroom.images.commands import follow

SUITE = "bookworm"
PACKAGES = (
    "bash", "busybox-static", "ca-certificates", "curl", "file", "git", "iproute2", "less", "login", "ncurses-bin",
    "netbase", "passwd", "procps", "python-is-python3", "python3", "python3-pip", "python3-venv", "sudo", "tzdata",
    "unzip", "xz-utils",
)  # fmt: skip
_UNWANTED = ("man", "doc", "doc-base", "info", "lintian", "locale")
_DEFAULT_MIRROR = "http://deb.debian.org/debian"


def mirror(root: Path = Path("/etc/apt")) -> str:
    """The Debian mirror this machine already uses (it may be the only one in reach), else Debian's own."""
    files = [root / "sources.list", *sorted((root / "sources.list.d").glob("*"))]
    for path in files:
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            match = re.match(r"\s*(?:deb\s+(?:\[[^]]*\]\s+)?|URIs:\s*)(https?://\S+?)/?(?:\s|$)", line)
            if match and match[1].endswith("/debian"):
                return match[1]
    return _DEFAULT_MIRROR


def build(target: Path, progress: Progress) -> None:
    """Fill `target/root` with the file system. Takes about half a minute and 250 MB."""
    root = target / "root"
    stages = 0

    def on_line(line: str) -> None:
        nonlocal stages
        if line.startswith("I: "):
            stages += 1
            # mmdebstrap tells about a dozen stages; the fraction is for the eye, not for arithmetic.
            progress("building the guest's root file system", min(0.95, stages / 14))

    hooks = (
        'chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 user',
        'printf "user ALL=(ALL:ALL) NOPASSWD: ALL\\n" > "$1/etc/sudoers.d/user"; chmod 0440 "$1/etc/sudoers.d/user"',
        # The agent gives each sandbox its own; the golden must have none that could be shared.
        ': > "$1/etc/machine-id"; rm -f "$1/var/lib/dbus/machine-id"',
        'rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/var/log/*',
        'ln -sf /bin/busybox "$1/sbin/init"',
    )
    with tempfile.TemporaryDirectory(prefix="greenroom-mmdebstrap-") as scratch:
        Path(scratch).chmod(0o755)
        follow(
            [
                "mmdebstrap",
                "--variant=minbase",
                '--aptopt=Acquire::Languages "none"',
                *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _UNWANTED),
                f"--include={','.join(PACKAGES)}",
                *(f"--customize-hook={hook}" for hook in hooks),
                SUITE,
                str(root),
                mirror(),
            ],
            on_line,
            deadline=900,
        )
