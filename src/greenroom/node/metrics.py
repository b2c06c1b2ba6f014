"""What a node counts and times; and what it reads off its pools, sandboxes and relay when it is asked.

The stages of a claim follow each other as the keeper takes them: `pop` (asking the pool), `queue` (until a member
came), `journal` (writing down whose VM it is), `turn` (until few enough guests start at once), `resume` (the VM's
`cont`), `identity` (the request that gives it), `clock`. `first_answer` spans from `cont` to the agent's first
answer, `total` the whole claim.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from greenroom.errors import GreenroomError
from greenroom.node.relay import RelayStatistics
from greenroom.runtime.engine import ClockReading
from greenroom.wire import metrics
from greenroom.wire.messages import PoolStatus, Size

_POOL = ("template", "size")

STAGE_SECONDS = metrics.histogram(
    "greenroom_node_claim_stage_seconds", "Stages of the claims that were served", (*_POOL, "stage")
)
CLAIMS = metrics.counter("greenroom_node_claims_total", "Claims answered", (*_POOL, "outcome"))
RELEASES = metrics.counter("greenroom_node_releases_total", "Requests to end a sandbox", ("outcome",))
ENDED = metrics.counter("greenroom_node_sandboxes_ended_total", "Sandboxes that ended, by why", ("reason",))
REFILL_SECONDS = metrics.histogram(
    "greenroom_node_refill_seconds", "From starting a pool's member to its being warm", _POOL
)
REFILL_FAILURES = metrics.counter(
    "greenroom_node_refill_failures_total", "Members lost before a claim got them, by why", (*_POOL, "reason")
)
JOURNAL_SECONDS = metrics.histogram(
    "greenroom_node_journal_commit_seconds", "Commits of the journal", ("operation",)
)
ADOPTED = metrics.counter(
    "greenroom_node_adopted_total", "What became of an earlier run's VMs and claims", ("outcome",)
)
SWEPT = metrics.counter(
    "greenroom_node_swept_total", "What an earlier run had left and the start removed", ("kind",)
)
CLOCK_STEPS = metrics.counter(
    "greenroom_node_clock_steps_total", "Times that the wall clock was set, so that deadlines were moved"
)
PAUSES = metrics.counter("greenroom_node_pauses_total", "Sandboxes paused to disk", ("outcome",))
PAUSE_SECONDS = metrics.histogram(
    "greenroom_node_pause_seconds", "From the wish to pause a sandbox until it is on disk"
)
RESUMES = metrics.counter("greenroom_node_resumes_total", "Paused sandboxes resumed", ("outcome",))
RESUME_SECONDS = metrics.histogram(
    "greenroom_node_resume_seconds",
    "From the wish to resume a sandbox until its guest has its identity and the time",
)

_COMMITS = {
    operation.upper(): JOURNAL_SECONDS.labels(operation).observe
    for operation in ("insert", "update", "delete")
}
_REASONS = {
    "it was killed": "killed",
    "its time was up": "timeout",
    "its shutdown time came": "shutdown",
    "its VM ended by itself": "vm_ended",
    "the node was stopped": "node_stopped",
    "nobody confirmed it in time": "unconfirmed",
}


def end_reason(text: str) -> str:
    """The class of a reason that is written for people; `other` for one that is not known here."""
    return _REASONS.get(text) or ("disk" if "disk" in text else "other")


def failure_reason(error: BaseException) -> str:
    """The class of a failed refill: the error's kind, or `interrupted`."""
    return error.kind if isinstance(error, GreenroomError) else "interrupted"


def committed(statement: str, begun: float) -> None:
    """A statement of the journal was carried out; only one that writes commits."""
    if (observe := _COMMITS.get(statement[:6])) is not None:
        observe(time.perf_counter() - begun)


_STAGES = ("pop", "queue", "journal", "turn", "resume", "first_answer", "identity", "clock", "total")


@functools.lru_cache(maxsize=256)
def _stages(template: str, size: str) -> list[Callable[[float], None]]:
    """What takes the seconds of each of `_STAGES` for one pool: found together, as a claim needs them."""
    return [STAGE_SECONDS.labels(template, size, stage).observe for stage in _STAGES]


def came_from_pool(template: str, size: Size, asked: float, queued: float) -> None:
    """A claim got its member: it asked at `asked` and stood in the queue from `queued` on (perf_counter)."""
    pop, queue = _stages(template, size.name)[:2]
    pop(queued - asked)
    queue(time.perf_counter() - queued)


def served(
    template: str,
    size: Size,
    steps: dict[str, float],
    reading: ClockReading,
    *,
    begun: float,
    assigned: float,
    saved: float,
) -> None:
    """A claim was served: the keeper's steps, the introduction's parts, and the seconds of its two records."""
    _, _, journal, turn, resume, first_answer, identity, clock, total = _stages(template, size.name)
    journal(assigned + saved)
    turn(max(0.0, steps["turn"] - assigned))
    resume(steps["start"])
    first_answer(steps["start"] + reading.answer_s)
    identity(reading.identity_s)
    clock(reading.clock_s)
    total(time.perf_counter() - begun)


def read(pools: list[PoolStatus], sandboxes: int, relay: RelayStatistics) -> Iterable[Metric]:
    """Pools, sandboxes and relay as they stand now."""
    yield metrics.gauges("greenroom_node_sandboxes", "Sandboxes that run here", (), [((), sandboxes)])
    for name, text, numbers in (
        ("target", "Members the pool should hold", [pool.target for pool in pools]),
        ("warm", "Members that are warm", [pool.warm for pool in pools]),
        ("starting", "Members being made", [pool.starting for pool in pools]),
        ("waiting", "Claims in the queue", [pool.waiting for pool in pools]),
        ("held_back", "1 while refill is held back", [int(bool(pool.reason)) for pool in pools]),
    ):
        rows = [((pool.template, pool.size), n) for pool, n in zip(pools, numbers, strict=True)]
        yield metrics.gauges(f"greenroom_node_pool_{name}", text, _POOL, rows)
    yield metrics.counts(
        "greenroom_node_pool_failed_total",
        "Members that never became warm or ended while they waited",
        _POOL,
        [((pool.template, pool.size), pool.failed) for pool in pools],
    )
    yield from _relay(relay)


def _relay(relay: RelayStatistics) -> Iterable[Metric]:
    states = {"waiting": relay.waiting, "connecting": relay.connecting, "spliced": relay.spliced}
    yield metrics.gauges(
        "greenroom_node_relay_connections",
        "Connections from the proxy, by how far they are",
        ("state",),
        [((state,), n) for state, n in states.items()],
    )
    yield metrics.counts(
        "greenroom_node_relay_accepted_total", "Connections taken", (), [((), relay.accepted)]
    )
    yield metrics.counts(
        "greenroom_node_relay_refused_total",
        "Requests the relay answered itself",
        ("status",),
        [((str(status),), n) for status, n in relay.refused.items()],
    )
    yield metrics.counts(
        "greenroom_node_relay_dropped_total",
        "Connections dropped without an answer",
        (),
        [((), relay.dropped)],
    )
    yield metrics.counts(
        "greenroom_node_relay_bytes_total",
        "Bytes of ended connections, up towards guests",
        ("direction",),
        [(("up",), relay.bytes_up), (("down",), relay.bytes_down)],
    )
