"""What comes in by names and HTTPS, as a user with the published SDK has it: a domain, a key, an authority."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from tests.support.platform import Platform, until
from tests.support.resolving import Resolver

pytestmark = [pytest.mark.vm, pytest.mark.compat]

PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "sdk_by_name.py"
DOMAIN = "sandboxes.test"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with a listener for HTTPS."""
    made = Platform(tmp_path_factory.mktemp("secured"))
    made.up("--warm", "2", "--tls-port", "0", "--domain", DOMAIN)
    try:
        yield made
    finally:
        made.down()
    assert made.leftovers() == {}


def by_name(platform: Platform) -> dict[str, str]:
    """What `greenroom env --tls` exports."""
    return dict(json.loads(platform.command("env", "--tls", "--json").stdout))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["names_alone", "private_ports", "masked_and_tls", "loopback", "killed"])
def test_the_sdk_needs_a_domain_a_key_and_an_authority(
    secured: Platform, tmp_path: Path, scenario: str
) -> None:
    environment = by_name(secured)
    assert set(environment) == {"E2B_API_KEY", "E2B_DOMAIN", "SSL_CERT_FILE", "KUBECONFIG"}
    with Resolver(DOMAIN) as resolver:
        done = resolver.run([sys.executable, str(PROGRAM), scenario], tmp_path, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"held": scenario}
    assert f"api.{DOMAIN}" in resolver.asked


def test_a_signed_url_of_the_shared_entry_finds_its_sandbox(
    secured: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in secured.env().items():
        monkeypatch.setenv(name, value)
    with Sandbox.create(timeout=120) as box, Sandbox.create(timeout=120) as other:
        for each in (box, other):
            each.files.write("name.txt", each.sandbox_id)
        with httpx.Client(trust_env=False, timeout=60) as client:
            for each in (box, other):
                url = each.download_url("name.txt", use_signature_expiration=60)
                assert each.sandbox_id not in url
                assert client.get(url).text == each.sandbox_id
            over = client.get(box.download_url("name.txt", use_signature_expiration=-5))
            expected = {"code": 401, "message": "signature is already expired"}
            assert (over.status_code, over.json()) == (401, expected)
            upload = client.post(other.upload_url("up.txt"), files={"file": ("up.txt", b"mine")})
            assert upload.status_code == 200, upload.text
            assert other.files.read("up.txt") == "mine"
            assert not box.files.exists("up.txt")
            wrong = client.get(box.download_url("name.txt").replace("name.txt", "else.txt"))
            assert (wrong.status_code, wrong.json()) == (401, {"code": 401, "message": "invalid signature"})


def test_a_private_sandbox_keeps_its_token_when_its_node_is_killed_and_no_log_has_it(
    secured: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in secured.env().items():
        monkeypatch.setenv(name, value)
    with Sandbox.create(timeout=300, network={"allow_public_traffic": False}) as box:
        token = box.traffic_access_token
        assert token
        url = secured.env()["E2B_SANDBOX_URL"]
        to_port = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8000"}

        def status(**more: str) -> int:
            return httpx.get(url, headers={**to_port, **more}, trust_env=False, timeout=30).status_code

        shown = {"e2b-traffic-access-token": token}
        # Nothing listens there: who may know is told so.
        assert (status(**shown), status()) == (502, 403)
        secured.strike("node-0")
        # The entry learns a node's new address a moment after the node is ready.
        until(lambda: status() == 403)
        assert status(**shown) == 502
        assert Sandbox.connect(box.sandbox_id).traffic_access_token == token
        for log in (secured.state / "log").iterdir():
            assert token not in log.read_text(encoding="utf-8", errors="replace"), log
