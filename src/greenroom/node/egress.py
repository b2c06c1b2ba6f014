"""The node's side of the way out: an egress process started, watched, and told of every sandbox.

The node opens the sockets in a sandbox's namespace and keeps them, so that an egress process that dies costs the open
connections and nothing more: new ones wait in the sockets' queues until the next process is there, which is told
everything anew. Whatever goes wrong on the way leaves a sandbox with less, never with more: without sockets its
namespace refuses all it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from socket import socket

import msgspec
from prometheus_client.core import Metric

from greenroom.config import Config
from greenroom.errors import GreenroomError, RuntimeFailure
from greenroom.runtime.engine import Runtime, Vm
from greenroom.runtime.namespaces import Outlets
from greenroom.wire import gate, metrics
from greenroom.wire.messages import Network
from greenroom.wire.network import parse
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)
PING = 1.0
"""Seconds between two signs of life that are asked for; each brings counts."""
SILENCE = 30.0
"""Seconds without one after which the process is ended: it hangs."""
ANSWER = 5.0
"""Seconds that a change of rules waits for its answer."""
FAREWELL = 2.0
"""Seconds that the process has to end by itself once it is let go."""
TAKEN = 5.0
"""Seconds for which the sockets of an earlier node's process may still be in the way."""
BACKOFF_FIRST, BACKOFF_LAST = 0.05, 5.0
"""Seconds before a process that ended is started again: doubling, back to the first after `SETTLED`."""
SETTLED = 10.0
_PASSED_ON = ("PATH", "LANG", "TZ", "GREENROOM_SUPERVISOR")


class _Box:
    """What the node knows of one VM's way out."""

    def __init__(self, sandbox_id: str, network: Network) -> None:
        self.sandbox_id = sandbox_id
        self.network = network
        self.outlets: Outlets | None = None
        self.turn = asyncio.Lock()
        self.gone = False


