"""What the node daemon does to a fresh clone: identity, clock, tokens."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.guest.machine import Machine
from tests.guest.harness import ME, Agent, Answer, b64, running_agent, shell

CONTROL = {"X-Greenroom-Control": "control-token"}


def init(agent: Agent, message: object, headers: dict[str, str] | None = None) -> Answer:
    return agent.request("POST", "/init", json.dumps(message).encode(), headers or {})


def recorded(agent: Agent) -> list[dict[str, Any]]:
    path = agent.identity / "identity.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_everything_at_once(fresh_agent: Agent, folder: Path) -> None:
    agent = fresh_agent
    stamp = time.time_ns() + 3_600_000_000_000
    answer = init(agent, {
        "accessToken": "access-token", "controlToken": "control-token", "sandboxId": "i123", "templateId": "base",
        "envVars": {"A": "b"}, "entropy": b64(os.urandom(64)), "machineId": "0123456789abcdef" * 2,
        "hostname": "green-1", "timestampNs": stamp, "defaultUser": ME, "defaultWorkdir": str(folder),
    })  # fmt: skip
    assert answer.status == 200
    assert abs(answer.json["nowNs"] - stamp) < 10_000_000_000
    steps = recorded(agent)
    assert [step["step"] for step in steps] == ["entropy", "clock", "machineId", "hostname"]
    assert [step["value"] for step in steps if step["step"] != "clock"] == [
        64,
        "0123456789abcdef" * 2,
        "green-1",
    ]
    assert stamp <= steps[1]["value"] < stamp + 10_000_000_000
    agent.token = "access-token"
    environment = {"A": "b", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "i123", "E2B_TEMPLATE_ID": "base"}
    assert agent.request("GET", "/envs").json == environment
    assert (
        agent.run("echo $A $E2B_SANDBOX_ID $E2B_SANDBOX; pwd").stdout.decode() == f"b i123 true\n{folder}\n"
    )
    assert agent.run("echo $A", process={"envs": {"A": "mine"}}).stdout == b"mine\n"


def test_fields_left_out_stay_as_they_are(fresh_agent: Agent) -> None:
    agent = fresh_agent
    init(agent, {"envVars": {"A": "1", "B": "1"}, "sandboxId": "one"})
    init(agent, {"envVars": {"B": "2"}})
    assert agent.request("GET", "/envs").json == {
        "A": "1", "B": "2", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "one",
    }  # fmt: skip
    assert init(agent, {}).status == 200
    assert recorded(agent) == []


def test_the_access_token_guards_the_data_plane(fresh_agent: Agent) -> None:
    agent = fresh_agent
    assert agent.request("GET", "/envs").status == 200
    init(agent, {"accessToken": "access-token"})
    for token in (None, "wrong", "access-toke", "é"):
        headers = {} if token is None else {"X-Access-Token": token}
        for path in ("/envs", "/metrics", "/nothing"):
            answer = agent.request("GET", path, headers=headers)
            assert (answer.status, answer.json["code"]) == (401, 401)
        answer = agent.call("Stat", {"path": "/"}, **headers)
        assert (answer.status, answer.json["code"]) == (401, "unauthenticated")
        stream = agent.open_stream("Start", {"process": shell("true")}, headers=headers)
        assert stream.response.status == 401
        assert json.loads(stream.response.read())["code"] == "unauthenticated"
        stream.close()
    assert agent.request("GET", "/health").status == 204
    assert agent.request("OPTIONS", "/envs", headers={"Origin": "x"}).status == 204
    agent.token = "access-token"
    assert agent.request("GET", "/envs").status == 200
    assert agent.call("Stat", {"path": "/"}).status == 200
    assert agent.run("echo in").stdout == b"in\n"


def test_the_control_token_hides_the_control_routes(fresh_agent: Agent) -> None:
    agent = fresh_agent
    assert agent.request("GET", "/clock").status == 200
    init(agent, {"controlToken": "control-token"})
    for headers in ({}, {"X-Greenroom-Control": "wrong"}, {"X-Access-Token": "control-token"}):
        for method, path in (
            ("POST", "/init"), ("GET", "/clock"), ("POST", "/clock"), ("GET", "/init"), ("POST", "/sync"),
        ):  # fmt: skip
            answer = agent.request(method, path, b"{}", headers)
            assert (answer.status, answer.json["code"]) == (404, 404)
    assert init(agent, {"sandboxId": "x"}, CONTROL).status == 200
    assert agent.request("GET", "/clock", headers=CONTROL).status == 200
    assert agent.request("POST", "/sync", b"{}", headers=CONTROL).status == 200
    assert init(agent, {"controlToken": "next"}, CONTROL).status == 200
    assert init(agent, {}, CONTROL).status == 404


@pytest.mark.parametrize("step", ["entropy", "clock", "machineId", "hostname", "settings"])
def test_a_failed_step_is_named_and_sets_no_token(fresh_agent: Agent, step: str) -> None:
    agent = fresh_agent
    (agent.identity / "fail").write_text(step)
    answer = init(agent, {
        "accessToken": "secret-a", "controlToken": "secret-c", "entropy": b64(bytes(32)), "timestampNs": 1,
        "machineId": "0" * 32, "hostname": "h",
    })  # fmt: skip
    assert answer.status == 500
    assert f"step {step}" in answer.json["message"]
    assert agent.request("GET", "/envs").json == {}
    assert agent.request("GET", "/clock").status == 200
    assert "secret" not in Path(str(agent.identity) + ".stderr").read_text()


@pytest.mark.parametrize("message", [
    {"entropy": "short"}, {"entropy": b64(bytes(31))}, {"entropy": b64(bytes(513))}, {"entropy": 5},
    {"machineId": "xyz"}, {"machineId": "0" * 31}, {"machineId": "0" * 32 + "\n"}, {"machineId": "A" * 32},
    {"hostname": "-x"}, {"hostname": "a b"}, {"hostname": "x" * 65}, {"hostname": "a\nb"},
    {"timestampNs": "soon"}, {"timestampNs": -1}, {"timestampNs": 1 << 63},
    {"envVars": {"A": 1}}, {"envVars": {"A=": "x"}},
    {"envVars": {"A": "\0"}}, {"accessToken": 5}, {"accessToken": "a\nb"}, {"controlToken": "é"}, [],
])  # fmt: skip
def test_a_wrong_field_changes_nothing(agent: Agent, message: object) -> None:
    before = recorded(agent)
    whole = {"hostname": "ok", "controlToken": "t", **message} if isinstance(message, dict) else message
    answer = init(agent, whole)
    assert (answer.status, answer.json["code"]) == (400, 400)
    assert recorded(agent) == before
    assert agent.request("GET", "/clock").status == 200


def test_a_restarted_agent_still_asks_for_the_tokens(tmp_path: Path) -> None:
    with running_agent(tmp_path / "identity") as agent:
        message = {"accessToken": "access", "controlToken": "control-token", "envVars": {"A": "b"}}
        assert init(agent, message).status == 200
        kept = tmp_path / "identity/run/greenroom/agent.json"
        assert kept.stat().st_mode & 0o777 == 0o600
    with running_agent(tmp_path / "identity") as agent:
        assert agent.request("GET", "/envs").status == 401
        assert init(agent, {}).status == 404
        assert init(agent, {}, CONTROL).status == 200
        agent.token = "access"
        assert agent.request("GET", "/envs").json["A"] == "b"
    # After a boot the node daemon introduces the guest anew.
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps({**content, "bootId": "another"}))
    with running_agent(tmp_path / "identity") as agent:
        assert agent.request("GET", "/envs").json == {}


def test_the_clock_can_be_moved(fresh_agent: Agent) -> None:
    agent = fresh_agent

    def now() -> int:
        return int(agent.request("GET", "/clock").json["nowNs"])

    assert abs(now() - time.time_ns()) < 10_000_000_000
    for offset in (5_000_000_000_000, "-2000000000000"):
        before = now()
        answer = agent.request("POST", "/clock", json.dumps({"adjustNs": offset}).encode())
        assert abs(answer.json["nowNs"] - before - int(offset)) < 10_000_000_000
    assert abs(now() - time.time_ns() - 3_000_000_000_000) < 10_000_000_000
    assert agent.request("POST", "/clock", b'{"adjustNs":"x"}').status == 400


class FilesOnly(Machine):
    """Writes the files for real, below another root, and leaves the kernel alone."""

    def _set_kernel_hostname(self, name: str) -> None:
        pass


def test_identity_files(tmp_path: Path) -> None:
    machine = FilesOnly(str(tmp_path))
    (tmp_path / "etc").mkdir()
    machine.set_machine_id("ab" * 16)
    machine.set_hostname("green-1")
    assert (tmp_path / "etc/machine-id").read_text() == "ab" * 16 + "\n"
    assert (tmp_path / "etc/hostname").read_text() == "green-1\n"
    assert "127.0.0.1\tlocalhost\n" in (tmp_path / "etc/hosts").read_text()
    (tmp_path / "etc/hosts").write_text(
        "# mine\n127.0.0.1 localhost\n127.0.1.1 old old.example\n10.0.0.1 x\n"
    )
    (tmp_path / "var/lib/dbus").mkdir(parents=True)
    (tmp_path / "var/lib/dbus/machine-id").write_text("old\n")
    machine.set_hostname("green-2")
    machine.set_machine_id("cd" * 16)
    assert (tmp_path / "etc/hosts").read_text() == (
        "# mine\n127.0.0.1 localhost\n10.0.0.1 x\n127.0.1.1\tgreen-2\n"
    )
    assert (tmp_path / "var/lib/dbus/machine-id").read_text() == "cd" * 16 + "\n"
    assert sorted(path.name for path in (tmp_path / "etc").iterdir()) == ["hostname", "hosts", "machine-id"]
    assert (tmp_path / "etc/machine-id").stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("there", [True, False], ids=["written over", "not there"])
def test_on_a_full_disk_a_machine_still_becomes_somebody(tmp_path: Path, there: bool) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "none", str(tmp_path)], check=True)
    try:
        (tmp_path / "etc").mkdir()
        (tmp_path / "run/greenroom").mkdir(parents=True)
        files = [tmp_path / "etc" / name for name in ("machine-id", "hostname", "hosts")]
        for file in files if there else []:
            file.write_text("what was there before, which is longer than what comes\n" * 3)
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "fill").write_bytes(b"x" * (1 << 20))
        machine = FilesOnly(str(tmp_path))
        machine.set_machine_id("0" * 32)
        machine.set_hostname("green-1")
        assert [file.read_text() for file in files[:2] if there] == ["0" * 32 + "\n", "green-1\n"][
            : 2 * there
        ]
        assert not list((tmp_path / "etc").glob("*.greenroom"))
        # What guards it is another matter: without its tokens it must not be let go on.
        with pytest.raises(OSError, match="No space"):
            machine.keep({"token": "t"})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
