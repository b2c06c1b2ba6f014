"""Certificates: what a client that trusts the authority accepts and what it does not, when they are made anew."""

from __future__ import annotations

import ssl
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config import ProxyConfig
from greenroom.errors import BadRequest, SetupError
from greenroom.wire import certificate_files, certificates
from greenroom.wire.certificates import DAY, Names, Pair

DOMAIN = "sandbox.localhost"
NOW = 1_800_000_000.0


def shake_hands(tmp_path: Path, authority: bytes, shown: Pair, name: str) -> None:
    """A TLS handshake in memory with a client that trusts `authority` alone. Raises ssl.SSLError."""
    (tmp_path / "cert").write_bytes(shown.certificate)
    (tmp_path / "key").write_bytes(shown.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    client = ssl.create_default_context(cadata=authority.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert sides[0].version()


@pytest.fixture(scope="module")
def authority() -> Pair:
    # Clients compare with their own clock.
    return certificates.new_authority(DOMAIN, time.time())


@pytest.fixture(scope="module")
def shown(authority: Pair) -> Pair:
    return certificates.issue(authority, DOMAIN, time.time())


@pytest.mark.parametrize("name", [DOMAIN, f"api.{DOMAIN}", f"49983-i{'a' * 19}.{DOMAIN}"])
def test_a_client_that_trusts_the_authority_accepts_every_name(
    tmp_path: Path, authority: Pair, shown: Pair, name: str
) -> None:
    shake_hands(tmp_path, authority.certificate, shown, name)


@pytest.mark.parametrize("name", ["localhost", f"a.b.{DOMAIN}", "example.com", f"x{DOMAIN}"])
def test_no_other_name_is_accepted(tmp_path: Path, authority: Pair, shown: Pair, name: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path, authority.certificate, shown, name)


@pytest.mark.parametrize("other", ["example.com", "localhost.example", "other.localhost"])
def test_the_authority_can_vouch_for_no_other_domain(tmp_path: Path, authority: Pair, other: str) -> None:
    """Even its holder cannot make a certificate for another name that a client takes."""
    forged = certificates.issue(authority, other, time.time())
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        shake_hands(tmp_path, authority.certificate, forged, f"www.{other}")


def test_an_authority_of_another_domain_or_with_another_key_is_not_ours(authority: Pair) -> None:
    other = certificates.new_authority("other.test", NOW)
    assert certificates.trusted_pair(authority, DOMAIN)
    assert not certificates.trusted_pair(other, DOMAIN)
    assert not certificates.trusted_pair(Pair(authority.certificate, other.key), DOMAIN)
    assert not certificates.trusted_pair(Pair(b"no PEM", other.key), DOMAIN)
    assert not certificates.serves(certificates.issue(other, DOMAIN, NOW), authority, DOMAIN)


@pytest.mark.parametrize(
    ("domain", "name"),
    [
        ("Sandbox.LOCALHOST:8443", "sandbox.localhost"),
        ("a-1.example.com.", "a-1.example.com"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
    ],
)
def test_the_name_for_a_domain(domain: str, name: str) -> None:
    assert certificates.host_of(domain) == name


@pytest.mark.parametrize(
    "domain",
    ["localhost", "", "127.0.0.1", "-a.test", "a_b.test", "a..b", "*.a.test", "../x.y", "a.b/c", "[::1]"],
)
def test_what_can_have_no_wildcard_is_refused(domain: str) -> None:
    with pytest.raises(BadRequest, match="wildcard"):
        certificates.host_of(domain)


@given(st.text(max_size=40))
def test_a_name_is_a_safe_file_name_or_refused(domain: str) -> None:
    try:
        name = certificates.host_of(domain)
    except BadRequest:
        return
    assert "/" not in name
    assert not name.startswith(".")
    assert name.isascii()


def test_a_key_is_not_in_the_repr(shown: Pair) -> None:
    assert "PRIVATE" not in repr(shown)


def test_files_are_made_once_and_private(tmp_path: Path) -> None:
    first = certificate_files.ensure(tmp_path, f"{DOMAIN}:8443", NOW)
    again = certificate_files.ensure(tmp_path, DOMAIN, NOW + DAY)
    assert (first.new_authority, first.new_certificate) == (True, True)
    assert (again.new_authority, again.new_certificate) == (False, False)
    assert again.pair == first.pair == certificate_files.current(tmp_path, DOMAIN)
    place = tmp_path / "tls" / DOMAIN
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.glob("*.key")} == {0o600}
    assert len(list(place.glob("*.key"))) == 2
    assert first.authority_file.read_bytes() == first.authority
    assert first.bundle_file.read_text(errors="replace").startswith(first.authority.decode())
    assert not list(place.glob(".*"))


def test_a_certificate_is_renewed_before_its_end_and_the_authority_stays(tmp_path: Path) -> None:
    first = certificate_files.ensure(tmp_path, DOMAIN, NOW)
    early = NOW + (certificates.CERTIFICATE_DAYS - certificates.RENEWAL_DAYS - 1) * DAY
    assert certificate_files.ensure(tmp_path, DOMAIN, early).pair == first.pair
    late = certificate_files.ensure(tmp_path, DOMAIN, early + 2 * DAY)
    assert (late.new_authority, late.new_certificate) == (False, True)
    assert late.authority == first.authority
    assert certificates.ends_at(late.pair.certificate) > certificates.ends_at(first.pair.certificate)
    forced = certificate_files.ensure(tmp_path, DOMAIN, early + 2 * DAY, renew=True)
    assert forced.pair.certificate != late.pair.certificate


def test_an_authority_near_its_end_is_replaced_and_no_certificate_outlives_its_issuer(tmp_path: Path) -> None:
    first = certificate_files.ensure(tmp_path, DOMAIN, NOW)
    last = NOW + (certificates.AUTHORITY_DAYS - certificates.AUTHORITY_RENEWAL_DAYS - 0.01) * DAY
    kept = certificate_files.ensure(tmp_path, DOMAIN, last, renew=True)
    assert kept.authority == first.authority
    assert certificates.ends_at(kept.pair.certificate) < certificates.ends_at(kept.authority)
    later = certificate_files.ensure(tmp_path, DOMAIN, last + DAY)
    assert (later.new_authority, later.new_certificate) == (True, True)


@pytest.mark.parametrize("name", ["ca.pem", "ca.key", "cert.pem", "cert.key"])
@pytest.mark.parametrize("damage", ["missing", "empty", "of another"])
def test_what_is_missing_damaged_or_half_written_is_made_anew(tmp_path: Path, name: str, damage: str) -> None:
    certificate_files.ensure(tmp_path, DOMAIN, NOW)
    path = tmp_path / "tls" / DOMAIN / name
    if damage == "missing":
        path.unlink()
    else:
        other = certificates.new_authority(DOMAIN, NOW)
        whole = other.key if name.endswith("key") else other.certificate
        path.write_bytes(b"" if damage == "empty" else whole)
    assert certificate_files.current(tmp_path, DOMAIN) is None or name == "ca.key"
    held = certificate_files.ensure(tmp_path, DOMAIN, NOW)
    authority = Pair(held.authority, (tmp_path / "tls" / DOMAIN / "ca.key").read_bytes())
    assert certificates.trusted_pair(authority, DOMAIN)
    assert certificates.serves(held.pair, authority, DOMAIN)
    assert held.new_certificate
    assert certificate_files.current(tmp_path, DOMAIN) == held.pair


def test_two_that_come_at_once_agree(tmp_path: Path) -> None:
    found: list[Pair] = []
    threads = [
        threading.Thread(target=lambda: found.append(certificate_files.ensure(tmp_path, DOMAIN, NOW).pair))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({pair.certificate for pair in found}) == 1


def test_a_place_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "tls").write_text("a file")
    with pytest.raises(SetupError, match="cannot keep certificates"):
        certificate_files.ensure(tmp_path, DOMAIN, NOW)


def test_names_of_the_control_plane_are_vouched_for_and_no_others(tmp_path: Path) -> None:
    names = certificates.control_names(
        ProxyConfig(host="0.0.0.0", kube_names=["kube.example.com", "192.0.2.7"]), "localhost:8700"
    )
    assert names.hosts == ("localhost", "kube.example.com")
    assert names.addresses == ("127.0.0.1", "::1", "192.0.2.7")
    authority = certificates.new_authority(names, time.time())
    pair = certificates.issue(authority, names, time.time())
    for name in ("localhost", "127.0.0.1", "::1", "kube.example.com", "192.0.2.7"):
        shake_hands(tmp_path, authority.certificate, pair, name)
    # Not even by its own authority.
    other = Names("control", ("example.org",), addresses=("192.0.2.8",))
    stranger = certificates.issue(authority, other, time.time())
    for name in ("example.org", "192.0.2.8"):
        with pytest.raises(ssl.SSLError):
            shake_hands(tmp_path, authority.certificate, stranger, name)


def test_another_set_of_names_gets_another_authority(tmp_path: Path) -> None:
    one = Names("control", ("localhost",), addresses=("127.0.0.1",))
    first = certificate_files.ensure(tmp_path, one, time.time())
    assert first.new_authority
    assert not certificate_files.ensure(tmp_path, one, time.time()).new_authority
    more = Names("control", ("localhost", "kube.example.com"), addresses=("127.0.0.1",))
    assert certificate_files.ensure(tmp_path, more, time.time()).new_authority


def test_a_name_that_is_none_is_told() -> None:
    with pytest.raises(SetupError, match="kube_names"):
        certificates.control_names(ProxyConfig(kube_names=["not a name"]), "localhost")
