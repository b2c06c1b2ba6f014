"""What a platform at rest costs: groups of processes, the arithmetic over samples, and a real pair of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.bench import idle, idle_host
from greenroom.bench.idle import IdlePlan, IdleSample
from greenroom.bench.idle_host import ProcessTimes, Usage, grouped, parse_stat
from greenroom.errors import RuntimeFailure
from tests.bench.results import Quiet, conditions


def usage(pss: float, cpu: float, processes: int = 1) -> Usage:
    return Usage(processes=processes, threads=2, pss_mib=pss, private_mib=pss / 2, rss_mib=2 * pss, cpu_s=cpu)


def sample(at: float, **groups: tuple[float, float]) -> IdleSample:
    return IdleSample(at=at, groups={name: usage(*figures) for name, figures in groups.items()})


def test_a_stat_line_is_read_whatever_the_name_is() -> None:
    fields = ["S", *["0"] * 10, "100", "50", "25", "5", "20", "0", "7", *["0"] * 30]
    line = f"42 (a) b (c)) {' '.join(fields)}".encode()
    assert parse_stat(line, tick=100) == ProcessTimes(cpu_s=1.8, threads=7)
    with pytest.raises(ValueError, match="not a line"):
        parse_stat(b"42 (cut off) S 1", tick=100)


def test_this_process_is_read() -> None:
    found = idle_host.usage_of([os.getpid()])
    assert found.processes == 1
    assert found.rss_mib > found.private_mib > 0
    assert found.pss_mib >= found.private_mib
    assert found.cpu_s > 0


def test_a_process_goes_to_the_nearest_root_above_it() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 10, 21: 20, 99: 1}
    found = grouped(parents, {"supervisor": 10, "node": 20})
    assert {name: sorted(pids) for name, pids in found.items()} == {
        "supervisor": [10, 11, 12],
        "node": [20, 21],
    }


def test_a_root_that_is_gone_has_no_processes() -> None:
    assert grouped({1: 0, 10: 1}, {"node": 77}) == {"node": []}


@given(st.dictionaries(st.integers(1, 60), st.integers(0, 60)), st.sets(st.integers(1, 60), max_size=5))
def test_every_process_is_in_one_group_at_most(parents: dict[int, int], roots: set[int]) -> None:
    """Whatever the tree looks like, even if reading it took so long that it has a cycle."""
    found = grouped(parents, {str(pid): pid for pid in roots})
    every = [pid for pids in found.values() for pid in pids]
    assert len(every) == len(set(every))
    assert set(every) <= set(parents)
    assert roots & set(parents) <= set(every)


def test_costs_are_means_over_the_span() -> None:
    samples = [
        sample(0.0, node=(40.0, 1.0), api=(20.0, 2.0)),
        sample(10.0, node=(50.0, 1.1), api=(30.0, 2.0)),
        sample(20.0, node=(42.0, 1.4), api=(22.0, 2.2)),
    ]
    node, api = idle.costs(samples)
    assert (node.name, node.pss_mib, node.pss_max_mib) == ("node", 44.0, 50.0)
    assert node.cpu_seconds == pytest.approx(0.4)
    assert node.cpu_percent == pytest.approx(2.0)
    assert api.cpu_percent == pytest.approx(1.0)
    together = idle.total(samples)
    assert (together.processes, together.pss_max_mib) == (2, 80.0)
    assert together.cpu_percent == pytest.approx(3.0)


def test_one_sample_spans_no_time() -> None:
    with pytest.raises(ValueError, match="two samples"):
        idle.costs([sample(0.0, node=(1.0, 1.0))])


@pytest.mark.parametrize(
    ("pss", "cpu", "within"), [(500.0, 1.0, True), (573.0, 1.0, False), (500.0, 6.1, False)]
)
def test_the_aims_decide(pss: float, cpu: float, within: bool) -> None:
    span = [sample(0.0, node=(pss, 0.0)), sample(300.0, node=(pss, cpu))]
    bare = [
        sample(0.0, python=(20.0, 0.0), envoy=(50.0, 0.0)),
        sample(60.0, python=(20.0, 0.0), envoy=(50.0, 0.1)),
    ]
    report = idle.summarise_run(conditions(), IdlePlan(seconds=300.0), bare, span)
    assert report.within is within
    (of_roles, _, against) = idle.tables(report)
    assert [row[0] for row in of_roles.rows] == ["node", "all"]
    assert against.rows[0][1:3] == [f"{pss:.0f}", "≤ 572"]


async def test_a_role_that_restarts_spoils_the_run() -> None:
    pids = iter([{"node": 1}, {"node": 1}, {"node": 2}])

    def look(roots: Mapping[str, int]) -> dict[str, Usage]:
        return {name: usage(1.0, 1.0) for name in roots}

    with pytest.raises(RuntimeFailure, match="restarted"):
        await idle.watch(lambda: next(pids), 0.001, look)


async def test_a_process_that_ends_spoils_the_run() -> None:
    def look(roots: Mapping[str, int]) -> dict[str, Usage]:
        return {name: usage(0.0, 0.0, processes=0) for name in roots}

    with pytest.raises(RuntimeFailure, match="node"):
        await idle.watch(lambda: {"node": 1}, 10.0, look)


async def test_real_processes_are_watched_with_their_children() -> None:
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1);"
        "print('up', flush=True); input(); child.communicate(b'\\n')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        plan = IdlePlan(seconds=0.01, settle=0.0)
        samples = await idle.measure(plan, lambda: {"pair": process.pid}, Quiet())
        process.communicate(b"\n")
    assert {entry.groups["pair"].processes for entry in samples} == {2}
    assert idle.costs(samples)[0].pss_mib > 0
