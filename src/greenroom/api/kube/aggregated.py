"""The dialect behind a kube-apiserver: an APIService sends its requests here, over a listener of their own.

Who connects shows a client certificate of the front proxy's authority with an allowed common name; then, and only on
this listener, the headers of the request say who the user is. A kube-apiserver asks its own RBAC before it passes a
request on; whether that is enough is a setting, because anybody with such a certificate can name any user.
Source: "Configure the Aggregation Layer" in Kubernetes' documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from greenroom.api.kube.access import CALLER
from greenroom.api.kube.status import render, unauthorized
from greenroom.api.rules import Caller
from greenroom.config import AggregatedConfig, RoleSpec
from greenroom.errors import GreenroomError, SetupError
from greenroom.store.records import EVERYTHING
from greenroom.wire import certificate_files
from greenroom.wire.certificates import Names
from greenroom.wire.guarded import TRANSPORT
from greenroom.wire.serving import listen, serving_beside
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)

LABEL: Final = "aggregated"
LOOK_EVERY: Final = 30.0
"""Seconds between two looks at the files of certificate and authority."""
OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/healthz"})
"""What probes ask for, which have no certificate."""
_MOST = 64
"""Groups, and extra values, of one user."""


class FrontProxied:
    """The ASGI application in front of the dialect's: finds out who asks, or answers 401."""

    def __init__(self, app: ASGIApp, config: AggregatedConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            caller = self._caller(scope)
            if caller is None:
                await render(unauthorized())(scope, receive, send)
                return
            scope[CALLER] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        transport = (scope.get("extensions") or {}).get(TRANSPORT)
        certificate = None if transport is None else transport.get_extra_info("peercert")
        if not certificate or common_name(certificate) not in self._config.allowed_names:
            return None
        headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        return caller_of(headers, self._config)


def common_name(certificate: Mapping[str, Any]) -> str:
    """The common name of a certificate as `ssl` tells it."""
    for part in certificate.get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return str(value)
    return ""


def caller_of(headers: Sequence[tuple[str, str]], config: AggregatedConfig) -> Caller | None:
    """The user whom headers (names in lower case) name, or None when there is none."""

    def values(names: Sequence[str]) -> list[str]:
        for name in names:
            if found := [value for key, value in headers if key == name.lower() and value]:
                return found
        return []

    users = values(config.username_headers)
    if not users:
        return None
    groups = values(config.group_headers)[:_MOST]
    extra: dict[str, list[str]] = {}
    for prefix in config.extra_headers_prefix:
        for key, value in headers:
            if key.startswith(prefix.lower()) and len(extra) < _MOST:
                extra.setdefault(unquote(key[len(prefix) :]), []).append(value)
    trusted = config.authorize == "trust" or not set(groups).isdisjoint(config.allow_groups)
    return Caller(
        user=users[0],
        owner="default",
        rules=[EVERYTHING] if trusted else [],
        groups=groups,
        extra=extra,
    )


class Certificates:
    """The listener's TLS: what it shows, whom it lets speak. Files that are replaced are read anew."""

    def __init__(self, state: Path, config: AggregatedConfig) -> None:
        self._state = state
        self._config = config
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Not required: probes have none, and clients that lack one are told 401.
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self._read: tuple[float, ...] = ()
        authority = config.requestheader_client_ca_file
        if not authority or not config.allowed_names:
            raise SetupError(
                "kube.aggregated needs requestheader_client_ca_file (of the front proxy's authority) and allowed_names"
            )
        if bool(config.cert_file) != bool(config.key_file):
            raise SetupError("kube.aggregated: cert_file and key_file belong together; one is missing")
        try:
            self.context.load_verify_locations(authority)
        except (OSError, ssl.SSLError) as error:
            raise SetupError(
                f"kube.aggregated.requestheader_client_ca_file: cannot read {authority}: {error}"
            ) from error
        self.load()

    def load(self) -> None:
        """Take the certificate as it lies in its files, made first where it is the platform's. Raises SetupError."""
        certificate, key = self._files()
        try:
            stamp = (certificate.stat().st_mtime, key.stat().st_mtime)
            if stamp != self._read:
                self.context.load_cert_chain(certificate, key)
                self._read = stamp
        except (OSError, ssl.SSLError) as error:
            raise SetupError(
                f"kube.aggregated: cannot use the certificate in {certificate}: {error}"
            ) from error

    def _files(self) -> tuple[Path, Path]:
        if self._config.cert_file:
            return Path(self._config.cert_file), Path(self._config.key_file)
        hosts = [name for name in self._config.names if not _is_address(name)]
        addresses = [name for name in self._config.names if _is_address(name)]
        names = Names(LABEL, ("localhost", *hosts), addresses=("127.0.0.1", "::1", *addresses))
        held = certificate_files.ensure(self._state, names, time.time())
        return held.directory / "cert.pem", held.directory / "cert.key"

    async def keep(self) -> None:
        """Follow the files until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                await asyncio.to_thread(self.load)
            except GreenroomError as error:
                _log.error("%s", error.message)


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, spec: RoleSpec) -> AsyncIterator[str]:
    """For the length of a block, the listener, where the settings want one; gives its URL, or an empty text.

    Raises SetupError for settings that cannot be followed.
    """
    config = spec.config.kube.aggregated
    if not config.listen:
        yield ""
        return
    certificates = Certificates(spec.state, config)
    sock = listen(config.listen, config.port + spec.replica if config.port else 0)
    async with serving_beside(FrontProxied(app, config), sock, certificates.context) as url:
        keeping = spawn(certificates.keep(), "keep-certificate")
        _log.info("a front proxy is served on %s", url)
        try:
            yield url
        finally:
            await stop(keeping)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
