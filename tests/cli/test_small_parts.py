"""Frames, records, process identities, plans and texts, each by itself."""

from __future__ import annotations

import base64
import io
import itertools
import os
import signal
import socket
import struct
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.cli import default_key
from greenroom.cli.children import role_environment
from greenroom.cli.frames import (
    Ended,
    FrameReader,
    Message,
    Output,
    Started,
    StreamError,
    StreamUnavailable,
    encode_frame,
)
from greenroom.cli.leftovers import Swept, describe
from greenroom.cli.plans import UpOptions, claim_port, make_plan
from greenroom.cli.processes import ProcessId, describe_exit, end
from greenroom.cli.records import LOG_LIMIT, Busy, Lock, StateDir
from greenroom.cli.reports import PipeReporter, PlainReporter, Report, format_seconds, read_reports
from greenroom.cli.supervisor import describe_ready
from greenroom.cli.words import plain_log_line
from greenroom.errors import BadRequest, InternalError, SetupError
from greenroom.store.keys import create_api_key, rule_of
from greenroom.store.sqlite import SqliteStore

# Frames


def frame(content: object, flags: int = 0) -> bytes:
    body = msgspec.json.encode(content)
    return struct.pack(">BI", flags, len(body)) + body


def data(name: str, payload: bytes) -> dict[str, object]:
    return {"event": {"data": {name: base64.b64encode(payload).decode()}}}


@given(
    pieces=st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=40)), max_size=8),
    cuts=st.lists(st.integers(0, 2000), max_size=10),
    status=st.integers(0, 255),
)
def test_frames_are_the_same_however_the_bytes_are_cut(
    pieces: list[tuple[str, bytes]], cuts: list[int], status: int
) -> None:
    stream = frame({"event": {"start": {"pid": 12}}})
    stream += b"".join(frame(data(name, payload)) for name, payload in pieces)
    stream += frame({"event": {"keepalive": {}}})
    stream += frame({"event": {"end": {"exitCode": status}}}) + frame({}, 2)
    reader = FrameReader()
    found: list[Message] = []
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        found += reader.feed(stream[start:stop])
    expected: list[Message] = [Started(12)]
    expected += [Output(payload, name == "stderr") for name, payload in pieces]
    assert found == [*expected, Ended(status)]
    assert reader.finished


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({}, 0),
        ({"exitCode": 3}, 3),
        ({"exitCode": -1, "status": "signal: killed"}, 137),
        ({"exitCode": -1, "status": "signal: terminated"}, 143),
        ({"exitCode": -1, "status": "signal: real-time 3"}, 255),
    ],
)
def test_exit_statuses_are_a_shells(event: dict[str, object], status: int) -> None:
    assert FrameReader().feed(frame({"event": {"end": event}})) == [Ended(status)]