class _Link:
    """One egress process and the channel to it."""

    def __init__(self, home: Path, uid: int, replica: int, level: str) -> None:
        """Start it. `home` is there to be seen in a list of processes. Raises OSError.

        Call on the main thread: the process dies with the thread that started it.
        """
        ours, theirs = gate.pair()
        with theirs:
            command = [sys.executable, "-m", "greenroom.egress"]
            environment = {
                name: value
                for name, value in os.environ.items()
                if name in _PASSED_ON or name.startswith(("PYTHON", "LC_"))
            }
            try:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(uid), str(replica), level, str(home)],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                )
            except BaseException:
                ours.close()
                raise
        self.ended = asyncio.Event()
        self.counts = gate.Counts()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[gate.Done]] = {}
        self._channel = gate.Channel(ours, self._received, self._lost)
        self._channel.start()

    def next_number(self) -> int:
        """A number for an order."""
        return next(self._numbers)

    def tell(self, order: gate.Order, sockets: Sequence[socket] = ()) -> asyncio.Future[gate.Done]:
        """Send an order; the future is its answer, and is cancelled when the process ends before."""
        answer: asyncio.Future[gate.Done] = asyncio.get_running_loop().create_future()
        self._waiting[order.number] = answer
        if self.ended.is_set():
            answer.cancel()
        self._channel.send(msgspec.json.encode(order), sockets)
        return answer

    def _received(self, payload: bytes, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        try:
            done = msgspec.json.decode(payload, type=gate.Done)
        except msgspec.DecodeError:
            # It reads what guests send: whatever comes from it is looked at like a stranger's word.
            _log.error("the egress process answered something unreadable and is started again")
            self._channel.close()
            return
        if done.counts is not None:
            self.counts = done.counts
        answer = self._waiting.pop(done.number, None)
        if answer is not None and not answer.done():
            answer.set_result(done)
        if done.error:
            _log.error("the egress process could not carry out an order: %s", done.error[:500])

    def _lost(self) -> None:
        self.ended.set()
        for answer in self._waiting.values():
            answer.cancel()
        self._waiting.clear()

    async def end(self) -> None:
        """Let the process go, and make sure that it has."""
        self._channel.close()
        try:
            await asyncio.to_thread(self.process.wait, FAREWELL)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


class Gate:
    """The ways out of a node's sandboxes. Use as an async context manager."""

    def __init__(self, runtime: Runtime, config: Config, home: Path, replica: int) -> None:
        """`home` is the node's directory, `replica` its number for the log."""
        self._runtime = runtime
        self._home = home
        self._config = config
        self._replica = replica
        self._boxes: dict[str, _Box] = {}
        self._link: _Link | None = None
        self._life: asyncio.Task[None] | None = None
        self._before = gate.Counts()
        self.starts = 0

    def __repr__(self) -> str:
        return f"<Gate sandboxes={len(self._boxes)} process={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The egress process's pid; None while there is none."""
        return None if self._link is None else self._link.process.pid

    async def __aenter__(self) -> Gate:
        if self._config.vm.engine != "simulated":
            self._life = spawn(self._run(), "egress process")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await stop(self._life)
        for box in self._boxes.values():
            box.gone = True
            if box.outlets is not None:
                box.outlets.close()
        self._boxes.clear()

    async def apply(self, vm: Vm, sandbox_id: str, network: Network) -> None:
        """Let the VM of a sandbox reach what these rules allow; returns when what they do not allow has ended.

        May be repeated, with other rules or after a node's restart. Raises BadRequest for rules that cannot be
        kept, RuntimeFailure; the VM may then be behind its old rules, the new ones or both until it is repeated.
        """
        rules = parse(network, self._config.network)
        box = self._boxes.setdefault(vm.name, _Box(sandbox_id, network))
        async with box.turn:
            await self._runtime.restrict(vm, rules)
            box.network = network
            if box.outlets is None:
                outlets = await self._open_outlets(vm)
                if outlets is None:
                    return
                if box.gone:
                    outlets.close()
                    return
                box.outlets = outlets
                if self._link is not None:
                    self._announce(self._link, vm.name, box)
            elif self._link is not None:
                link = self._link
                await self._answered(link, gate.Change(link.next_number(), vm.name, network))

    async def close(self, vm: Vm) -> None:
        """Reset all connections of a VM that ends. Nothing if it has no way out."""
        box = self._boxes.pop(vm.name, None)
        if box is None:
            return
        box.gone = True
        if box.outlets is None:
            return
        box.outlets.close()
        if (link := self._link) is not None:
            with contextlib.suppress(RuntimeFailure):
                await self._answered(link, gate.Close(link.next_number(), vm.name))

    async def _answered(self, link: _Link, order: gate.Change | gate.Close) -> None:
        """Send an order and wait for its answer. A process that ends instead takes all connections with it."""
        answer = link.tell(order)
        await asyncio.wait((answer,), timeout=ANSWER)
        if not answer.done():
            raise RuntimeFailure("the egress process does not answer; try again shortly")
        if not answer.cancelled() and (error := answer.result().error):
            raise RuntimeFailure(f"the egress process could not change a sandbox's rules: {error}")

    def _announce(self, link: _Link, vm: str, box: _Box) -> None:
        if box.outlets is not None:
            link.tell(gate.Open(link.next_number(), vm, box.sandbox_id, box.network), box.outlets)

    async def _open_outlets(self, vm: Vm) -> Outlets | None:
        """The sockets in a VM's namespace; those of an earlier node's egress process may be about to go."""
        loop = asyncio.get_running_loop()
        end = loop.time() + TAKEN
        while True:
            try:
                return self._runtime.open_outlets(vm)
            except RuntimeFailure as error:
                cause = error.__cause__
                taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
                if not taken or loop.time() > end:
                    raise
            await asyncio.sleep(0.05)

    async def _run(self) -> None:
        """Keep a process running, for ever."""
        loop = asyncio.get_running_loop()
        pause = BACKOFF_FIRST
        while True:
            began = loop.time()
            try:
                link = await self._start()
            except (OSError, GreenroomError) as error:
                _log.error("the egress process cannot be started, next try in %.1f s: %s", pause, error)
            else:
                self.starts += 1
                self._link = link
                try:
                    link.tell(gate.Settings(link.next_number(), self._config.network))
                    for vm, box in self._boxes.items():
                        self._announce(link, vm, box)
                    await self._watch(link)
                finally:
                    self._link = None
                    self._before = _sum(self._before, link.counts)
                    await asyncio.shield(link.end())
                _log.error(
                    "the egress process ended (exit status %s): open connections of %d sandboxes are lost; next "
                    "start in %.2f s", link.process.returncode, len(self._boxes), pause,
                )  # fmt: skip
            if loop.time() - began > SETTLED:
                pause = BACKOFF_FIRST
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF_LAST)

    async def _start(self) -> _Link:
        """A process that is bounded before it is told of any sandbox. Raises OSError, SetupError."""
        link = _Link(self._home, self._runtime.service_uid, self._replica, self._config.logs.level)
        try:
            self._runtime.confine("egress", link.process.pid, self._config.network.egress_memory_mib << 20)
        except BaseException:
            await asyncio.shield(link.end())
            raise
        return link

    async def _watch(self, link: _Link) -> None:
        """Return when the process has ended or says nothing any more."""
        while not link.ended.is_set():
            answer = link.tell(gate.Ping(link.next_number()))
            await asyncio.wait((answer,), timeout=SILENCE)
            if not answer.done():
                _log.error("the egress process has said nothing for %.0f s and is ended", SILENCE)
                link.process.kill()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING):
                    await link.ended.wait()

    def counts(self) -> gate.Counts:
        """What all processes together have counted since this node started."""
        return _sum(self._before, gate.Counts() if self._link is None else self._link.counts)

    def read(self) -> Iterable[Metric]:
        """What of it is told as metrics; up to a second old."""
        counts = self.counts()
        yield metrics.counts(
            "greenroom_egress_connections_total",
            "Connections out of sandboxes, by what came of them",
            ("outcome",),
            [((outcome,), number) for outcome, number in counts.connections.items()],
        )
        yield metrics.gauges(
            "greenroom_egress_open", "Connections out of sandboxes that are open", (), [((), counts.open)]
        )
        yield metrics.counts(
            "greenroom_egress_bytes_total",
            "Bytes that went out of sandboxes and into them",
            ("direction",),
            [(("out",), counts.bytes_out), (("in",), counts.bytes_in)],
        )
        yield metrics.counts(
            "greenroom_egress_dns_total",
            "DNS questions of sandboxes, by what came of them",
            ("outcome",),
            [((outcome,), number) for outcome, number in counts.dns.items()],
        )
        yield metrics.counts(
            "greenroom_egress_starts_total",
            "Times that the egress process was started",
            (),
            [((), self.starts)],
        )


def _sum(before: gate.Counts, now: gate.Counts) -> gate.Counts:
    """Both processes' counters; what is open is the later one's."""
    return gate.Counts(
        connections=dict(Counter(before.connections) + Counter(now.connections)),
        dns=dict(Counter(before.dns) + Counter(now.dns)),
        open=now.open,
        bytes_out=before.bytes_out + now.bytes_out,
        bytes_in=before.bytes_in + now.bytes_in,
    )


class NoGate:
    """Stands where no gate is, as in an engine without a network."""

    async def apply(self, vm: Vm, sandbox_id: str, network: Network) -> None:
        """There is nothing to apply rules to."""

    async def close(self, vm: Vm) -> None:
        """There is nothing to close."""
