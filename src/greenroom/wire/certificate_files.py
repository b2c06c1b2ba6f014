"""Where certificates lie in the state directory, and who makes them when.

    <state>/tls/<domain>/       0700
        ca.pem                  the authority, to be handed to clients
        ca.key                  0600, never leaves this directory
        cert.pem, cert.key      what the entry shows; cert.key 0600
        bundle.pem              ca.pem and the machine's own authorities, for SSL_CERT_FILE
        lock                    held while any of them is made

`control` is there beside the domains: what the control plane shows to Kubernetes' clients.

Whoever comes first makes them, the proxy at its start or `greenroom certs`; a lock keeps two from making one each.
A pair is written key first, each file by rename, and read with a check that its halves belong together, so a
process that dies in between leaves something that is made anew and never a half that is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from greenroom.errors import SetupError
from greenroom.wire import certificates
from greenroom.wire.certificates import Names, Pair
from greenroom.wire.credentials import write_private

SYSTEM_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Debian's bundle of the authorities that the machine trusts."""


class Held(msgspec.Struct, frozen=True):
    """A domain's certificates as they lie in `directory`."""

    directory: Path
    domain: str
    authority: bytes
    pair: Pair
    new_authority: bool = False
    """Whether the authority was made just now: clients must be told of it."""
    new_certificate: bool = False

    @property
    def authority_file(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def bundle_file(self) -> Path:
        return self.directory / "bundle.pem"


def place_of(state: Path, domain: str) -> Path:
    """The directory of a domain's certificates; `domain` is one that `certificates.host_of` gave."""
    return state / "tls" / domain


def ensure(state: Path, domain: str | Names, now: float, *, renew: bool = False) -> Held:
    """The certificates of `domain` (or of some names): those that are there, or new ones where they are missing,
    damaged or near their end, and with `renew` a new certificate in any case. `now` is in Unix seconds.

    Raises BadRequest for a domain that can have none, SetupError when the files cannot be read or written.
    """
    names = domain if isinstance(domain, Names) else Names.below(certificates.host_of(domain))
    place = place_of(state, names.label)
    try:
        # Each by itself: parents that `mkdir` makes have another mode.
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        with _locked(place):
            authority = _read(place, "ca")
            fresh = authority is None or not _usable_authority(authority, names, now)
            if authority is None or fresh:
                authority = certificates.new_authority(names, now)
                _write(place, "ca", authority)
            pair = _read(place, "cert")
            stale = pair is None or fresh or renew or not _usable(pair, authority, names, now)
            if pair is None or stale:
                pair = certificates.issue(authority, names, now)
                _write(place, "cert", pair)
            held = Held(place, names.label, authority.certificate, pair, fresh, stale)
            _write_bundle(held)
            return held
    except OSError as error:
        raise SetupError(f"cannot keep certificates in {place}: {error.strerror}") from error


def current(state: Path, domain: str | Names) -> Pair | None:
    """The pair that the entry shows, read anew; None while it is missing or only half written."""
    place = place_of(state, domain.label if isinstance(domain, Names) else domain)
    authority, pair = _read(place, "ca"), _read(place, "cert")
    if authority is None or pair is None or not certificates.serves(pair, authority, domain):
        return None
    return pair


def _usable_authority(authority: Pair, domain: Names, now: float) -> bool:
    return certificates.trusted_pair(authority, domain) and not certificates.due(
        authority.certificate, certificates.AUTHORITY_RENEWAL_DAYS, now
    )


def _usable(pair: Pair, authority: Pair, domain: Names, now: float) -> bool:
    return certificates.serves(pair, authority, domain) and not certificates.due(
        pair.certificate, certificates.RENEWAL_DAYS, now
    )


def _read(place: Path, name: str) -> Pair | None:
    try:
        return Pair((place / f"{name}.pem").read_bytes(), (place / f"{name}.key").read_bytes())
    except FileNotFoundError:
        return None


def _write(place: Path, name: str, pair: Pair) -> None:
    write_private(place / f"{name}.key", pair.key.decode())
    write_private(place / f"{name}.pem", pair.certificate.decode())


def _write_bundle(held: Held) -> None:
    """Programs that are told of SSL_CERT_FILE trust nothing beside it, so the machine's own go in, too."""
    try:
        system = SYSTEM_AUTHORITIES.read_text(encoding="ascii", errors="replace")
    except OSError:
        system = ""
    content = held.authority.decode() + system
    with contextlib.suppress(FileNotFoundError):
        if held.bundle_file.read_text(encoding="ascii", errors="replace") == content:
            return
    write_private(held.bundle_file, content)


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    fd = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
