"""The way out of real microVMs, through the real platform and the E2B SDK, to a stand-in internet of the tests' own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2b import Sandbox
from e2b.exceptions import NotFoundException, SandboxException

from tests.support.internet import Internet
from tests.support.platform import Platform
from tests.support.waiting import until_true

pytestmark = [pytest.mark.vm, pytest.mark.slow]
ALL = "0.0.0.0/0"


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    made = Internet(tmp_path_factory.mktemp("internet"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, internet: Internet) -> Iterator[Platform]:
    """A platform whose sandboxes' names are looked up in the stand-in internet; nothing may be left of it."""
    made = Platform(tmp_path_factory.mktemp("world"))
    made.settings += internet.settings
    made.up("--warm", "3")
    environment = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("E2B_")}
    os.environ.update(made.env())
    try:
        yield made
    finally:
        for name in [name for name in os.environ if name.startswith("E2B_")]:
            del os.environ[name]
        os.environ.update(environment)
        made.down()
    assert made.leftovers() == {}
    assert egress_pids(made) == []


def egress_pids(platform: Platform) -> list[int]:
    """The egress processes of its nodes."""
    commands = [(process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [
        pid
        for pid, words in commands
        if "greenroom.egress" in words and words[-1].startswith(str(platform.state))
    ]


def get(box: Sandbox, url: str, *options: str, deadline: int = 20) -> str:
    """What curl in the guest gets, or `failed <status of curl>`."""
    command = f"curl -sS -m {deadline} {' '.join(options)} {url} 2>/tmp/error || echo failed $?"
    return box.commands.run(command, timeout=deadline + 20).stdout.strip()


def reached(box: Sandbox, url: str, *options: str) -> dict[str, Any]:
    """What the server that was reached says of the request."""
    text = get(box, url, *options)
    assert text.startswith("{"), text
    return dict(json.loads(text))


REFUSED = "failed 7"
"""curl could not connect: reset in the sandbox's namespace already."""
RESET = ("failed 56", "failed 55", "failed 52", "failed 35", "failed 7")
"""curl's connection was reset by the egress process: as it read, as it wrote, before an answer, in its handshake, or
so soon that it did not even notice the connection."""


def test_without_rules_the_internet_is_there_by_name_and_address(world: Platform, internet: Internet) -> None:
    with Sandbox.create(timeout=120) as box:
        box.files.write("/tmp/ca.pem", internet.ca.read_text(encoding="ascii"))
        assert reached(box, f"http://{internet.one}/")["at"] == internet.one
        assert reached(box, "http://other.test/")["at"] == internet.far
        secure = reached(box, "https://two.test/", "--cacert /tmp/ca.pem")
        assert secure == {"at": internet.two, "host": "two.test", "tls": True}
        assert "hello from port 2525" in get(box, f"telnet://{internet.one}:2525", "< /dev/null")
        box.commands.run("head -c 3000000 /dev/urandom > /tmp/much")
        get(box, "http://one.test/echo", "--data-binary @/tmp/much -o /tmp/back")
        assert box.commands.run("cmp /tmp/much /tmp/back").exit_code == 0
        info = box.get_info()
        assert info.allow_internet_access is True


def test_host_private_and_metadata_addresses_are_refused_at_once(world: Platform, internet: Internet) -> None:
    with Sandbox.create(timeout=120, network={"allow_out": [ALL]}) as box:
        inside = ["10.0.2.2:47001", "10.0.2.2:47053", "127.0.0.1:1", "10.0.2.2", "169.254.169.254", "10.1.2.3",
                  "172.16.0.1", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"]  # fmt: skip
        for address in inside:
            assert get(box, f"http://{address}/", deadline=5) == REFUSED, address
        with listening(internet.host_side) as (port, accepted):
            # The host's own address looks like any public one; only the kernel knows.
            assert get(box, f"http://{internet.host_side}:{port}/", deadline=5) in RESET
            for own in own_addresses():
                assert get(box, f"http://{own}:{port}/", deadline=5).startswith("failed"), own
            assert accepted == []
        assert get(box, "http://inward.test/", deadline=5) == "failed 6"  # such answers are left out
        assert reached(box, "http://mixed.test/")["at"] == internet.one
        udp = f"import socket; s = socket.socket(2, 2); s.settimeout(3); s.connect(('{internet.one}', 123))"
        done = box.commands.run(f"python3 -c \"{udp}; s.send(b'x'); s.recv(1)\" 2>&1 | tail -1").stdout
        assert "refused" in done.lower()
        ipv6 = box.commands.run("curl -6 -sS -m 5 'http://[2001:db8::1]/' 2>&1; true").stdout
        assert "{" not in ipv6


@contextmanager
def listening(address: str) -> Iterator[tuple[int, list[Any]]]:
    """A listener on one of the host's own addresses and everywhere else, that notes who comes."""
    accepted: list[Any] = []
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.settimeout(0.2)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    sock, peer = server.accept()
                except TimeoutError:
                    continue
                accepted.append(peer)
                sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        with socket.create_connection((address, port), timeout=5):
            until_true(lambda: accepted)
        accepted.clear()
        try:
            yield port, accepted
        finally:
            over.set()
            thread.join()


def own_addresses() -> list[str]:
    return [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]


def test_another_sandbox_cannot_be_reached(world: Platform, internet: Internet) -> None:
    with Sandbox.create(timeout=120, network={"allow_out": [ALL]}) as one, Sandbox.create(timeout=120):
        # Every guest has 10.0.2.15, which from `one` is `one` itself; the other's agent listens there, too.
        for address in ("10.0.2.16", "10.0.2.1", "10.0.2.2", "10.0.2.255"):
            assert get(one, f"http://{address}:49983/health", deadline=5) == REFUSED, address


def test_rules_stay_with_a_sandbox_that_is_paused_and_resumed(world: Platform, internet: Internet) -> None:
    rules = {"allow_out": [internet.one], "deny_out": [ALL]}
    box = Sandbox.create(timeout=200)
    try:
        box.update_network(rules)
        box.pause()
        with pytest.raises(SandboxException, match="409"):
            box.update_network({})
        box = box.connect(timeout=200)
        assert reached(box, f"http://{internet.one}/")["at"] == internet.one
        assert get(box, f"http://{internet.two}/") == REFUSED
        assert box.get_info().network == rules
    finally:
        box.kill()


def test_allowed_addresses_win_over_denied_ones(world: Platform, internet: Internet) -> None:
    rules = {"allow_out": [internet.one], "deny_out": [ALL]}
    with Sandbox.create(timeout=120, network=rules) as box:
        assert reached(box, f"http://{internet.one}/")["at"] == internet.one
        assert get(box, f"http://{internet.two}/") == REFUSED
        assert get(box, f"http://{internet.dns}:53/") in RESET  # the platform's own DNS, which knows no HTTP
        info = box.get_info()
        assert info.network == rules
    with Sandbox.create(timeout=120, network={"allow_out": [internet.network], "deny_out": [ALL]}) as box:
        assert reached(box, f"http://{internet.two}/")["at"] == internet.two
        assert get(box, f"http://{internet.far}/") == REFUSED
    with Sandbox.create(timeout=120, network={"deny_out": [internet.one, "::/0"]}) as box:
        assert get(box, f"http://{internet.one}/") == REFUSED
        assert reached(box, "http://two.test/")["at"] == internet.two


def test_names_and_patterns_are_allowed_where_all_else_is_denied(world: Platform, internet: Internet) -> None:
    rules = {"allow_out": ["two.test", "*.one.test", "inward.test"], "deny_out": [ALL]}
    with Sandbox.create(timeout=200, network=rules) as box:
        box.files.write("/tmp/ca.pem", internet.ca.read_text(encoding="ascii"))
        ca = "--cacert /tmp/ca.pem"
        assert reached(box, "http://two.test/")["at"] == internet.two
        assert reached(box, "https://two.test/", ca)["at"] == internet.two
        assert reached(box, "https://api.one.test/", ca)["at"] == internet.one
        assert reached(box, "https://deep.api.one.test/", ca)["at"] == internet.one
        # The domain of a pattern itself is not meant by it, and DNS tells nothing of what is not allowed.
        asked = len(internet.questions())
        assert get(box, "http://one.test/") == "failed 6"
        assert get(box, "http://other.test/") == "failed 6"
        assert not {"one.test", "other.test"} & set(internet.questions()[asked:])
        # A name makes no address right: wherever the guest points an allowed name, it gets to that name's own place.
        forged = f"--resolve two.test:443:{internet.one} --resolve two.test:80:{internet.one}"
        assert reached(box, "https://two.test/", ca, forged)["at"] == internet.two
        assert reached(box, "http://two.test/", forged)["at"] == internet.two
        # Nothing by address, by a wrong name, or by a protocol that tells no name first.
        assert get(box, f"http://{internet.two}/").startswith("failed")
        assert get(box, f"http://{internet.one}/", "-H 'Host: other.test'") in RESET
        assert get(box, f"https://other.test/ --resolve other.test:443:{internet.far}", ca) in RESET
        assert get(box, f"telnet://{internet.two}:2525", "< /dev/null").startswith("failed")
        # A name that leads inwards leads nowhere, asked of DNS or named to the proxy.
        assert get(box, "http://inward.test/") == "failed 6"
        assert get(box, f"http://inward.test/ --resolve inward.test:80:{internet.one}") in RESET


def test_without_internet_access_there_is_no_dns_either(world: Platform, internet: Internet) -> None:
    with Sandbox.create(timeout=120, allow_internet_access=False) as box:
        asked = len(internet.questions())
        assert get(box, f"http://{internet.one}/") == REFUSED
        assert get(box, "http://secret-data.one.test/") == "failed 6"
        script = (
            "import socket; s = socket.socket(2, 2); s.settimeout(3); s.connect(('203.0.113.53', 53)); "
            "s.send(bytes.fromhex('123401000001000000000000036f6e6504746573740000010001')); print(s.recv(99))"
        )
        assert "refused" in box.commands.run(f'python3 -c "{script}" 2>&1 | tail -1').stdout.lower()
        assert internet.questions()[asked:] == []
        assert box.get_info().allow_internet_access is False
        # The node still reaches in.
        assert box.commands.run("echo still here").stdout == "still here\n"


def test_rules_are_replaced_while_the_sandbox_runs(world: Platform, internet: Internet) -> None:
    with Sandbox.create(timeout=200) as box:
        for number, host in enumerate((internet.one, internet.two)):
            box.commands.run(
                f"curl -sSN http://{host}/drip > /tmp/drip{number} 2>/tmp/end{number}", background=True
            )
        until_true(lambda: all(size(box, f"/tmp/drip{number}") > 20 for number in (0, 1)))
        box.update_network({"deny_out": [internet.one]})
        until_true(lambda: "reset" in box.commands.run("cat /tmp/end0").stdout)
        assert get(box, f"http://{internet.one}/") == REFUSED
        before = size(box, "/tmp/drip1")
        until_true(lambda: size(box, "/tmp/drip1") > before)  # the other one goes on
        box.update_network({"allow_internet_access": False})
        until_true(lambda: "reset" in box.commands.run("cat /tmp/end1").stdout)
        assert get(box, "http://two.test/") == "failed 6"
        box.update_network({"allow_out": ["two.test"], "deny_out": [ALL]})
        assert reached(box, "http://two.test/")["at"] == internet.two
        box.update_network({})
        assert reached(box, f"http://{internet.one}/")["at"] == internet.one
        with pytest.raises(SandboxException, match="Names are only possible"):
            box.update_network({"deny_out": ["one.test"]})
        sandbox_id = box.sandbox_id
    with pytest.raises(NotFoundException):
        Sandbox.update_network(sandbox_id, {})


def size(box: Sandbox, path: str) -> int:
    return int(box.commands.run(f"stat -c %s {path} 2>/dev/null || echo 0").stdout)


def test_dns_by_tcp_and_long_answers(world: Platform, internet: Internet) -> None:
    with Sandbox.create(timeout=120) as box:
        assert reached(box, "http://many.test/")["at"] == internet.one  # its answer needs TCP upstream
        script = (
            "import socket\n"
            "q = bytes.fromhex('123401000001000000000000') + b'\\x03one\\x04test\\0\\0\\x01\\0\\x01'\n"
            f"s = socket.create_connection(('{internet.far}', 53), 10)\n"
            "s.sendall(len(q).to_bytes(2, 'big') + q)\n"
            "print(socket.inet_ntoa(s.recv(999)[-4:]))\n"
        )
        box.files.write("/tmp/ask.py", script)
        # Whatever server was meant: the platform's answers.
        assert box.commands.run("python3 /tmp/ask.py").stdout.strip() == internet.one
        assert get(box, "http://lost.test/", deadline=15) == "failed 6"


def test_the_egress_process_has_no_privilege(world: Platform) -> None:
    (pid,) = egress_pids(world)
    process = psutil.Process(pid)
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    status = dict(line.split(":\t", 1) for line in text.splitlines())
    uids = set(status["Uid"].split())
    assert len(uids) == 1
    assert uids.isdisjoint({"0"})
    assert uids.isdisjoint({str(psutil.Process(vm).uids().real) for vm in world.vm_pids()})
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Groups"].strip()) == ("1", "")
    assert not [name for name in process.environ() if "TOKEN" in name or "KEY" in name]
    uid = uids.pop()
    for path in (world.state, world.state / "secrets" / "node.token"):
        done = subprocess.run(
            ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "cat", str(path)],
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode != 0, path


@pytest.mark.fault
def test_an_egress_process_that_is_killed_or_hangs_costs_the_open_connections_only(
    world: Platform, internet: Internet
) -> None:
    rules = {"allow_out": ["two.test"], "deny_out": [ALL]}
    with Sandbox.create(timeout=200) as open_box, Sandbox.create(timeout=200, network=rules) as box:
        (before,) = egress_pids(world)
        open_box.commands.run(
            f"curl -sSN http://{internet.one}/drip > /tmp/drip 2>/tmp/end; echo $? > /tmp/over",
            background=True,
        )
        until_true(lambda: size(open_box, "/tmp/drip") > 20)
        os.kill(before, signal.SIGKILL)
        until_true(lambda: size(open_box, "/tmp/over") > 0)
        # Whoever connects meanwhile waits for the next process, which knows all rules.
        assert reached(open_box, f"http://{internet.one}/")["at"] == internet.one
        assert reached(box, "http://two.test/")["at"] == internet.two
        assert get(box, f"http://{internet.one}/").startswith("failed")
        assert egress_pids(world) != [before]


@pytest.mark.fault
def test_a_node_that_is_killed_gives_its_sandboxes_their_way_out_back(
    world: Platform, internet: Internet
) -> None:
    rules = {"allow_out": [internet.two], "deny_out": [ALL]}
    with Sandbox.create(timeout=300) as open_box, Sandbox.create(timeout=300) as box:
        box.update_network(rules)
        egress = egress_pids(world)
        world.strike("node-0", open_box, box)
        until_true(lambda: all(pid not in egress for pid in egress_pids(world)) and egress_pids(world))
        until_true(lambda: get(open_box, f"http://{internet.one}/").startswith("{"))
        until_true(lambda: get(box, f"http://{internet.two}/").startswith("{"))
        assert get(box, f"http://{internet.one}/") == REFUSED
        assert box.get_info().network == rules
        box.update_network({})
        assert reached(box, f"http://{internet.one}/")["at"] == internet.one


def test_nothing_of_an_ended_sandbox_keeps_its_namespace(world: Platform, internet: Internet) -> None:
    box = Sandbox.create(timeout=120)
    box.commands.run(f"curl -sSN http://{internet.one}/drip > /tmp/drip", background=True)
    until_true(lambda: size(box, "/tmp/drip") > 20)
    connections = open_to(internet.one)
    assert connections
    box.kill()
    until_true(lambda: not open_to(internet.one))


def open_to(address: str) -> list[Any]:
    """Connections of this host's egress processes to an address."""
    return [
        found
        for found in psutil.net_connections("tcp4")
        if found.raddr and found.raddr.ip == address and found.status == psutil.CONN_ESTABLISHED
    ]


def test_what_went_out_is_counted_and_logged_without_content(world: Platform, internet: Internet) -> None:
    with Sandbox.create(timeout=120) as box:
        reached(box, "http://two.test/?password=hunter2")
    until_true(lambda: "the way out is closed" in world.log("node-0"))
    log = world.log("node-0")
    lines = [json.loads(line) for line in log.splitlines() if "the way out is closed" in line]
    mine = [line for line in lines if line.get("sandbox_id") == box.sandbox_id]
    assert [line["connections"] for line in mine] == [{"allowed": 1}]
    assert mine[0]["bytes_in"] > 50
    for secret in ("hunter2", "two.test", internet.two):
        assert secret not in log
