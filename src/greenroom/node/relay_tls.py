"""TLS between the relay and a service in the guest, for the ports of `httpsPorts`.

The splice joins plain sockets. For a service that speaks TLS it gets one end of a socket pair; what comes out at the
other end is encrypted and sent to the guest, and what the guest sends is decrypted the other way, each no faster than
the slower side takes it.

Nothing is verified: the service is the user's own, its certificate will be self-signed, and the way to it is a wire
inside this machine. What TLS gives here is that the service can be reached, not that it is who it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
import ssl
from collections.abc import Callable

from greenroom.wire import tasks

_CHUNK = 16 << 10


class HandshakeFailed(Exception):
    """What listens does not speak TLS. Never leaves the relay."""


def _context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.set_alpn_protocols(["http/1.1"])
    return made


_CONTEXT = _context()


class Tunnel:
    """An open TLS connection to the guest. Whatever is written to `socket` goes to it, and the other way."""

    def __init__(
        self,
        socket: sockets.socket,
        plain: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        secure: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        broken: Callable[[], None],
    ) -> None:
        self.socket = socket
        self._plain_reader, self._plain_writer = plain
        self._secure_reader, self._secure_writer = secure
        self._broken = broken
        self._closed = False
        self._up = tasks.spawn(self._carry_up(), "relay-tls-up")
        self._down = tasks.spawn(self._carry_down(), "relay-tls-down")

    def __repr__(self) -> str:
        return f"<Tunnel {'closed' if self._closed else 'open'}>"

    def abort(self) -> None:
        """Let go of the guest's connection and of our end, now. Idempotent; `socket` is its owner's to close."""
        if self._closed:
            return
        self._closed = True
        for task in (self._up, self._down):
            task.cancel()
        self._plain_writer.transport.abort()
        self._secure_writer.transport.abort()

    async def _carry_up(self) -> None:
        """From the client. Its end closes the connection: TLS has no way to end one direction alone."""
        with contextlib.suppress(OSError):
            await _carry(self._plain_reader, self._secure_writer)
            self._secure_writer.close()

    async def _carry_down(self) -> None:
        """From the guest. An end is passed on, whether it was announced or not, as most servers do not; a reset
        breaks the whole."""
        try:
            await _carry(self._secure_reader, self._plain_writer)
            self._plain_writer.write_eof()
        except OSError:  # which SSLError is
            if not self._closed:
                self._broken()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()


async def open_tunnel(guest: sockets.socket, name: str, broken: Callable[[], None]) -> Tunnel:
    """Speak TLS on the connected socket `guest`, which belongs to this from now on, asking for `name`.

    `broken` is called once when the guest resets the connection later. Raises HandshakeFailed; the deadline is the
    caller's.
    """
    try:
        secure = await asyncio.open_connection(
            sock=guest, ssl=_CONTEXT, server_hostname=name, limit=_CHUNK, ssl_shutdown_timeout=1.0
        )
    except (ssl.SSLError, ConnectionError) as error:
        guest.close()
        raise HandshakeFailed(str(error)) from error
    except BaseException:
        guest.close()
        raise
    near, far = sockets.socketpair()
    near.setblocking(False)
    try:
        plain = await asyncio.open_connection(sock=far, limit=_CHUNK)
    except BaseException:
        secure[1].transport.abort()
        near.close()
        far.close()
        raise
    return Tunnel(near, plain, secure, broken)
