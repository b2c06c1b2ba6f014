"""What the way to a sandbox adds: requests and their arithmetic, finding the VM, and a small run on a real platform."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from greenroom.bench import execution, performance
from greenroom.bench.channels import Channel
from greenroom.bench.execution import ExecutionPlan, ExecutionReport, FetchRow, Records, RequestRow, Way
from greenroom.errors import NodeUnavailable
from tests.bench.results import Quiet, conditions
from tests.bench.test_channels import END, chunked, output, served
from tests.bench.test_host_commands import Command

PLAN = ExecutionPlan(template="base", count=4, echoes=2, file_mib=1, fetches=2)


class Guest:
    """A test double of an agent: knows the requests of the benchmark; `short` bytes of the file are missing."""

    def __init__(self, short: int = 0, deaf: bool = False) -> None:
        self.short, self.deaf = short, deaf
        self.seen: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.split(b"\r\n")
                length = next((int(line.split(b":")[1]) for line in lines if b"Content-Length" in line), 0)
                self.seen.append(lines[0])
                writer.write(self.answer(lines[0], await reader.readexactly(length)))
                await writer.drain()

    def answer(self, line: bytes, body: bytes) -> bytes:
        if self.deaf:
            return b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"
        if b"/health" in line:
            return b"HTTP/1.1 204 No Content\r\n\r\n"
        if b"/files" in line:
            size = (PLAN.file_mib << 20) - self.short
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)
        if b"Start" in line:
            asked = msgspec.json.decode(body[5:])["process"]["args"][-1].encode()
            said = asked.removeprefix(b"echo ") + b"\n" if asked.startswith(b"echo") else b""
            return chunked(output(said) + END, 64)
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@contextlib.asynccontextmanager
async def ways(platform: Guest, direct: Guest) -> AsyncIterator[dict[Way, Channel]]:
    async with served(platform.serve) as to_platform, served(direct.serve) as to_direct:
        found: dict[Way, Channel] = {
            "platform": Channel("guest", to_platform),
            "direct": Channel("guest", to_direct, keep=False),
            "kept": Channel("guest", to_direct),
        }
        try:
            yield found
        finally:
            for channel in found.values():
                channel.close()


def reported(records: Records) -> ExecutionReport:
    return execution.summarise_run(conditions(), PLAN, records)


async def test_every_request_goes_every_way_and_is_a_row() -> None:
    platform, direct, records = Guest(), Guest(), Records()
    async with ways(platform, direct) as both:
        await execution.measure(both, PLAN, records, Quiet())
    report = reported(records)
    assert report.failed == 0, records
    assert {entry.kind: entry.platform_ms.n for entry in report.kinds} == {"health": 4, "list": 4, "echo": 2}
    assert all(entry.added_ms is not None for entry in report.kinds)
    assert [(row.round, row.way) for row in records.fetches] == [
        (1, "platform"), (1, "direct"), (2, "direct"), (2, "platform"),
    ]  # fmt: skip
    # Twice as many but for the file, which was made there.
    assert len(direct.seen) == 2 * len(platform.seen) - PLAN.fetches + 1
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)


async def test_what_is_answered_wrongly_is_no_measurement() -> None:
    records = Records()
    async with ways(Guest(short=1), Guest()) as both:
        await execution.measure(both, PLAN, records, Quiet())
    report = reported(records)
    assert report.failed == PLAN.fetches
    assert report.fetch.time.overall is None
    assert "of 1048576 bytes" in next(row.error for row in records.fetches if row.error)
    deaf = Records()
    async with ways(Guest(deaf=True), Guest()) as both:
        await execution.measure(both, PLAN, deaf, Quiet())
    report = reported(deaf)
    assert report.failed == 4 + 4 + 2 + 2
    assert sum(summary.failed for _, summary in execution.failures(report)) == report.failed
    assert [target.verdict for target in report.targets] == ["not measured"] * 3


def records_of(platform_ms: float, seconds: float) -> Records:
    records = Records()
    kinds: list[execution.Kind] = ["health", "list", "echo"]
    for kind in kinds:
        records.requests += [
            RequestRow(
                kind=kind, round=number, platform_ms=platform_ms * number, direct_ms=2.0 * number, kept_ms=1.0
            )
            for number in (1, 1, 2)
        ]
    for number in (1, 2):
        records.fetches.append(FetchRow(way="platform", round=number, seconds=seconds))
        records.fetches.append(FetchRow(way="direct", round=number, seconds=1.0))
    return records


def test_what_is_added_is_a_difference_of_medians_and_told_by_round() -> None:
    report = reported(records_of(3.0, 1.25))
    (health, _, _) = report.kinds
    assert health.added_ms == pytest.approx(1.0)
    assert health.added_rounds == [pytest.approx(1.0), pytest.approx(2.0)]
    assert report.fetch.time.overall == pytest.approx(1.25)
    assert report.fetch.platform_mib_s.p50 == pytest.approx(0.8)
    assert [target.verdict for target in report.targets] == ["met"] * 3
    assert [target.verdict for target in reported(records_of(4.0, 1.5)).targets] == ["missed"] * 3


def test_every_target_has_a_cause_and_the_page_shows_the_report(tmp_path: Path) -> None:
    report = reported(records_of(9.0, 9.0))
    words = performance.read_words()
    assert all(words.cause(target.name) for target in report.targets)
    (tmp_path / "exec.json").write_bytes(msgspec.json.encode(report))
    page = performance.page(words, performance.read(tmp_path, words), [])
    assert "| Process.List | direct |" in page
    assert "the cause is not known yet" not in page


def test_the_vm_of_a_sandbox_is_found_in_the_journals(tmp_path: Path) -> None:
    from greenroom.node.journal import Journal

    paths = [tmp_path / "one.db", tmp_path / "two.db"]
    for path in paths:
        Journal(path).close()
    with contextlib.closing(sqlite3.connect(paths[1])) as db:
        for number, (state, vm) in enumerate([("ended", "gr-1"), ("running", "gr-2")]):
            db.execute(
                "INSERT INTO claims (key, digest, sandbox_id, state, vm, changed_at) VALUES (?, '', ?, ?, ?, 0)",
                (f"k{number}", f"i{number}", state, vm),
            )
        db.commit()
    assert execution.vm_of(paths, "i1") == "gr-2"
    for unknown in ("i0", "i9"):
        with pytest.raises(NodeUnavailable, match="no node of this machine"):
            execution.vm_of(paths, unknown)
    with pytest.raises(NodeUnavailable, match="cannot be read"):
        execution.vm_of([tmp_path / "none.db"], "i1")


def test_a_namespace_that_is_gone_is_said() -> None:
    with pytest.raises(NodeUnavailable, match="gr-none-0"):
        execution.Inside("gr-none-0")


@pytest.mark.vm
@pytest.mark.long
def test_a_small_run_asks_a_real_sandbox_every_way(tmp_path: Path) -> None:
    command = Command(tmp_path)
    done = command.run(
        "exec", "--count", "20", "--echoes", "2", "--file", "8", "--fetches", "1", "--json", str(command.json)
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(command.json.read_bytes(), type=ExecutionReport)
    assert report.failed == 0
    assert {entry.kind: entry.direct_ms.n for entry in report.kinds} == {"health": 20, "list": 20, "echo": 2}
    for row in report.requests:
        assert all((took or 0) > 0 for took in (row.platform_ms, row.direct_ms, row.kept_ms))
    assert {row.way for row in report.fetches} == {"platform", "direct"}
    assert report.conditions.engine == "qemu"
    assert [target.verdict for target in report.targets].count("not measured") == 0
    assert all(table.title in done.stdout for table in report.tables)
    command.assert_clean()
