"""How many VMs a second, from nothing and from a stock, as ratio to a bare loop; what one holds; a cold boot beside.

The loop is `bench/bare_loop.py` at the root of the checkout, run as a process of its own in each round, so that
nothing of Greenroom's works against it. Both sides try 1 to 4 at a time and their best counts. From nothing, the
slot of each VM is made inside the measured time; a stock is filled before it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
import psutil

import greenroom
from greenroom.bench.lanes import in_lanes, unbroken
from greenroom.bench.report import Meter, Table, Target, cell, reason
from greenroom.bench.stages import StagedRuntime, memory_of
from greenroom.config import RoleSpec, VmConfig
from greenroom.errors import GreenroomError, RuntimeFailure
from greenroom.runtime import guestclient
from greenroom.runtime.engine import Golden, Vm
from greenroom.wire.messages import Size

LANES = (1, 2, 3, 4)
SETTLE = 1.0
ANSWER_DEADLINE = 60.0
LOOP_DEADLINE = 600.0
COLD_DEADLINE = 240.0
Supply = Literal["loop", "nothing", "stock"]


class RateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One batch: `count` VMs paused, `lanes` at a time."""

    round: int
    supply: Supply
    lanes: int
    count: int
    per_second: float


class RateSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The best of a supply in each round, and its ratio to the loop's best of the same round."""

    supply: Supply
    best: list[float]
    ratio: list[float]
    median_ratio: float | None


class HeldRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a VM holds on average with `alive` of them, in MiB. PSS decides.

    For `copy` the part of a VM's RAM file that nothing maps is added to its PSS, because it is in memory all the
    same. `available_mib` is what MemAvailable of the host lost for each.
    """

    mode: Literal["cow", "copy"]
    state: Literal["paused", "answered"]
    memory_mib: int
    alive: int
    pss_mib: float
    private_mib: float
    available_mib: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    rates: list[RateRow]
    summaries: list[RateSummary]
    held: list[HeldRow]
    cold_boot_ms: float | None
    notes: list[str]


def loop_script() -> Path | None:
    """The bare loop, where Greenroom runs from a checkout."""
    path = Path(greenroom.__file__).resolve().parents[2] / "bench" / "bare_loop.py"
    return path if path.is_file() else None


def vm_settings(spec: RoleSpec, **changes: object) -> RoleSpec:
    """The same place with other settings of the engine."""
    vm: VmConfig = msgspec.structs.replace(spec.config.vm, **changes)
    return msgspec.structs.replace(spec, config=msgspec.structs.replace(spec.config, vm=vm))


def without_stock(spec: RoleSpec) -> RoleSpec:
    """What a benchmark of restores needs: it counts what it makes itself, and fills a stock when it wants one."""
    return vm_settings(spec, stock_slots=0, stock_waiting=0)


async def measure(
    runtime: StagedRuntime,
    golden: Golden,
    spec: RoleSpec,
    template: str,
    *,
    count: int,
    rounds: int,
    held: int,
    held_memory_mib: int,
    meter: Meter,
) -> Figures:
    """Rates with `count` VMs a batch, memory with `held` alive, one cold boot. Raises GreenroomError."""
    notes: list[str] = []
    rates = await _rates(runtime, golden, spec, template, count, rounds, meter, notes)
    rows = await held_by_mode(spec, template, held, held_memory_mib, meter, notes) if held else []
    meter.say("one cold boot")
    try:
        boot = await unbroken(runtime.cold_boot(template, golden, COLD_DEADLINE), "cold boot")
    except GreenroomError as error:
        boot = None
        notes.append(f"the cold boot failed: {reason(error)}")
    return Figures(rates=rates, summaries=summarise(rates), held=rows, cold_boot_ms=boot, notes=notes)


async def _rates(
    runtime: StagedRuntime,
    golden: Golden,
    spec: RoleSpec,
    template: str,
    count: int,
    rounds: int,
    meter: Meter,
    notes: list[str],
) -> list[RateRow]:
    rows: list[RateRow] = []
    script = loop_script()
    if script is None:
        notes.append("not run from a checkout: no bare loop to compare with")
    for number in range(1, rounds + 1):
        if script is not None:
            meter.say(f"round {number} of {rounds}: the bare loop")
            rows += await _loop(script, golden.size, spec, count, number)
        for lanes in LANES:
            meter.say(f"round {number} of {rounds}: {lanes} at a time, from nothing and from a stock")
            rows.append(await _batch(runtime, golden, "nothing", count, lanes, number))
            await runtime.fill(count)
            rows.append(await _batch(runtime, golden, "stock", count, lanes, number))
    return rows


async def _batch(
    runtime: StagedRuntime, golden: Golden, supply: Supply, count: int, lanes: int, number: int
) -> RateRow:
    alive: list[Vm] = []

    async def one(_index: int) -> None:
        alive.append(await unbroken(runtime.restore(golden), "restore"))

    began = time.perf_counter()
    try:
        await in_lanes(count, lanes, one, supply)
        seconds = time.perf_counter() - began
    finally:
        for vm in alive:
            await unbroken(runtime.stop(vm), "stop")
    await asyncio.sleep(SETTLE)
    return RateRow(round=number, supply=supply, lanes=lanes, count=count, per_second=count / seconds)


async def _loop(script: Path, size: Size, spec: RoleSpec, count: int, number: int) -> list[RateRow]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), "--json", "--count", str(count), "--memory", str(size.memory_mib),
        "--accelerator", spec.config.vm.accelerator, "--cache-dir", spec.cache_dir,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LOOP_DEADLINE):
            output, errors = await process.communicate()
    except BaseException:
        process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        raise RuntimeFailure(f"the bare loop failed: {errors.decode(errors='replace').strip()[-300:]}")
    rates: dict[str, float] = json.loads(output)["per_second"]
    return [
        RateRow(round=number, supply="loop", lanes=int(lanes), count=count, per_second=rate)
        for lanes, rate in rates.items()
    ]


def summarise(rows: list[RateRow]) -> list[RateSummary]:
    """The best of each supply, round by round."""
    best: dict[Supply, dict[int, float]] = {}
    for row in rows:
        found = best.setdefault(row.supply, {})
        found[row.round] = max(found.get(row.round, 0.0), row.per_second)
    loop = best.get("loop", {})
    made = []
    for supply, by_round in best.items():
        ratio = [rate / loop[number] for number, rate in sorted(by_round.items()) if loop.get(number)]
        middle = sorted(ratio)[len(ratio) // 2] if ratio else None
        made.append(
            RateSummary(
                supply=supply,
                best=[rate for _, rate in sorted(by_round.items())],
                ratio=ratio,
                median_ratio=middle,
            )
        )
    return made


async def held_by_mode(
    spec: RoleSpec, template: str, alive: int, memory_mib: int, meter: Meter, notes: list[str]
) -> list[HeldRow]:
    """Memory of paused VMs and of the same ones after their agent's first answer, by both modes.

    In directories below the one that `spec` names. What kept it from making all of `alive` goes into `notes`.
    """
    rows: list[HeldRow] = []
    for mode in ("cow", "copy"):
        room = (psutil.virtual_memory().available >> 20) - spec.config.pools.memory_floor_mib
        count = min(alive, max(1, room // (memory_mib + 128)))
        if count < alive:
            notes.append(f"{mode}: {count} instead of {alive} VMs, for want of memory")
        place = msgspec.structs.replace(spec, state_dir=f"{spec.state_dir}/{mode}")
        engine = StagedRuntime(vm_settings(place, restore_mode=mode))
        try:
            meter.say(f"memory of {count} VMs by {mode}")
            base = spec_size(memory_mib)
            golden = await engine.snapshot_golden(template, base, lambda step, _done: meter.say(step))
            rows += await _hold(engine, golden, mode, count)
        finally:
            await unbroken(engine.close(), "close the engine")
        await asyncio.sleep(SETTLE)
    return rows


def spec_size(memory_mib: int) -> Size:
    """A guest of this much memory, otherwise like the base template's."""
    return Size(f"bench-{memory_mib}", 1, memory_mib, 4096)


