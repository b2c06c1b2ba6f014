"""What a master counts: claims and where it placed them; and what it reads off its tables when it is asked."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from greenroom.master.membership import Membership
from greenroom.wire import metrics

CLAIMS = metrics.counter("greenroom_master_claims_total", "Claims answered", ("outcome",))
CLAIM_SECONDS = metrics.histogram(
    "greenroom_master_claim_seconds", "From a claim's arrival to its answer", ("outcome",)
)
PLACEMENTS = metrics.counter(
    "greenroom_master_placements_total",
    "Claims sent to a node; one claim may be sent to several",
    ("outcome",),
)
QUOTA_REFUSALS = metrics.counter(
    "greenroom_master_quota_refusals_total", "Sandboxes that were refused because of a quota"
)
POOL_CALLS = metrics.counter(
    "greenroom_master_pool_calls_total", "Lists of pool targets sent to nodes, again ones too", ("outcome",)
)
DECISIONS = metrics.histogram(
    "greenroom_master_pool_decision_seconds", "Working out every node's share of the pools"
)


def read(
    membership: Membership,
    claims: dict[str, int],
    admission: dict[str, int],
    driving: dict[str, int],
    view: dict[str, int],
) -> Iterable[Metric]:
    """The node table and what the parts' `statistics` tell, as they stand now."""
    states = {"live": 0, "draining": 0, "dead": 0}
    for info in membership.nodes().nodes:
        state = "dead" if not info.live else "draining" if info.status.draining else "live"
        states[state] += 1
    yield metrics.gauges(
        "greenroom_master_nodes", "Known nodes", ("state",), [((s,), n) for s, n in states.items()]
    )
    yield metrics.gauges(
        "greenroom_master_keys_remembered",
        "Idempotency keys whose node is remembered",
        (),
        [((), claims["remembered"])],
    )
    yield metrics.gauges(
        "greenroom_master_keys_under_way",
        "Idempotency keys with a claim under way",
        (),
        [((), claims["under_way"])],
    )
    yield metrics.gauges(
        "greenroom_master_claims_unseen",
        "Claims answered whose sandbox the view does not show yet",
        (),
        [((), admission["unseen"])],
    )
    yield metrics.gauges(
        "greenroom_master_pool_members_wanted",
        "Warm members wanted, all pools",
        (),
        [((), driving["wanted"])],
    )
    yield metrics.gauges(
        "greenroom_master_pool_members_unplaced",
        "Warm members wanted that fit on no node",
        (),
        [((), driving["unplaced"])],
    )
    yield metrics.gauges(
        "greenroom_master_pool_problems",
        "Declared warm pools that have a problem",
        (),
        [((), driving["problems"])],
    )
    yield metrics.gauges(
        "greenroom_master_view_nodes",
        "Nodes of the table, by whether their changes are followed",
        ("state",),
        [(("whole",), view["nodes"] - view["partial"]), (("partial",), view["partial"])],
    )
    yield metrics.gauges(
        "greenroom_master_view_sandboxes",
        "Sandboxes that this master knows of",
        (),
        [((), view["sandboxes"])],
    )
