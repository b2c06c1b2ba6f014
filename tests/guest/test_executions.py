"""Execution ids, replay from an offset, lossless output: the extension of docs/executions.md."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from greenroom.guest import __main__ as program
from greenroom.guest.outputs import MAX_RUNS
from tests.guest.harness import Agent, Stream, collect, descriptors, eventually, running_agent, shell

MIB = 1024 * 1024


@dataclass
class Replay:
    """What a stream with offsets has brought."""

    data: bytes
    names: list[str]
    first: int | None
    next: int
    end: dict[str, Any] | None
    error: dict[str, Any] | None


def replay(stream: Stream) -> Replay:
    """All of a stream with offsets; each chunk must begin where the one before has ended."""
    found = Replay(b"", [], None, 0, None, None)
    for message in stream.events():
        event = message["event"]
        if "data" in event:
            offset = int(event["data"].pop("offset"))
            [(name, encoded)] = event["data"].items()
            if found.first is None:
                found.first = found.next = offset
            assert offset == found.next
            data = base64.b64decode(encoded)
            found.data += data
            found.names.append(name)
            found.next += len(data)
        elif "end" in event:
            found.end = event["end"]
    found.error = (stream.ended or {}).get("error")
    return found


def from_offset(agent: Agent, selector: dict[str, object], offset: int) -> Replay:
    with agent.stream("Connect", {"process": selector, "offset": str(offset)}) as stream:
        return replay(stream)


def inspect(agent: Agent, selector: dict[str, object]) -> dict[str, Any]:
    answer = agent.process_call("Inspect", {"process": selector})
    assert answer.status == 200, answer.body
    found = answer.json["execution"]
    assert isinstance(found, dict)
    return found


def started(agent: Agent, script: str, **fields: object) -> tuple[str, int]:
    """Start a script and leave at once; its execution id and pid."""
    with agent.stream("Start", {"process": shell(script), "stdin": False, **fields}) as stream:
        start = stream.next()["start"]
    return start["executionId"], start["pid"]


def ended(agent: Agent, execution: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        seen = inspect(agent, {"executionId": execution})
        return seen if seen["state"] == "STATE_ENDED" else None

    found = eventually(look, "the execution has ended")
    assert isinstance(found, dict)
    return found


@pytest.fixture
def small_agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent that keeps 1 MiB in memory and 2 MiB on disk of each command."""
    with running_agent(tmp_path / "identity", "--output-disk", str(2 * MIB)) as running:
        yield running


def test_output_nobody_followed_can_be_read_later(agent: Agent) -> None:
    execution, pid = started(agent, "echo one; echo two >&2; exit 4")
    ended(agent, execution)
    for selector in ({"executionId": execution}, {"pid": pid}):
        found = from_offset(agent, selector, 0)
        assert sorted(found.data.splitlines()) == [b"one", b"two"]
        assert set(found.names) == {"stdout", "stderr"}
        assert found.end is not None
        assert found.end["exitCode"] == 4


def test_a_stream_is_taken_up_where_it_broke(agent: Agent, folder: Path) -> None:
    go = folder / "go"
    os.mkfifo(go)
    with agent.started(f"seq 1 10000; read x < {go}; seq 10001 20000", offsets=True) as (stream, pid):
        event = stream.next()["data"]
        assert event["offset"] == "0"
        had = base64.b64decode(event["stdout"])
    go.write_text("\n")
    rest = from_offset(agent, {"pid": pid}, len(had))
    assert had + rest.data == b"".join(b"%d\n" % number for number in range(1, 20001))
    assert rest.end == {"exitCode": 0, "exited": True, "status": "exit status 0"}


def test_without_an_offset_nothing_is_replayed_and_none_is_told(agent: Agent, folder: Path) -> None:
    go = folder / "go"
    os.mkfifo(go)
    script = f"echo early; read x < {go}; echo late"
    with agent.started(script) as (first, pid):
        assert base64.b64decode(first.next()["data"]["stdout"]) == b"early\n"
        with agent.stream("Connect", {"process": {"pid": pid}}) as stream:
            stream.next()
            go.write_text("\n")
            [data] = [message["event"]["data"] for message in stream.events() if "data" in message["event"]]
        collect(first)
    assert list(data) == ["stdout"]
    assert base64.b64decode(data["stdout"]) == b"late\n"


