"""From a fault run's rows to its verdict. Pure: rows in, faults and figures out.

What counts as a fault:

* *lost*: a sandbox that a client was told of, that nobody asked to end and whose time was not up, is not listed,
  or a request to it was answered `not found`;
* *unreachable*: it is listed and no command comes through to it; *changed*: another machine answers for it;
* *undead*: a sandbox whose end was confirmed is listed;
* *doubled*: one idempotency key stood for two sandboxes;
* *unsettled*: a create or kill was never answered for good, however often it was asked again;
* *unchecked*: a check could not read the list; *down*: the platform did not come back in time;
* *stray*: a VM that neither a claim nor a pool owned, a target that died by itself; *leaked*: what was on the
  host after `down`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from greenroom.bench.faults_records import (
    CheckRow,
    Fault,
    FaultPlan,
    HostCount,
    KillRow,
    RequestRow,
    Stray,
    Verdict,
)
from greenroom.bench.report import Conditions, Table, cell
from greenroom.bench.summaries import Sample, Summary, summarise

NOT_FOUND = (404, 410)


def find_faults(
    kills: Sequence[KillRow],
    requests: Sequence[RequestRow],
    checks: Sequence[CheckRow],
    strays: Sequence[Stray],
    left: HostCount,
) -> list[Fault]:
    """Everything that must not be, in the order of the module's list."""
    return [
        *_lost(requests, checks),
        *_changed(requests, checks),
        *_undead(checks),
        *_doubled(requests, checks),
        *_unsettled(requests),
        *_unchecked(checks),
        *_down(kills),
        *(Fault(kind="stray", what=f"{stray.vm}: {stray.why}") for stray in strays),
        *(Fault(kind="leaked", what=line) for line in left.lines()),
    ]


def _lost(requests: Iterable[RequestRow], checks: Iterable[CheckRow]) -> Iterable[Fault]:
    """Each sandbox once, by the first that showed it."""
    lost: dict[str, Fault] = {}
    for request in requests:
        if request.must_exist and request.status in NOT_FOUND:
            what = f"{request.op} of {request.sandbox} was answered {request.status} at {request.end:.2f} s"
            lost.setdefault(request.sandbox, Fault(kind="lost", what=what))
    for row in checks:
        if row.expected == "alive" and row.listed is False:
            lost.setdefault(
                row.sandbox, Fault(kind="lost", what=f"{row.sandbox} is not listed", kill=row.kill)
            )
    yield from lost.values()
    for row in checks:
        if row.expected == "alive" and row.answer == "silent" and row.sandbox not in lost:
            yield Fault(kind="unreachable", what=f"{row.sandbox}: {row.error}", kill=row.kill)


def _changed(requests: Iterable[RequestRow], checks: Iterable[CheckRow]) -> Iterable[Fault]:
    """A machine says the same of itself for life, and no two say the same."""
    said: dict[str, set[str]] = defaultdict(set)
    heard = [(row.sandbox, row.identity) for row in requests] + [
        (row.sandbox, row.identity) for row in checks
    ]
    for sandbox, identity in heard:
        if sandbox and identity:
            said[sandbox].add(identity)
    for sandbox, identities in said.items():
        if len(identities) > 1:
            yield Fault(kind="changed", what=f"{sandbox} said {' and '.join(sorted(identities))}")
    for row in checks:
        if row.answer == "other" and len(said[row.sandbox]) < 2:
            yield Fault(kind="changed", what=f"{row.sandbox} said {row.identity}", kill=row.kill)
    owners: dict[str, set[str]] = defaultdict(set)
    for sandbox, identities in said.items():
        for identity in identities:
            owners[identity].add(sandbox)
    for identity, sandboxes in owners.items():
        if len(sandboxes) > 1:
            yield Fault(kind="changed", what=f"{' and '.join(sorted(sandboxes))} are one machine: {identity}")


def _undead(checks: Iterable[CheckRow]) -> Iterable[Fault]:
    for row in checks:
        if row.expected == "gone" and row.listed:
            yield Fault(kind="undead", what=f"{row.sandbox} is listed", kill=row.kill)


def _doubled(requests: Iterable[RequestRow], checks: Iterable[CheckRow]) -> Iterable[Fault]:
    """By what was answered and by what was listed: a second one need never have been told to anybody."""
    made: dict[str, set[str]] = defaultdict(set)
    for request in requests:
        if request.op in ("create", "again") and request.outcome == "ok":
            made[request.key].add(request.sandbox)
    for row in checks:
        if row.listed and row.key:
            made[row.key].add(row.sandbox)
    for key, sandboxes in made.items():
        if len(sandboxes) > 1:
            yield Fault(kind="doubled", what=f"{key} stands for {' and '.join(sorted(sandboxes))}")


def _unsettled(requests: Iterable[RequestRow]) -> Iterable[Fault]:
    last: dict[tuple[str, str], RequestRow] = {}
    for row in requests:
        if row.op in ("create", "kill"):
            last[row.op, row.key] = row
    for (op, key), row in last.items():
        if row.outcome in ("rejected", "unknown"):
            what = f"{op} {key}: {row.outcome} at the end of {row.attempt} attempts ({row.error})"
            yield Fault(kind="unsettled", what=what)


