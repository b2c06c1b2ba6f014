"""Every command explains itself, and wrong usage is answered in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from greenroom import __version__
from greenroom.cli.main import app, run


def every_command() -> list[list[str]]:
    """The words of every command and group, the empty one for `greenroom` itself."""
    found: list[list[str]] = [[]]

    def walk(command: Any, path: list[str]) -> None:
        for name, child in getattr(command, "commands", {}).items():
            found.append([*path, name])
            walk(child, [*path, name])

    walk(typer.main.get_command(app), [])
    return found


@pytest.mark.parametrize("command", every_command(), ids=lambda command: " ".join(command) or "greenroom")
def test_every_help_has_examples(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "Examples" in shown.output
    assert f"$ greenroom {' '.join(command)}".rstrip() in shown.output


def test_the_commands_there_are() -> None:
    assert {
        "up", "down", "status", "env", "run", "exec", "demo", "doctor", "version", "keys",
    } <= {command[0] for command in every_command() if command}  # fmt: skip


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"greenroom {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["up", "--nonsense"], "No such option: --nonsense"),
        (["up", "--nodes", "many"], "--nodes"),
        (["up", "--nodes", "0"], "--nodes 0: choose between 1 and 64"),
        (["up", "--master", "2"], "--master 2: more than one is not possible yet"),
        (["up", "--proxy", "3"], "--proxy 3: more than one is not possible yet"),
        (["up", "--store", "etcd"], "--store etcd is not there yet"),
        (["up", "--store", "oracle"], "--store oracle is unknown"),
        (["up", "--port", "70000"], "--port 70000: choose between 0"),
        (["up", "--warm", "-1"], "--warm -1"),
        (["up", "--domain", "a b"], "--domain a b: not a host name"),
        (["up", "--domain", "localhost:0"], "not a host name"),
        (["up", "--engine", "abacus"], "--engine"),
        (["run"], "CMD ARGS"),
        (["run", "--env", "novalue", "--", "true"], "write NAME=VALUE"),
        (["exec", "i0"], "CMD ARGS"),
        (["down", "--timeout", "soon"], "--timeout"),
        (["keys", "revoke"], "ID"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_status_2_and_one_or_two_lines(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["--state-dir", str(tmp_path / "state"), *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) <= 2
    assert captured.out == ""
    assert not (tmp_path / "state").exists(), "nothing is touched"


def test_a_bare_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    captured = capsys.readouterr()
    assert "Examples" in captured.out + captured.err


def test_the_state_directory_is_taken_before_and_after_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREENROOM_STATE_DIR", str(tmp_path / "environment"))
    assert run(["status"]) == 4
    assert str(tmp_path / "environment") in capsys.readouterr().out
    assert run(["--state-dir", str(tmp_path / "before"), "status"]) == 4
    assert str(tmp_path / "before") in capsys.readouterr().out
    assert (
        run(["--state-dir", str(tmp_path / "before"), "status", "--state-dir", str(tmp_path / "after")]) == 4
    )
    assert str(tmp_path / "after") in capsys.readouterr().out


def test_a_bad_settings_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "config.toml").write_text("[claims]\nqueue_wait = 'long'\n", encoding="utf-8")
    assert run(["up", "--state-dir", str(state), "--port", "0"]) == 1
    captured = capsys.readouterr()
    assert "config.toml" in captured.err
    assert "queue_wait" in captured.err
    assert len(captured.err.splitlines()) <= 2


def test_an_unforeseen_error_is_told_without_a_traceback_unless_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("greenroom.cli.records.StateDir.running", broken)
    monkeypatch.setenv("GREENROOM_DEBUG", "")
    assert run(["status", "--state-dir", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "error: unexpected ZeroDivisionError: of all things" in captured.err
    assert "Traceback" not in captured.err
    with pytest.raises(ZeroDivisionError):
        run(["--debug", "status", "--state-dir", str(tmp_path)])


def test_help_does_not_load_what_it_does_not_need() -> None:
    code = (
        "import sys; from greenroom.cli.main import run; run(['--help']);"
        "heavy = {'aiohttp', 'uvicorn', 'starlette', 'asyncio', 'sqlite3', 'pyroute2'} & set(sys.modules);"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
