"""`certs`: the entry's certificates, made or renewed, and what a client needs to trust and to find it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli.options import JsonOption, StateDirOption, examples, state_dir_of

if TYPE_CHECKING:
    from greenroom.cli.records import StateDir
    from greenroom.wire.certificate_files import Held


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "greenroom certs                       # show them, made first if there are none",
            "greenroom certs --domain box.example.com",
            "greenroom certs --out ./for-clients   # copies: ca.pem to hand on, cert.pem and cert.key",
            "greenroom certs --renew               # a running entry takes the new one within seconds",
        )
    )(certs)


def certs(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Option(
            "--domain",
            metavar="D",
            show_default=False,
            help="Whose (default: the platform's, else sandbox.localhost)",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", show_default=False, help="A directory to copy them to."),
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Make a new certificate in any case.")] = False,
    json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Show, make or renew the certificates for HTTPS, and tell how clients trust them and find their names.

    A local authority, which can vouch for this domain only, signs a certificate for D and *.D. Both are kept in
    the state directory; the authority's key never leaves it. `greenroom up --tls-port` makes and renews them by
    itself, too.
    """
    from greenroom.cli.output import print_json
    from greenroom.cli.records import StateDir
    from greenroom.wire import certificate_files, certificates

    state = StateDir(state_dir_of(context, state_dir))
    state.prepare()
    held = certificate_files.ensure(state.root, domain or _domain_of(state), time.time(), renew=renew)
    if out is not None:
        _copy(held, out)
    if json:
        print_json(
            {
                "domain": held.domain,
                "authority": str(held.authority_file),
                "authority_sha256": certificates.fingerprint(held.authority),
                "authority_ends_at": certificates.ends_at(held.authority),
                "bundle": str(held.bundle_file),
                "ends_at": certificates.ends_at(held.pair.certificate),
            }
        )
        return
    print("\n".join(describe(held, out)))


def describe(held: Held, out: Path | None) -> list[str]:
    """The lines for people."""
    from greenroom.wire import certificates

    domain = held.domain
    authority = (out / "ca.pem") if out is not None else held.authority_file
    made = "new " if held.new_certificate else ""
    return [
        f"authority       {authority}{' (new: clients must be told to trust it)' if held.new_authority else ''}",
        f"  can vouch for {domain} and names below it, until {_date(certificates.ends_at(held.authority))}",
        f"  SHA-256       {certificates.fingerprint(held.authority)}",
        f"{made}certificate for {domain} and *.{domain}, until "
        f"{_date(certificates.ends_at(held.pair.certificate))}, renewed in time by the running entry",
        "",
        "To trust it",
        f"  one shell     export SSL_CERT_FILE={held.bundle_file}",
        f"  Node.js       export NODE_EXTRA_CA_CERTS={authority}",
        f"  this machine  cp {authority} /usr/local/share/ca-certificates/greenroom-{domain}.crt "
        "&& update-ca-certificates",
        "",
        "To let its names lead to the entry (/etc/hosts knows no wildcards)",
        *_resolving(domain),
    ]


def _resolving(domain: str) -> list[str]:
    lines = [
        f"  dnsmasq       address=/{domain}/127.0.0.1",
        f"  DNS           *.{domain}. A 127.0.0.1    # or the entry's address, where clients are elsewhere",
    ]
    if domain.endswith(".localhost"):
        local = [
            "  browsers, curl, systemd-resolved   nothing to do for names below localhost",
            "  Debian else   apt-get install libnss-myhostname",
        ]
        return local + lines[:1]
    return lines


def _domain_of(state: StateDir) -> str:
    """The domain of the platform that runs, else of the settings, else the default."""
    from greenroom.cli.plans import DEFAULT_TLS_DOMAIN
    from greenroom.cli.words import load_settings

    record = state.running()
    if record is not None and record.tls_port is not None:
        return record.domain
    return load_settings(state.root).proxy.domain or DEFAULT_TLS_DOMAIN


def _copy(held: Held, out: Path) -> None:
    """Copy what may leave. Raises SetupError."""
    from greenroom.errors import SetupError
    from greenroom.wire.credentials import write_private

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_private(out / "cert.key", held.pair.key.decode())
        for name, content in (("cert.pem", held.pair.certificate), ("ca.pem", held.authority)):
            write_private(out / name, content.decode())
            (out / name).chmod(0o644)
    except OSError as error:
        raise SetupError(f"cannot write certificates to {out}: {error.strerror}") from error


def _date(instant: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(instant))