def _unchecked(checks: Iterable[CheckRow]) -> Iterable[Fault]:
    for number in sorted({row.kill for row in checks if row.listed is None}):
        yield Fault(kind="unchecked", what="the list could not be read", kill=number)


def _down(kills: Iterable[KillRow]) -> Iterable[Fault]:
    for row in kills:
        if row.cut_short:
            continue
        if row.up_s is None:
            yield Fault(kind="down", what="the platform did not come up again in time", kill=row.number)
        elif row.command_s is None:
            yield Fault(kind="down", what="no command came through in time", kill=row.number)


def judge(
    conditions: Conditions,
    plan: FaultPlan,
    seconds: float,
    kills: Sequence[KillRow],
    requests: Sequence[RequestRow],
    checks: Sequence[CheckRow],
    strays: Sequence[Stray],
    left: HostCount,
) -> Verdict:
    """The verdict over a whole run."""
    faults = find_faults(kills, requests, checks, strays, left)
    by_outcome: dict[str, Counter[str]] = defaultdict(Counter)
    by_status: dict[str, Counter[str]] = defaultdict(Counter)
    for row in requests:
        by_outcome[row.op][row.outcome] += 1
        if row.outcome != "ok":
            by_status[row.op][str(row.status or "no answer")] += 1
    flights: Counter[str] = Counter()
    for kill in kills:
        flights.update(op for op, count in kill.in_flight.items() if count)
    judged = [row for row in checks if row.expected != "open"]
    return Verdict(
        passed=not faults and sum(kill.hit for kill in kills) == plan.kills,
        conditions=conditions,
        plan=plan,
        seconds=round(seconds, 3),
        kills=sum(kill.hit for kill in kills),
        kills_by_aim=dict(Counter(kill.aim for kill in kills)),
        kills_with_in_flight=dict(flights),
        kills_during_refill=sum(kill.warm < plan.warm for kill in kills),
        sandboxes=len({row.sandbox for row in requests if row.op == "create" and row.outcome == "ok"}),
        checked=len(judged),
        checked_alive=sum(row.expected == "alive" for row in judged),
        requests={op: dict(counts) for op, counts in by_outcome.items()},
        statuses={op: dict(counts) for op, counts in by_status.items()},
        up_s=_seconds((kill for kill in kills if not kill.cut_short), "up_s"),
        command_s=_seconds((kill for kill in kills if not kill.cut_short), "command_s"),
        fault_counts=dict(Counter(fault.kind for fault in faults)),
        faults=faults,
        left=left,
    )


def _seconds(kills: Iterable[KillRow], field: str) -> Summary:
    return summarise(Sample(getattr(kill, field), "not in time") for kill in kills)


def tables(verdict: Verdict) -> list[Table]:
    """The verdict for people."""
    outcomes = ("ok", "rejected", "unknown", "failed")
    times = [("platform up", verdict.up_s), ("first command", verdict.command_s)]
    return [
        Table(
            "From the kill on, s",
            ["until", "n", "not in time", "min", "p50", "p95", "max"],
            [
                [
                    name,
                    str(times.n),
                    str(times.failed),
                    *map(cell, (times.min, times.p50, times.p95, times.max)),
                ]
                for name, times in times
            ],
        ),
        Table(
            "Attempts",
            ["op", *outcomes],
            [
                [op, *(str(counts.get(outcome, 0)) for outcome in outcomes)]
                for op, counts in sorted(verdict.requests.items())
            ],
        ),
        Table(
            "Kills",
            ["aimed at", "kills"],
            [[aim, str(count)] for aim, count in sorted(verdict.kills_by_aim.items())],
        ),
    ]


def lines(verdict: Verdict) -> list[str]:
    """What was found, a line each, the verdict last."""
    plan = verdict.plan
    flights = (
        ", ".join(f"{op} {count}" for op, count in sorted(verdict.kills_with_in_flight.items())) or "none"
    )
    found = [f"{fault.kind}{_after(fault)}: {fault.what}" for fault in verdict.faults]
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(verdict.fault_counts.items()))
    short = "" if verdict.kills >= plan.kills else f" ({plan.kills} were asked for)"
    return [
        f"{verdict.kills} kills{short} in {verdict.seconds:.0f} s under {plan.load} clients, seed {plan.seed}; "
        f"kills with a request under way, by op: {flights}; during refill {verdict.kills_during_refill}",
        f"{verdict.sandboxes} sandboxes, {verdict.checked} looks ({verdict.checked_alive} at one that had to be "
        "alive)",
        *found,
        f"FAILED: {counts or 'not every kill hit a process'}"
        if not verdict.passed
        else "passed: nothing lost, changed, doubled or left",
    ]


def _after(fault: Fault) -> str:
    return "" if fault.kill is None else f" after kill {fault.kill}"
