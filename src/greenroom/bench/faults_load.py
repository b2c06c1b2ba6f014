"""The clients of a fault run: they make, use and end sandboxes through the platform's entry, and write it all down.

A client treats a platform that keeps dying as a careful program would: every create has an idempotency key, an
answer that leaves open what happened is settled by sending the same request again until one says, and nothing is
ever repeated under a new key. What a client was told is kept in the `Ledger`, against which the checks are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

import aiohttp
import msgspec

from greenroom.bench.faults_records import Op, Outcome, Records, RequestRow
from greenroom.bench.report import reason
from greenroom.errors import GreenroomError

IDENTITY = "cat /etc/machine-id; hostname"
"""What a sandbox is asked for; the guest sets both when the sandbox is handed over."""
TTL = 3600
"""Seconds that most sandboxes live, longer than it takes until one is renewed."""
BRIEF = (6, 15)
"""Seconds that the others live, at least and at most: their time-outs pass while nodes are away."""
GRACE = 12.0
"""Seconds after its time-out at which a sandbox must be gone, the node's restart included."""
MARGIN = 0.5
"""Seconds before its time-out from which nothing is expected of a sandbox any more."""
SETTLE_DEADLINE = 120.0
"""Seconds over which a request is sent again until an answer settles it."""
CALL_DEADLINE = 75.0
"""Seconds for one attempt of a create; the platform gives up itself before."""
ASK_DEADLINE = 8.0
"""Seconds for one command in a sandbox."""

Command = Callable[[str, str | None, str], Awaitable[tuple[int, str]]]
"""Run a command line in the sandbox with this id and token; returns exit status and standard output.

Raises GreenroomError or OSError."""


class Made(msgspec.Struct, frozen=True, rename={"sandbox_id": "sandboxID", "token": "envdAccessToken"}):
    """What a create answers, as far as it is needed here."""

    sandbox_id: str
    token: str | None = None


class ListedSandbox(msgspec.Struct, frozen=True, rename={"sandbox_id": "sandboxID"}):
    """An entry of a list."""

    sandbox_id: str
    metadata: dict[str, str] = {}


class Held(msgspec.Struct, kw_only=True):
    """A sandbox that a client was told of. Times are monotonic seconds."""

    key: str
    sandbox_id: str
    token: str | None
    ttl: int
    ends_from: float
    """The earliest moment at which its time can be up."""
    ends_by: float
    """The latest."""
    state: Literal["held", "ending", "killed", "lost"] = "held"
    """`lost`: a check has told that it is not there; nothing more is expected of it."""
    identity: str = ""

    @property
    def brief(self) -> bool:
        """Whether it is left to its time-out."""
        return self.ttl < TTL

    def expected(self, now: float) -> Literal["alive", "gone", "open"]:
        """What must be so at monotonic second `now`."""
        if self.state == "killed" or now > self.ends_by + GRACE:
            return "gone"
        if self.state == "held" and now < self.ends_from - MARGIN:
            return "alive"
        return "open"


