"""The page `docs/performance.md`, made of the files that the benchmarks wrote: no figure on it is typed in by hand.

A benchmark's file holds its conditions and, ready to be shown, its tables and targets; those of `restore` are made
here from its rows, and the scripts in `bench/`, which know nothing of reports, get a table each. What is missing is
said to be missing. The words around the figures, and why a target was missed, are in `performance.toml`. The pictures
are `performance_plots`'.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from greenroom.bench import faults_records, faults_verdict, restore
from greenroom.bench.report import Conditions, Table, Target, cell, conditions_lines
from greenroom.errors import SetupError

WORDS = Path(__file__).with_suffix(".toml")
PAGE = "performance.md"
PICTURES = "performance"
"""Directory of the pictures, beside the page."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One benchmark on the page."""

    file: str
    title: str
    command: str
    text: str


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of somebody else's figures, under one section."""

    section: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    text: str


class Words(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that people wrote."""

    intro: str
    section: list[Section]
    reference: list[Reference]
    causes: dict[str, str]

    def cause(self, target: str) -> str:
        """Why a target was missed: the longest key that its name begins with. Empty when nobody has said."""
        found = [key for key in self.causes if target.startswith(key)]
        return self.causes[max(found, key=len)] if found else ""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark's file has for the page, whatever else is in it."""

    conditions: Conditions | None = None
    tables: list[Table] = []
    targets: list[Target] = []
    notes: list[str] = []


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One section's file as it was found; `problem` says why there is nothing to show."""

    section: Section
    stored: Stored = Stored()
    raw: dict[str, Any] = {}
    problem: str = ""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture that was made for a section."""

    section: str
    file: str
    text: str
    """What is to be seen, also for those who cannot see it."""


def read_words(path: Path = WORDS) -> Words:
    """Raises SetupError naming what is wrong in the file."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Words)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SetupError(f"{path}: {error}") from error


def read(directory: Path, words: Words) -> list[Result]:
    """All sections' files. Raises SetupError when there is not one that can be shown."""
    found = [read_one(directory, section) for section in words.section]
    if all(result.problem for result in found):
        raise SetupError(f"there is no result of any benchmark in {directory}; run `make bench`")
    return found


def read_one(directory: Path, section: Section) -> Result:
    """One file; a problem with it is part of the result."""
    try:
        content = (directory / section.file).read_bytes()
    except OSError:
        return Result(section=section, problem="not measured in this run")
    if not content.strip():
        return Result(section=section, problem="not measured in this run: the benchmark failed")
    try:
        raw = msgspec.json.decode(content, type=dict[str, Any])
        reader = _READERS.get(raw.get("benchmark", ""), _READERS.get(section.file))
        stored = reader(content) if reader else msgspec.json.decode(content, type=Stored)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        return Result(
            section=section, problem=f"not shown: {section.file} is of another version, or broken ({error})"
        )
    return Result(section=section, stored=stored, raw=raw)


def _restore(content: bytes) -> Stored:
    found = msgspec.json.decode(content, type=restore.RestoreReport)
    return Stored(
        conditions=found.conditions,
        tables=restore.tables(found),
        notes=restore.notes(found),
        targets=restore.targets(found),
    )


def _faults(content: bytes) -> Stored:
    found = msgspec.json.decode(content, type=faults_records.Verdict)
    return Stored(
        conditions=found.conditions, tables=faults_verdict.tables(found), notes=faults_verdict.lines(found)
    )


def _bare_loop(content: bytes) -> Stored:
    raw = msgspec.json.decode(content, type=dict[str, Any])
    rates: Mapping[str, float] = raw["per_second"]
    table = Table(
        f"Bare QEMUs with a loaded state a second, {raw['count']} a batch",
        ["threads", *rates, "best"],
        [["VMs/s", *map(cell, rates.values()), cell(raw["best"])]],
    )
    return Stored(tables=[table])


def _slow_medium(content: bytes) -> Stored:
    raw = msgspec.json.decode(content, type=dict[str, Any])
    mib = 1 << 20
    rows = [
        [
            name,
            cell(raw[key]["seconds"]),
            cell(raw[key]["loading_seconds"]),
            cell(raw[key]["bytes_from_medium"] / mib),
        ]
        for name, key in (
            ("unthrottled", "fast"),
            (f"throttled to {raw['mib_per_second']} MiB/s", "slow"),
            ("throttled, restores of another golden beside it", "slow_with_another_fill_beside"),
        )
    ]
    other = raw["other_golden_meanwhile"]
    return Stored(
        tables=[
            Table(
                f"Filling {raw['fast']['count']} members with a cold page cache",
                ["medium", "seconds", "of it, loading the golden", "MiB off the medium"],
                rows,
            ),
            Table(
                "Against one sequential read",
                ["figure", "seconds"],
                [
                    ["slower by", cell(raw["slower_by_seconds"])],
                    ["one sequential read of the golden", cell(raw["one_sequential_read_seconds"])],
                ],
            ),
            Table(
                "Restores of another golden meanwhile, ms",
                ["n", "p50", "max"],
                [[str(other["restores"]), cell(other["p50_ms"]), cell(other["max_ms"])]],
            ),
        ],
        targets=[
            Target(
                name="slow medium: slower than the fast one by",
                value=raw["slower_by_seconds"],
                limit=round(raw["one_sequential_read_seconds"], 2),
                unit=" s",
            )
        ],
    )


_READERS: dict[str, Callable[[bytes], Stored]] = {
    "restore": _restore,
    "bare_loop": _bare_loop,
    "slow_medium": _slow_medium,
    "faults/verdict.json": _faults,
}
"""By the file's own word, or by its name; any other file brings its tables along."""


def page(words: Words, results: list[Result], pictures: list[Picture]) -> str:
    """The page as Markdown."""
    blocks = ["# Performance", words.intro.strip(), _overview(results), _targets(words, results)]
    for result in results:
        blocks += _section(
            words, result, [entry for entry in pictures if entry.section == result.section.file]
        )
    return "\n\n".join(block for block in blocks if block) + "\n"


def _overview(results: list[Result]) -> str:
    rows = []
    for result in results:
        where, when, commit, load = result.stored.conditions, result.problem or "with this run", "", ""
        if where is not None:
            when = where.date.replace("+00:00", " UTC")
            commit = (where.commit or "")[:12] + (" (modified)" if where.modified else "")
            load = _load(where)
        rows.append([result.section.title, f"`{result.section.command}`", when, commit, load])
    columns = ["section", "command", "when", "commit", "load, 1 min"]
    return markdown(Table("What was measured", columns, rows))


def _load(where: Conditions) -> str:
    after = "" if where.load_after is None else f" → {where.load_after[0]:.1f}"
    return f"{where.load_before[0]:.1f}{after}"


def _targets(words: Words, results: list[Result]) -> str:
    every = [target for result in results for target in result.stored.targets]
    if not every:
        return ""
    table = Table(
        "Targets",
        ["figure", "target", "measured", "verdict"],
        [
            [
                entry.name,
                entry.aim,
                "–" if entry.value is None else f"{cell(entry.value)}{entry.unit}",
                f"**{entry.verdict}**" if entry.verdict == "missed" else entry.verdict,
            ]
            for entry in every
        ],
    )
    missed = [entry.name for entry in every if entry.verdict == "missed"]
    if not missed:
        return "## Targets\n\n" + markdown(table, titled=False)
    lines = [f"- **{name}**: {words.cause(name) or 'the cause is not known yet.'}" for name in missed]
    return (
        "## Targets\n\n"
        + markdown(table, titled=False)
        + "\n\nWhat falls short, and why:\n\n"
        + "\n".join(lines)
    )


def _section(words: Words, result: Result, pictures: list[Picture]) -> Iterable[str]:
    yield f"## {result.section.title}"
    yield result.section.text.strip()
    if result.problem:
        yield f"*{result.problem[0].upper()}{result.problem[1:]}.*"
        return
    told = [] if result.stored.conditions is None else conditions_lines(result.stored.conditions)
    if told or result.stored.notes:
        yield "\n".join(f"- {_escaped(line)}" for line in [*told, *result.stored.notes])
    for picture in pictures:
        yield f"![{picture.text}]({PICTURES}/{picture.file})"
    for table in result.stored.tables:
        yield markdown(table)
    for reference in words.reference:
        if reference.section == result.section.file:
            yield markdown(Table(reference.title, reference.columns, reference.rows))
            yield reference.text.strip()


def markdown(table: Table, *, titled: bool = True) -> str:
    """A table; columns in which every cell begins like a figure are set to the right."""
    figures = [
        all(_is_figure(row[index]) for row in table.rows if row[index]) for index in range(len(table.columns))
    ]
    lines = [
        "| " + " | ".join(_escaped(name) or " " for name in table.columns) + " |",
        "|" + "|".join("--:" if right else "---" for right in figures) + "|",
        *("| " + " | ".join(map(_escaped, row)) + " |" for row in table.rows),
    ]
    body = "\n".join(lines)
    return f"**{_escaped(table.title)}**\n\n{body}" if titled and table.title else body


def _is_figure(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "–-≤"


def _escaped(text: str) -> str:
    """No cell may end its column."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def write(out: Path, words: Words, results: list[Result]) -> tuple[Path, list[Picture]]:
    """Draw the pictures and write the page into the directory `out`. Raises SetupError."""
    from greenroom.bench import performance_plots

    try:
        (out / PICTURES).mkdir(parents=True, exist_ok=True)
        pictures = performance_plots.draw(
            out / PICTURES, {result.section.file: result.raw for result in results}
        )
        place = out / PAGE
        place.write_text(page(words, results, pictures), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return place, pictures
