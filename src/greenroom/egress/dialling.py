"""Connecting to an address in the world, from the host's namespace: with a deadline, and never to the host itself.

Which addresses are the host's own changes while it runs and cannot be listed. The kernel is asked instead: a UDP
socket that is connected (which sends nothing) gets, for one of the host's own addresses, that very address as its
source, and for no other.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address

from greenroom.wire.splice import reset

MOST_TRIES = 3
"""Addresses of one name that are tried, one after the other."""


def is_own(address: IPv4Address) -> bool:
    """Whether `address` is one of this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect((str(address), 9))
            return bool(probe.getsockname()[0] == str(address))
        except OSError:
            # No way there, or a broadcast address: dialling it fails just so.
            return False


async def connect(sock: socket.socket, where: tuple[str, int]) -> None:
    """Connect a non-blocking socket to an address. Raises OSError.

    The event loop's own `sock_connect` would first have a thread look the address up, though it is no name.
    """
    error = sock.connect_ex(where)
    if error == errno.EINPROGRESS:
        loop = asyncio.get_running_loop()
        writable: asyncio.Future[None] = loop.create_future()
        loop.add_writer(sock, _settle, writable)
        try:
            await writable
        finally:
            loop.remove_writer(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def dial(
    addresses: Iterable[IPv4Address], port: int, deadline: float
) -> tuple[socket.socket, IPv4Address]:
    """A connected, non-blocking socket to the first address that answers, each within `deadline` seconds.

    The caller has judged the addresses. Raises OSError, TimeoutError among it, when none does.
    """
    last: OSError = ConnectionRefusedError("there is no address to connect to")
    for address in list(addresses)[:MOST_TRIES]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(deadline):
                await connect(sock, (str(address), port))
            return sock, address
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            reset(sock)
            raise
    raise last
