"""``GET /metrics``: how loaded the guest is, from ``/proc`` and the root file system, when asked."""

from __future__ import annotations

import os
import time
from typing import Any

_MIB = 1024 * 1024


class Metrics:
    """Takes a reading; the processor share is over the time since the reading before (or the start)."""

    def __init__(self) -> None:
        self._busy, self._total = _cpu_ticks()

    def read(self) -> dict[str, Any]:
        """The fields of the contract: bytes, percent of all processors together, Unix seconds."""
        busy, total = _cpu_ticks()
        elapsed = total - self._total
        share = 100.0 * (busy - self._busy) / elapsed if elapsed > 0 else 0.0
        self._busy, self._total = busy, total
        memory = _memory()
        memory_total = memory.get("MemTotal", 0)
        memory_used = max(0, memory_total - memory.get("MemAvailable", memory.get("MemFree", 0)))
        disk = os.statvfs("/")
        return {
            "ts": int(time.time()),
            "cpu_count": os.cpu_count() or 1,
            "cpu_used_pct": round(min(max(share, 0.0), 100.0), 2),
            "mem_total": memory_total,
            "mem_used": memory_used,
            "mem_cache": memory.get("Cached", 0) + memory.get("SReclaimable", 0),
            "mem_total_mib": memory_total // _MIB,
            "mem_used_mib": memory_used // _MIB,
            "disk_used": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "disk_total": disk.f_blocks * disk.f_frsize,
        }


def _cpu_ticks() -> tuple[int, int]:
    """Busy and all ticks of all processors since boot (proc(5), first line of /proc/stat)."""
    with open("/proc/stat", "rb", buffering=0) as file:
        fields = [int(field) for field in file.read(512).split(b"\n", 1)[0].split()[1:9]]
    idle = fields[3] + (fields[4] if len(fields) > 4 else 0)
    return sum(fields) - idle, sum(fields)


def _memory() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found: dict[str, int] = {}
    with open("/proc/meminfo", "rb", buffering=0) as file:
        for line in file.read(8192).decode("ascii").splitlines():
            name, _, rest = line.partition(":")
            fields = rest.split()
            if fields and fields[0].isdigit():
                found[name] = int(fields[0]) * 1024
    return found
