"""Envoy's administration interface, asked over its socket: is it ready, where does it listen, what runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec

from greenroom.proxy.resources import ADMIN_SOCKET, ENTRY, RUN

_DEADLINE = aiohttp.ClientTimeout(total=5.0)
_STAT = re.compile(r"^(\S+): (.*)$", re.MULTILINE)


class _SocketAddress(msgspec.Struct, frozen=True):
    address: str
    port_value: int


class _Address(msgspec.Struct, frozen=True):
    socket_address: _SocketAddress


class _Listener(msgspec.Struct, frozen=True):
    name: str
    local_address: _Address


class _Listeners(msgspec.Struct, frozen=True):
    listener_statuses: list[_Listener] = []


class AdminError(Exception):
    """Envoy does not answer, or not as it should; it may be starting or gone. Never leaves this package."""


class Admin:
    """Calls to the interface. Each raises AdminError when it cannot be answered."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ready(self) -> bool:
        """True once Envoy has its first configuration and takes requests."""
        status, _body = await self._ask("GET", "/ready")
        return status == 200

    async def ports(self) -> dict[str, int]:
        """The real port of each listener that listens, by its name."""
        status, body = await self._ask("GET", "/listeners?format=json")
        if status != 200:
            return {}
        try:
            listeners = msgspec.json.decode(body, type=_Listeners)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise AdminError("the list of listeners is not readable") from error
        return {
            listener.name: listener.local_address.socket_address.port_value
            for listener in listeners.listener_statuses
        }

    async def version(self, kind: str) -> str:
        """Version of the running configuration of `kind`: `cluster_manager.cds` or `listener_manager.lds`."""
        name = f"{kind}.version_text"
        values = dict(_STAT.findall(await self._stats(name)))
        return str(values.get(name, "")).strip('"')

    async def active_connections(self) -> int:
        """Client connections open at the entry."""
        name = f"http.{ENTRY}.downstream_cx_active"
        values = dict(_STAT.findall(await self._stats(name)))
        return int(values.get(name, "0"))

    async def prometheus(self, names: str) -> str:
        """The statistics whose names match the expression, in the Prometheus format."""
        status, body = await self._ask("GET", f"/stats/prometheus?filter={quote(names, safe='')}")
        if status != 200:
            raise AdminError(f"statistics were answered {status}")
        return body.decode(errors="replace")

    async def drain(self) -> None:
        """Tell clients to go: answers close their connections; the listener closes after the drain time."""
        status, _body = await self._ask("POST", "/drain_listeners?graceful")
        if status != 200:
            raise AdminError(f"draining was answered {status}")

    async def _stats(self, name: str) -> str:
        status, body = await self._ask("GET", f"/stats?filter=^{re.escape(name)}$")
        if status != 200:
            raise AdminError(f"statistics were answered {status}")
        return body.decode()

    async def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.request(method, f"http://envoy{path}", timeout=_DEADLINE) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise AdminError(str(error) or type(error).__name__) from error


@contextlib.asynccontextmanager
async def admin_of(directory: Path) -> AsyncIterator[Admin]:
    """The interface of the Envoy that runs in `directory`, whichever it is at the time of each call.

    A socket's path may have 107 bytes, which a state directory's can exceed; a descriptor's path never does.
    """
    fd = os.open(directory / RUN, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connector = aiohttp.UnixConnector(f"/proc/self/fd/{fd}/{Path(ADMIN_SOCKET).name}", force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Admin(session)
    finally:
        os.close(fd)
