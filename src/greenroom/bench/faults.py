"""Kill a node over and over under load, and look from the outside whether anything was lost, doubled or left.

`run` works on a platform that somebody else started (`cli.bench_faults`) and takes down afterwards. Clients
(`faults_load`) keep making, using and ending sandboxes through its entry. One sandbox more, the *witness*, is
made first and lives through the whole run; should it be lost, another takes its place. Each kill is timed at
random or at something that is under way; then the platform must come up again by itself, a command must come
through to the witness, and every sandbox that a client was told of must be listed, reachable and the machine it
was. Everything that can be drawn is drawn from the seed; what happens when is not repeatable, because kills race
with the platform.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from greenroom.bench import faults_host as host
from greenroom.bench.faults_load import Client, Command, Entry, Held, Ledger
from greenroom.bench.faults_records import Aim, Answer, CheckRow, FaultPlan, KillRow, Records, Stray
from greenroom.bench.faults_verdict import NOT_FOUND
from greenroom.bench.lanes import in_lanes
from greenroom.bench.report import Meter, reason
from greenroom.config import Config
from greenroom.errors import RuntimeFailure
from greenroom.wire.tasks import spawn, stop

UP_DEADLINE = 90.0
"""Seconds from a kill to a platform that is whole again."""
COMMAND_DEADLINE = 30.0
"""The same, from there on, for a command to come through."""
RESTART_DEADLINE = 60.0
"""Seconds for the supervisor to start the process again."""
CHECK_DEADLINE = 30.0
"""Seconds for the list, and for a sandbox's answer, of one check."""
AIM_DEADLINE = 4.0
"""Seconds to wait for something to aim at."""
REST_DEADLINE = 90.0
"""Seconds for the node to have nothing under way at the end; claims that nobody confirmed end within 20."""
LOOK_EVERY = 0.05
"""Seconds between two looks at the platform."""
AIMS: tuple[Aim, ...] = ("any", "any", "claim", "claim", "refill", "release", "release")
"""What kills are timed at, drawn with these weights; a share of them is followed by one at the restart."""
RESTART_SHARE = 0.15


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """The platform as its own status tells it."""

    up: bool
    pid: int | None
    """The target's process."""
    warm: int
    starting: int
    target: int
    problems: list[str]


class Supervised(Protocol):
    """The platform's processes. Implemented with the command line's own means."""

    home: Path
    """The target's directory."""

    def pid(self) -> int | None:
        """The target's process right now, by the supervisor's record; None while there is none."""

    def kill(self, pid: int) -> bool:
        """SIGKILL to the target if its process is still `pid`; False when it is not."""

    def restarts(self) -> int:
        """How often the supervisor has started the target again."""

    async def look(self) -> Look:
        """The platform's status. Raises nothing for what is down."""