def test_followers_at_different_places(agent: Agent, folder: Path) -> None:
    go = folder / "go"
    os.mkfifo(go)
    execution, _ = started(agent, f"printf 0123456789; read x < {go}; printf abc")
    selector: dict[str, object] = {"executionId": execution}
    eventually(lambda: inspect(agent, selector)["nextOffset"] == "10", "ten bytes were written")
    streams = [
        agent.open_stream("Connect", {"process": selector, "offset": offset}) for offset in (0, "4", 10)
    ]
    go.write_text("\n")
    found = [replay(stream) for stream in streams]
    for stream in streams:
        stream.close()
    assert [one.data for one in found] == [b"0123456789abc", b"456789abc", b"abc"]


def test_more_than_the_memory_is_read_back_from_disk(agent: Agent) -> None:
    execution, _ = started(agent, "seq 1 1500000")
    last = ended(agent, execution)
    expected = b"".join(b"%d\n" % number for number in range(1, 1_500_001))
    assert (last["firstOffset"], last["nextOffset"]) == ("0", str(len(expected)))
    assert from_offset(agent, {"executionId": execution}, 0).data == expected
    assert from_offset(agent, {"executionId": execution}, 5_000_000).data == expected[5_000_000:]


def test_a_lost_offset_names_the_first_one_kept(small_agent: Agent) -> None:
    execution, _ = started(small_agent, "head -c 9000000 /dev/zero; echo end")
    last = ended(small_agent, execution)
    first = int(last["firstOffset"])
    assert last["nextOffset"] == "9000004"
    assert 9_000_004 - 4 * MIB < first <= 9_000_004 - 3 * MIB
    selector: dict[str, object] = {"executionId": execution}
    lost = from_offset(small_agent, selector, first - 1)
    assert lost.error == {
        "code": "out_of_range",
        "message": f"the output at offset {first - 1} is lost, the first offset kept is {first}",
    }
    kept = from_offset(small_agent, selector, first)
    assert kept.data == bytes(9_000_000 - first) + b"end\n"
    ahead = from_offset(small_agent, selector, 9_000_005)
    assert ahead.error == {
        "code": "out_of_range",
        "message": "offset 9000005 is ahead of the output, the next offset is 9000004",
    }


def test_spilled_output_has_no_name_and_is_private(small_agent: Agent, tmp_path: Path) -> None:
    execution, _ = started(small_agent, "head -c 3000000 /dev/zero; sleep 600")
    selector: dict[str, object] = {"executionId": execution}
    eventually(lambda: inspect(small_agent, selector)["nextOffset"] == "3000000", "all was written")

    def spilled() -> list[Path]:
        place = str(tmp_path / "identity") + "/"
        return [link for link, target in descriptors(small_agent.process.pid) if target.startswith(place)]

    [link] = eventually(spilled, "something was spilled")
    status = link.stat()
    assert (status.st_nlink, status.st_mode & 0o777, status.st_uid) == (0, 0o600, os.geteuid())
    small_agent.process_call("SendSignal", {"process": selector, "signal": "SIGNAL_SIGKILL"})
    assert ended(small_agent, execution)["end"]["status"] == "signal: killed"


def test_a_lossless_command_waits_for_its_reader(small_agent: Agent, folder: Path) -> None:
    marker = folder / "marker"
    size = 12_000_000
    execution, _ = started(small_agent, f"head -c {size} /dev/zero; echo x > {marker}", lossless=True)
    selector: dict[str, object] = {"executionId": execution}
    blocked = eventually(
        lambda: (seen := inspect(small_agent, selector))["blocked"] and seen, "the command is held up"
    )
    assert blocked["firstOffset"] == "0"
    assert int(blocked["nextOffset"]) < size
    assert not marker.exists()
    taken = 0
    rounds = 0
    while not marker.exists():
        taken = max(taken, int(inspect(small_agent, selector)["nextOffset"]))
        answer = small_agent.process_call("Ack", {"process": selector, "offset": str(taken)})
        assert answer.json == {}
        rounds += 1
        assert rounds < 10_000
    assert ended(small_agent, execution)["nextOffset"] == str(size)


