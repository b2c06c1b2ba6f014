"""The node's egress process: real, watched, started again, told everything anew. Its sandboxes are loopback sockets.

What answers here is DNS, which needs no redirection: a box whose rules leave no way out refuses, another one does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from greenroom.config import Config, NetworkConfig, VmConfig
from greenroom.errors import BadRequest, RuntimeFailure, SetupError
from greenroom.node import egress as module
from greenroom.node.egress import Gate
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.companions import Companions
from greenroom.runtime.engine import Vm
from greenroom.runtime.namespaces import Outlets
from greenroom.runtime.simulated import SimulatedRuntime, SimulatedVm
from greenroom.runtime.slots import tag_of
from greenroom.wire.messages import Network
from greenroom.wire.network import Rules
from tests.node.conftest import SMALL
from tests.support.waiting import until

QUESTION = bytes.fromhex("0007010000010000000000000378797a0474657374000010" + "0001")
"""TXT of xyz.test: answered empty where names resolve, without asking anybody."""
NODE = """
import asyncio
from pathlib import Path
from greenroom.config import Config, VmConfig
from greenroom.node.egress import Gate
from greenroom.wire.gate import Ping
from tests.node.test_egress import Loopback

async def main():
    async with Gate(Loopback(), Config(vm=VmConfig(engine="qemu")), Path("/"), 0) as gate:
        while gate._link is None:
            await asyncio.sleep(0.01)
        await gate._link.tell(Ping(1_000_000))
        print(gate.pid, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""
"""A process that has an egress process, which has answered and so has given up all rights."""
REFUSED, EMPTY = 5, 0
CLOSED = Network(allow_internet_access=False)


def a_vm(name: str) -> SimulatedVm:
    return SimulatedVm(name, "base", SMALL, "golden")


class Loopback(SimulatedRuntime):
    """An engine whose VMs have their outlets on loopback."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: list[Rules] = []
        self.taken = 0
        """So many openings fail because an earlier process still holds the ports."""
        self.dns: dict[str, tuple[str, int]] = {}

    async def restrict(self, vm: Vm, rules: Rules) -> None:
        self.rules.append(rules)

    def open_outlets(self, vm: Vm) -> Outlets | None:
        if self.taken:
            self.taken -= 1
            raise RuntimeFailure("in use") from OSError(errno.EADDRINUSE, "in use")
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        self.dns[vm.name] = udp.getsockname()
        return Outlets(socket.create_server(("127.0.0.1", 0)), udp, socket.create_server(("127.0.0.1", 0)))


@pytest.fixture
def engine() -> Loopback:
    if os.geteuid() != 0:
        pytest.skip("the egress process gives up root's rights")
    return Loopback()


@pytest.fixture
async def gate(engine: Loopback, tmp_path: Path) -> AsyncIterator[Gate]:
    config = Config(vm=VmConfig(engine="qemu"), network=NetworkConfig(resolvers=["127.0.0.1:9"]))
    async with Gate(engine, config, tmp_path, 0) as made:
        yield made
        pid = made.pid
    assert pid is None or not Path(f"/proc/{pid}").exists()


async def ask(engine: Loopback, name: str) -> int | None:
    """The code of the answer to a question from the sandbox with this VM; None for silence."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.setblocking(False)
        asker.connect(engine.dns[name])
        try:
            async with asyncio.timeout(10):
                await loop.sock_sendall(asker, QUESTION)
                return (await loop.sock_recv(asker, 512))[3] & 0xF
        except (TimeoutError, OSError):
            return None


async def test_a_sandbox_is_served_by_its_rules_as_they_change(gate: Gate, engine: Loopback) -> None:
    one, other = a_vm("one"), a_vm("other")
    await gate.apply(one, "one", Network())
    await gate.apply(other, "other", CLOSED)
    assert (await ask(engine, "one"), await ask(engine, "other")) == (EMPTY, REFUSED)
    await gate.apply(one, "one", CLOSED)
    await gate.apply(other, "other", Network())
    assert (await ask(engine, "one"), await ask(engine, "other")) == (REFUSED, EMPTY)
    assert [rules.closed for rules in engine.rules] == [False, True, True, False]
    await gate.close(a_vm("one"))
    await gate.close(a_vm("one"))
    assert await ask(engine, "one") is None
    await until(lambda: gate.counts().dns == {"empty": 2, "refused": 2})


async def test_rules_that_cannot_be_kept_change_nothing(gate: Gate, engine: Loopback) -> None:
    vm = a_vm("one")
    await gate.apply(vm, "one", CLOSED)
    with pytest.raises(BadRequest):
        await gate.apply(vm, "one", Network(allow_out=["10.0.0.1"]))
    assert await ask(engine, "one") == REFUSED
    assert len(engine.rules) == 1


async def test_a_process_that_dies_is_followed_by_one_that_knows_everything(
    gate: Gate, engine: Loopback
) -> None:
    await gate.apply(a_vm("one"), "one", Network())
    await gate.apply(a_vm("other"), "other", CLOSED)
    assert await ask(engine, "one") == EMPTY
    await until(lambda: gate.counts().dns == {"empty": 1})
    for start in (2, 3):
        # Counts come once a second; those since the last time die with their process.
        assert gate.pid is not None
        os.kill(gate.pid, signal.SIGKILL)
        await until(lambda start=start: gate.starts == start and gate.pid is not None)
        # Questions wait in the sockets, which the node has kept.
        assert (await ask(engine, "one"), await ask(engine, "other")) == (EMPTY, REFUSED)
        expected = {"empty": start, "refused": start - 1}
        await until(lambda expected=expected: gate.counts().dns == expected)


async def test_a_process_that_takes_more_memory_than_it_may_is_killed_and_followed(
    engine: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    companions = Companions(tmp_path, tag_of(tmp_path), Cgroups.detect())
    allowed: list[int] = []

    def confine(name: str, pid: int, memory: int) -> None:
        allowed.append(memory)
        # The first one gets less than Python itself needs.
        companions.admit(name, pid, 4 << 20 if len(allowed) == 1 else memory)

    monkeypatch.setattr(engine, "confine", confine)
    config = Config(vm=VmConfig(engine="qemu"), network=NetworkConfig(resolvers=["127.0.0.1:9"]))
    try:
        async with Gate(engine, config, tmp_path, 0) as gate:
            vm = a_vm("one")
            await gate.apply(vm, "one", Network())
            await until(lambda: gate.starts > 1, 30)
            assert await ask(engine, "one") == EMPTY
            (record,) = companions.recorded()
            assert gate.pid in Cgroups.detect().pids(record.cgroup)
    finally:
        companions.clear()
    assert set(allowed) == {config.network.egress_memory_mib << 20}
    assert "exit status -9" in caplog.text


async def test_a_process_that_cannot_be_bounded_serves_nobody(
    engine: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[int] = []

    def confine(_name: str, pid: int, _memory: int) -> None:
        if len(refused) < 2:
            refused.append(pid)
            raise SetupError("the egress process cannot be bounded")

    monkeypatch.setattr(engine, "confine", confine)
    config = Config(vm=VmConfig(engine="qemu"), network=NetworkConfig(resolvers=["127.0.0.1:9"]))
    async with Gate(engine, config, tmp_path, 0) as gate:
        await gate.apply(a_vm("one"), "one", Network())
        await until(lambda: gate.pid is not None, 30)
        assert not [pid for pid in refused if Path(f"/proc/{pid}").exists()]
        assert gate.starts == 1
        assert await ask(engine, "one") == EMPTY
    assert "cannot be bounded" in caplog.text


async def test_a_process_that_hangs_is_ended_and_followed(
    gate: Gate, engine: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gate.apply(a_vm("one"), "one", Network())
    assert await ask(engine, "one") == EMPTY
    monkeypatch.setattr(module, "SILENCE", 0.3)
    assert gate.pid is not None
    os.kill(gate.pid, signal.SIGSTOP)
    await until(lambda: gate.starts >= 2 and gate.pid is not None)
    monkeypatch.setattr(module, "SILENCE", 30.0)
    assert await ask(engine, "one") == EMPTY


async def test_a_change_that_is_not_answered_is_an_error_and_the_end_of_a_sandbox_is_not(
    gate: Gate, engine: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = a_vm("one")
    await gate.apply(vm, "one", Network())
    assert await ask(engine, "one") == EMPTY
    monkeypatch.setattr(module, "ANSWER", 0.1)
    pid = gate.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeFailure, match="does not answer"):
        await gate.apply(vm, "one", CLOSED)
    await gate.close(a_vm("one"))
    os.kill(pid, signal.SIGCONT)


async def test_ports_that_an_earlier_process_still_holds_are_waited_for(
    gate: Gate, engine: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.taken = 3
    await gate.apply(a_vm("one"), "one", Network())
    assert await ask(engine, "one") == EMPTY
    monkeypatch.setattr(module, "TAKEN", 0.0)
    engine.taken = 10_000
    with pytest.raises(RuntimeFailure, match="in use"):
        await gate.apply(a_vm("other"), "other", Network())


async def test_a_sandbox_that_ends_while_it_is_opened_leaves_nothing(gate: Gate, engine: Loopback) -> None:
    engine.taken = 3
    opening = asyncio.gather(gate.apply(a_vm("one"), "one", Network()))
    await until(lambda: engine.taken < 3)
    await gate.close(a_vm("one"))
    await opening
    assert await ask(engine, "one") is None


async def test_a_node_that_dies_takes_its_egress_process_along_even_a_stopped_one(engine: Loopback) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert node.stdout is not None
        async with asyncio.timeout(60):
            pid = int(await node.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
    finally:
        with contextlib.suppress(ProcessLookupError):
            node.kill()
        await node.wait()
    await until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in state_of(pid))


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2]
    except OSError:
        return "Z"