class Faults:
    """One run on a running platform. `strays` is known once `run` has ended."""

    def __init__(
        self, plan: FaultPlan, platform: Supervised, entry: Entry, ledger: Ledger, rows: Records, meter: Meter
    ) -> None:
        self._plan = plan
        self._platform = platform
        self._entry = entry
        self._ledger = ledger
        self._rows = rows
        self._meter = meter
        self._random = random.Random(f"{plan.seed}-killer")  # noqa: S311
        self._keeper = Client(0, entry, ledger, str(plan.seed), plan.held)
        self._clients = [
            Client(number + 1, entry, ledger, str(plan.seed), plan.held) for number in range(plan.load)
        ]
        self._witness: Held | None = None
        self._leave = asyncio.Event()
        self._gone: set[str] = set()
        """Sandboxes that were seen to be gone: worth a row once, and again only if one is back."""
        self.strays: list[Stray] = []

    async def run(self) -> None:
        """Load, kills, checks; then everything is released and the node counted.

        Raises RuntimeFailure when the run cannot even begin, or the platform stays down.
        """
        self._meter.say("the first sandbox")
        self._witness = await self._keeper.create()
        if self._witness is None:
            raise RuntimeFailure("no sandbox could be made before the first kill; see requests.jsonl")
        await self._check(-1)
        self._meter.begin(self._plan.kills)
        clients = [
            spawn(client.run(self._leave), f"client {index}") for index, client in enumerate(self._clients)
        ]
        try:
            await self._kills()
            self._meter.say("the clients bring what they began to its end")
            self._leave.set()
            await asyncio.gather(*clients)
        finally:
            await stop(*clients)
        self._meter.say("the last check")
        await self._check(0)
        self._meter.say("ending every sandbox")
        await self._release()
        self.strays = [*self._own_deaths(), *await self._count_strays()]

    # Killing

    async def _kills(self) -> None:
        number = 0
        again = False
        while number < self._plan.kills:
            if self._witness is None or self._witness.state != "held":
                self._witness = await self._keeper.create()
            aim: Aim = "restart" if again else self._random.choice(AIMS)
            if not again:
                await self._wait_for(aim)
            row = self._kill(number + 1, aim)
            if not row.hit:
                # It was dead already, by nobody's hand of ours: the status will tell of it.
                again = False
                if await self._until_up(time.monotonic(), None) is None:
                    raise RuntimeFailure(f"there was nothing to kill for {UP_DEADLINE:.0f} s")
                continue
            number += 1
            killed = time.monotonic()
            again = number < self._plan.kills and self._random.random() < RESTART_SHARE
            if again and await self._restarted(row.pid):
                self._rows.add(msgspec.structs.replace(row, cut_short=True))
                self._meter.say(f"kill {number} ({aim}), and again at its restart")
                self._meter.advance()
                # Either before it has done anything, or while it adopts what the one before left.
                longest = 0.1 if self._random.random() < 0.5 else 2.5
                await asyncio.sleep(self._random.uniform(0.0, longest))
                continue
            again = False
            row = await self._recovered(row, killed)
            self._rows.add(row)
            self._meter.say(
                f"kill {number} ({aim}): up after {_seconds(row.up_s)}, a command after {_seconds(row.command_s)}"
            )
            self._meter.advance()
            if row.up_s is None:
                raise RuntimeFailure(f"the platform did not come up again within {UP_DEADLINE:.0f} s")

    async def _wait_for(self, aim: Aim) -> None:
        """Let time pass until the moment that is aimed at."""
        draw = self._random.uniform
        moments = {
            "any": ("", draw(0.0, 1.5)),
            "claim": ("create", draw(0.0, 0.5)),
            # The pool refills from the moment a member is taken.
            "refill": ("create", draw(0.05, 0.25)),
            "release": ("kill", draw(0.0, 0.06)),
            "restart": ("", 0.0),
        }
        op, pause = moments[aim]
        if op:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AIM_DEADLINE):
                    await self._ledger.next(op)
        await asyncio.sleep(pause)

    def _kill(self, number: int, aim: Aim) -> KillRow:
        pid = self._platform.pid()
        vms = host.vms(self._platform.home)
        row = KillRow(
            number=number,
            at=round(self._entry.now(), 4),
            aim=aim,
            pid=pid or 0,
            in_flight={op: count for op, count in self._ledger.in_flight.items() if count},
            held=len(self._ledger.held()),
            warm=sum(vm.whole and not vm.claimed for vm in vms),
            half_made=sum(not vm.whole for vm in vms),
            hit=False,
        )
        hit = pid is not None and self._platform.kill(pid)
        return msgspec.structs.replace(row, hit=hit)

    async def _restarted(self, before: int) -> bool:
        """Wait for the target's next process; False when none came in time."""
        end = time.monotonic() + RESTART_DEADLINE
        while time.monotonic() < end:
            if self._platform.pid() not in (None, before):
                return True
            await asyncio.sleep(0.02)
        return False

    async def _until_up(self, killed: float, before: int | None) -> float | None:
        """Seconds from `killed` to a whole platform with another process than `before`; None when in vain."""
        while time.monotonic() - killed < UP_DEADLINE:
            if self._platform.pid() not in (None, before):
                look = await self._platform.look()
                if look.up and look.pid not in (None, before):
                    return time.monotonic() - killed
            await asyncio.sleep(LOOK_EVERY)
        return None

    async def _recovered(self, row: KillRow, killed: float) -> KillRow:
        """Wait for the platform and, at the same time, for a command to come through to the witness; then check."""
        up = spawn(self._until_up(killed, row.pid), "until it is up")
        command = spawn(self._until_command(killed), "until a command comes through")
        checking: asyncio.Task[None] | None = None
        try:
            up_s = await up
            checking = spawn(self._check(row.number), f"check {row.number}")
            command_s: float | None = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMAND_DEADLINE):
                    command_s = await asyncio.shield(command)
            await checking
        finally:
            await stop(up, command, checking)
        return msgspec.structs.replace(row, up_s=_rounded(up_s), command_s=_rounded(command_s))

    async def _until_command(self, killed: float) -> float | None:
        """Seconds from `killed` to the end of a command; None when the witness is lost."""
        witness = self._witness
        attempt = 0
        while True:
            attempt += 1
            if witness is None or witness.state != "held":
                return None
            row = await self._entry.ask(0, witness, attempt)
            if row.outcome == "ok":
                return time.monotonic() - killed
            if row.status in NOT_FOUND:
                witness.state = "lost"
            await asyncio.sleep(0.1)

    # Checking

    async def _check(self, kill: int) -> None:
        """Compare what clients were told with what is listed and who answers."""
        ledger = self._ledger
        now = time.monotonic()
        before = {name: held.expected(now) for name, held in ledger.sandboxes.items()}
        unsettled = {key for key, sandbox in ledger.keys.items() if not sandbox}
        listed, problem = await self._list()
        alive = [ledger.sandboxes[name] for name, expected in before.items() if expected == "alive"]
        answers: dict[str, tuple[Answer, str, str]] = {}

        async def one(index: int) -> None:
            held = alive[index]
            answers[held.sandbox_id] = await self._answer(held)

        await in_lanes(len(alive), 4, one, "check")
        now = time.monotonic()
        for name, expected in before.items():
            held = ledger.sandboxes[name]
            if expected == "gone" and listed is not None and name not in listed:
                if name in self._gone:
                    continue
                self._gone.add(name)
            answer, identity, error = answers.get(name, ("unasked", "", ""))
            still = expected if expected == held.expected(now) else "open"
            if still == "alive" and listed is not None and name not in listed:
                held.state = "lost"
            self._rows.add(
                CheckRow(
                    kill=kill,
                    at=round(self._entry.now(), 4),
                    key=held.key,
                    sandbox=name,
                    expected=still,
                    listed=None if listed is None else name in listed,
                    answer=answer,
                    identity=identity,
                    error=error or problem,
                )
            )
        for name, key in (listed or {}).items():
            if name in before:
                continue
            # Not told of when the list was asked for: its create is under way, was answered since, or is lost.
            settled = key in ledger.keys and key not in unsettled
            self._rows.add(
                CheckRow(
                    kill=kill,
                    at=round(self._entry.now(), 4),
                    key=key,
                    sandbox=name,
                    expected="gone" if settled and ledger.keys[key] != name else "open",
                    listed=True,
                    answer="unasked",
                )
            )

    async def _list(self) -> tuple[dict[str, str] | None, str]:
        """What is listed, or None and why not."""
        end, problem = time.monotonic() + CHECK_DEADLINE, ""
        while time.monotonic() < end:
            try:
                return await self._entry.listed(), ""
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                problem = reason(error)
            await asyncio.sleep(0.2)
        return None, problem

    async def _answer(self, held: Held) -> tuple[Answer, str, str]:
        """Whether the machine that answers for a sandbox is the one that it was."""
        end, attempt = time.monotonic() + CHECK_DEADLINE, 0
        while True:
            attempt += 1
            known = held.identity
            row = await self._entry.ask(0, held, attempt)
            if row.outcome == "ok":
                same = row.identity == (known or row.identity) and row.identity.endswith(held.sandbox_id)
                return ("same" if same else "other"), row.identity, ""
            late = time.monotonic() > end or held.expected(time.monotonic()) != "alive"
            if late or row.status in NOT_FOUND:
                return "silent", "", row.error
            await asyncio.sleep(0.2)

    # The end

    async def _release(self) -> None:
        entries = [held for held in self._ledger.sandboxes.values() if held.state == "held"]
        now = time.monotonic()
        living = [held for held in entries if held.expected(now) == "alive"]

        async def one(index: int) -> None:
            await self._keeper.kill(living[index])

        await in_lanes(len(living), 4, one, "release")

    def _own_deaths(self) -> list[Stray]:
        """A target that was started again more often than it was killed died of itself."""
        more = self._platform.restarts() - sum(kill.hit for kill in self._rows.kills)
        return [Stray(vm=self._platform.home.name, why=f"it died {more} times by itself")] if more > 0 else []

    async def _count_strays(self) -> list[Stray]:
        """VMs that nothing owns, once nothing is under way any more."""
        end = time.monotonic() + REST_DEADLINE
        while True:
            look = await self._platform.look()
            found = await asyncio.to_thread(host.vms, self._platform.home)
            claims = await asyncio.to_thread(host.journalled, self._platform.home)
            strays = host.strays(found, claims, look.warm, Config().vm.stock_waiting)
            after = await self._platform.look()
            at_rest = (after.warm, after.starting) == (look.warm, look.starting) == (look.target, 0)
            if (at_rest and look.up and not strays and not claims) or time.monotonic() > end:
                if claims and not strays:
                    strays = [Stray(vm=name, why="its sandbox was not ended") for name in sorted(claims)]
                if not at_rest and not strays:
                    strays = [
                        Stray(vm="the pool", why=f"it did not come to rest: {', '.join(look.problems)}")
                    ]
                return strays
            await asyncio.sleep(0.5)


async def run(
    plan: FaultPlan,
    platform: Supervised,
    entry_url: str,
    api_key: str,
    command: Command,
    rows: Records,
    meter: Meter,
) -> tuple[list[Stray], float]:
    """A whole run; returns the strays and how many seconds it took. See `Faults.run`."""
    ledger = Ledger(secrets.token_hex(4))
    async with Entry(entry_url, api_key, command, ledger, rows) as entry:
        faults = Faults(plan, platform, entry, ledger, rows, meter)
        await faults.run()
        return faults.strays, entry.now()


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
