"""Which paths lie on a network file system: there inotify hears only of changes made on this machine.

Below ``watching``. Reading the mount table is apart from understanding it.
"""

from __future__ import annotations

import re
from pathlib import Path

_NETWORK = frozenset(
    {
        *("9p", "afs", "ceph", "cifs", "coda", "fuse", "fuseblk", "glusterfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "smb3", "smbfs", "virtiofs"),
    }
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


def network_type(path: str, table: str | None = None) -> str | None:
    """The file system's type if the real ``path`` lies on a network (or FUSE) mount, else None.

    ``table`` is the text of ``/proc/self/mountinfo`` (proc(5)), read when it is not given.
    """
    if table is None:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    best, found = -1, ""
    for line in table.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts at one point the later one is on top.
        if inside and len(point) >= best:
            best, found = len(point), rest[0]
    return found if found in _NETWORK or found.startswith("fuse.") else None