async def _hold(
    engine: StagedRuntime, golden: Golden, mode: Literal["cow", "copy"], count: int
) -> list[HeldRow]:
    warm_up = await engine.restore(golden)
    await engine.stop(warm_up)
    before = psutil.virtual_memory().available
    vms = [await unbroken(engine.restore(golden), "restore") for _ in range(count)]

    def row(state: Literal["paused", "answered"]) -> HeldRow:
        found = [_held_by(vm, mode) for vm in vms]
        return HeldRow(
            mode=mode,
            state=state,
            memory_mib=golden.size.memory_mib,
            alive=count,
            pss_mib=sum(pss for pss, _ in found) / count,
            private_mib=sum(private for _, private in found) / count,
            available_mib=(before - psutil.virtual_memory().available) / count / (1 << 20),
        )

    rows = [row("paused")]
    for vm in vms:
        await engine.start(vm)
        await guestclient.wait_ready(vm, ANSWER_DEADLINE)
        # Stopped again, so that what it does later, and its weight on the others, does not count.
        await engine.pause(vm)
    rows.append(row("answered"))
    return rows


def _held_by(vm: Vm, mode: str) -> tuple[float, float]:
    """PSS and private MiB of one VM; for `copy` with what of its RAM file is not mapped."""
    pid = vm.describe().pid
    if pid is None:
        raise RuntimeFailure(f"{vm.name} has no process")
    memory = memory_of(pid)
    if mode == "cow":
        return memory.pss_mib, memory.private_mib
    files = Path(f"/proc/{pid}/fd")
    own = next(entry for entry in files.iterdir() if "-copy" in str(entry.readlink()))
    unmapped = max(0.0, own.stat().st_blocks * 512 / (1 << 20) - memory.shared_file_mib)
    return memory.pss_mib + unmapped, memory.private_mib + unmapped


def tables(figures: Figures) -> list[Table]:
    """For people."""
    return [
        Table(
            "VMs a second into paused members, best of 1 to 4 at a time, and as ratio to the bare loop",
            ["from", "VM/s, each round", "ratio, each round", "median ratio"],
            [
                [
                    entry.supply,
                    " ".join(map(cell, entry.best)),
                    " ".join(map(cell, entry.ratio)),
                    cell(entry.median_ratio),
                ]
                for entry in figures.summaries
            ],
        ),
        held_table(figures.held),
        Table("Cold boot to the agent's first answer, ms", ["cold boot"], [[cell(figures.cold_boot_ms)]]),
    ]


def held_table(rows: list[HeldRow]) -> Table:
    """Memory by restore mode, for people."""
    return Table(
        "Memory of a VM, MiB, mean (PSS decides)",
        ["mode", "state", "guest", "alive", "PSS", "private", "MemAvailable lost"],
        [
            [
                row.mode,
                row.state,
                str(row.memory_mib),
                str(row.alive),
                cell(row.pss_mib),
                cell(row.private_mib),
                cell(row.available_mib),
            ]
            for row in rows
        ],
    )


LEAST = {"nothing": 1.2, "stock": 5.0}
"""Ratio to the bare loop that is aimed at."""
MOST_MIB = {"paused": 20e6 / (1 << 20), "answered": 50e6 / (1 << 20)}
"""PSS of a copy-on-write VM of 256 MB that is aimed at: 20 MB, and 50 MB after the agent's first answer."""


def targets(figures: Figures) -> list[Target]:
    """What was aimed at."""
    made = [
        Target(
            name=f"restore from {entry.supply} over the bare loop",
            value=entry.median_ratio,
            limit=LEAST[entry.supply],
            unit="",
            at_least=True,
        )
        for entry in figures.summaries
        if entry.supply in LEAST
    ]
    return made + [
        Target(
            name=f"memory of a VM, {row.mode}, {row.state}",
            value=row.pss_mib,
            limit=round(MOST_MIB[row.state], 1),
            unit=" MiB",
        )
        for row in figures.held
        if row.mode == "cow"
    ]