def test_errors_of_a_stream() -> None:
    with pytest.raises(StreamError, match="invalid_argument: no such cwd"):
        FrameReader().feed(frame({"error": {"code": "invalid_argument", "message": "no such cwd"}}, 2))
    with pytest.raises(StreamUnavailable):
        FrameReader().feed(frame({"error": {"code": "unavailable"}}, 2))
    with pytest.raises(InternalError):
        FrameReader().feed(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(InternalError):
        FrameReader().feed(struct.pack(">BI", 0, 1) + b"{")


def test_a_frame_read_back() -> None:
    assert encode_frame({"a": 1}) == b"\0\0\0\0\x07" + b'{"a":1}'


# Processes


def test_an_identity_names_one_process_only() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        assert identity.alive()
        other = msgspec.structs.replace(identity, ticks=identity.ticks - 1)
        assert not other.alive()
        assert not other.signal(signal.SIGKILL)
        assert other.wait_gone(0)
        elsewhere = msgspec.structs.replace(identity, boot="another boot")
        assert not elsewhere.signal(signal.SIGKILL)
        assert not identity.wait_gone(0)
        assert process.poll() is None
        assert end(identity, 10)
        assert ProcessId.of(process.pid) is None, "a zombie is gone"
        assert identity.wait_gone(0)
    assert not identity.signal(signal.SIGTERM)
    assert ProcessId.own().pid == os.getpid()


def test_exits_in_words() -> None:
    assert describe_exit(0) == "ended with exit status 0"
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(-64) in ("was ended by SIGRTMAX", "was ended by signal 64")


def test_a_role_environment_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREENROOM_X", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    monkeypatch.setenv("E2B_API_KEY", "secret")
    given = role_environment("api", "m")
    assert given["GREENROOM_X"] == "1"
    assert given["PYTHONHASHSEED"] == "0"
    assert not {"E2B_API_KEY", "HTTP_PROXY"} & set(given)
    assert role_environment("node", "m")["HTTP_PROXY"] == "http://proxy"


# Records


def test_the_lock_admits_one(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.prepare()
    with Lock(state), pytest.raises(Busy, match=f"pid {os.getpid()}"):
        Lock(state)
    Lock(state).close()


def test_preparing_closes_the_directory_and_keeps_what_is_there(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "state"
    root.mkdir(parents=True, mode=0o755)
    (root / "config.toml").write_text("", encoding="utf-8")
    StateDir(root).prepare()
    StateDir(root).prepare()
    assert root.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in root.iterdir()} == {"config.toml", "run", "log", "secrets"}


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SetupError, match="cannot use the state directory"):
        StateDir(tmp_path / "file").prepare()


def test_unreadable_records_count_as_none(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.prepare()
    (state.run / "supervisor.json").write_text('{"process": 3}', encoding="utf-8")
    (state.run / "roles.json").write_text("[", encoding="utf-8")
    assert state.supervisor() is None
    assert state.running() is None
    assert state.roles() == []


def test_a_large_log_is_set_aside(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.prepare()
    path = state.log_path("node-0")
    path.write_bytes(b"x" * (LOG_LIMIT + 1))
    os.close(state.open_log("node-0"))
    assert path.stat().st_size == 0
    assert path.with_name("node-0.log.1").stat().st_size == LOG_LIMIT + 1
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    os.close(state.open_log("node-0"))
    assert state.log_tail("node-0", lines=2) == "two\nthree"
    assert state.log_tail("nobody") == ""


# Plans


def options(tmp_path: Path, **more: object) -> UpOptions:
    base = UpOptions(state_dir=str(tmp_path / "s"), cache_dir=str(tmp_path / "c"), port=0)
    return msgspec.structs.replace(base, **more)


def test_a_plan_has_each_role_with_the_settings_on_top_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "config.toml").write_text(
        "[pools]\ndefault_target = 9\ndefault_warm = 'running'\n[proxy]\ndomain = 'box.test'\n",
        encoding="utf-8",
    )
    plan = make_plan(options(tmp_path, nodes=2, api=2, warm=3, engine="simulated", accelerator="tcg"))
    assert [spec.name for spec in plan.specs] == [
        "master-0", "node-0", "node-1", "api-0", "api-1", "proxy-0",
    ]  # fmt: skip
    config = plan.specs[0].config
    assert (config.pools.base_target, config.pools.default_target, config.pools.default_warm) == (
        3,
        9,
        "running",
    )
    assert (config.vm.engine, config.vm.accelerator) == ("simulated", "tcg")
    assert plan.domain == config.proxy.domain == plan.specs[-1].domain == "box.test"
    assert plan.entry_url == f"http://127.0.0.1:{config.proxy.port}"
    assert config.proxy.port != 0
    assert [role.stop_deadline for role in plan.role_plans()] == [30, 60, 60, 30, 30, 30]
    assert min(role.start_deadline for role in plan.role_plans() if role.kind == "node") >= 1800


def test_the_default_domain_names_the_port(tmp_path: Path) -> None:
    plan = make_plan(options(tmp_path))
    assert plan.domain == f"localhost:{plan.specs[0].config.proxy.port}"


def test_an_engine_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="engine"):
        make_plan(options(tmp_path, engine="abacus"))


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}"):
            claim_port("127.0.0.1", port)
    assert claim_port("127.0.0.1", port) == port


