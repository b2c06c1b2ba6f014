"""A front proxy as kube-apiserver is one: TLS to clients, its own certificate and headers that name the user to us."""

from __future__ import annotations

import contextlib
import datetime
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from greenroom.wire import certificates
from greenroom.wire.certificates import Names

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade"})


class Authority:
    """An authority for client certificates, with its files in a directory."""

    def __init__(self, directory: Path, name: str = "front-proxy-ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(self._subject, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def client(self, common_name: str) -> tuple[Path, Path]:
        """Files of a client certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        made = (
            self._builder(subject, key).add_extension(usage, critical=False).sign(self._key, hashes.SHA256())
        )
        files = self._directory / f"{common_name}.pem", self._directory / f"{common_name}.key"
        files[0].write_bytes(made.public_bytes(Encoding.PEM))
        files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return files


class FrontProxy:
    """Passes requests on to `upstream`. `users` are user and groups by bearer token."""

    def __init__(
        self, upstream: str, tls: ssl.SSLContext, users: Mapping[str, tuple[str, list[str]]]
    ) -> None:
        self._upstream = upstream
        self._tls = tls
        self._users = users
        self.url = ""
        self.authority = b""

    @contextlib.asynccontextmanager
    async def running(self, directory: Path) -> AsyncIterator[FrontProxy]:
        """For the length of a block, on a free port of loopback."""
        names = Names("front", ("localhost",), addresses=("127.0.0.1",))
        authority = certificates.new_authority(names, time.time())
        pair = certificates.issue(authority, names, time.time())
        self.authority = authority.certificate
        (directory / "front.pem").write_bytes(pair.certificate)
        (directory / "front.key").write_bytes(pair.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / "front.pem", directory / "front.key")
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            self._session = session
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
            await site.start()
            self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        user = self._users.get(token)
        if user is None:
            return web.Response(status=401)
        headers = [
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in _HOP
            and name.lower() != "authorization"
            and not name.lower().startswith("x-remote-")
        ]
        headers += [("X-Remote-User", user[0]), *(("X-Remote-Group", group) for group in user[1])]
        async with self._session.request(
            request.method,
            self._upstream + request.path_qs,
            headers=headers,
            data=await request.read(),
            ssl=self._tls,
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in _HOP:
                    response.headers.add(name, value)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response
