"""The process itself: harmless before it reads anything, wherever its code lies; there for a node, gone with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import greenroom
from greenroom.config import NetworkConfig
from greenroom.egress.__main__ import main
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.companions import Companions
from greenroom.runtime.slots import tag_of
from greenroom.wire import gate
from greenroom.wire.messages import Network
from tests.support.waiting import until

UID = 64_999
SOURCES = Path(greenroom.__file__).parents[1]


class Process:
    """An egress process, with the node's end of its channel."""

    def __init__(self, sources: Path) -> None:
        ours, theirs = gate.pair()
        self.answers: list[gate.Done] = []
        self.lost = asyncio.Event()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "greenroom.egress",
                    str(theirs.fileno()),
                    str(UID),
                    "0",
                    "info",
                    "/home",
                ],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": str(sources)},
                stderr=subprocess.PIPE,
                cwd="/",
            )
        self.channel = gate.Channel(ours, self._received, self.lost.set)
        self.channel.start()

    def _received(self, payload: bytes, _fds: list[int]) -> None:
        self.answers.append(msgspec.json.decode(payload, type=gate.Done))

    async def tell(self, order: gate.Order, *sockets: socket.socket) -> gate.Done:
        """Send an order and wait for its answer."""
        self.channel.send(msgspec.json.encode(order), sockets)
        await until(lambda: any(done.number == order.number for done in self.answers), 30)
        return next(done for done in self.answers if done.number == order.number)

    def end(self) -> str:
        """Let go of it; what it logged."""
        self.channel.close()
        _, errors = self.process.communicate(timeout=20)
        return errors.decode()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    """One whose code lies where only root can enter."""
    if os.geteuid() != 0:
        pytest.skip("giving up root's rights needs them")
    tmp_path.chmod(0o700)
    shutil.copytree(
        SOURCES / "greenroom", tmp_path / "greenroom", ignore=shutil.ignore_patterns("__pycache__")
    )
    made = Process(tmp_path)
    yield made
    if made.process.poll() is None:
        made.end()


def status(pid: int) -> dict[str, list[str]]:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}


async def test_it_has_no_privilege_when_it_serves_and_ends_in_good_order(process: Process) -> None:
    assert (await process.tell(gate.Ping(1))).counts == gate.Counts()
    facts = status(process.process.pid)
    assert set(facts["Uid"]) == set(facts["Gid"]) == {str(UID)}
    assert facts["Groups"] == []
    assert {int(facts[name][0], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert facts["NoNewPrivs"] == ["1"]
    log = process.end()
    assert process.process.returncode == 0
    assert "Traceback" not in log


async def test_an_order_that_cannot_be_carried_out_is_answered_so_and_the_next_one_is(
    process: Process,
) -> None:
    assert "not known" in (await process.tell(gate.Change(1, "vm", Network()))).error
    assert "without settings" in (await process.tell(gate.Open(2, "vm", "sandbox", Network()))).error
    assert not (await process.tell(gate.Settings(3, NetworkConfig(resolvers=["127.0.0.1:9"])))).error
    assert "sockets" in (await process.tell(gate.Open(4, "vm", "sandbox", Network()))).error
    sockets = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
               socket.create_server(("127.0.0.1", 0))]  # fmt: skip
    sockets[1].bind(("127.0.0.1", 0))
    try:
        assert not (await process.tell(gate.Open(5, "vm", "sandbox", Network()), *sockets)).error
        assert not (await process.tell(gate.Change(6, "vm", Network(deny_out=["192.0.2.1"])))).error
        assert (
            "no sandbox may reach"
            in (await process.tell(gate.Change(7, "vm", Network(allow_out=["10.0.0.1"])))).error
        )
    finally:
        for sock in sockets:
            sock.close()
    assert not (await process.tell(gate.Close(8, "vm"))).error
    assert not (await process.tell(gate.Close(9, "vm"))).error


async def test_a_flood_of_connections_is_bounded_in_number_and_memory(
    process: Process, tmp_path: Path
) -> None:
    cgroups, flood = Cgroups.detect(), 1_500
    companions = Companions(tmp_path, tag_of(tmp_path), cgroups)
    companions.admit("egress", process.process.pid, 256 << 20)
    try:
        settings = NetworkConfig(
            resolvers=["127.0.0.1:9"], connections_per_sandbox=20, new_connections_per_second=50
        )
        assert not (await process.tell(gate.Settings(1, settings))).error
        sockets = [socket.create_server(("127.0.0.1", 0), backlog=4096),
                   socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
                   socket.create_server(("127.0.0.1", 0))]  # fmt: skip
        sockets[1].bind(("127.0.0.1", 0))
        address = sockets[0].getsockname()
        assert not (await process.tell(gate.Open(2, "vm", "sandbox", Network()), *sockets)).error
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            for number in range(flood):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                with contextlib.suppress(ConnectionError):
                    await loop.sock_connect(one, address)
                if number % 100 == 0:
                    counts = (await process.tell(gate.Ping(10 + number))).counts
                    assert counts is not None
                    assert counts.open <= 20
            number = 10 + flood

            async def all_judged() -> bool:
                nonlocal number
                number += 1
                counts = (await process.tell(gate.Ping(number))).counts
                return counts is not None and sum(counts.connections.values()) == flood

            async with asyncio.timeout(60):
                while not await all_judged():
                    pass
        counts = (await process.tell(gate.Ping(number + 1))).counts
        assert counts is not None
        assert counts.connections["limited"] > 0
        assert counts.open == 0
        for sock in sockets:
            sock.close()
        (record,) = companions.recorded()
        assert cgroups.pids(record.cgroup) == {process.process.pid}, "it has lived through it"
        most = ("memory.max_usage_in_bytes", "memory.peak")
        for file in (directory / name for directory in cgroups.directories(record.cgroup) for name in most):
            if file.exists():
                assert 0 < int(file.read_text()) < 128 << 20
    finally:
        process.end()
        companions.clear()


async def test_wrong_settings_are_told(process: Process) -> None:
    answer = await process.tell(gate.Settings(1, NetworkConfig(resolvers=["dns.example"])))
    assert "[network] resolvers" in answer.error


def test_it_is_not_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "started by a node" in capsys.readouterr().err


async def test_the_channel_carries_much_in_order_and_ends_for_both() -> None:
    ours, theirs = gate.pair()
    got: list[bytes] = []
    ended: list[str] = []
    first = gate.Channel(ours, lambda payload, _fds: got.append(payload), lambda: ended.append("first"))
    other = gate.Channel(theirs, lambda payload, _fds: got.append(payload), lambda: ended.append("other"))
    messages = [str(number).encode() * 20_000 for number in range(60)]
    for message in messages:
        first.send(message)
    with socket.socket() as gone:
        pass
    first.send(b"with a socket that is closed", [gone])
    first.send(b"last")
    other.start()
    await until(lambda: got[-1:] == [b"last"])
    assert got == [*messages, b"last"]
    first.close()
    await until(lambda: ended == ["first", "other"])
    other.send(b"to nobody")
    other.close()
    assert ended == ["first", "other"]