def test_a_lossless_reader_acknowledges_by_coming_back(small_agent: Agent) -> None:
    execution, _ = started(small_agent, "seq 1 1200000", lossless=True)
    selector: dict[str, object] = {"executionId": execution}
    data = b""
    sessions = 0
    end = None
    while end is None:
        with small_agent.stream("Connect", {"process": selector, "offset": str(len(data))}) as stream:
            for message in stream.events():
                event = message["event"]
                if "data" in event:
                    assert int(event["data"]["offset"]) == len(data)
                    data += base64.b64decode(event["data"]["stdout"])
                    if len(data) // 2_000_000 > sessions:
                        break
                elif "end" in event:
                    end = event["end"]
        sessions += 1
    assert data == b"".join(b"%d\n" % number for number in range(1, 1_200_001))
    assert sessions >= 4


def test_a_lossless_command_can_be_killed_while_it_waits(small_agent: Agent) -> None:
    execution, pid = started(small_agent, "yes", lossless=True)
    selector: dict[str, object] = {"executionId": execution}
    eventually(lambda: inspect(small_agent, selector)["blocked"], "the command is held up")
    small_agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    assert ended(small_agent, execution)["end"]["exitCode"] == -1


def test_a_client_that_reads_slowly_does_not_slow_a_command_it_follows_by_offset(
    agent: Agent, folder: Path
) -> None:
    marker = folder / "marker"
    with agent.started(f"head -c 30000000 /dev/zero; echo x > {marker}", offsets=True) as (stream, _):
        eventually(marker.exists, "the command has ended without its reader")
        found = replay(stream)
    assert len(found.data) == 30_000_000
    assert found.end is not None


def test_a_reader_that_is_overtaken_is_told(small_agent: Agent, folder: Path) -> None:
    marker = folder / "marker"
    script = f"head -c 60000000 /dev/zero; echo x > {marker}"
    with small_agent.started(script, offsets=True) as (stream, _):
        eventually(marker.exists, "the command has ended without its reader")
        found = replay(stream)
    assert found.error is not None
    assert found.error["code"] == "out_of_range"
    assert 0 < len(found.data) < 60_000_000


def test_a_terminal_is_replayed_too(agent: Agent) -> None:
    execution, _ = started(agent, "echo hi; exit 2", pty={"size": {"cols": 80, "rows": 24}})
    ended(agent, execution)
    found = from_offset(agent, {"executionId": execution}, 0)
    assert (found.data, set(found.names)) == (b"hi\r\n", {"pty"})


def test_a_deadline_ends_a_stream_with_offsets(agent: Agent) -> None:
    with agent.started("echo x; sleep 600", headers={"Connect-Timeout-Ms": "700"}, offsets=True) as (
        stream,
        _,
    ):
        found = replay(stream)
    assert found.end is None
    assert found.error is not None
    assert found.error["code"] == "deadline_exceeded"


def test_silence_is_filled_here_too(agent: Agent) -> None:
    headers = {"Keepalive-Ping-Interval": "1"}
    with agent.started("sleep 600", headers=headers, offsets=True) as (stream, pid):
        assert stream.next() == {"keepalive": {}}
        agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        assert replay(stream).end is not None


def test_an_inspection(agent: Agent) -> None:
    with agent.started("read x; exit 9", stdin=True, tag="looked-at") as (stream, pid):
        seen = inspect(agent, {"tag": "looked-at"})
        execution = seen.pop("executionId")
        assert seen == {
            "pid": pid,
            "tag": "looked-at",
            "state": "STATE_RUNNING",
            "firstOffset": "0",
            "nextOffset": "0",
            "acknowledgedOffset": "0",
            "lossless": False,
            "blocked": False,
        }
        agent.process_call("CloseStdin", {"process": {"executionId": execution}})
        collect(stream)
    seen = inspect(agent, {"executionId": execution})
    assert (seen["state"], seen["end"]["exitCode"]) == ("STATE_ENDED", 9)


