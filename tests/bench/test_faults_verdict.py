"""The verdict of a fault run, from made-up rows: each kind of fault is found, and a clean run passes."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.bench.faults_host import VmOnHost, strays
from greenroom.bench.faults_records import (
    CheckRow,
    FaultPlan,
    HostCount,
    KillRow,
    RequestRow,
    Stray,
    Verdict,
)
from greenroom.bench.faults_verdict import judge, lines, tables
from tests.bench.results import conditions

MACHINE = "0123 ione"


def kill(number: int = 1, **changes: Any) -> KillRow:
    row: dict[str, Any] = {
        "number": number, "at": 1.0, "aim": "claim", "pid": 7, "in_flight": {"create": 2, "kill": 0}, "held": 3,
        "warm": 3, "half_made": 1, "hit": True, "up_s": 2.0, "command_s": 2.5,
    }  # fmt: skip
    return KillRow(**(row | changes))


def request(op: str = "create", **changes: Any) -> RequestRow:
    row: dict[str, Any] = {
        "start": 1.0, "end": 2.0, "client": 1, "op": op, "key": "k1", "attempt": 1, "outcome": "ok",
        "status": 201, "sandbox": "ione", "must_exist": False,
    }  # fmt: skip
    return RequestRow(**(row | changes))


def check(**changes: Any) -> CheckRow:
    row: dict[str, Any] = {
        "kill": 1, "at": 3.0, "key": "k1", "sandbox": "ione", "expected": "alive", "listed": True,
        "answer": "same", "identity": MACHINE,
    }  # fmt: skip
    return CheckRow(**(row | changes))


def verdict(
    kills: list[KillRow] | None = None,
    requests: list[RequestRow] | None = None,
    checks: list[CheckRow] | None = None,
    found: list[Stray] | None = None,
    left: HostCount | None = None,
) -> Verdict:
    """The verdict over a clean run with these rows added to it; kills replace the one that it has."""
    return judge(
        conditions(),
        FaultPlan(kills=1, load=2, held=3, seed=4),
        9.0,
        [kill()] if kills is None else kills,
        [request(), request("ask", identity=MACHINE), *(requests or [])],
        [check(), *(checks or [])],
        found or [],
        left or HostCount(),
    )


def test_a_clean_run_passes_and_is_counted() -> None:
    clean = verdict(
        requests=[
            request(key="k2", outcome="rejected", status=503, sandbox=""),
            request(key="k2", outcome="unknown", status=None, sandbox="", attempt=2),
            request(key="k2", sandbox="itwo", attempt=3),
            request("kill", key="k2", sandbox="itwo", status=204),
        ],
        checks=[
            check(key="k2", sandbox="itwo", expected="gone", listed=False, answer="unasked", identity=""),
            # Killed while the check looked: whatever was seen, nothing follows.
            check(key="k3", sandbox="ithree", expected="open", listed=False, answer="silent", identity=""),
        ],
    )
    assert clean.passed, clean.faults
    assert (clean.kills, clean.kills_with_in_flight, clean.kills_during_refill) == (1, {"create": 1}, 1)
    assert (clean.sandboxes, clean.checked, clean.checked_alive) == (2, 2, 1)
    assert clean.requests["create"] == {"ok": 2, "rejected": 1, "unknown": 1}
    assert clean.statuses["create"] == {"503": 1, "no answer": 1}
    assert (clean.up_s.p50, clean.command_s.p50) == (2.0, 2.5)
    assert lines(clean)[-1].startswith("passed")
    assert all(len(row) == len(table.columns) for table in tables(clean) for row in table.rows)


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "not listed": ("lost", {"checks": [check(listed=False)]}),
    "answered not found": (
        "lost",
        {"requests": [request("renew", outcome="failed", status=404, must_exist=True)]},
    ),
    "a first kill finds nothing": ("lost", {"requests": [request("kill", status=404, must_exist=True)]}),
    "its key says it ended": (
        "lost",
        {"requests": [request("again", outcome="failed", status=410, must_exist=True)]},
    ),
    "a command finds nothing": (
        "lost",
        {"requests": [request("ask", outcome="failed", status=404, must_exist=True)]},
    ),
    "silent": ("unreachable", {"checks": [check(answer="silent", identity="", error="no answer")]}),
    "another machine, in a check": ("changed", {"checks": [check(answer="other", identity="4567 ione")]}),
    "another machine, to a client": ("changed", {"requests": [request("ask", identity="4567 ione")]}),
    "the wrong machine from the start": (
        "changed",
        {"checks": [check(key="k2", sandbox="itwo", answer="other", identity="89 ithree")]},
    ),
    "one machine for two": ("changed", {"checks": [check(key="k2", sandbox="itwo", identity=MACHINE)]}),
    "listed after its end": (
        "undead",
        {"checks": [check(key="k2", sandbox="itwo", expected="gone", answer="unasked", identity="")]},
    ),
    "two answers to one key": ("doubled", {"requests": [request("again", sandbox="itwo")]}),
    "a second one that nobody was told of": (
        "doubled",
        {"checks": [check(sandbox="itwo", expected="open", answer="unasked", identity="")]},
    ),
    "a create that was never answered": (
        "unsettled",
        {"requests": [request(key="k2", outcome="unknown", status=None, sandbox="")]},
    ),
    "a kill that was only ever rejected": (
        "unsettled",
        {"requests": [request("kill", outcome="rejected", status=503)]},
    ),
    "no list": ("unchecked", {"checks": [check(listed=None)]}),
    "not up in time": ("down", {"kills": [kill(up_s=None, command_s=None)]}),
    "no command in time": ("down", {"kills": [kill(command_s=None)]}),
    "a VM that nothing owns": ("stray", {"found": [Stray(vm="gr-1-1", why="its claim is over")]}),
    "a process": ("leaked", {"left": HostCount(processes=["pid 7"])}),
    "a namespace": ("leaked", {"left": HostCount(namespaces=["gr-1-1"])}),
    "a cgroup": ("leaked", {"left": HostCount(cgroups=["greenroom/1"])}),
    "a slot": ("leaked", {"left": HostCount(slots=["node-0/vms/1"])}),
    "a uid block": ("leaked", {"left": HostCount(uid_blocks=["3"])}),
    "a mount": ("leaked", {"left": HostCount(mounts=["netns /run/netns/gr-1-1"])}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_kind_of_fault_is_found(name: str) -> None:
    kind, rows = FAULTS[name]
    found = verdict(**rows)
    assert not found.passed
    assert found.fault_counts == {kind: 1}
    assert kind in lines(found)[-1]


def test_a_kill_that_the_next_one_cut_short_is_not_down() -> None:
    cut = kill(up_s=None, command_s=None, cut_short=True)
    found = judge(
        conditions(), FaultPlan(kills=2, load=2, held=3, seed=4), 9.0, [cut, kill(2)], [], [], [], HostCount()
    )
    assert found.passed
    assert found.up_s.attempts == 1


def test_fewer_kills_than_asked_for_are_no_pass() -> None:
    assert not verdict(kills=[]).passed
    assert not verdict(kills=[kill(hit=False)]).passed


def test_strays_are_vms_that_neither_a_claim_nor_a_pool_has() -> None:
    found = [VmOnHost("a", True), VmOnHost("b", False), VmOnHost("c", False)]
    assert strays(found, {"a"}, 2, 0) == []
    assert strays(found, {"a"}, 3, 0) == []
    assert [stray.vm for stray in strays(found, set(), 2, 0)] == ["a"]
    assert [stray.vm for stray in strays(found, {"a"}, 1, 0)] == ["b, c"]
    assert [stray.vm for stray in strays(found, {"a", "d"}, 2, 0)] == ["d"]
    # A claim may have been given its VM a moment before the VM was marked.
    assert strays(found, {"a", "b"}, 1, 0) == []
    stock = [VmOnHost("e", False, whole=False), VmOnHost("f", False, whole=False)]
    assert strays([*found, *stock], {"a"}, 2, 2) == []
    assert [stray.vm for stray in strays([*found, *stock], {"a"}, 2, 1)] == ["e, f"]
