"""Measuring the restore modes (see `modes`) on a few real VMs, once for a golden, medium and kernel."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from greenroom.errors import RuntimeFailure
from greenroom.runtime import modes
from greenroom.runtime.golden import Loaded
from greenroom.runtime.vm import QemuVm

_log = logging.getLogger(__name__)
_MEASURED = 3
"""VMs of each restore mode that count when the modes are measured."""
Make = Callable[[Loaded], Awaitable[QemuVm]]


async def choose_mode(
    loaded: Loaded, wanted: Literal["auto", "cow", "copy"], cache: Path, make: Make
) -> None:
    """Settle how VMs of this golden get their RAM; `make` gives a QEMU that waits for its state."""
    measured = None
    if wanted == "auto":
        memory_file = cache / "restore-modes.json"
        what = modes.key(loaded.golden.digest, cache)
        measured = modes.remembered(memory_file, what)
        if measured is None:
            try:
                costs = {mode: await _cost(loaded, mode, make) for mode in modes.MODES}
            except (RuntimeFailure, OSError) as error:
                _log.warning("the restore modes could not be measured: %s", error)
            else:
                measured = modes.Measured(**costs)
                await asyncio.to_thread(modes.remember, memory_file, what, measured)
    loaded.mode = modes.choose(wanted, measured)
    _log.info("VMs of %s get their RAM by %s: %s", loaded.golden.digest, loaded.mode.mode, loaded.mode.reason)


async def _cost(loaded: Loaded, mode: modes.Mode, make: Make) -> modes.Cost:
    """Restore a few VMs by `mode`, one after the other; the first brings files into memory and does not count."""
    loaded.mode = modes.Choice(mode=mode, reason="it is being measured")
    vms: list[QemuVm] = []
    spans: list[float] = []
    held: list[int] = []
    try:
        for _ in range(_MEASURED + 1):
            began = time.perf_counter()
            vm = await make(loaded)
            vms.append(vm)
            await vm.load()
            spans.append((time.perf_counter() - began) * 1000)
            # A file of the VM's own is its alone, also where nothing maps it.
            held.append(_private_bytes(vm.pid) + (loaded.golden.ram_bytes if mode == "copy" else 0))
    finally:
        await asyncio.gather(*(vm.destroy() for vm in vms))
    return modes.Cost(ms=statistics.median(spans[1:]), mib=statistics.median(held[1:]) / (1 << 20))


def _private_bytes(pid: int | None) -> int:
    """Bytes that only this process maps (smaps_rollup, proc(5)); anonymous ones, so a mapped file counts elsewhere."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    fields = {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}
    return int(fields["Anonymous"].split()[0]) * 1024
