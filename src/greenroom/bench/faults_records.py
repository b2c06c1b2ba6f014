"""What a fault run writes down: every attempt, every kill, every look afterwards, and the verdict over them.

Times are seconds since the run began, so that the rows of the three files can be put side by side. The verdict
(`faults_verdict`) is made from these rows and from nothing else: whoever has the files can judge again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from greenroom.bench.report import Conditions
from greenroom.bench.summaries import Summary
from greenroom.errors import SetupError

Op = Literal["create", "again", "ask", "renew", "kill"]
"""`again` repeats a create that was answered, under its key; `ask` runs a command in the sandbox."""
Outcome = Literal["ok", "rejected", "failed", "unknown"]
"""`rejected` asks to be tried again (429, 503); `failed` says no for good; `unknown` is no answer, or one that
leaves open what happened (500, 502, 504)."""
Aim = Literal["any", "claim", "refill", "release", "restart"]
"""At what a kill was timed: nothing, a create under way, the refill after one, a kill under way, the restart
after the kill before."""
Expected = Literal["alive", "gone", "open"]
"""`open`: it changed while the check looked, so that nothing follows from what was seen."""
Answer = Literal["same", "other", "silent", "unasked"]


class KillRow(msgspec.Struct, frozen=True, kw_only=True):
    """One SIGKILL to the target."""

    number: int
    at: float
    aim: Aim
    pid: int
    in_flight: dict[str, int]
    """Requests under way at that moment, by op."""
    held: int
    """Sandboxes that clients had been told of and not yet asked to end."""
    warm: int
    """Warm members on the host."""
    half_made: int
    """VMs whose process runs and that are no members yet: being restored, or in stock for it."""
    hit: bool
    """Whether there was a process to kill."""
    up_s: float | None = None
    """From the kill to the platform being whole again; None when that took too long or the next kill came first."""
    command_s: float | None = None
    """From the kill to the end of the first command in a sandbox from before it."""
    cut_short: bool = False
    """The next kill was aimed at this one's restart, so there was nothing to wait for."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of one request."""

    start: float
    end: float
    client: int
    op: Op
    key: str
    """The create's idempotency key; it names the sandbox before it has an id."""
    attempt: int
    outcome: Outcome
    status: int | None
    """HTTP status; None without an answer."""
    sandbox: str = ""
    must_exist: bool = False
    """Nobody had asked for the sandbox's end, nor could it have come, so that `not found` is a loss."""
    identity: str = ""
    """What the sandbox said it was."""
    error: str = ""


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox as it was seen after a kill (0: at the end of the load, -1: before the first)."""

    kill: int
    at: float
    key: str
    sandbox: str
    expected: Expected
    listed: bool | None
    """None when the list could not be read."""
    answer: Answer
    identity: str = ""
    error: str = ""


class Stray(msgspec.Struct, frozen=True, kw_only=True):
    """A VM that nothing owns, or whatever else went another way than anybody asked for."""

    vm: str
    why: str


class HostCount(msgspec.Struct, frozen=True, kw_only=True):
    """What is on the host under a node's tag or with its directory's name, looked for from the outside."""

    processes: list[str] = []
    namespaces: list[str] = []
    cgroups: list[str] = []
    slots: list[str] = []
    uid_blocks: list[str] = []
    mounts: list[str] = []

    def total(self) -> int:
        """How many things these are."""
        return sum(len(getattr(self, name)) for name in self.__struct_fields__)

    def lines(self) -> list[str]:
        """Each of them, with its kind."""
        return [f"{name}: {thing}" for name in self.__struct_fields__ for thing in getattr(self, name)]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must not be."""

    kind: Literal[
        "lost",
        "unreachable",
        "changed",
        "undead",
        "doubled",
        "unsettled",
        "unchecked",
        "down",
        "stray",
        "leaked",
    ]
    what: str
    kill: int | None = None


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    kills: int
    load: int
    held: int
    seed: int
    target: Literal["node"] = "node"
    warm: int = 4


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The run in figures. `faults` is empty exactly when nothing was lost, doubled or left."""

    benchmark: Literal["faults"] = "faults"
    passed: bool
    conditions: Conditions
    plan: FaultPlan
    seconds: float
    kills: int
    kills_by_aim: dict[str, int]
    kills_with_in_flight: dict[str, int]
    """Kills during which at least one request of this op was under way."""
    kills_during_refill: int
    """Kills at which the pool had fewer warm members than it wants."""
    sandboxes: int
    """Creates that were answered with a sandbox."""
    checked: int
    """Looks at a sandbox that had to be alive or gone."""
    checked_alive: int
    requests: dict[str, dict[str, int]]
    """Attempts by op and outcome."""
    statuses: dict[str, dict[str, int]]
    """Attempts that were not ok, by op and status."""
    up_s: Summary
    command_s: Summary
    fault_counts: dict[str, int]
    faults: list[Fault]
    left: HostCount


class Records:
    """The three files of rows, appended to as things happen, so that an interrupted run leaves what it saw."""

    def __init__(self, directory: Path) -> None:
        """Raises SetupError when the directory cannot be made or written to."""
        self.kills: list[KillRow] = []
        self.requests: list[RequestRow] = []
        self.checks: list[CheckRow] = []
        self._files: dict[type[msgspec.Struct], BinaryIO] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for kind, name in ((KillRow, "kills"), (RequestRow, "requests"), (CheckRow, "checks")):
                self._files[kind] = (directory / f"{name}.jsonl").open("wb", buffering=0)
        except OSError as error:
            self.close()
            raise SetupError(f"cannot write to {directory}: {error.strerror}") from error

    def add(self, row: KillRow | RequestRow | CheckRow) -> None:
        """Keep a row and write it down."""
        match row:
            case KillRow():
                self.kills.append(row)
            case RequestRow():
                self.requests.append(row)
            case CheckRow():
                self.checks.append(row)
        self._files[type(row)].write(msgspec.json.encode(row) + b"\n")

    def last(self) -> float:
        """When the last request ended."""
        return self.requests[-1].end if self.requests else 0.0

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


@contextlib.contextmanager
def records(directory: Path) -> Iterator[Records]:
    """Records for the length of a block."""
    made = Records(directory)
    try:
        yield made
    finally:
        made.close()
