"""What a local user, a client without rights or a hostile guest gets from the running platform: nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2b import Sandbox
from e2b.exceptions import AuthenticationException

from tests.support.platform import Platform

pytestmark = pytest.mark.vm


@pytest.mark.parametrize("role", ["master-0", "node-0"])
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer " + "0" * 64}])
def test_any_other_local_users_call_to_a_role_gets_401(
    platform: Platform, role: str, header: dict[str, str]
) -> None:
    url = platform.role(role)["url"]
    calls = [("GET", "/v1/status"), ("POST", "/v1/claims"), ("PUT", "/v1/pools")]
    calls += (
        [("GET", "/v1/sandboxes")] if role == "node-0" else [("GET", "/v1/nodes"), ("GET", "/v1/templates")]
    )
    for method, path in calls:
        answer = httpx.request(method, url + path, headers=header, content=b"{}", trust_env=False)
        assert answer.status_code == 401, (method, path)
        assert "token" not in answer.text


def test_the_relay_answers_nobody_but_the_proxy(sdk: Platform) -> None:
    with Sandbox.create(timeout=60) as box:
        node = sdk.status()["nodes"][0]
        head = (
            f"GET /health HTTP/1.1\r\nHost: x\r\nx-greenroom-sandbox: {box.sandbox_id}\r\n"
            "x-greenroom-port: 49983\r\nx-greenroom-relay: wrong\r\n\r\n"
        )
        host, port = relay_of(sdk, node)
        with socket.create_connection((host, port), timeout=20) as sock:
            sock.sendall(head.encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 401")


def relay_of(platform: Platform, node: dict[str, Any]) -> tuple[str, int]:
    """The relay's address: the node's other listening port."""
    process = psutil.Process(platform.pid(node["name"]))
    api_port = int(node["url"].rpartition(":")[2])
    ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    (relay,) = ports - {api_port}
    return "127.0.0.1", relay


def test_every_listener_is_on_loopback(platform: Platform) -> None:
    status = platform.status()
    pids = [row["pid"] for row in status["roles"]] + [status["pid"]]
    family = {
        p.pid for pid in pids for p in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    }
    listening = [
        (c.pid, c.laddr.ip)
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.pid in family
    ]
    assert listening
    assert {ip for _, ip in listening} == {"127.0.0.1"}


def test_no_secret_is_in_a_log_a_process_list_or_readable_by_others(sdk: Platform) -> None:
    with Sandbox.create(timeout=60, envs={"PASSWORD": "hunter2-hunter2"}) as box:
        token = box._envd_access_token
        assert token
        box.commands.run("true")
        secrets = {token, sdk.env()["E2B_API_KEY"], "hunter2-hunter2"}
        secrets |= {
            path.read_text(encoding="utf-8").strip() for path in (sdk.state / "secrets").glob("*.token")
        }
        for process in psutil.process_iter(["cmdline", "environ"]):
            if process.pid == os.getpid():
                continue
            if str(sdk.state) in " ".join(process.info["cmdline"] or []):
                words = " ".join(process.info["cmdline"]) + json.dumps(process.info["environ"] or {})
                assert not any(secret in words for secret in secrets), process
        for log in (sdk.state / "log").iterdir():
            text = log.read_text(encoding="utf-8", errors="replace")
            assert not any(secret in text for secret in secrets), log
    assert sdk.state.stat().st_mode & 0o077 == 0
    assert (sdk.state / "secrets").stat().st_mode & 0o077 == 0


def test_no_role_keeps_an_api_key_in_the_clear(sdk: Platform) -> None:
    key = sdk.env()["E2B_API_KEY"].encode()
    for path in [sdk.state / "store.db", sdk.state / "store.db-wal"]:
        if path.exists():
            assert key not in path.read_bytes()


def test_a_revoked_key_stops_working(sdk: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    made = json.loads(sdk.command("keys", "create", "short-lived", "--json").stdout)
    assert Sandbox.list(api_key=made["secret"]).next_items() == []
    sdk.command("keys", "revoke", made["id"])

    def refused() -> bool:
        try:
            Sandbox.list(api_key=made["secret"]).next_items()
        except AuthenticationException:
            return True
        return False

    for _ in range(2000):
        if refused():
            return
    pytest.fail("the revoked key still works")


def test_another_owners_sandbox_does_not_exist_for_a_key(sdk: Platform) -> None:
    made = json.loads(sdk.command("keys", "create", "another", "--owner", "another", "--json").stdout)
    with Sandbox.create(timeout=60) as box:
        assert Sandbox.list(api_key=made["secret"]).next_items() == []
        assert Sandbox.kill(box.sandbox_id, api_key=made["secret"]) is False
        assert box.is_running()


def test_the_agents_internal_routes_do_not_exist_from_outside(sdk: Platform) -> None:
    with Sandbox.create(timeout=60) as box:
        url = sdk.env()["E2B_SANDBOX_URL"]
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}
        headers["X-Access-Token"] = box._envd_access_token or ""
        for path in ("/init", "/init/", "//init", "/%69nit", "/x/../init", "/clock", "/init?x=1"):
            answer = httpx.post(url + path, headers=headers, json={"hostname": "stolen"}, trust_env=False)
            assert answer.status_code == 404, path
        assert box.commands.run("hostname").stdout.strip() == box.sandbox_id


def test_without_the_sandboxs_token_nothing_is_run(sdk: Platform) -> None:
    with Sandbox.create(timeout=60) as box:
        url = sdk.env()["E2B_SANDBOX_URL"]
        for token in (None, "wrong", ""):
            headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}
            headers |= {} if token is None else {"X-Access-Token": token}
            answer = httpx.post(f"{url}/process.Process/List", headers=headers, json={}, trust_env=False)
            assert answer.status_code == 401
            assert (
                httpx.get(f"{url}/files?path=/etc/passwd", headers=headers, trust_env=False).status_code
                == 401
            )


def test_what_a_guest_learns_of_its_host_is_nothing(sdk: Platform) -> None:
    with Sandbox.create(timeout=60) as box:
        seen = box.commands.run(
            "cat /proc/cmdline; env; sudo cat /proc/1/environ | tr '\\0' '\\n'; mount"
        ).stdout
        assert str(sdk.state) not in seen
        for secret in (sdk.state / "secrets").glob("*.token"):
            assert secret.read_text(encoding="utf-8").strip() not in seen
        reach = "import socket; s = socket.socket(); s.settimeout(2); s.connect(('10.0.2.2', %d))"
        port = int(sdk.env()["E2B_API_URL"].rpartition(":")[2])
        done = box.commands.run(f'python3 -c "{reach % port}" 2>&1 | tail -1; true')
        assert "Error" in done.stdout or "timed out" in done.stdout


def test_a_uid_of_a_vm_cannot_enter_the_state_directory(sdk: Platform) -> None:
    uid = psutil.Process(next(iter(sdk.vm_pids()))).uids().real
    for path in [sdk.state, *sdk.state.iterdir()]:
        done = subprocess.run(
            ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "cat", str(path)],
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode != 0, path
    assert Path(f"/proc/{next(iter(sdk.vm_pids()))}").exists()
