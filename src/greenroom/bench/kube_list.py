"""A list of everything: 50,000 sandboxes over 200 nodes, to the last byte, as JSON and as a Table.

The api process follows 200 nodes that hold 250 sandboxes each; the list comes over plain HTTP on loopback and is read
as bytes, not parsed (once, after the timing, it is counted). In turns with each list the same number of bytes comes
from a server that has them ready (`kube_bare.answering`). How much the api grows at its peak is the kernel's own word:
VmHWM, reset before (proc(5), clear_refs).
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from greenroom.api.kube.kinds import SANDBOX
from greenroom.bench import kube_bare
from greenroom.bench.channels import Channel
from greenroom.bench.kube_client import TABLE, Kube
from greenroom.bench.kube_world import Shape, World
from greenroom.bench.report import TAIL_COLUMNS, Meter, Table, Target, cell, reason, tail_cells
from greenroom.bench.summaries import Sample, Summary, divide, summarise
from greenroom.errors import GreenroomError, RuntimeFailure

Form = Literal["json", "table"]
FORMS: tuple[Form, ...] = ("json", "table")
LISTS = 20
"""Of each form."""
NODES, HOLD = 200, 250
P50_LIMIT = 100.0
GROWTH_LIMIT = 64.0
"""MiB."""
DEADLINE = 120.0
"""Seconds for one list."""
SEEN_DEADLINE = 120.0
"""Seconds for the api to see all sandboxes."""
REFRESH = "5"
"""What resets VmHWM when it is written to clear_refs."""


class FormFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One form, in milliseconds and MiB."""

    form: Form
    bytes: int
    items: int
    first_ms: float | None
    """The very first list, in which nothing could have been kept from one before; not in `list_ms`."""
    list_ms: Summary
    bare_ms: Summary
    """The baseline."""
    to_bare: float | None
    growth_mib: Summary
    """Of the api's resident memory at the peak of each list, over what it was just before."""
    first_growth_mib: float
    """The same of the very first one, after which more is kept than before."""


class ListFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Both forms."""

    runtime: Literal["simulated"] = "simulated"
    shape: Shape
    sandboxes: int
    forms: list[FormFigures]


class Memory:
    """How far a process's resident memory rises. Raises RuntimeFailure where the kernel does not tell."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._directory = proc / str(pid)
        self._before = 0.0

    def begin(self) -> None:
        """Forget the peak; what is resident now is what counts from."""
        try:
            (self._directory / "clear_refs").write_text(REFRESH, encoding="ascii")
        except OSError as error:
            raise RuntimeFailure(
                f"the peak of a process's memory cannot be reset: {error.strerror}"
            ) from error
        self._before = self._field("VmRSS")

    def growth(self) -> float:
        """MiB between what was resident at `begin` and the peak since."""
        return max(0.0, self._field("VmHWM") - self._before)

    def _field(self, name: str) -> float:
        try:
            text = (self._directory / "status").read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise RuntimeFailure(f"a process's memory cannot be read: {error.strerror}") from error
        found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
        if found is None:
            raise RuntimeFailure(f"the kernel does not tell a process's {name}")
        return int(found[1]) / 1024


async def measure(directory: Path, quick: bool, meter: Meter) -> ListFigures:
    """A world that holds sandboxes, and the lists."""
    nodes, hold, lists = (3, 20, 3) if quick else (NODES, HOLD, LISTS)
    # A heartbeat a second of 200 nodes would be a fifth of what this machine can do, and is not what is asked for.
    shape = Shape(nodes=nodes, hold=hold, heartbeat=5.0)
    meter.begin(2 * lists)
    meter.say(f"list: starting {shape.text()}, {nodes * hold} sandboxes")
    async with World(directory, shape) as world, world.client() as kube:
        await _seen(kube, nodes * hold)
        memory = Memory(world.apis[0].pid)
        forms = [await _one(form, kube, memory, directory, nodes * hold, lists, meter) for form in FORMS]
    return ListFigures(shape=shape, sandboxes=nodes * hold, forms=forms)


async def _seen(kube: Kube, count: int) -> None:
    """Wait until the api lists them all; with `limit` an answer says how many more there are."""
    ends = time.monotonic() + SEEN_DEADLINE
    while True:
        metadata = (await kube.objects(SANDBOX, "?limit=1")).get("metadata", {})
        seen = 1 + int(metadata.get("remainingItemCount", 0) or 0)
        if seen >= count:
            return
        if time.monotonic() > ends:
            raise RuntimeFailure(f"the api lists {seen} sandboxes instead of {count}")
        await asyncio.sleep(0.2)


