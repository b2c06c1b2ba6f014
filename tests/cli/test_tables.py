"""Tables on narrow terminals: nothing that one may have to copy is ever broken."""

from __future__ import annotations

import os
import pty
import subprocess
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.cli import output
from greenroom.cli.output import print_table
from greenroom.wire.messages import FOREVER

from .conftest import DEADLINE, Home

COLUMNS = ["id", "state", "why", "started"]
SANDBOX = "i" + "k3" * 9 + "z"


@given(width=st.integers(4, 200), why=st.text("abc ", max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_stay_whole_at_any_width(
    width: int, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_terminal_width", lambda: width)
    rows = [[SANDBOX, "running", why, "3 min ago"], ["short", "lost", "", ""]]
    print_table("Things", COLUMNS, rows, texts=["why"], spare=["started", "state"])
    shown = capsys.readouterr().out
    assert SANDBOX in shown
    if width < 30:
        assert "started" in shown.splitlines()[-2], "what is left out is said"


def test_a_wide_terminal_leaves_nothing_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_terminal_width", lambda: 120)
    print_table(
        "Things", COLUMNS, [[SANDBOX, "running", "x" * 30, "3 min ago"]], texts=["why"], spare=["started"]
    )
    shown = capsys.readouterr().out
    assert "not shown" not in shown
    assert all(name in shown for name in COLUMNS)


def test_without_a_terminal_lines_are_as_long_as_they_must(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Things", ["id", "why"], [[SANDBOX, "word " * 80]], spare=["why"])
    assert "word " * 79 in capsys.readouterr().out


def test_an_end_is_told_as_far_as_there_is_one() -> None:
    assert output.until(time.time() + 90.5) == "in 1 min 30 s"
    assert output.until(time.time() - 1) == "over"
    assert output.until(time.time() + FOREVER) == "when it is deleted"


@pytest.mark.slow
def test_status_in_fifty_columns(home: Home) -> None:
    home.up()
    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            home.command("status"),
            env=home.environment | {"COLUMNS": "50", "TERM": "xterm"}, stdout=follower, stderr=follower,
        )  # fmt: skip
        os.close(follower)
        shown = b""
        while True:
            try:
                shown += os.read(leader, 65536)
            except OSError:  # EIO: the other side is closed
                break
        assert process.wait(DEADLINE) == 0
    finally:
        os.close(leader)
    text = shown.decode()
    assert "iabcd" + "0" * 15 in text
    for name in ("master-0", "node-0", "api-0", "proxy-0", "ready"):
        assert name in text
