"""The clients of a fault run against scripted answers: one key until it is settled, and a true account of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.bench import faults_load
from greenroom.bench.faults_load import BRIEF, GRACE, TTL, Client, Entry, Held, Ledger, outcome_of
from greenroom.bench.faults_records import Records, RequestRow, records
from greenroom.errors import GreenroomError, NodeUnavailable, TemporaryError

Answer = tuple[int, bytes] | Exception


class Unavailable(TemporaryError):
    """What a stream that was refused for now raises."""

    kind = "stream_unavailable"


class Scripted(Entry):
    """An entry whose answers are given beforehand."""

    def __init__(self, rows: Records, ledger: Ledger, *answers: Answer) -> None:
        super().__init__("http://entry", "key", self.say, ledger, rows)
        self.answers = list(answers)
        self.sent: list[tuple[str, str, object, dict[str, str]]] = []
        self.said: list[tuple[int, str] | Exception] = []

    async def _send(self, method: str, path: str, body: object, headers: dict[str, str]) -> tuple[int, bytes]:
        self.sent.append((method, path, body, headers))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def say(self, _sandbox_id: str, _token: str | None, _line: str) -> tuple[int, str]:
        said = self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Records]:
    with records(tmp_path / "out") as made:
        yield made


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_seconds: float) -> None:
        return None

    monkeypatch.setattr(faults_load.asyncio, "sleep", at_once)


def made(sandbox: str) -> tuple[int, bytes]:
    return 201, json.dumps({"sandboxID": sandbox, "envdAccessToken": "t"}).encode()


def setting(rows: Records, *answers: Answer) -> tuple[Scripted, Client, Ledger]:
    ledger = Ledger("mark")
    entry = Scripted(rows, ledger, *answers)
    return entry, Client(1, entry, ledger, "seed", 6), ledger


def held(**changes: object) -> Held:
    now = time.monotonic()
    made = {"key": "k", "sandbox_id": "ione", "token": None, "ttl": TTL, "ends_from": now + TTL}
    return Held(**(made | {"ends_by": now + TTL} | changes))  # type: ignore[arg-type]


async def test_a_create_is_sent_again_under_its_key_until_an_answer_settles_it(rows: Records) -> None:
    entry, client, ledger = setting(
        rows, (503, b"try again"), ConnectionResetError("gone"), (500, b"?"), (502, b"?"), made("ione")
    )
    sandbox = await client.create()
    assert sandbox is not None
    assert (sandbox.sandbox_id, sandbox.token) == ("ione", "t")
    assert {headers["Idempotency-Key"] for *_, headers in entry.sent} == {sandbox.key}
    assert len({json.dumps(body) for _, _, body, _ in entry.sent}) == 1
    assert [row.outcome for row in rows.requests] == ["rejected", "unknown", "unknown", "unknown", "ok"]
    assert [row.attempt for row in rows.requests] == [1, 2, 3, 4, 5]
    assert ledger.keys == {sandbox.key: "ione"}
    assert ledger.held() == [sandbox]


async def test_a_create_that_is_refused_for_good_is_not_sent_again(rows: Records) -> None:
    entry, client, ledger = setting(rows, (503, b""), (410, b"has ended"))
    assert await client.create() is None
    assert len(entry.sent) == 2
    assert (ledger.held(), ledger.count()) == ([], 0)


async def test_a_create_without_an_answer_is_given_up_in_the_end(
    rows: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults_load, "SETTLE_DEADLINE", -1.0)
    _, client, _ = setting(rows, (503, b""))
    assert await client.create() is None
    assert rows.requests[-1].outcome == "rejected"


async def test_a_kill_is_settled_and_a_sandbox_that_is_not_there_at_first_is_lost(rows: Records) -> None:
    _, client, _ = setting(rows, TimeoutError(), (404, b""), (404, b""))
    first, second = held(), held(sandbox_id="itwo")
    assert await client.kill(first)
    assert await client.kill(second)
    assert [first.state, second.state] == ["killed", "killed"]
    # After an attempt without an answer `not found` only says that the first one had done it.
    assert [(row.status, row.must_exist) for row in rows.requests] == [
        (None, True),
        (404, False),
        (404, True),
    ]


@pytest.mark.parametrize(
    ("said", "outcome", "status"),
    [
        ((0, "0123\nione\n"), "ok", None),
        ((1, "no such file"), "failed", None),
        (Unavailable("the sandbox's node cannot be reached"), "rejected", 503),
        (NodeUnavailable("the connection was lost"), "unknown", None),
        (GreenroomError("the sandbox answered 502: The sandbox was not found"), "failed", 404),
        (TimeoutError(), "unknown", None),
    ],
)
async def test_commands_have_their_outcomes(
    rows: Records, said: tuple[int, str] | Exception, outcome: str, status: int | None
) -> None:
    entry, _, _ = setting(rows)
    entry.said = [said]
    sandbox = held()
    row = await entry.ask(1, sandbox)
    assert (row.outcome, row.status) == (outcome, status)
    assert row.must_exist
    assert row.identity == sandbox.identity == ("0123 ione" if outcome == "ok" else "")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        *((status, "ok") for status in (200, 201, 204)),
        *((status, "failed") for status in (400, 404, 409, 410)),
        *((status, "rejected") for status in (429, 503)),
        *((status, "unknown") for status in (500, 502, 504, None)),
    ],
)
def test_answers_have_their_classes(status: int | None, outcome: str) -> None:
    assert outcome_of(status) == outcome


def test_what_must_be_so_follows_from_what_was_told() -> None:
    now = time.monotonic()
    brief = held(ttl=BRIEF[0], ends_from=now + 6, ends_by=now + 7)
    assert brief.brief
    assert brief.expected(now) == "alive"
    assert brief.expected(now + 6.5) == "open"
    assert brief.expected(now + 7 + GRACE - 1) == "open"
    assert brief.expected(now + 7 + GRACE + 1) == "gone"
    assert held(state="ending").expected(now) == "open"
    assert held(state="killed").expected(now) == "gone"


async def test_rows_are_on_disk_as_they_come(rows: Records, tmp_path: Path) -> None:
    _, client, _ = setting(rows, made("ione"))
    await client.create()
    (line,) = (tmp_path / "out" / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["sandbox"] == "ione"
    assert isinstance(rows.requests[0], RequestRow)