# Texts


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        ({}, "ready"),
        ({"envoy_pid": 17}, "ready"),
        (
            {"engine": "qemu", "accelerator": "tcg", "why": "KVM is not usable: it dies"},
            "ready on qemu/tcg (KVM is not usable: it dies)",
        ),
        (
            {"engine": "simulated", "accelerator": "none", "why": "asked for by name"},
            "ready on simulated (asked for by name)",
        ),
        ({"engine": "qemu", "accelerator": "kvm"}, "ready on qemu/kvm"),
    ],
)
def test_what_a_role_says_when_it_is_ready(detail: dict[str, object], text: str) -> None:
    assert describe_ready(detail) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.234, "0.23 s"), (12.34, "12.3 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (273_600, "3 d 4 h")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_log_lines_in_words() -> None:
    assert plain_log_line("greenroom node: a tool is missing") == "greenroom node: a tool is missing"
    assert plain_log_line('{"level":"error","message":"no room left"}') == "no room left"
    broken = '{"message":"the process ends","exception":"Traceback\\n  File\\nTypeError: no"}'
    assert plain_log_line(broken) == "the process ends: TypeError: no"
    assert plain_log_line('{"message":"cut') == '{"message":"cut'


def test_sweeps_in_words() -> None:
    assert describe(Swept(node="node-0")) == "node-0: nothing to remove"
    assert describe(Swept(node="node-0", removed={"processes": [1, 2], "cgroups": 1, "files": 0})) == (
        "node-0: removed 2 processes, 1 cgroups"
    )
    assert "still there: 1 slots" in describe(Swept(node="node-0", left={"slots": [7]}))
    assert Swept(node="n", left={"slots": []}).clean
    assert not Swept(node="n", error="gone wrong").clean


def test_reports_travel_through_a_pipe_and_end_with_the_start() -> None:
    read_end, write_end = os.pipe()
    reporter = PipeReporter(write_end)
    sent = [Report(kind="step", name="node-0", text="starting"), Report(kind="up", text="up")]
    for report in sent:
        reporter.show(report)
    reporter.show(Report(kind="notice", text="nobody listens any more"))
    with os.fdopen(read_end, "rb") as stream:
        assert list(read_reports(stream)) == sent


def test_reports_to_nobody_do_no_harm() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    reporter = PipeReporter(write_end)
    reporter.show(Report(kind="step", text="starting"))
    reporter.show(Report(kind="step", text="starting"))
    reporter.close()


def test_plain_reports_print_a_step_once() -> None:
    out = io.StringIO()
    reporter = PlainReporter(out)
    for done in (0.1, 0.2, 0.9):
        reporter.show(Report(kind="progress", name="node-0", text="building", done=done))
    reporter.show(Report(kind="progress", name="node-0", text="booting"))
    assert out.getvalue() == "node-0: building\nnode-0: booting\n"


# The port for Kubernetes' clients


def test_the_port_for_kubernetes_clients_follows_the_entrys(tmp_path: Path) -> None:
    plan = make_plan(options(tmp_path))
    assert plan.kube_port not in (None, 0, 8701)
    assert plan.specs[0].config.proxy.kube_port == plan.kube_port
    none = make_plan(options(tmp_path, kube_port="none"))
    assert none.kube_port is None
    assert none.specs[0].config.proxy.kube_port == "none"
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "config.toml").write_text('[proxy]\nkube_port = "none"\n', encoding="utf-8")
    assert make_plan(options(tmp_path)).kube_port is None


def test_ports_that_are_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--port has it already"):
        options(tmp_path, port=9000, kube_port=9000).check()
    with pytest.raises(BadRequest, match="--kube-port 70000"):
        options(tmp_path, kube_port=70000).check()


async def test_the_default_key_of_an_older_state_directory_becomes_the_operators(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.prepare()
    store = await SqliteStore.open(state.store)
    try:
        old, secret = await create_api_key(store, "default", "default")
        default_key.keep_secret(state, secret)
        assert await default_key.ensure_default_key(state) is None
        assert [key.admin for key in await store.api_keys()] == [True]
        # One that was given something less keeps it, and so does everybody else's.
        await store.set_api_key_rules(old.key_id, [rule_of("* * in default", "default")])
        await create_api_key(store, "ci", "default")
        await default_key.ensure_default_key(state)
        assert [key.admin for key in await store.api_keys()] == [False, False]
    finally:
        await store.close()