class Ledger:
    """What all clients together know; `in_flight` counts requests under way by op."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.sandboxes: dict[str, Held] = {}
        self.keys: dict[str, str] = {}
        """Sandbox by key, empty while its create is not settled."""
        self.in_flight: Counter[str] = Counter()
        self.reserved = 0
        self.began: dict[str, asyncio.Event] = {}

    def held(self) -> list[Held]:
        """Those that must be alive now."""
        now = time.monotonic()
        return [entry for entry in self.sandboxes.values() if entry.expected(now) == "alive"]

    def count(self) -> int:
        """Sandboxes that may exist, those included whose create is under way."""
        now = time.monotonic()
        living = (
            entry.state != "killed" and now < entry.ends_by + GRACE for entry in self.sandboxes.values()
        )
        return self.reserved + sum(living)

    @contextlib.contextmanager
    def under_way(self, op: str) -> Iterator[None]:
        """Count a request, and wake who waits for one of its kind."""
        self.in_flight[op] += 1
        if (event := self.began.pop(op, None)) is not None:
            event.set()
        try:
            yield
        finally:
            self.in_flight[op] -= 1

    async def next(self, op: str) -> None:
        """Wait until the next request with this op begins."""
        await self.began.setdefault(op, asyncio.Event()).wait()


class Entry:
    """The platform's entry, each call one attempt that is written down. Use as an async context manager."""

    def __init__(self, url: str, key: str, command: Command, ledger: Ledger, rows: Records) -> None:
        self._url = url
        self._key = key
        self._command = command
        self._ledger = ledger
        self._rows = rows
        self._session: aiohttp.ClientSession | None = None
        self.began = time.monotonic()

    async def __aenter__(self) -> Entry:
        self._session = aiohttp.ClientSession(
            headers={"X-API-Key": self._key},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=CALL_DEADLINE, sock_connect=5.0),
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    async def _send(self, method: str, path: str, body: object, headers: dict[str, str]) -> tuple[int, bytes]:
        assert self._session is not None  # noqa: S101
        data = None if body is None else msgspec.json.encode(body)
        sent = {"Content-Type": "application/json", **headers} if data is not None else headers
        async with self._session.request(
            method, self._url + path, data=data, headers=sent, allow_redirects=False
        ) as response:
            return response.status, await response.read()

    async def attempt(
        self,
        client: int,
        op: Op,
        key: str,
        attempt: int,
        method: str,
        path: str,
        *,
        body: object = None,
        held: Held | None = None,
        named: str = "",
    ) -> tuple[RequestRow, bytes]:
        """One control request, written down. Never raises for what the platform does."""
        start = self.now()
        status: int | None = None
        payload, error = b"", ""
        existed = held is not None and held.expected(time.monotonic()) == "alive"
        headers = {"Idempotency-Key": key} if op in ("create", "again") else {}
        with self._ledger.under_way(op):
            try:
                status, payload = await self._send(method, path, body, headers)
            except (aiohttp.ClientError, TimeoutError, OSError) as problem:
                error = reason(problem)
        outcome = outcome_of(status)
        if op == "kill" and status == 404:
            outcome = "ok"  # it is gone, which is what was asked for
        if status is not None and outcome != "ok":
            error = payload[:200].decode(errors="replace")
        sandbox = named
        if outcome == "ok" and op in ("create", "again"):
            sandbox = msgspec.json.decode(payload, type=Made).sandbox_id
        # A kill makes its sandbox `ending` before it is sent; it had to be there at the first attempt.
        must = held is not None and (
            (op == "kill" and attempt == 1 and time.monotonic() < held.ends_from - MARGIN)
            or (existed and held.expected(time.monotonic()) == "alive")
        )
        row = RequestRow(
            start=round(start, 4),
            end=round(self.now(), 4),
            client=client,
            op=op,
            key=key,
            attempt=attempt,
            outcome=outcome,
            status=status,
            sandbox=sandbox,
            must_exist=must,
            error=error,
        )
        self._rows.add(row)
        return row, payload

    async def ask(self, client: int, held: Held, attempt: int = 1) -> RequestRow:
        """Ask a sandbox who it is; the first answer is remembered as its identity."""
        start = self.now()
        identity, error, status = "", "", None
        outcome: Outcome = "ok"
        existed = held.expected(time.monotonic()) == "alive"
        with self._ledger.under_way("ask"):
            try:
                async with asyncio.timeout(ASK_DEADLINE):
                    ended, output = await self._command(held.sandbox_id, held.token, IDENTITY)
                if ended == 0:
                    identity = " ".join(output.split())
                else:
                    outcome, error = "failed", f"exit status {ended}: {output[:100]}"
            except (GreenroomError, OSError, TimeoutError) as problem:
                error = reason(problem)
                outcome, status = _refusal(problem)
        if outcome == "ok" and not held.identity:
            held.identity = identity
        row = RequestRow(
            start=round(start, 4),
            end=round(self.now(), 4),
            client=client,
            op="ask",
            key=held.key,
            attempt=attempt,
            outcome=outcome,
            status=status,
            sandbox=held.sandbox_id,
            must_exist=existed and held.expected(time.monotonic()) == "alive",
            identity=identity,
            error=error,
        )
        self._rows.add(row)
        return row

    async def listed(self) -> dict[str, str]:
        """Every listed sandbox of this run, with its key, over all pages. Raises OSError without a whole list."""
        found: dict[str, str] = {}
        token = ""
        query = {"metadata": urllib.parse.urlencode({"faults": self._ledger.mark}), "limit": "100"}
        while True:
            assert self._session is not None  # noqa: S101
            page = query | ({"nextToken": token} if token else {})
            async with self._session.get(
                f"{self._url}/v2/sandboxes", params=page, timeout=aiohttp.ClientTimeout(total=20.0)
            ) as response:
                payload = await response.read()
                if response.status != 200 or response.headers.get("X-Greenroom-Partial"):
                    raise OSError(f"the list was answered {response.status}: {payload[:200]!r}")
                token = response.headers.get("X-Next-Token", "")
            for entry in msgspec.json.decode(payload, type=list[ListedSandbox]):
                found[entry.sandbox_id] = entry.metadata.get("key", "")
            if not token:
                return found


def outcome_of(status: int | None) -> Outcome:
    """The class of an answer."""
    if status is None or status in (500, 502, 504):
        return "unknown"
    if status in (429, 503):
        return "rejected"
    return "ok" if status < 400 else "failed"


def _refusal(error: Exception) -> tuple[Outcome, int | None]:
    """The class of a command that came to nothing, and 404 where the answer was that there is no such sandbox."""
    if isinstance(error, GreenroomError) and "not found" in error.message:
        return "failed", 404
    if isinstance(error, GreenroomError) and error.kind == "stream_unavailable":
        return "rejected", 503
    return "unknown", None  # a connection that broke, or was made to


