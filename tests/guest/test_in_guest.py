"""The agent inside a real microVM, through the whole platform: what no workstation can show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2b import CommandExitException, PtySize, Sandbox

from tests.guest.harness import envelope, eventually
from tests.support.platform import Platform

pytestmark = [pytest.mark.vm, pytest.mark.compat, pytest.mark.slow]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A sandbox of a platform of its own."""
    platform = Platform(tmp_path_factory.mktemp("platform"))
    platform.up("--warm", "1")
    try:
        env = platform.env()
        with Sandbox.create(
            timeout=600,
            api_key=env["E2B_API_KEY"],
            api_url=env["E2B_API_URL"],
            sandbox_url=env["E2B_SANDBOX_URL"],
        ) as made:
            yield made
    finally:
        platform.down()
    assert platform.leftovers() == {}


def run(box: Sandbox, command: str, **options: Any) -> str:
    return box.commands.run(command, **options).stdout


def replay(box: Sandbox, pid: int, offset: int) -> list[dict[str, Any]]:
    """All events of a command from an offset on, by plain HTTP: the SDK knows nothing of offsets."""
    headers = {**box.connection_config.sandbox_headers, "Content-Type": "application/connect+json"}
    body = envelope(json.dumps({"process": {"pid": pid}, "offset": str(offset)}).encode())
    answer = httpx.post(
        f"{box.envd_api_url}/process.Process/Connect", content=body, headers=headers, timeout=60
    )
    assert answer.status_code == 200
    events, rest = [], answer.content
    while rest:
        size = int.from_bytes(rest[1:5], "big")
        events.append(json.loads(rest[5 : 5 + size]))
        rest = rest[5 + size :]
    return events


def test_a_terminal_of_the_sandboxs_user(box: Sandbox) -> None:
    shown = bytearray()
    handle = box.pty.create(PtySize(rows=30, cols=100), cwd="/tmp")
    box.pty.resize(handle.pid, PtySize(rows=31, cols=101))
    box.pty.send_stdin(handle.pid, b"stty size; id -un; tty; pwd; exit 3\n")
    with pytest.raises(CommandExitException) as caught:
        handle.wait(on_pty=shown.extend)
    assert caught.value.exit_code == 3
    lines = shown.decode().replace("\r", "").split("\n")
    for expected in ("31 101", "user", "/dev/pts/0", "/tmp"):
        assert any(expected in line for line in lines), shown


def test_a_directory_is_watched(box: Sandbox) -> None:
    run(box, "mkdir -p watched")
    handle = box.files.watch_dir("watched", recursive=True)
    box.files.write("watched/new/file", "x")
    events = [(event.type.value, event.name) for event in handle.get_new_events()]
    assert ("create", "new") in events
    assert ("create", "new/file") in events
    handle.stop()


def test_nothing_of_a_killed_command_survives(box: Sandbox) -> None:
    handle = box.commands.run(
        "setsid sh -c '(sleep 7777 & echo $! >/tmp/daemon) &'; sleep 7778", background=True
    )
    eventually(lambda: "yes" in run(box, "test -s /tmp/daemon && echo yes || true"), "the daemon runs")
    daemon = int(run(box, "cat /tmp/daemon"))
    group = run(box, f"cut -d: -f3 /proc/{daemon}/cgroup").strip()
    assert group.startswith("/commands/")
    assert handle.kill() is True
    eventually(lambda: run(box, f"test -e /proc/{daemon} && echo there || true") == "", "the daemon is gone")
    assert run(box, f"test -e /sys/fs/cgroup{group} && echo there || true") == ""


def test_groups_are_entered_quickly(box: Sandbox) -> None:
    assert "favordynmods" in run(box, "grep cgroup2 /proc/mounts")


def test_output_is_replayed_from_the_guests_disk(box: Sandbox) -> None:
    handle = box.commands.run("seq 1 400000", background=True)
    handle.disconnect()
    size = sum(len(f"{number}\n") for number in range(1, 400_001))
    # Asked from its very end, the answer comes when the command has ended.
    eventually(lambda: "error" not in replay(box, handle.pid, size)[-1], "all was written")
    events = replay(box, handle.pid, 0)
    kinds = [next(iter(event.get("event", event))) for event in events if event]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    last = [event["event"]["data"] for event in events if "data" in event.get("event", {})][-1]
    assert int(last["offset"]) < size
    assert run(box, "sudo ls -A /var/lib/greenroom") == ""


def test_the_way_to_the_loopback_is_closed_to_clients(box: Sandbox) -> None:
    url = f"{box.envd_api_url}/upgrade/loopback/22"
    headers = {**box.connection_config.sandbox_headers, "X-Greenroom-Control": "guess"}
    assert httpx.get(url, headers=headers).status_code == 404
    upgrade = {**headers, "Connection": "Upgrade", "Upgrade": "greenroom-loopback"}
    assert httpx.get(url, headers=upgrade).status_code in (403, 404)  # 403: Envoy knows no such upgrade
    # Nor from within, as the token never was in there for anybody but the agent.
    inside = run(
        box,
        "curl -s -o /dev/null -w '%{http_code}' -H 'Connection: Upgrade' -H 'Upgrade: greenroom-loopback' "
        "http://127.0.0.1:49983/upgrade/loopback/22",
    )
    assert inside == "404"
