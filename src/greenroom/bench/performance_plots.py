"""The pictures of `docs/performance.md`: what a table cannot show, drawn from the benchmarks' files as SVG.

A picture whose figures are missing, for instance because a part was not asked for, is left out. All share one look:
no frame that says nothing, figures where they are few. matplotlib is
installed with the extra `bench`; it is imported only here, and only when there is something to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.bench.kube_watchers import BUCKET_MS
from greenroom.bench.performance import Picture
from greenroom.errors import SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f5f8b", "#d1495b", "#66a182", "#8d6a9f", "#b07d2b")
GREY = "#6b7280"
STYLE: Any = {
    "svg.fonttype": "none",
    # The same figures make the same file: no random ids.
    "svg.hashsalt": "greenroom",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
}
WIDTH = 7.6
"""Inches, of every picture."""

Raw = Mapping[str, Any]


def draw(directory: Path, raws: Mapping[str, Raw], suffix: str = "svg") -> list[Picture]:
    """Draw all that the files have figures for into `directory`; older pictures there are removed.

    `raws` are the files' contents by name. Raises SetupError when matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(
            "the pictures need matplotlib; run `scripts/setup.sh bench`, or pip install 'greenroom[bench]'"
        ) from error
    for old in directory.glob(f"*.{suffix}"):
        old.unlink()
    made: list[Picture] = []
    for section, name, text, plot in _PICTURES:
        with rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, 3.0))
            if not plot(figure, raws.get(section, {})):
                continue
            file = f"{name}.{suffix}"
            # No date: the same figures make the same file.
            metadata = {"Date": None} if suffix == "svg" else {}
            figure.savefig(directory / file, format=suffix, metadata=metadata, dpi=110)
        made.append(Picture(section=section, file=file, text=text))
    return made


def at(raw: object, *path: str) -> Any:
    """What lies at a path of keys in a file's content, None where one is missing."""
    for key in path:
        if not isinstance(raw, Mapping):
            return None
        raw = raw.get(key)
    return raw


def values(rows: object, field: str, **wanted: object) -> list[float]:
    """The figures of one field over the rows that have all the wanted values; rows without a figure are left out."""
    found: list[float] = []
    for row in rows if isinstance(rows, list) else []:
        if all(at(row, key) == value for key, value in wanted.items()):
            figure = at(row, *field.split("."))
            if isinstance(figure, int | float):
                found.append(float(figure))
    return found


def steps(figures: Sequence[float]) -> tuple[list[float], list[float]]:
    """The distribution's steps: sorted figures, and the per cent of all that are that small or smaller."""
    ordered = sorted(figures)
    return ordered, [100 * (index + 1) / len(ordered) for index in range(len(ordered))]


def distributions(axes: Axes, title: str, lines: Iterable[tuple[str, Sequence[float]]]) -> None:
    """One panel of cumulative distributions in milliseconds, the lines named in a key."""
    for colour, (name, figures) in zip(COLOURS, lines, strict=False):
        ordered, share = steps(figures)
        axes.step(ordered, share, where="post", color=colour, linewidth=1.6, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 101)
    axes.set_title(title)
    axes.set_xlabel("ms (log)")
    axes.legend(frameon=False, fontsize=7.5, loc="best")


