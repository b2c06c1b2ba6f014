"""Signed URLs of `/files` that name no sandbox: found by asking the nodes, whose tokens made them.

Why here. The tokens are the nodes' and stay there; which nodes there are is known to the proxy, which has to know
where to send the request anyway. So the entry's routing filter asks this controller, the controller asks every
node at once (`POST /v1/signatures`, see `node.signatures`), and the request goes on to the sandbox's agent, which
checks it as if its sandbox had been named. The api has no part in it, and no body waits anywhere.

Never an oracle. Whoever asks learns whether their signature is somebody's, which a right one is for its holder
alone, and 128 bits are not to be guessed. All that fail look alike. What is not free is the work: so many are looked
up at a time, and failures are counted, for each client and for all of them; a signature that is right costs nothing
and is never refused for what others did.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from greenroom.errors import GreenroomError
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import SignatureOwner, SignedUrl
from greenroom.wire.serving import endpoint, read_body

_log = logging.getLogger(__name__)

PATH = "/v1/signed"
MAX_TARGET = 16 << 10
"""Bytes of a request target; a path in a guest has at most 4096, three times that when it is encoded. The filter
refuses longer ones by itself (`routing.lua`)."""
NODE_DEADLINE = 2.0
"""Seconds a node may take. The filter waits a little longer for all of them."""
CLIENT_BURST, CLIENT_RATE = 20.0, 2.0
"""Failures one client may have at once, and a second from then on."""
ALL_BURST, ALL_RATE = 200.0, 50.0
"""The same for all clients together."""
ASKING, WAITING = 16, 512
"""Requests for which the nodes are asked at the same time, and those that may wait for that; one more gets 503."""
CLIENTS = 4096
"""Clients that are told apart; one more forgets the one that was silent longest."""
_OPERATIONS: dict[str, tuple[str, ...]] = {
    "GET": ("read",),
    "HEAD": ("read",),
    "POST": ("write",),
    "PUT": ("write",),
    # A browser asks before it uploads, and does not say so in the signature.
    "OPTIONS": ("read", "write"),
}


class _Bucket:
    __slots__ = ("at", "left")

    def __init__(self, left: float, at: float) -> None:
        self.left, self.at = left, at


class Budget:
    """How many failures are left, for each client and for all. Pure: told times (monotonic seconds)."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Bucket] = OrderedDict()
        self._all = _Bucket(ALL_BURST, 0.0)

    def __len__(self) -> int:
        return len(self._clients)

    def spend(self, client: str, now: float) -> bool:
        """Count a failure. False, and nothing taken, when none is left."""
        mine = self._clients.get(client) or _Bucket(CLIENT_BURST, now)
        self._clients[client] = mine
        self._clients.move_to_end(client)
        if len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)
        _fill(mine, CLIENT_BURST, CLIENT_RATE, now)
        _fill(self._all, ALL_BURST, ALL_RATE, now)
        if mine.left < 1 or self._all.left < 1:
            return False
        mine.left -= 1
        self._all.left -= 1
        return True


def _fill(bucket: _Bucket, burst: float, rate: float, now: float) -> None:
    bucket.left = min(burst, bucket.left + max(0.0, now - bucket.at) * rate)
    bucket.at = now


def client_of(address: str) -> str:
    """What is counted as one client: an IPv4 address, or the /64 of an IPv6 one, of which everybody has many."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)


class Finder:
    """Answers the filter. `nodes` gives the URLs of the nodes' APIs as they are known now."""

    def __init__(self, client: RoleClient, nodes: Callable[[], Iterable[str]]) -> None:
        self._client = client
        self._nodes = nodes
        self._budget = Budget()
        self._asking = asyncio.Semaphore(ASKING)
        self._waiting = 0

    def routes(self) -> list[Route]:
        """For the controller's own listener: only the proxy, which Envoy's credential is, may ask."""
        return [endpoint("POST", PATH, self._answer, ("proxy",))]

    async def _answer(self, request: Request) -> Response:
        target = (await read_body(request, MAX_TARGET)).decode("latin-1")
        operations = _OPERATIONS.get(request.headers.get("x-greenroom-method", ""), ())
        client = client_of(request.headers.get("x-greenroom-from", ""))
        if not operations:
            return Response(status_code=404)
        if self._waiting >= WAITING:
            return Response(status_code=503)
        self._waiting += 1
        try:
            async with self._asking:
                found, all_asked = await self._find(SignedUrl(target.partition("?")[2], operations))
        finally:
            self._waiting -= 1
        if found is not None:
            # Whoever has a right one is let in, whatever others from the same address or all of them have tried.
            return Response(status_code=200, headers={"x-greenroom-sandbox": found})
        if not all_asked:
            return Response(status_code=503)
        now = asyncio.get_running_loop().time()
        return Response(status_code=404 if self._budget.spend(client, now) else 429)

    async def _find(self, url: SignedUrl) -> tuple[str | None, bool]:
        """The sandbox, and whether every node was asked. None is left out early: they answer in the same time."""

        async def ask(node: str) -> SignatureOwner:
            return await self._client.call(
                "POST", f"{node}/v1/signatures", SignatureOwner, url, deadline=NODE_DEADLINE
            )

        answers = await asyncio.gather(*map(ask, self._nodes()), return_exceptions=True)
        found, all_asked = None, True
        for answer in answers:
            if isinstance(answer, SignatureOwner):
                found = found or answer.sandbox_id
            elif isinstance(answer, GreenroomError):
                _log.warning("a node cannot say whose a signature is: %s", answer.message)
                all_asked = False
            else:
                raise answer
        return found, all_asked
