"""Every command explains itself, and wrong usage is answered in words."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from greenroom import __version__
from greenroom.cli.main import app, run
from greenroom.cli.plans import UpOptions, check_user
from greenroom.errors import SetupError


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
        (["up", "--nodes", "many"], "Invalid value for '--nodes': a whole number is needed"),
        (["up", "--nodes", "0"], "--nodes 0: choose between 1 and 64"),
        (["up", "--master", "2"], "--master 2: more than one is not possible yet"),
        (["up", "--proxy", "3"], "--proxy 3: more than one is not possible yet"),
        (["up", "--store", "etcd"], "--store etcd is not there yet"),
        (["up", "--store", "oracle"], "--store oracle is unknown"),
        (["up", "--port", "70000"], "--port 70000: choose between 0"),
        (["up", "--tls-port", "-1"], "--tls-port -1: choose between 0"),
        (["up", "--port", "9000", "--tls-port", "9000"], "--tls-port 9000: --port has it already"),
        (["up", "--warm", "-1"], "--warm -1"),
        (["up", "--domain", "a b"], "--domain a b: not a host name"),
        (["up", "--domain", "localhost:0"], "not a host name"),
        (["up", "--engine", "abacus"], "'abacus' is not one of 'qemu', 'simulated'"),
        (["bench", "restore", "--count", "0"], "'--count': it must be 1 or more"),
        (["bench", "restore", "--count", "10001"], "'--count': it must be 10000 or less"),
        (["run", "--timeout", "x", "--", "true"], "'--timeout': a whole number is needed"),
        (["run", "--", "echo", "\udcff\udcfe"], r"arguments must be UTF-8 text, which b'\xff\xfe' is not"),
        (["run", "-e", "A=\udcff", "--", "env"], "arguments must be UTF-8 text"),
        (["keys", "create", "\udcff"], "arguments must be UTF-8 text"),
        (["run"], "CMD ARGS"),
        (["run", "--env", "novalue", "--", "true"], "write NAME=VALUE"),
        (["exec", "i0"], "CMD ARGS"),
        (["down", "--timeout", "soon"], "'--timeout': a number is needed"),
        (["down", "--timeout", "nan"], "'--timeout'"),
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
    assert "Input should" not in captured.err
    assert "Value error" not in captured.err
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


@pytest.mark.parametrize("group", [["keys"], ["bench"]], ids=" ".join)
def test_groups_take_both_directories_too(
    group: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    command = {"keys": "list", "bench": "claim"}[group[0]]
    assert run([*group, "--state-dir", str(file), command]) == 1
    assert f"{file} is not a directory" in capsys.readouterr().err
    outer = ["--state-dir", str(tmp_path / "outer")]
    assert run([*outer, *group, "--state-dir", str(file), command]) == 1, "the inner one counts"
    assert f"{file} is not a directory" in capsys.readouterr().err
    assert run([*group, "--cache-dir", str(tmp_path), "--help"]) == 0
    capsys.readouterr()
    if group == ["bench"]:
        assert run(["bench", "--cache-dir", str(file), "claim", "--state-dir", str(tmp_path / "none")]) == 1
        assert f"the cache directory {file} is not a directory" in capsys.readouterr().err


def test_a_bad_settings_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "config.toml").write_text("[claims]\nqueue_wait = 'long'\n", encoding="utf-8")
    assert run(["up", "--state-dir", str(state), "--port", "0"]) == 1
    captured = capsys.readouterr()
    assert "config.toml: a number is needed, not a text in quotes (in [claims] queue_wait)" in captured.err
    assert len(captured.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[pools]\ndefault_target = 'x'\n",
            "a whole number is needed, not a text in quotes (in [pools] default_target)",
        ),
        ("[vm]\nengine = 'xen'\n", "'xen' is not one of the choices (in [vm] engine)"),
        ("nonsense = 1\n", "there is no setting named nonsense"),
        ("vm = 3\n", "a table is needed, not a whole number (in [vm])"),
        ("[vm\n", "config.toml"),
    ],
)
def test_settings_are_refused_in_plain_words(
    text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    for command in (["up", "--port", "0"], ["doctor"]):
        assert run(["--state-dir", str(tmp_path), *command]) == 1
        captured = capsys.readouterr()
        assert said in captured.err
        assert "Expected `" not in captured.err


STATE_DIR_COMMANDS = [
    ["up"], ["down"], ["status"], ["env"], ["run", "--", "true"], ["exec", "i0", "--", "true"], ["demo"],
    ["doctor"], ["keys", "list"], ["keys", "create", "x"], ["keys", "revoke", "x"], ["bench", "claim"],
]  # fmt: skip


@pytest.mark.parametrize("command", STATE_DIR_COMMANDS, ids=" ".join)
def test_what_cannot_be_a_state_directory_is_named(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    for place, said in ((file, f"{file} is not a directory"), (file / "below", "is not a directory")):
        assert run(["--state-dir", str(place), *command]) == 1
        captured = capsys.readouterr()
        assert said in captured.err
        assert "--state-dir" in captured.err
    assert file.read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_users_state_directory_is_named_with_its_owner(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from greenroom.cli.options import SetupError, check_place\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: check_place(Path(sys.argv[1]), 'state directory', '--state-dir')\n"
        "except SetupError as error: print(error.message)"
    )

    def said(place: Path) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(place)], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    with tempfile.TemporaryDirectory() as name:  # pytest's own lie below one that others cannot enter
        state = Path(name)
        assert f"the state directory {state} belongs to root" in said(state)
        assert "Run this as root (sudo greenroom …), or name another with --state-dir" in said(state)
        assert "cannot be reached by this user" in said(state / "run")
        state.chmod(0o777)
        assert said(state) == ""


@pytest.mark.parametrize("command", [["up"], ["up", "--detach"], ["demo"]], ids=" ".join)
def test_microvms_are_refused_at_once_to_who_is_not_root(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65_534)
    state = tmp_path / "state"
    assert run(["--state-dir", str(state), *command]) == 1
    captured = capsys.readouterr()
    assert "microVMs need root" in captured.err
    assert "--engine simulated" in captured.err
    assert not state.exists(), "nothing is touched"


def test_the_engine_that_needs_no_root_is_seen_in_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65_534)
    options = UpOptions(state_dir=str(tmp_path), cache_dir=str(tmp_path))
    check_user(msgspec.structs.replace(options, engine="simulated"))
    with pytest.raises(SetupError, match="need root"):
        check_user(options)
    (tmp_path / "config.toml").write_text("[vm]\nengine = 'simulated'\n", encoding="utf-8")
    check_user(options)
    with pytest.raises(SetupError, match="need root"):
        check_user(msgspec.structs.replace(options, engine="qemu"))


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
