#!/usr/bin/env python3
"""Does a slow medium cost a fill more than one sequential read of the golden, and does it hold up others?

The golden is copied to a file system on a loop device whose reads are throttled (blkio controller of cgroup v1).
With a cold page cache, 20 VMs are filled from it: from loading the golden until the last VM is paused. The same
from an unthrottled device is the fast medium; restores of a golden that is loaded already run beside the slow one.

    .venv/bin/python bench/slow_medium.py [--count 20] [--mib-per-second 20] [--json]

Needs root, losetup, mkfs.ext4 and cgroup v1's blkio. What it makes is removed at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from greenroom.bench.stages import StagedRuntime
from greenroom.config import Config, RoleSpec, VmConfig, default_cache_dir
from greenroom.master.catalogue import BASE, BASE_SIZE
from greenroom.runtime.engine import Golden, Vm

BLKIO = Path("/sys/fs/cgroup/blkio")
SECTOR = 512
SLACK_MIB = 64


def quiet(_step: str, _done: float | None) -> None:
    """Tells nobody."""


def engine(directory: Path, name: str, cache: Path) -> StagedRuntime:
    """An engine without a stock and without measuring modes, which would be part of the time."""
    vm = VmConfig(stock_slots=0, stock_waiting=0, restore_mode="cow")
    return StagedRuntime(
        RoleSpec(
            role="node",
            replica=0,
            state_dir=str(directory / name),
            cache_dir=str(cache),
            config=Config(vm=vm),
        )
    )


@contextlib.contextmanager
def medium(directory: Path, golden: Path, cache: Path) -> Iterator[tuple[Path, str]]:
    """A cache whose golden lies on a loop device; yields it and the device's name."""
    used = sum(part.stat().st_blocks * SECTOR for part in golden.iterdir()) >> 20
    image, place, other = directory / "medium.img", directory / "medium", directory / "cache"
    with open(image, "wb") as file:
        file.truncate((used + SLACK_MIB) << 20)
    place.mkdir()
    other.mkdir()
    run("mkfs.ext4", "-q", "-F", str(image))
    device = run("losetup", "--find", "--show", str(image))
    try:
        run("mount", device, str(place))
        try:
            run("cp", "-a", "--sparse=always", str(golden), str(place))
            for entry in cache.iterdir():
                if not entry.name.startswith("."):
                    target = place / golden.name if entry.name == golden.name else entry
                    (other / entry.name).symlink_to(target)
            yield other, device
        finally:
            run("umount", str(place))
    finally:
        run("losetup", "--detach", device)


@contextlib.contextmanager
def throttled(device: str, mib_per_second: int) -> Iterator[None]:
    """This process reads from `device` no faster than that."""
    number = os.stat(device).st_rdev
    group = BLKIO / f"greenroom-bench-{os.getpid()}"
    before = next(
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        if line.split(":")[1] == "blkio"
    )
    group.mkdir()
    try:
        limit = f"{os.major(number)}:{os.minor(number)} {mib_per_second << 20}"
        (group / "blkio.throttle.read_bps_device").write_text(limit, encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        (BLKIO / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()


def run(*command: str) -> str:
    """Output of a command; raises when it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def bytes_read(device: str) -> int:
    """Bytes that came off the device since it was attached."""
    fields = Path(f"/sys/block/{Path(device).name}/stat").read_text(encoding="ascii").split()
    return int(fields[2]) * SECTOR


async def fill(directory: Path, name: str, cache: Path, device: str, count: int) -> dict[str, Any]:
    """Load the golden with a cold page cache and restore `count` VMs, two at a time."""
    runtime = engine(directory, name, cache)
    place = directory / "medium"
    # The first call says which golden it is; what it read is then forgotten by mounting anew.
    await asyncio.to_thread(run, "umount", str(place))
    await asyncio.to_thread(run, "mount", device, str(place))
    start = await asyncio.to_thread(bytes_read, device)
    alive: list[Vm] = []
    try:
        began = time.perf_counter()
        golden = await runtime.snapshot_golden(BASE, BASE_SIZE, quiet)
        loaded = time.perf_counter() - began
        numbers = iter(range(count))

        async def lane() -> None:
            for _ in numbers:
                vm = await runtime.restore(golden)
                alive.append(vm)

        await asyncio.gather(lane(), lane())
        seconds = time.perf_counter() - began
        read = await asyncio.to_thread(bytes_read, device) - start
    finally:
        await runtime.close()
    return {"seconds": seconds, "loading_seconds": loaded, "bytes_from_medium": read, "count": count}


async def beside(other: StagedRuntime, golden: Golden, until: asyncio.Event) -> dict[str, Any]:
    """Restores of another golden until the event."""
    spans: list[float] = []
    while not until.is_set():
        began = time.perf_counter()
        vm = await other.restore(golden)
        spans.append((time.perf_counter() - began) * 1000)
        await other.stop(vm)
    spans.sort()
    return {"restores": len(spans), "p50_ms": spans[len(spans) // 2], "max_ms": spans[-1]}


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    cache = arguments.cache_dir or default_cache_dir()
    other = engine(directory, "other", cache)
    try:
        golden = await other.snapshot_golden(BASE, BASE_SIZE, quiet)
        source = cache / golden.digest
        size = sum(part.stat().st_blocks * SECTOR for part in source.iterdir())
        with medium(directory, source, cache) as (slow_cache, device):
            fast = await fill(directory, "fast", slow_cache, device, arguments.count)
            with throttled(device, arguments.mib_per_second):
                slow = await fill(directory, "slow", slow_cache, device, arguments.count)
                done = asyncio.Event()
                meanwhile = asyncio.get_running_loop().create_task(beside(other, golden, done))
                crowded = await fill(directory, "crowded", slow_cache, device, arguments.count)
                done.set()
                others = await meanwhile
    finally:
        await other.close()
    read_seconds = size / (arguments.mib_per_second << 20)
    return {
        "benchmark": "slow_medium",
        "mib_per_second": arguments.mib_per_second,
        "golden_bytes": size,
        "one_sequential_read_seconds": read_seconds,
        "fast": fast,
        "slow": slow,
        "slower_by_seconds": slow["seconds"] - fast["seconds"],
        "slow_with_another_fill_beside": crowded,
        "other_golden_meanwhile": others,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="VMs of a fill (default 20)")
    parser.add_argument("--mib-per-second", type=int, default=20, help="read rate of the slow medium")
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if not (BLKIO / "cgroup.procs").exists() or shutil.which("losetup") is None:
        print("this needs losetup and the blkio controller of cgroup v1", file=sys.stderr)
        return 78
    with tempfile.TemporaryDirectory(prefix="greenroom-slow-") as directory:
        found = asyncio.run(measure(arguments, Path(directory)))
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    fast, slow, others = found["fast"], found["slow"], found["other_golden_meanwhile"]
    print(f"golden: {found['golden_bytes'] >> 20} MiB; one read {found['one_sequential_read_seconds']:.1f} s")
    print(f"fast: {fast['seconds']:.1f} s, {fast['bytes_from_medium'] >> 20} MiB off the medium")
    print(f"slow: {slow['seconds']:.1f} s, {slow['bytes_from_medium'] >> 20} MiB off the medium")
    print(f"slower by {found['slower_by_seconds']:.1f} s")
    print(f"another golden meanwhile: {others['restores']} restores, p50 {others['p50_ms']:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