@pytest.mark.parametrize(("fields", "code"), [
    ({"process": {"executionId": "nothing"}, "offset": 0}, "not_found"),
    ({"process": {"executionId": 7}, "offset": 0}, "invalid_argument"),
    ({"process": {"tag": "acknowledged"}}, "invalid_argument"),
    ({"process": {"tag": "acknowledged"}, "offset": "x"}, "invalid_argument"),
    ({"process": {"tag": "acknowledged"}, "offset": -1}, "invalid_argument"),
    ({"process": {"tag": "acknowledged"}, "offset": str(1 << 63)}, "invalid_argument"),
    ({"process": {"tag": "acknowledged"}, "offset": "1"}, "out_of_range"),
])  # fmt: skip
def test_refused_acknowledgements(agent: Agent, fields: dict[str, object], code: str) -> None:
    with agent.started("read x", stdin=True, tag="acknowledged") as (stream, pid):
        answer = agent.process_call("Ack", fields)
        assert answer.json["code"] == code
        agent.process_call("CloseStdin", {"process": {"pid": pid}})
        collect(stream)


def test_a_tag_is_bounded(agent: Agent) -> None:
    assert (agent.run("true", tag="x" * 5000).error or {})["code"] == "invalid_argument"


def test_exits_are_remembered_up_to_a_number(tmp_path: Path) -> None:
    with running_agent(tmp_path / "identity", "--executions", "3") as agent:
        executions = [started(agent, f"exit {number}")[0] for number in range(3)]
        for execution in executions:
            ended(agent, execution)
        newest, _ = started(agent, "exit 3")
        ended(agent, newest)
        answers = [
            agent.process_call("Inspect", {"process": {"executionId": one}}).json for one in executions
        ]
        assert [answer.get("code") for answer in answers].count("not_found") == 1


def test_exits_are_remembered_up_to_a_time(tmp_path: Path) -> None:
    with running_agent(tmp_path / "identity", "--execution-seconds", "0") as agent:
        execution, _ = started(agent, "exit 3")

        def forgotten() -> bool:
            return bool(agent.process_call("Inspect", {"process": {"executionId": execution}}).status == 404)

        eventually(forgotten, "the execution is forgotten")


def test_output_of_ended_commands_is_bounded_in_total(tmp_path: Path) -> None:
    options = ("--output-memory-total", str(2 * MIB), "--output-disk-total", "0")
    with running_agent(tmp_path / "identity", *options) as agent:
        executions = []
        for number in range(5):
            execution, _ = started(agent, f"head -c 900000 /dev/zero; exit {number}")
            assert ended(agent, execution)["end"]["exitCode"] == number
            executions.append(execution)
        firsts = [inspect(agent, {"executionId": one})["firstOffset"] for one in executions]
        assert firsts == ["900000"] * 3 + ["0"] * 2
        exits = [inspect(agent, {"executionId": one})["end"]["exitCode"] for one in executions]
        assert exits == [0, 1, 2, 3, 4]


def test_a_full_disk_costs_the_oldest_output_only(tmp_path: Path) -> None:
    allowed = "WARNING greenroom.guest.recording: output cannot be kept on disk"
    with running_agent(tmp_path / "identity", "--spill", "/proc/nowhere", allowed=allowed) as agent:
        execution, _ = started(agent, "head -c 5000000 /dev/zero; echo end")
        last = ended(agent, execution)
        found = from_offset(agent, {"executionId": execution}, int(last["firstOffset"]))
        assert found.data.endswith(b"\0end\n")
        assert len(found.data) >= MIB


def test_the_document_names_the_agents_options_and_limits() -> None:
    document = (Path(__file__).parents[2] / "docs" / "executions.md").read_text(encoding="utf-8")
    chosen = vars(program.options([]))
    shown = {
        option: amount for amount, option in re.findall(r"\| ([\d,]+ ?\w*) \| `--([a-z-]+)` \|", document)
    }
    units = {"MiB": MIB, "h": 3600.0}
    for option, amount in shown.items():
        number, _, unit = amount.partition(" ")
        assert chosen[option.replace("-", "_")] == int(number) * units.get(unit, 1), option
    assert len(shown) == 6
    assert f"{MAX_RUNS:,}" in document