async def _one(
    form: Form, kube: Kube, memory: Memory, directory: Path, count: int, lists: int, meter: Meter
) -> FormFigures:
    meter.say(f"list: {count} sandboxes as {form}, {lists} times")
    channel = kube_bare.connecting(kube.url)
    wanted = _request(kube, channel, form)
    body = bytearray()
    try:
        memory.begin()
        first = await _timed(channel, wanted, body)
        first_growth = memory.growth()
        items, size = _items(body, form), len(body)
        body.clear()
        rows: list[Sample] = []
        bare_rows: list[Sample] = []
        growth: list[Sample] = []
        async with kube_bare.answering(directory, size, f"bare-{form}") as bare:
            trivial = bare.request("GET", "/")
            gc.collect()
            for _ in range(lists):
                memory.begin()
                rows.append(await _timed(channel, wanted))
                growth.append(Sample(memory.growth()))
                bare_rows.append(await _timed(bare, trivial))
                meter.advance()
    finally:
        channel.close()
    list_ms, bare_ms = summarise(rows), summarise(bare_rows)
    return FormFigures(
        form=form,
        bytes=size,
        items=items,
        first_ms=first.value,
        list_ms=list_ms,
        bare_ms=bare_ms,
        to_bare=divide(list_ms.p50, bare_ms.p50),
        growth_mib=summarise(growth),
        first_growth_mib=first_growth,
    )


def _request(kube: Kube, channel: Channel, form: Form) -> bytes:
    accept = TABLE if form == "table" else "application/json"
    lines = [f"GET {kube.path(SANDBOX)} HTTP/1.1", "Host: api", f"Accept: {accept}"]
    lines += [f"{name}: {value}" for name, value in kube.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def _timed(channel: Channel, request: bytes, body: bytearray | None = None) -> Sample:
    """Milliseconds from the request to the last byte; the body is kept only where there is a place for it."""
    begun = time.perf_counter()
    try:
        status = await channel.read(request, len if body is None else body.extend, DEADLINE)
    except GreenroomError as error:
        return Sample(None, reason(error))
    took = (time.perf_counter() - begun) * 1000
    return Sample(took) if status == 200 else Sample(None, f"the api answered {status}")


def _items(body: bytearray, form: Form) -> int:
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise RuntimeFailure(f"a list cannot be read: {error}") from error
    return len(found.get("rows" if form == "table" else "items", []))


def targets(figures: ListFigures) -> list[Target]:
    """What was aimed at."""
    made: list[Target] = []
    for entry in figures.forms:
        what = f"list of {figures.sandboxes} as {entry.form}"
        made += [
            Target(
                name=f"{what}: to the last byte, p50", value=entry.list_ms.p50, limit=P50_LIMIT, unit=" ms"
            ),
            Target(
                name=f"{what}: peak memory, the first included",
                value=max(entry.first_growth_mib, entry.growth_mib.max or 0.0),
                limit=GROWTH_LIMIT,
                unit=" MiB",
            ),
            Target(
                name=f"{what}: objects in it",
                value=float(entry.items),
                limit=figures.sandboxes,
                unit="",
                at_least=True,
            ),
        ]
    return made


def tables(figures: ListFigures) -> list[Table]:
    """For people."""
    where = f"{figures.sandboxes} sandboxes on {figures.shape.nodes} nodes"
    return [
        Table(
            f"List of {where}, simulated VMs, plain HTTP on loopback, ms to the last byte",
            ["form", "", *TAIL_COLUMNS, "MB", "MB/s"],
            [
                [entry.form, side, *tail_cells(found), cell(entry.bytes / 1e6), _speed(entry, found)]
                for entry in figures.forms
                for side, found in (
                    ("list", entry.list_ms),
                    ("baseline: bytes that are ready", entry.bare_ms),
                )
            ],
        ),
        Table(
            "Beside the baseline, and the api's memory at the peak, MiB over before",
            ["form", "over the baseline, p50", "the first list, ms", "its growth", "growth p50", "max"],
            [
                [
                    entry.form,
                    cell(entry.to_bare),
                    cell(entry.first_ms),
                    cell(entry.first_growth_mib),
                    cell(entry.growth_mib.p50),
                    cell(entry.growth_mib.max),
                ]
                for entry in figures.forms
            ],
        ),
    ]


def _speed(entry: FormFigures, found: Summary) -> str:
    return cell(divide(entry.bytes / 1e6, None if found.p50 is None else found.p50 / 1000))


def failures(figures: ListFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [(f"list as {entry.form}", entry.list_ms) for entry in figures.forms]
