"""The Kubernetes API as the benchmarks speak it: JSON over one aiohttp session, an API key as the bearer token.

No client library: it would spend more on a request than the platform does. Objects are plain dictionaries here;
`objects` has those that are made, `ready` and its like say what is read from them. A watch is given as the lines that
arrived, in the bytes that they were sent in, because most of who watch only look whether anything is missing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from greenroom.api.kube.kinds import CLAIM, SANDBOX, TEMPLATE, WARM_POOL, Kind
from greenroom.errors import GreenroomError, NodeUnavailable

Object = dict[str, Any]
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
CALL_DEADLINE = 60.0
"""Seconds for one answer, unless told otherwise."""
LINE_LIMIT = 8 << 20
"""Bytes of one line of a watch."""
LAUNCH = "sandbox.greenroom.dev/launch"
"""Label of a sandbox that says whether it was `warm` or `cold`."""


class Refused(GreenroomError):
    """An answer that is a `Status`; its `reason` is Kubernetes' own."""

    kind = "refused"

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason


def _refusal(code: int, payload: bytes) -> Refused:
    told: Object = {}
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(payload)
        told = found if isinstance(found, dict) else {}
    return Refused(code, str(told.get("reason", "")), str(told.get("message", payload[:200])))


class Kube:
    """One client of one api. Use as an async context manager."""

    def __init__(self, url: str, secret: str, namespace: str) -> None:
        self.url = url
        self.namespace = namespace
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Kube:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def headers(self) -> dict[str, str]:
        """What authenticates a request, for whoever sends it by other means."""
        return dict(self._headers)

    def path(self, kind: Kind, name: str = "", part: str = "") -> str:
        """The path of a kind's objects in this namespace, of one of them, or of a subresource."""
        words = [f"{kind.prefix}/namespaces/{self.namespace}/{kind.plural}", name, part]
        return "/".join(word for word in words if word)

    async def raw(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        deadline: float = CALL_DEADLINE,
    ) -> bytes:
        """The body of an answer. Raises Refused, or NodeUnavailable when there was none."""
        assert self._session is not None  # noqa: S101
        data = None if body is None else msgspec.json.encode(body)
        sent = {} if data is None else {"Content-Type": "application/json"}
        sent.update(headers or {})
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=sent,
                timeout=aiohttp.ClientTimeout(total=deadline, sock_connect=5.0),
                allow_redirects=False,
            ) as response:
                payload = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NodeUnavailable(f"no answer from the api: {str(error) or type(error).__name__}") from error
        if response.status >= 400:
            raise _refusal(response.status, payload)
        return payload

    async def _object(self, method: str, path: str, body: object = None, **more: Any) -> Object:
        return msgspec.json.decode(await self.raw(method, path, body, **more), type=dict[str, Any])

    async def create(self, kind: Kind, obj: Object) -> Object:
        """Create an object. Raises Refused."""
        return await self._object("POST", self.path(kind), obj)

    async def get(self, kind: Kind, name: str, part: str = "") -> Object:
        """Read an object. Raises Refused."""
        return await self._object("GET", self.path(kind, name, part))

    async def objects(self, kind: Kind, query: str = "") -> Object:
        """All objects of the namespace. Raises Refused."""
        return await self._object("GET", self.path(kind) + query)

    async def merge(self, kind: Kind, name: str, patch: Object, part: str = "") -> Object:
        """Change an object by a merge patch. Raises Refused."""
        headers = {"Content-Type": "application/merge-patch+json"}
        return await self._object("PATCH", self.path(kind, name, part), patch, headers=headers)

    async def delete(self, kind: Kind, name: str) -> None:
        """Delete an object. Raises Refused."""
        await self.raw("DELETE", self.path(kind, name))

    async def delete_all(self, kind: Kind, query: str = "", deadline: float = 300.0) -> None:
        """Delete all objects of the namespace. Raises Refused."""
        await self.raw("DELETE", self.path(kind) + query, deadline=deadline)

    async def scale(self, name: str, replicas: int) -> None:
        """Set how many members a warm pool shall have. Raises Refused."""
        await self.merge(WARM_POOL, name, {"spec": {"replicas": replicas}}, "scale")

    async def watch(self, kind: Kind, query: str = "") -> AsyncGenerator[list[bytes], None]:
        """The lines of a watch, as many at once as have come; close it with `aclosing`.

        It begins with the state where `query` names no version. Raises Refused, NodeUnavailable when it breaks off.
        """
        assert self._session is not None  # noqa: S101
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=90.0)
        url = f"{self.url}{self.path(kind)}?watch=true&timeoutSeconds=3600{query}"
        rest = b""
        try:
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
                if response.status >= 400:
                    raise _refusal(response.status, await response.read())
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    if whole:
                        yield whole
                    if len(rest) > LINE_LIMIT:
                        raise NodeUnavailable(f"an event has more than {LINE_LIMIT} bytes")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NodeUnavailable(f"the watch broke off: {str(error) or type(error).__name__}") from error
        raise NodeUnavailable("the watch has ended")


def pod_template(image: str) -> Object:
    """A pod template of one container."""
    return {"spec": {"containers": [{"name": "agent", "image": image}]}}


def template(name: str, image: str) -> Object:
    """A SandboxTemplate."""
    return {
        "apiVersion": TEMPLATE.api_version,
        "kind": TEMPLATE.name,
        "metadata": {"name": name},
        "spec": {"podTemplate": pod_template(image)},
    }


def warm_pool(name: str, of: str, replicas: int) -> Object:
    """A SandboxWarmPool of a template."""
    return {
        "apiVersion": WARM_POOL.api_version,
        "kind": WARM_POOL.name,
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": of}},
    }


def claim(name: str, pool: str, warm: str = "prefer") -> Object:
    """A SandboxClaim on a pool."""
    return {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.name,
        "metadata": {"name": name},
        "spec": {"warmPoolRef": {"name": pool}, "warmPolicy": warm},
    }


def sandbox(name: str, image: str, **metadata: Any) -> Object:
    """A Sandbox of its own."""
    return {
        "apiVersion": SANDBOX.api_version,
        "kind": SANDBOX.name,
        "metadata": {"name": name, **metadata},
        "spec": {"podTemplate": pod_template(image)},
    }


def name_of(obj: Object) -> str:
    """An object's name."""
    return str(obj.get("metadata", {}).get("name", ""))


def ready(obj: Object) -> bool:
    """Whether its condition Ready is True."""
    conditions = obj.get("status", {}).get("conditions", [])
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def launch_of(obj: Object) -> str:
    """`warm` or `cold`, as the sandbox says it was launched; empty where it does not say."""
    return str(obj.get("metadata", {}).get("labels", {}).get(LAUNCH, ""))


class Event(msgspec.Struct, frozen=True):
    """An event of a watch, decoded, and when its bytes had come (`now`)."""

    type: str
    object: Object
    at: float


def event_of(line: bytes, at: float) -> Event:
    """An event in a line. Raises NodeUnavailable for an ERROR, which tells that the watch is over."""
    found = msgspec.json.decode(line, type=dict[str, Any])
    obj = found.get("object", {})
    if found.get("type") == "ERROR":
        raise NodeUnavailable(f"the watch was ended: {obj.get('message', obj)}")
    return Event(str(found.get("type")), obj, at)


def now() -> float:
    """The clock of all that is measured here: monotonic seconds, the same in every process of the machine."""
    return time.monotonic()
