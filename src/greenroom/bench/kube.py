"""The Kubernetes dialect, from a pick in memory to a thousand watchers: every part in a world of its own.

A part is a module with its own question, rows, baseline and targets: `kube_pick` (in one process, no servers),
`kube_list`, `kube_watch`, `kube_serial`, `kube_grid`, `kube_burst` (three bursts), `kube_scale` and `kube_store` (two
shapes). Each starts real master, api and node daemons with simulated VMs (`kube_world`), measures, and leaves nothing.
This module puts them together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from greenroom.bench import (
    kube_burst,
    kube_grid,
    kube_list,
    kube_pick,
    kube_scale,
    kube_serial,
    kube_store,
    kube_watch,
)
from greenroom.bench.kube_burst import BurstFigures
from greenroom.bench.kube_grid import GridFigures
from greenroom.bench.kube_list import ListFigures
from greenroom.bench.kube_pick import PickFigures
from greenroom.bench.kube_scale import ScaleFigures
from greenroom.bench.kube_serial import SerialFigures
from greenroom.bench.kube_store import StoreFigures
from greenroom.bench.kube_watch import WatchFigures
from greenroom.bench.report import (
    Conditions,
    Meter,
    Table,
    Target,
    finish,
    gather_conditions,
    medium_of,
    reason,
    target_table,
)
from greenroom.bench.summaries import Sample, Summary, summarise
from greenroom.errors import GreenroomError
from greenroom.runtime.engine import EngineInfo
from greenroom.wire.messages import Size

Part = Literal[
    "pick", "list", "watch", "serial", "grid", "spread", "burst", "drained", "scale", "store", "seed"
]
PARTS: tuple[Part, ...] = (
    "pick",
    "list",
    "watch",
    "serial",
    "grid",
    "spread",
    "burst",
    "drained",
    "scale",
    "store",
    "seed",
)
Figures = (
    PickFigures
    | ListFigures
    | WatchFigures
    | SerialFigures
    | GridFigures
    | BurstFigures
    | ScaleFigures
    | StoreFigures
)


class KubePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    template: str
    size: Size
    parts: list[Part]
    quick: bool


class KubeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen; a part that was not asked for, or could not be measured, is None."""

    benchmark: Literal["kube"] = "kube"
    conditions: Conditions
    plan: KubePlan
    pick: PickFigures | None = None
    list: ListFigures | None = None
    watch: WatchFigures | None = None
    serial: SerialFigures | None = None
    grid: GridFigures | None = None
    spread: BurstFigures | None = None
    burst: BurstFigures | None = None
    drained: BurstFigures | None = None
    scale: ScaleFigures | None = None
    store: StoreFigures | None = None
    seed: StoreFigures | None = None
    problems: dict[str, str] = {}
    """By part, why it could not be measured."""
    targets: tuple[Target, ...] = ()
    failed: int = 0
    tables: tuple[Table, ...] = ()
    """As they are shown to people."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every part was measured, nothing failed and no target was missed."""
        missed = any(target.verdict != "met" for target in self.targets)
        return not (self.failed or self.problems or missed)

    def parts(self) -> dict[Part, Figures]:
        """The parts that were measured, in order."""
        found = {part: getattr(self, part) for part in PARTS}
        return {part: figures for part, figures in found.items() if figures is not None}


_MODULES: dict[type[Any], Any] = {
    PickFigures: kube_pick,
    ListFigures: kube_list,
    WatchFigures: kube_watch,
    SerialFigures: kube_serial,
    GridFigures: kube_grid,
    BurstFigures: kube_burst,
    ScaleFigures: kube_scale,
    StoreFigures: kube_store,
}


async def _measure(part: Part, directory: Path, quick: bool, meter: Meter) -> Figures:
    match part:
        case "spread" | "burst" | "drained":
            return await kube_burst.measure(directory, quick, meter, part)
        case "store":
            return await kube_store.measure(directory, quick, meter, "many")
        case "seed":
            return await kube_store.measure(directory, quick, meter, "seed")
        case _:
            measures: dict[str, Callable[[Path, bool, Meter], Awaitable[Figures]]] = {
                "pick": kube_pick.measure,
                "list": kube_list.measure,
                "watch": kube_watch.measure,
                "serial": kube_serial.measure,
                "grid": kube_grid.measure,
                "scale": kube_scale.measure,
            }
            return await measures[part](directory, quick, meter)


async def measure(directory: Path, plan: KubePlan, meter: Meter) -> KubeReport:
    """Every part of the plan, one after the other, each in a directory of its own below `directory`.

    A part that cannot be measured is told of in the report, and the rest goes on.
    """
    engine = EngineInfo(
        engine="simulated", accelerator="none", version="1", reason="real daemons, simulated VMs"
    )
    conditions = gather_conditions(engine, plan.template, plan.size)
    conditions = msgspec.structs.replace(conditions, medium=medium_of(directory))
    found: dict[str, Figures] = {}
    problems: dict[str, str] = {}
    for part in plan.parts:
        try:
            found[part] = await _measure(part, directory / part, plan.quick, meter)
        except GreenroomError as error:
            problems[part] = reason(error)
    report = KubeReport(conditions=finish(conditions), plan=plan, problems=problems, **found)  # type: ignore[arg-type]
    return put_together(report)


def put_together(report: KubeReport) -> KubeReport:
    """The same report with its targets, tables and counts."""
    made = [
        target for figures in report.parts().values() for target in _MODULES[type(figures)].targets(figures)
    ]
    shown = [
        table for figures in report.parts().values() for table in _MODULES[type(figures)].tables(figures)
    ]
    if made:
        shown.append(target_table(made))
    return msgspec.structs.replace(
        report,
        targets=tuple(made),
        failed=sum(summary.failed for _, summary in failures(report)),
        tables=tuple(shown),
        notes=tuple(notes(report)),
    )


def notes(report: KubeReport) -> list[str]:
    """What was run, for people."""
    made = ["VMs are simulated; master, api and node daemons, their journals and the store are the real ones"]
    for part, figures in report.parts().items():
        shape = getattr(figures, "shape", None) or getattr(getattr(figures, "plan", None), "shape", None)
        if shape is not None:
            made.append(f"{part}: {shape.text()}, seed {shape.seed}")
    return made


def failures(report: KubeReport) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    made: list[tuple[str, Summary]] = []
    for figures in report.parts().values():
        made += _MODULES[type(figures)].failures(figures)
    return [*made, *((part, summarise([Sample(None, why)])) for part, why in report.problems.items())]