def _panels(figure: Figure, panels: list[tuple[str, list[tuple[str, list[float]]]]]) -> bool:
    shown = [(title, kept) for title, lines in panels if (kept := [line for line in lines if line[1]])]
    if not shown:
        return False
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure.set_size_inches(WIDTH, 2.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for index, axes in enumerate(grid.flat):
        if index >= len(shown):
            axes.set_visible(False)
            continue
        distributions(axes, *shown[index])
        _plain_ticks(axes, [figure_ for _, line in shown[index][1] for figure_ in line])
        if index % columns == 0:
            axes.set_ylabel("% done by then")
    return True


def _plain_ticks(axes: Axes, figures: Sequence[float]) -> None:
    """Numbers as people write them, few enough to be read; a narrow range on a log axis has no power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [figure for figure in figures if figure > 0]
    span = max(positive) / min(positive) if positive else 1.0
    subs = (1.0,) if span > 200 else (1.0, 3.0) if span > 30 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(10, subs=subs if span > 8 else (1.0, 2.0, 3.0, 5.0, 7.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


_SIDES = {
    "platform": "through api and proxy",
    "bare": "a paused VM let run",
    "introduced": "the same, with an identity",
}
"""What the sides of a claim's `output` part are."""


def _claims(figure: Figure, raw: Raw) -> bool:
    engine, http = at(raw, "engine", "rows"), at(raw, "http", "rows")
    supply, output = at(raw, "platform", "supply", "claims"), at(raw, "platform", "output", "rows")
    patterns = at(raw, "platform", "patterns", "rows")
    sides = dict.fromkeys(str(at(row, "side")) for row in output or [])
    return _panels(
        figure,
        [
            (
                "Claim engine in one process (simulated VMs)",
                [
                    ("claim", values(engine, "claim_ms")),
                    ("one bare transaction", values(engine, "transaction_ms")),
                    ("dict.pop", values(engine, "pop_ms")),
                ],
            ),
            (
                "Over a node's HTTP (simulated VMs)",
                [("claim", values(http, "claim_ms")), ("a trivial request", values(http, "trivial_ms"))],
            ),
            (
                "Create of a sandbox, as a client sees it",
                [
                    ("warm pool", values(supply, "create_ms", supply="warm")),
                    ("dry pool", values(supply, "create_ms", supply="on_demand")),
                ],
            ),
            (
                "Create to a command's first output",
                [(_SIDES.get(side, side), values(output, "output_ms", side=side)) for side in sides],
            ),
            (
                "Creates by pattern",
                [
                    (name, values(patterns, "ms", pattern=name, outcome="ok"))
                    for name in dict.fromkeys(str(at(row, "pattern")) for row in patterns or [])
                ],
            ),
        ],
    )


def _kube_claims(figure: Figure, raw: Raw) -> bool:
    cells = at(raw, "grid", "cells") or []
    lanes = list(dict.fromkeys(int(at(cell, "parallel")) for cell in cells))
    return _panels(
        figure,
        [
            (
                f"Claim → Ready, {lane} at a time" if lane > 1 else "Claim → Ready, one after the other",
                [
                    (f"pool of {at(cell, 'pool')}", [float(value) for value in at(cell, "values") or []])
                    for cell in cells
                    if at(cell, "parallel") == lane
                ],
            )
            for lane in lanes
        ],
    )


def _kube_watch(figure: Figure, raw: Raw) -> bool:
    rows, crowd = at(raw, "watch", "rows"), at(raw, "watch", "crowd")
    histogram = at(crowd, "histogram") or {}
    seen = [
        (name, values(rows, "ms", op=op, paused=paused))
        for name, op, paused in (
            ("create", "create", False),
            ("delete", "delete", False),
            ("create, first after a pause", "create", True),
            ("delete, first after a pause", "delete", True),
        )
    ]
    many = _thinned({int(bucket): int(count) for bucket, count in histogram.items()})
    title = f"{at(crowd, 'watchers')} watchers, {float(at(crowd, 'rate') or 0):g} events/s aimed at"
    return _panels(
        figure,
        [("Seen by ten watchers, from the request", seen), (title, [("seen by each", many)] if many else [])],
    )


def _thinned(histogram: Mapping[int, int], most: int = 2000) -> list[float]:
    """About `most` of the times that a histogram counts, spread as all of them are: their upper bounds."""
    total, seen, made = sum(histogram.values()), 0, list[float]()
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        made += [(bucket + 1) * BUCKET_MS] * (seen * min(most, total) // total - len(made))
    return made


def _restores(figure: Figure, raw: Raw) -> bool:
    rows = at(raw, "restores")
    lanes = sorted({int(at(row, "parallel")) for row in rows or []})
    return _panels(
        figure,
        [
            (
                f"Restore to a paused VM, {lane} at a time",
                [
                    ("Greenroom", values(rows, "stages.total_ms", side="greenroom", parallel=lane)),
                    ("bare QEMU, no fence", values(rows, "stages.total_ms", side="bare", parallel=lane)),
                ],
            )
            for lane in lanes
        ],
    )


def _fill(figure: Figure, raw: Raw) -> bool:
    fill, members = at(raw, "fill"), at(raw, "host", "memories")
    times, warm, free = values(fill, "at"), values(fill, "warm"), values(fill, "available_mib")
    pss = values(members, "pss_mib")
    if len(times) < 2 or not pss:
        return False
    curve, memory, spread = figure.subplots(1, 3)
    curve.plot(times, warm, color=COLOURS[0], linewidth=1.8)
    curve.set_title("Paused members")
    curve.set_xlabel("s since the pool was declared")
    memory.plot(warm, [value / 1024 for value in free], color=COLOURS[2], linewidth=1.8)
    memory.set_title("MemAvailable, GiB")
    memory.set_xlabel("paused members")
    for axes in (curve, memory):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    spread.hist(pss, bins=24, color=COLOURS[0])
    spread.set_title(f"Members by PSS ({len(pss)} alive)")
    spread.set_xlabel("MiB")
    return True


def _memory(figure: Figure, raw: Raw) -> bool:
    rows = [row for row in at(raw, "held") or [] if isinstance(at(row, "pss_mib"), int | float)]
    if not rows:
        return False
    axes = figure.subplots()
    figure.set_size_inches(WIDTH, 0.55 * len(rows) + 1.0)
    fields = (("PSS", "pss_mib", COLOURS[0]), ("MemAvailable lost", "available_mib", COLOURS[2]))
    for place, row in enumerate(rows):
        for index, (_, field, colour) in enumerate(fields):
            bar = axes.barh(place + (index - 0.5) * 0.36, float(row[field]), height=0.34, color=colour)
            axes.bar_label(bar, fmt="%.0f", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['mode']}, {row['state']}" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)
    axes.set_title(f"MiB a VM, mean of {rows[0]['alive']} guests of {rows[0]['memory_mib']} MiB alive")
    _key(axes, [(name, colour) for name, _, colour in fields])
    return True


def _rest(figure: Figure, raw: Raw) -> bool:
    roles = [row for row in at(raw, "roles") or [] if isinstance(at(row, "pss_mib"), int | float)]
    bare = [row for row in at(raw, "baseline") or [] if isinstance(at(row, "pss_mib"), int | float)]
    if not roles:
        return False
    figure.set_size_inches(WIDTH, 3.0)
    memory, cpu = figure.subplots(1, 2, width_ratios=(3, 2))
    for place, rows in enumerate((roles, bare)):
        left = 0.0
        for row in rows:
            kind = str(row["name"]).rstrip("-0123456789 ")
            width = float(row["pss_mib"])
            memory.barh(place, width, left=left, height=0.55, color=_shade(kind), edgecolor="white")
            left += width
        memory.text(left + 5, place, f"{left:.0f}", va="center")
    aim = at(raw, "most_pss_mib")
    if isinstance(aim, int | float):
        memory.axvline(float(aim), color=GREY, linestyle="--", linewidth=1)
        memory.text(float(aim) - 6, -0.42, f"aim {aim:g}", ha="right", color=GREY, fontsize=8)
    memory.set_yticks((0, 1), ("platform", "bare\nprocesses"))
    memory.invert_yaxis()
    memory.set_title("PSS, MiB")
    names = dict.fromkeys(str(row["name"]).rstrip("-0123456789 ") for row in [*roles, *bare])
    _key(memory, [(name, _shade(name)) for name in names], below=True)
    shares = [float(row["cpu_percent"]) for row in roles]
    bars = cpu.barh(range(len(roles)), shares, height=0.55, color=[_shade(str(row["name"])) for row in roles])
    cpu.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    cpu.set_yticks(range(len(roles)), [str(row["name"]).rstrip("-0123456789 ") for row in roles])
    cpu.invert_yaxis()
    cpu.margins(x=0.2)
    cpu.set_title(f"CPU, % of a core (together {sum(shares):.2f})")
    for axes in (memory, cpu):
        axes.grid(axis="y", visible=False)
    return True


def _shade(kind: str) -> str:
    order = ("master", "node", "api", "proxy", "supervisor", "python", "envoy")
    colours = (*COLOURS, "#9ca3af", "#c9b8d3")
    return next((colour for name, colour in zip(order, colours, strict=True) if kind.startswith(name)), GREY)


def _key(axes: Axes, entries: Sequence[tuple[str, str]], *, below: bool = False) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in entries]
    if below:
        axes.legend(
            handles=handles,
            frameon=False,
            fontsize=7.5,
            ncols=4,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
        )
    else:
        axes.legend(handles=handles, frameon=False, fontsize=8, loc="best")


_PICTURES: tuple[tuple[str, str, str, Callable[[Figure, Raw], bool]], ...] = (
    ("claim.json", "claims", "Cumulative distributions of claims and creates, in milliseconds", _claims),
    (
        "kube.json",
        "kube-claims",
        "Cumulative distributions of claims until a watch shows them ready, by number of clients and size of the pool",
        _kube_claims,
    ),
    (
        "kube.json",
        "kube-watch",
        "Cumulative distributions of how long an event takes to ten watchers and to a thousand, in milliseconds",
        _kube_watch,
    ),
    (
        "restore.json",
        "restores",
        "Cumulative distributions of restores, Greenroom beside bare QEMU, in milliseconds",
        _restores,
    ),
    (
        "density.json",
        "density",
        "Members against time, available memory against members, and how members' PSS is spread",
        _fill,
    ),
    ("density.json", "memory", "Memory of a VM by restore mode, paused and after its first answer", _memory),
    (
        "platform.json",
        "platform",
        "Memory and CPU of a platform at rest, by role, beside bare processes",
        _rest,
    ),
)
