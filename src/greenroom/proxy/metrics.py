"""What the proxy tells: the controller's own counts, and a bounded choice of Envoy's statistics.

Envoy keeps some thousand statistics, in the Prometheus format at its administration socket. The choice is made
twice: by name in the question, so that Envoy need not write the rest, and by family in the answer, so that a
newer Envoy which names more things alike adds nothing that docs/observability.md does not list.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from prometheus_client.core import Metric

from greenroom.proxy.admin import Admin, AdminError
from greenroom.proxy.resources import API, API_KUBE, ENTRY
from greenroom.wire import metrics

_log = logging.getLogger(__name__)

STARTS = metrics.counter("greenroom_proxy_envoy_starts_total", "Times that Envoy was started")

_ENTRY = (
    *("downstream_cx_active", "downstream_cx_total", "downstream_cx_rx_bytes_total"),
    *("downstream_cx_tx_bytes_total", "downstream_rq_active", "downstream_rq_total", "downstream_rq_xx"),
    "downstream_rq_time",
)
_CLUSTER = (
    *("membership_healthy", "membership_total", "upstream_cx_active", "upstream_cx_connect_fail"),
    *("upstream_rq_active", "upstream_rq_pending_overflow", "upstream_rq_retry", "upstream_rq_total"),
    *("upstream_rq_xx", "upstream_rq_time"),
)
_SERVER = ("live", "uptime", "memory_allocated")
FAMILIES = frozenset(
    [f"envoy_http_{name}" for name in _ENTRY]
    + [f"envoy_cluster_{name}" for name in _CLUSTER]
    + [f"envoy_server_{name}" for name in _SERVER]
)
"""Envoy's metrics that are passed on."""


def _names(names: Iterable[str]) -> str:
    # Envoy counts each class of status under a name of its own and makes a label of it.
    return "|".join(name.replace("_xx", "_[1-5]xx") for name in names)


FILTER = (
    rf"^(http\.{ENTRY}\.({_names(_ENTRY)})"
    rf"|cluster\.({API}|{API_KUBE}|node_[a-z0-9]+)\.({_names(_CLUSTER)})"
    rf"|server\.({_names(_SERVER)}))$"
)
"""The same choice as Envoy's own names have it."""

_SERIES = re.compile(r"(?:# TYPE )?([a-zA-Z_:][a-zA-Z0-9_:]*)")


def chosen(text: str) -> bytes:
    """The lines of Envoy's answer that belong to `FAMILIES`; a histogram's series end with a suffix."""
    kept = [line for line in text.splitlines() if line and _family(line) in FAMILIES]
    return "".join(f"{line}\n" for line in kept).encode()


def _family(line: str) -> str:
    found = _SERIES.match(line)
    name = found[1] if found is not None else ""
    return re.sub(r"(?<=_time)_(bucket|sum|count)$", "", name)


async def of_envoy(admin: Admin) -> bytes:
    """Envoy's share of the metrics; nothing while it does not answer, which `envoy_up` tells."""
    try:
        return chosen(await admin.prometheus(FILTER))
    except AdminError as error:
        _log.warning("Envoy does not tell its statistics: %s", error)
        return b""


def read(*, up: bool, nodes: int, versions: int, certificate_ends: float = 0.0) -> Iterable[Metric]:
    """What the controller knows, as it stands now."""
    yield metrics.gauges("greenroom_proxy_envoy_up", "1 while Envoy runs", (), [((), int(up))])
    yield metrics.gauges("greenroom_proxy_nodes", "Nodes that requests are routed to", (), [((), nodes)])
    yield metrics.counts(
        "greenroom_proxy_configurations_total", "Lists of nodes written for Envoy", (), [((), versions)]
    )
    yield metrics.gauges(
        "greenroom_proxy_certificate_end_timestamp_seconds",
        "When the certificate that the entry shows ends; 0 without TLS",
        (),
        [((), certificate_ends)],
    )
