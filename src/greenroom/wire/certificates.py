"""Certificates as documents: a local authority that can vouch for one domain only, and its wildcard certificate.

Pure but for the random keys: names and times in, PEM out; `wire.certificate_files` keeps them.

*Name constraints.* People are asked to trust this authority on their machines. It can therefore vouch for nothing
but `domain` and the names below it (RFC 5280, 4.2.1.10): whoever gets hold of its key can deceive nobody about any
other site. Addresses are excluded too, because a list of permitted names says nothing about them.

An authority for the control plane (`Names`) vouches for a few hosts and addresses instead, and as strictly.

*Two labels.* Clients refuse `*.localhost` and the like (RFC 6125, 7.2; OpenSSL and browsers), so a domain has at
least two labels.
"""

from __future__ import annotations

import datetime
import ipaddress
import re

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from greenroom.config import ProxyConfig
from greenroom.errors import BadRequest, SetupError

DAY = 86_400.0
AUTHORITY_DAYS, AUTHORITY_RENEWAL_DAYS = 3650, 100
"""How long an authority vouches, and how long before its end another takes its place. Longer than a certificate's
life, so that none outlives its issuer."""
CERTIFICATE_DAYS, RENEWAL_DAYS = 90, 30
"""The same for the certificate."""
_SLACK = datetime.timedelta(hours=1)
"""Clocks of clients that are behind ours accept it all the same."""

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})+")
_ANYWHERE = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
_LONGEST_COMMON_NAME = 64


class Pair(msgspec.Struct, frozen=True):
    """A certificate and its private key, both PEM. Its repr shows no key, because it may end up in a log."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"<Pair until {ends_at(self.certificate):.0f}>"


class Names(msgspec.Struct, frozen=True):
    """What a certificate is for: hosts, with `wildcard` everything one label below the first too, and addresses.

    `label` tells certificates apart: it is the directory of their files and part of the authority's name.
    """

    label: str
    hosts: tuple[str, ...]
    wildcard: bool = False
    addresses: tuple[str, ...] = ()

    @classmethod
    def below(cls, domain: str) -> Names:
        """A domain and every name one label below it; `domain` is as `host_of` gives it."""
        return cls(domain, (domain,), wildcard=True)

    @property
    def alternatives(self) -> list[x509.GeneralName]:
        """The names that a certificate has."""
        hosts = [*self.hosts, *([f"*.{self.hosts[0]}"] if self.wildcard else [])]
        return [
            *(x509.DNSName(host) for host in hosts),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in self.addresses),
        ]

    @property
    def permitted(self) -> list[x509.GeneralName]:
        """What an authority for them may vouch for."""
        return [
            *(x509.DNSName(host) for host in self.hosts),
            *(x509.IPAddress(ipaddress.ip_network(address)) for address in self.addresses),
        ]

    @property
    def excluded(self) -> list[x509.GeneralName] | None:
        """And for what not: of names of a kind, addresses for one, that no permitted one is of, all are allowed."""
        kinds = {ipaddress.ip_address(address).version for address in self.addresses}
        return [x509.IPAddress(network) for network in _ANYWHERE if network.version not in kinds] or None


CONTROL = "control"
"""Label of the certificate for Kubernetes' clients; no domain is called so, it has one label."""
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")


def control_names(config: ProxyConfig, domain: str) -> Names:
    """What the listener for Kubernetes' clients is reached under. Raises SetupError for what is no name."""
    found = [
        "localhost",
        "127.0.0.1",
        "::1",
        config.host,
        domain.lower().partition(":")[0],
        *config.kube_names,
    ]
    hosts: list[str] = []
    addresses: list[str] = []
    for name in found:
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            if name and (not _HOST.fullmatch(name) or len(name) > 253):
                raise SetupError(f"{name[:80]!r} is no host name or address (proxy.kube_names)") from None
            if name and name not in hosts:
                hosts.append(name)
            continue
        if not address.is_unspecified and str(address) not in addresses:
            addresses.append(str(address))
    return Names(CONTROL, tuple(hosts), addresses=tuple(addresses))


def _named(names: str | Names) -> Names:
    return names if isinstance(names, Names) else Names.below(names)


def host_of(domain: str) -> str:
    """The name that certificates are made for: `domain` in lower case without its port and the root's dot.

    Raises BadRequest for what no client accepts a wildcard certificate for.
    """
    name = domain.lower().partition(":")[0].removesuffix(".")
    # The wildcard's own label must fit, and the longest label below it, which a sandbox's port and id make.
    if not _NAME.fullmatch(name) or len(name) > 220 or name.rpartition(".")[2].isdigit():
        raise BadRequest(
            f"there can be no wildcard certificate for {domain!r}; "
            "name a domain of two labels or more, such as sandbox.localhost"
        )
    return name


def new_authority(domain: str | Names, now: float) -> Pair:
    """An authority for `domain` (as `host_of` gives it) from `now`, in Unix seconds, for AUTHORITY_DAYS."""
    names = _named(domain)
    key = ec.generate_private_key(ec.SECP256R1())
    begins = _instant(now)
    # A name of its own for each: clients look issuers up by name, and an old one may still be installed.
    subject = _subject(f"Greenroom CA for {names.label} since {begins:%Y-%m-%d %H:%M:%S}", "Greenroom CA")
    constraints = x509.NameConstraints(
        permitted_subtrees=names.permitted,
        excluded_subtrees=names.excluded,
    )
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _SLACK)
        .not_valid_after(begins + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(built, key)


def issue(authority: Pair, domain: str | Names, now: float) -> Pair:
    """A certificate by `authority` for `domain` and every name one label below it, for CERTIFICATE_DAYS.

    `certificate` holds it alone: clients have the authority's already.
    """
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, password=None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)  # noqa: S101  `trusted_pair` has looked
    key = ec.generate_private_key(ec.SECP256R1())
    begins = _instant(now)
    named = _named(domain)
    built = (
        x509.CertificateBuilder()
        .subject_name(_subject(named.hosts[0], "Greenroom"))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _SLACK)
        .not_valid_after(begins + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(named.alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
        .sign(issuer_key, hashes.SHA256())
    )
    return _pair(built, key)


def trusted_pair(pair: Pair, domain: str | Names) -> bool:
    """True if `pair` is an authority for exactly `domain`, with the key that belongs to it."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        found = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    return found.permitted_subtrees == _named(domain).permitted and _belongs(pair, certificate)


def serves(pair: Pair, authority: Pair, domain: str | Names) -> bool:
    """True if `pair` has a key that belongs to it, is `authority`'s, and is for `domain` and its wildcard."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return set(_named(domain).alternatives) <= set(names) and _belongs(pair, certificate)


def ends_at(certificate: bytes) -> float:
    """When a PEM certificate ends, in Unix seconds. Raises ValueError for what is none."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def due(certificate: bytes, days: float, now: float) -> bool:
    """True if fewer than `days` are left of it, or it cannot be read."""
    try:
        return ends_at(certificate) - now < days * DAY
    except ValueError:
        return True


def fingerprint(certificate: bytes) -> str:
    """The SHA-256 of a PEM certificate as people compare it: pairs of hexadecimal digits."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex(":").upper()


def _belongs(pair: Pair, certificate: x509.Certificate) -> bool:
    try:
        key = load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return False
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _subject(common_name: str, organization: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name[:_LONGEST_COMMON_NAME]),
        ]
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _instant(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
