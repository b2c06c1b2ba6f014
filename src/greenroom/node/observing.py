"""What can be told of a sandbox's past: samples of how loaded its guest was, and the log of what became of it.

Both are rings in memory: they are for people who look, and are gone with the sandbox or the node's process. Samples
are asked of one guest after the other, so on a node with many sandboxes they come less often instead of costing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec

from greenroom.errors import RuntimeFailure
from greenroom.runtime import guestclient
from greenroom.runtime.engine import Vm
from greenroom.wire.messages import LogEntry, Sample

_log = logging.getLogger(__name__)
SAMPLES = 720
"""Samples kept of one sandbox: an hour of them, one every five seconds."""
ENTRIES = 1000
"""Log entries kept of one sandbox."""
DEADLINE = 3.0
"""Seconds that a guest gets for a sample."""


class History:
    """The samples and the log of one sandbox."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.entries: deque[LogEntry] = deque(maxlen=ENTRIES)

    def note(
        self,
        at: float,
        message: str,
        level: Literal["debug", "info", "warn", "error"] = "info",
        **fields: str,
    ) -> None:
        """Something became of the sandbox at `at` (Unix seconds)."""
        self.entries.append(LogEntry(timestamp=at, message=message, level=level, fields=fields))


_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Reading(msgspec.Struct, frozen=True):
    """The guest agent's answer; one that leaves something out or goes beyond these bounds is no sample."""

    cpu_count: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    cpu_used_pct: Annotated[float, msgspec.Meta(ge=0, le=100)]
    mem_total: _Bytes
    mem_used: _Bytes
    mem_cache: _Bytes
    disk_used: _Bytes
    disk_total: _Bytes


async def sample(vm: Vm, token: str | None, now: float) -> Sample:
    """How loaded a guest is. Raises RuntimeFailure, OSError or TimeoutError when it does not say."""
    headers = {} if token is None else {"X-Access-Token": token}
    status, body = await guestclient.request(vm, "GET", "/metrics", deadline=DEADLINE, headers=headers)
    if status != 200:
        raise RuntimeFailure(f"the guest agent answered {status} to GET /metrics")
    try:
        reading = msgspec.json.decode(body, type=_Reading)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RuntimeFailure("the guest agent's metrics are not what they should be") from error
    return Sample(timestamp=now, **msgspec.structs.asdict(reading))


Asked = tuple[History, Vm, str | None]
"""A guest to ask: where its sample goes, the VM, its envd token."""


class Sampler:
    """Takes a sample of every running sandbox each `interval` seconds, or as often as one after the other allows."""

    def __init__(
        self, running: Callable[[], Iterable[Asked]], now: Callable[[], float], interval: float
    ) -> None:
        self._running = running
        self._now = now
        self._interval = interval

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            for history, vm, token in list(self._running()):
                try:
                    history.samples.append(await sample(vm, token, self._now()))
                except (RuntimeFailure, OSError, TimeoutError) as error:
                    _log.debug("no sample of %s: %s", vm.name, error)
                except Exception:
                    # Whatever one guest answers, the others' samples go on.
                    _log.exception("a sample of %s failed", vm.name)
            await asyncio.sleep(max(0.1, begun + self._interval - loop.time()))
