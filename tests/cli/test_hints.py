"""Commands that messages name can be pasted: they find the state directory that the message is about."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from greenroom.cli.hints import pasteable
from greenroom.cli.main import app, run
from greenroom.config import default_state_dir

from .conftest import DEADLINE, Home

ODD = Path("/srv/it's a place")


def test_the_directory_is_named_and_quoted() -> None:
    text = 'see `greenroom status`; eval "$(greenroom env)"; `greenroom keys create NAME` makes one'
    quoted = shlex.quote(str(ODD))
    assert pasteable(text, ODD) == (
        f'see `greenroom --state-dir {quoted} status`; eval "$(greenroom --state-dir {quoted} env)"; '
        f"`greenroom --state-dir {quoted} keys create NAME` makes one"
    )


def test_what_names_it_or_needs_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GREENROOM_STATE_DIR", raising=False)
    for text in (
        "`greenroom --state-dir /x down`",
        "`greenroom --debug …`",
        "Greenroom is up",
        "greenroom run",
    ):
        assert pasteable(text, ODD) == text
    assert pasteable("`greenroom down`", default_state_dir()) == "`greenroom down`"


def test_a_directory_from_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The shell that the command is pasted into may not have the variable.
    monkeypatch.setenv("GREENROOM_STATE_DIR", str(ODD))
    assert shlex.quote(str(ODD)) in pasteable("`greenroom down`", default_state_dir())


@pytest.mark.parametrize(
    "command",
    [["env"], ["run", "--", "true"], ["exec", "i0", "--", "true"], ["keys", "list"], ["keys", "revoke", "x"]],
    ids=" ".join,
)
def test_every_refusal_on_an_empty_place_names_commands_for_that_place(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "it's a place"
    assert run(["--state-dir", str(place), *command]) == 1
    (hint,) = re.findall(r"`(.*?)`", capsys.readouterr().err)
    words = shlex.split(hint)
    assert words[:3] == ["greenroom", "--state-dir", str(place)]
    assert words[3] in getattr(typer.main.get_command(app), "commands", {})


@pytest.mark.slow
def test_the_hint_after_up_works_when_it_is_pasted(home: Home) -> None:
    told = home.up()
    hint = next(line for line in told.splitlines() if line.startswith("To use it: ")).removeprefix(
        "To use it: "
    )
    assert f"`greenroom --state-dir {home.state.root} env` prints it" in told
    here = " ".join(map(shlex.quote, home.command()[:3]))
    shell = f'greenroom() {{ {here} "$@"; }}; {hint}; echo "$E2B_API_KEY"'
    done = subprocess.run(
        ["bash", "-c", shell],
        env=home.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout.strip() == home.state.default_key.read_text(encoding="utf-8").strip()
