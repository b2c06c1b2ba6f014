"""``GET /upgrade/loopback/<port>``: a way for the node to what listens on the guest's loopback only.

From outside the guest nothing bound to 127.0.0.1 can be reached, but users expect it to be (E2B forwards such
ports). So when a port refuses the node's relay, the relay asks the agent on the agent's own port. The request
needs the control token, and an upgrade::

    GET /upgrade/loopback/8000 HTTP/1.1
    Connection: Upgrade
    Upgrade: greenroom-loopback
    X-Greenroom-Control: <token>

After ``101 Switching Protocols`` the connection is a plain byte stream to the port, half-closes included, and
a reset on one side is a reset on the other. 502 says that nothing listens there either. Whoever has no token
sees an unknown path; the node's relay refuses the path to its clients besides, as it does ``/init``.
"""

from __future__ import annotations

import asyncio
import re

from .errors import AgentError
from .exchange import Request, Response
from .identity import ControlService
from .server import reset
from .settings import Settings

PREFIX = "/upgrade/loopback/"
PROTOCOL = "greenroom-loopback"
MAX_TUNNELS = 1024
"""Half of the connections that the server takes, so that commands and files find room."""

CONNECT_SECONDS = 5.0
_ADDRESSES = ("127.0.0.1", "::1")
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


class LoopbackService:
    """Opens tunnels for the node."""

    def __init__(self, control: ControlService, settings: Settings) -> None:
        self._control = control
        self._settings = settings
        self._open = 0

    async def get(self, request: Request, response: Response) -> None:
        """Serve one tunnel until both sides have closed. Raises :class:`AgentError` before it stands."""
        self._control.authorize(request)
        if self._settings.control_token is None:
            raise AgentError("not_found", "not found")  # before the hand-over there is nobody to ask for it
        digits = request.path[len(PREFIX) :]
        if _PORT.fullmatch(digits) is None or int(digits) > 65535:
            raise AgentError("invalid_argument", "a port is a number from 1 to 65535")
        options = [word.strip().lower() for word in request.headers.get("connection", "").split(",")]
        if "upgrade" not in options or request.headers.get("upgrade", "").lower() != PROTOCOL:
            raise AgentError("invalid_argument", f"ask for an upgrade to {PROTOCOL}", status=426)
        if not request.body.done:
            raise AgentError("invalid_argument", "an upgrade request has no body")
        if self._open >= MAX_TUNNELS:
            raise AgentError("resource_exhausted", f"{MAX_TUNNELS} tunnels are open already")
        self._open += 1
        try:
            tunnel = Tunnel(request)
            await tunnel.connect(int(digits))
            response.upgrade(PROTOCOL)
            await tunnel.run(response)
        finally:
            self._open -= 1

    def statistics(self) -> dict[str, int]:
        """Tunnels that stand."""
        return {"tunnels": self._open}


class Tunnel(asyncio.Protocol):
    """The far side of a tunnel as asyncio's protocol, and the near side's receiver and listener."""

    def __init__(self, request: Request) -> None:
        self._near = request.connection
        self._far: asyncio.Transport | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open_ways = 2

    async def connect(self, port: int) -> None:
        """Reach the port. Raises ``unavailable`` (502) when nothing listens there."""
        loop = asyncio.get_running_loop()
        for address in _ADDRESSES:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await loop.create_connection(lambda: self, address, port)
            except OSError:  # which TimeoutError is
                continue
            return
        raise AgentError("unavailable", f"nothing listens on port {port} of the loopback", status=502)

    async def run(self, response: Response) -> None:
        """Carry bytes both ways until it is over."""
        response.listen(self)
        early = self._near.take_over(self)
        if early:
            self.received(early)
        if self._far is not None and not self._over.done():
            self._far.resume_reading()
        await self._over
        response.listen(None)

    # -- from the near side -----------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes for the port."""
        if self._far is not None and not self._far.is_closing():
            self._far.write(data)

    def finished(self) -> None:
        """The node will send no more."""
        if self._far is not None and not self._far.is_closing():
            self._far.write_eof()
        self._one_way_less()

    def flow(self, writable: bool) -> None:
        """The node lags, or has caught up."""
        if self._far is None or self._far.is_closing():
            return
        if writable:
            self._far.resume_reading()
        else:
            self._far.pause_reading()

    def gone(self) -> None:
        """The node's connection is no more."""
        if self._far is not None:
            reset(self._far)
        self._end()

    # -- from the far side ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection gives
        self._far = transport
        transport.pause_reading()  # until the 101 is out

    def data_received(self, data: bytes) -> None:
        self._near.transmit(data)

    def eof_received(self) -> bool:
        self._near.send_eof()
        self._one_way_less()
        return True

    def pause_writing(self) -> None:
        self._near.hold(True)

    def resume_writing(self) -> None:
        self._near.hold(False)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._near.reset()
        self._end()

    def _one_way_less(self) -> None:
        self._open_ways -= 1
        if not self._open_ways and self._far is not None:
            self._far.close()  # flushes first

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
