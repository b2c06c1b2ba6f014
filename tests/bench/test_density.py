"""Filling a pool: what counts as full, when a fill is given up, whose answers are right, how the report reads."""

from __future__ import annotations

import re

import psutil
import pytest

from greenroom.bench import density, density_host
from greenroom.bench.density import DensityPlan, DensityReport, PoolLook, Seen
from greenroom.bench.density_host import HostMemory, MembersOnHost
from greenroom.bench.faults_records import HostCount
from greenroom.bench.idle_host import Usage
from greenroom.bench.stages import Memory
from greenroom.errors import NodeUnavailable, SetupError
from greenroom.wire.messages import Size
from tests.bench.results import Quiet, conditions

SIZE = Size("bench-256", 1, 256, 4096)
IDLE = Usage(processes=1, threads=3, pss_mib=50.0, private_mib=48.0, rss_mib=60.0, cpu_s=1.0)


def plan(count: int = 4, claims: int = 2) -> DensityPlan:
    return DensityPlan(template="base", size=SIZE, count=count, claims=claims, seed=1)


def memory() -> HostMemory:
    return HostMemory(available=1000.0, kernel=100.0)


class Made:
    """A platform in memory: members come one a look until `room` is full; sandboxes can multiply."""

    def __init__(self, room: int = 99, reason: str = "", same: bool = False, wrong: bool = False) -> None:
        self.room, self.reason, self.same, self.wrong = room, reason, same, wrong
        self.target = self.warm = 0
        self.now = 0.0
        self.alive: list[str] = []
        self.ended: list[str] = []
        self.fails = ""

    def clock(self) -> float:
        return self.now

    async def rest(self, seconds: float) -> None:
        self.now += seconds

    async def declare(self, target: int) -> None:
        self.target = target

    async def look(self) -> PoolLook:
        self.warm = min(self.warm + 1, self.target, self.room)
        held = self.reason if self.warm == self.room else ""
        return PoolLook(warm=self.warm, starting=0, failed=0, reason=held)

    async def create(self, template: str, ttl: int) -> str:
        if self.fails:
            raise NodeUnavailable(self.fails)
        self.alive.append(f"i{len(self.alive)}")
        return self.alive[-1]

    async def command(self, sandbox_id: str, line: str) -> tuple[int, str]:
        one, other = map(int, re.findall(r"\d+", line)[1:])
        product = one * other + self.wrong
        return 0, f"{product}\n{0 if self.same else len(self.alive):032x}\n"

    async def kill(self, sandbox_id: str) -> bool:
        self.ended.append(sandbox_id)
        return True

    def members(self) -> MembersOnHost:
        held = [Memory(pss_mib=16.0 + number, private_mib=15.0) for number in range(self.warm)]
        return MembersOnHost(
            memories=held, stocked=0, processes=self.warm, threads=4 * self.warm, fds=20 * self.warm,
            namespaces=self.warm, node=IDLE, node_fds=9,
        )  # fmt: skip


async def test_a_pool_that_fills_is_seen_to_its_end() -> None:
    made, meter = Made(), Quiet()
    samples, last, why = await density.fill(made, 4, meter, memory=memory, clock=made.clock, rest=made.rest)
    assert why == ""
    assert [entry.warm for entry in samples] == [1, 2, 3, 4]
    assert [entry.at for entry in samples] == [0.0, 0.5, 1.0, 1.5]
    assert last.warm == meter.advanced == 4


async def test_a_fill_that_stops_growing_is_given_up_with_the_nodes_reason() -> None:
    made = Made(room=2, reason="only 900 MiB of memory are available, the floor is 1024 MiB")
    samples, last, why = await density.fill(made, 4, Quiet(), memory=memory, clock=made.clock, rest=made.rest)
    assert last.warm == 2
    assert "2 of 4 members" in why
    assert "the floor is 1024 MiB" in why
    assert density.STALLED_AFTER < samples[-1].at < density.STALLED_AFTER + 2


async def test_a_fill_without_any_reason_names_the_log() -> None:
    made = Made(room=0)
    _, _, why = await density.fill(made, 1, Quiet(), memory=memory, clock=made.clock, rest=made.rest)
    assert "log" in why


async def test_right_answers_count_and_every_sandbox_is_ended() -> None:
    made = Made()
    rows = await density.claim_some(made, plan(), 3, Quiet())
    assert [row.right for row in rows] == [True] * 3
    assert len({row.expected for row in rows}) == 3
    assert made.ended == made.alive == ["i0", "i1", "i2"]


async def test_the_numbers_can_be_drawn_again() -> None:
    first, second = [await density.claim_some(Made(), plan(), 2, Quiet()) for _ in range(2)]
    assert [row.expected for row in first] == [row.expected for row in second]


async def test_a_wrong_answer_is_wrong() -> None:
    (row,) = await density.claim_some(Made(wrong=True), plan(), 1, Quiet())
    assert (row.right, row.error) == (False, "it answered something else")


async def test_two_sandboxes_with_one_identity_are_both_wrong() -> None:
    rows = await density.claim_some(Made(same=True), plan(), 2, Quiet())
    assert [row.right for row in rows] == [False, False]
    assert "machine id" in rows[0].error


async def test_a_claim_that_fails_is_a_row() -> None:
    made = Made()
    made.fails = "no node"
    (row,) = await density.claim_some(made, plan(), 1, Quiet())
    assert (row.right, row.error) == (False, "no node")
    assert not made.ended


def test_more_members_than_memory_is_said_with_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 3024 << 20})())
    plan(count=100).check(1024)
    with pytest.raises(SetupError, match="--count up to 100"):
        plan(count=101).check(1024)


async def report(made: Made, left: HostCount, count: int = 4, stopped: str = "") -> DensityReport:
    samples, last, _ = await density.fill(
        made, min(count, made.room), Quiet(), memory=memory, clock=made.clock, rest=made.rest
    )
    seen = Seen(
        stopped=stopped,
        before=HostMemory(available=2000.0, kernel=50.0),
        full=memory(),
        host=made.members(),
        failed_members=last.failed,
        fill=samples,
        claims=await density.claim_some(made, plan(), 2, Quiet()),
    )
    return density.summarise_run(conditions(), plan(count), seen, 3.0, left, memory())


async def test_a_run_passes_when_full_right_and_clean() -> None:
    found = await report(Made(), HostCount())
    assert found.passed
    assert (found.reached, found.pss_sum_mib, found.claims_right) == (4, 70.0, 2)
    assert found.per_second == pytest.approx(4 / 1.5)
    text = {table.title: table.rows for table in density.tables(found)}
    assert ["PSS", "70.0", "17.5"] in text["Memory of all members together, MiB"]


async def test_a_run_fails_for_each_of_its_reasons() -> None:
    assert not (await report(Made(), HostCount(namespaces=["gr-x-1"]))).passed
    assert not (await report(Made(wrong=True), HostCount())).passed
    stopped = await report(Made(room=2), HostCount(), stopped="2 of 4 members: no memory")
    assert not stopped.passed
    assert "the fill stopped: 2 of 4 members: no memory" in density.notes(stopped)


def test_the_hosts_memory_is_read() -> None:
    found = density_host.host_memory()
    assert 0 < found.kernel < psutil.virtual_memory().total >> 20
    assert 0 < found.available <= psutil.virtual_memory().total >> 20