class Client:
    """One client: `run` until it is told to stop. Its sandboxes are its own; the ledger is everybody's."""

    def __init__(self, number: int, entry: Entry, ledger: Ledger, seed: str, held: int) -> None:
        self._number = number
        self._entry = entry
        self._ledger = ledger
        self._random = random.Random(f"{seed}-{number}")  # noqa: S311
        self._held = held
        self._keys = 0
        self.own: list[Held] = []

    async def run(self, leave: asyncio.Event) -> None:
        """Do this and that until `leave` is set; what was begun is brought to its end."""
        while not leave.is_set():
            await self._step()
            await asyncio.sleep(self._random.uniform(0.02, 0.25))

    async def _step(self) -> None:
        now, rng = time.monotonic(), self._random
        self.own = [entry for entry in self.own if entry.expected(now) != "gone" and entry.state == "held"]
        mine = [entry for entry in self.own if entry.expected(now) == "alive"]
        lasting = [entry for entry in mine if not entry.brief]
        if self._ledger.count() < self._held and (not mine or rng.random() < 0.5):
            await self.create(rng.randint(*BRIEF) if rng.random() < 0.15 else TTL)
            return
        if not mine:
            return
        roll, chosen = rng.random(), rng.choice(mine)
        if roll < 0.2 and lasting:
            await self.kill(rng.choice(lasting))
        elif roll < 0.4:
            await self._entry.ask(self._number, chosen)
        elif roll < 0.6 and lasting:
            await self.renew(rng.choice(lasting))
        elif roll < 0.8:
            await self._create_again(chosen)

    def _body(self, key: str, ttl: int) -> dict[str, object]:
        return {
            "templateID": "base",
            "timeout": ttl,
            "metadata": {"faults": self._ledger.mark, "key": key},
        }

    async def create(self, ttl: int = TTL) -> Held | None:
        """Make one sandbox; None when the platform said no for good, or never said anything for good."""
        self._keys += 1
        key = f"{self._ledger.mark}-{self._number}-{self._keys}"
        self._ledger.keys[key] = ""
        self._ledger.reserved += 1
        first = time.monotonic()
        try:
            attempt = 0
            while True:
                attempt += 1
                row, payload = await self._entry.attempt(
                    self._number, "create", key, attempt, "POST", "/v2/sandboxes", body=self._body(key, ttl)
                )
                if row.outcome in ("ok", "failed") or time.monotonic() - first > SETTLE_DEADLINE:
                    break
                await asyncio.sleep(self._random.uniform(0.1, 0.6))
            if row.outcome != "ok":
                return None
            made = msgspec.json.decode(payload, type=Made)
            held = Held(
                key=key,
                sandbox_id=made.sandbox_id,
                token=made.token,
                ttl=ttl,
                ends_from=first + ttl,
                ends_by=time.monotonic() + ttl,
            )
            self._ledger.keys[key] = made.sandbox_id
            self._ledger.sandboxes[made.sandbox_id] = held
            self.own.append(held)
            return held
        finally:
            self._ledger.reserved -= 1

    async def _create_again(self, held: Held) -> None:
        """Send a create that was answered once more: it must name the same sandbox."""
        await self._entry.attempt(
            self._number,
            "again",
            held.key,
            1,
            "POST",
            "/v2/sandboxes",
            body=self._body(held.key, held.ttl),
            held=held,
            named=held.sandbox_id,
        )

    async def renew(self, held: Held) -> None:
        """Let a sandbox live longer."""
        path = f"/sandboxes/{held.sandbox_id}/timeout"
        before = held.ends_from, held.ends_by
        held.ends_from, held.ends_by = min(before[0], time.monotonic() + TTL), time.monotonic() + 2 * TTL
        row, _ = await self._entry.attempt(
            self._number,
            "renew",
            held.key,
            1,
            "POST",
            path,
            body={"timeout": TTL},
            held=held,
            named=held.sandbox_id,
        )
        if row.outcome == "ok":
            held.ends_from = held.ends_by = time.monotonic() + TTL

    async def kill(self, held: Held) -> bool:
        """End a sandbox; True once the platform says that it is gone."""
        held.state = "ending"
        first, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            row, _ = await self._entry.attempt(
                self._number,
                "kill",
                held.key,
                attempt,
                "DELETE",
                f"/sandboxes/{held.sandbox_id}",
                held=held,
                named=held.sandbox_id,
            )
            if row.outcome == "ok":
                held.state = "killed"
                return True
            if row.outcome == "failed" or time.monotonic() - first > SETTLE_DEADLINE:
                return False
            await asyncio.sleep(self._random.uniform(0.1, 0.6))
