"""`greenroom certs` and what TLS changes in `up` and `env`."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

import msgspec
import pytest

from greenroom.cli.main import run
from greenroom.cli.plans import UpOptions, make_plan, settle_domain
from greenroom.errors import BadRequest
from tests.cli.conftest import Home


def told(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["--state-dir", str(tmp_path / "state"), "certs", *arguments]) == 0
    return capsys.readouterr().out


def test_certs_are_made_once_and_the_way_to_trust_them_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = told(tmp_path, capsys)
    place = tmp_path / "state" / "tls" / "sandbox.localhost"
    assert f"authority       {place}/ca.pem (new: clients must be told to trust it)\n" in first
    assert f"export SSL_CERT_FILE={place}/bundle.pem\n" in first
    for word in ("update-ca-certificates", "libnss-myhostname", "dnsmasq", "new certificate for"):
        assert word in first
    again = told(tmp_path, capsys)
    assert "(new" not in again
    assert "new certificate" not in again
    assert "new certificate" in told(tmp_path, capsys, "--renew")
    assert "PRIVATE" not in first + again


def test_json_names_the_files_and_the_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(tmp_path, capsys, "--json", "--domain", "Box.Example.com:8443"))
    assert found["domain"] == "box.example.com"
    assert Path(found["authority"]).read_text().startswith("-----BEGIN CERTIFICATE")
    assert Path(found["bundle"]).exists()
    assert found["authority_ends_at"] > found["ends_at"]
    assert len(found["authority_sha256"]) == 95


def test_out_gets_copies_but_never_the_authoritys_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert f"cp {out}/ca.pem " in told(tmp_path, capsys, "--out", str(out), "--domain", "box.example.com")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert modes == {"ca.pem": 0o644, "cert.pem": 0o644, "cert.key": 0o600}
    authority_key = tmp_path / "state" / "tls" / "box.example.com" / "ca.key"
    assert not any(authority_key.read_text() in path.read_text() for path in out.iterdir())


def test_a_domain_that_can_have_none_and_a_place_that_cannot_be_written_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state-dir", str(tmp_path / "state"), "certs"]
    assert run([*state, "--domain", "localhost"]) == 1
    assert "two labels" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run([*state, "--out", str(tmp_path / "file")]) == 1
    assert "cannot write certificates" in capsys.readouterr().err


def test_the_settings_domain_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "config.toml").write_text("[proxy]\ndomain = 'box.test:444'\n")
    assert "*.box.test," in told(tmp_path, capsys)


@pytest.mark.parametrize(
    ("named", "tls_port", "domain"),
    [
        ("", None, "localhost:8700"),
        ("box.test", None, "box.test"),
        ("", 8443, "sandbox.localhost:8443"),
        ("", 443, "sandbox.localhost"),
        ("box.test", 8443, "box.test:8443"),
        ("box.test", 443, "box.test"),
        # Something in front listens there.
        ("box.test:9443", 8443, "box.test:9443"),
        ("box.test:443", 8443, "box.test:443"),
    ],
)
def test_the_domain_has_the_port_that_clients_need(named: str, tls_port: int | None, domain: str) -> None:
    assert settle_domain(named, 8700, tls_port) == domain


def test_tls_for_a_domain_without_wildcards_is_refused_before_anything_starts(tmp_path: Path) -> None:
    options = UpOptions(
        state_dir=str(tmp_path), cache_dir=str(tmp_path), port=0, tls_port=0, domain="localhost"
    )
    with pytest.raises(BadRequest, match="two labels"):
        make_plan(options)
    plan = make_plan(msgspec.structs.replace(options, domain=None))
    assert plan.tls_port == plan.specs[-1].config.proxy.tls_port
    assert plan.domain == plan.specs[-1].domain == f"sandbox.localhost:{plan.tls_port}"


def test_env_tls_points_at_names_alone(home: Home) -> None:
    home.up("--tls-port", "0", "--domain", "box.example.test")
    script = home.ok("env", "--tls") + 'printf "%s\\n" "$E2B_API_KEY" "$E2B_DOMAIN" "$SSL_CERT_FILE" '
    script += '"${E2B_API_URL-unset}" "${E2B_SANDBOX_URL-unset}" "${E2B_DEBUG-unset}"'
    before = {"E2B_DEBUG": "1", "E2B_API_URL": "http://x", "E2B_SANDBOX_URL": "http://x"}
    shell = subprocess.run(["sh", "-c", script], env=before, capture_output=True, text=True, check=True)
    key, domain, bundle, *rest = shell.stdout.split()
    _code, seen = home.status()
    assert (domain, rest) == (seen.domain, ["unset"] * 3)
    assert domain.startswith("box.example.test:")
    assert bundle == str(home.state.root / "tls" / "box.example.test" / "bundle.pem")
    assert key.startswith("e2b_")
    assert json.loads(home.ok("env", "--tls", "--json"))["SSL_CERT_FILE"] == bundle
    assert f"with TLS on port {domain.rpartition(':')[2]}," in home.run("status").stdout
    # The plain entry stays what it was.
    assert json.loads(home.ok("env", "--json"))["E2B_API_URL"] == seen.entry_url


def test_env_tls_of_a_platform_without_is_refused_with_the_way_out(home: Home) -> None:
    home.up()
    done = home.run("env", "--tls")
    assert done.returncode == 1
    assert "--tls-port" in done.stderr
