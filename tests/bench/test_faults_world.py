"""The whole fault run against a platform that exists in memory and can be made to misbehave in each way."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote

import pytest

from greenroom.bench import faults
from greenroom.bench import faults_host as host
from greenroom.bench.faults import Faults, Look
from greenroom.bench.faults_load import Entry, Ledger
from greenroom.bench.faults_records import FaultPlan, HostCount, Records, Verdict, records
from greenroom.bench.faults_verdict import judge
from greenroom.errors import NodeUnavailable, RuntimeFailure
from tests.bench.results import Quiet, conditions

PLAN = FaultPlan(kills=4, load=2, held=4, seed=1)


class World(Entry):
    """Entry and node in one; a test double. `vice` is what it does wrong, from the second kill on."""

    def __init__(self, rows: Records, ledger: Ledger, home: Path, vice: str) -> None:
        super().__init__("http://entry", "key", self.command, ledger, rows)
        self.home = home
        self.vice = vice
        self.kills = 0
        self.keys: dict[str, str] = {}
        self.alive: dict[str, str] = {}
        self.ghosts: dict[str, str] = {}

    @property
    def bad(self) -> bool:
        return self.kills >= 2

    async def _send(self, method: str, path: str, body: object, headers: dict[str, str]) -> tuple[int, bytes]:
        match method, unquote(path).strip("/").split("/"):
            case "POST", ["v2", "sandboxes"]:
                key = headers["Idempotency-Key"]
                if key not in self.keys or (self.bad and self.vice == "doubled"):
                    self.keys[key] = f"i{len(self.alive) + len(self.ghosts)}-{key}-{self.kills}"
                    self.alive[self.keys[key]] = key
                return 201, json.dumps({"sandboxID": self.keys[key]}).encode()
            case "DELETE", [_, sandbox]:
                if self.alive.pop(sandbox, None) is None:
                    return 404, b""
                if self.bad and self.vice == "undead":
                    self.ghosts[sandbox] = ""
                return 204, b""
            case "POST", [_, sandbox, "timeout"]:
                return (204 if sandbox in self.alive else 404), b""
        raise AssertionError((method, path))

    async def command(self, sandbox: str, _token: str | None, _line: str) -> tuple[int, str]:
        if self.bad and self.vice == "unreachable":
            raise NodeUnavailable("no way there")
        if sandbox not in self.alive:
            raise RuntimeFailure("The sandbox was not found")
        other = "other" if self.bad and self.vice == "changed" else ""
        return 0, f"machine-{sandbox}{other}\n{sandbox}\n"

    async def listed(self) -> dict[str, str]:
        return self.alive | self.ghosts

    def pid(self) -> int | None:
        return None if self.vice == "down" and self.bad else 100 + self.kills

    def kill(self, pid: int) -> bool:
        assert pid == self.pid()
        self.kills += 1
        if self.bad and self.vice == "lost" and self.alive:
            del self.alive[next(iter(self.alive))]
        return True

    def restarts(self) -> int:
        return self.kills + (self.vice == "died")

    async def look(self) -> Look:
        return Look(up=True, pid=self.pid(), warm=4, starting=0, target=4, problems=[])


async def verdict_of(tmp_path: Path, vice: str, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    for name in ("UP_DEADLINE", "COMMAND_DEADLINE", "CHECK_DEADLINE", "REST_DEADLINE", "AIM_DEADLINE"):
        monkeypatch.setattr(faults, name, 0.5)
    monkeypatch.setattr(host, "journalled", lambda _home: set())
    monkeypatch.setattr(host, "vms", lambda _home: [host.VmOnHost("a", True)] if vice == "stray" else [])
    ledger, meter = Ledger("mark"), Quiet()
    with records(tmp_path / "out") as rows:
        world = World(rows, ledger, tmp_path, vice)
        run = Faults(PLAN, world, world, ledger, rows, meter)
        if vice == "down":
            with pytest.raises(RuntimeFailure):
                await run.run()
        else:
            await run.run()
            assert meter.advanced == meter.total == PLAN.kills
            assert not world.alive or vice in ("doubled", "lost", "unreachable")
        return judge(conditions(), PLAN, 1.0, rows.kills, rows.requests, rows.checks, run.strays, HostCount())


async def test_a_platform_that_keeps_its_word_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = await verdict_of(tmp_path, "none", monkeypatch)
    assert verdict.passed, verdict.faults
    assert verdict.kills == PLAN.kills
    assert verdict.checked_alive >= PLAN.kills
    assert {"ask", "create"} <= set(verdict.requests)


@pytest.mark.parametrize(
    "vice", ["lost", "doubled", "undead", "changed", "unreachable", "stray", "died", "down"]
)
async def test_a_platform_that_breaks_it_is_found_out(
    tmp_path: Path, vice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = await verdict_of(tmp_path, vice, monkeypatch)
    assert not verdict.passed
    # What a vice breaks beside is told too, but it is told.
    kind = {"died": "stray"}.get(vice, vice)
    assert kind in verdict.fault_counts or (vice == "down" and verdict.kills < PLAN.kills)
