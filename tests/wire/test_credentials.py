"""Role credentials: private, stable, told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.errors import SetupError
from greenroom.wire import credentials
from greenroom.wire.credentials import Verifier


def test_every_role_has_its_own_and_it_is_recognised(tmp_path: Path) -> None:
    credentials.ensure(tmp_path / "s")
    verifier = Verifier.load(tmp_path / "s")
    tokens = {role: credentials.own_token(tmp_path / "s", role) for role in credentials.ROLES}
    assert len(set(tokens.values())) == len(credentials.ROLES)
    assert {role: verifier.role_of(token) for role, token in tokens.items()} == {
        r: r for r in credentials.ROLES
    }
    assert verifier.role_of("wrong") is None
    assert verifier.role_of("") is None


def test_only_the_owner_can_read_them(tmp_path: Path) -> None:
    credentials.ensure(tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0
    for path in (tmp_path / "s").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_accepted_list_holds_no_token(tmp_path: Path) -> None:
    credentials.ensure(tmp_path / "s")
    accepted = (tmp_path / "s/accepted.json").read_text(encoding="utf-8")
    for role in credentials.ROLES:
        assert credentials.own_token(tmp_path / "s", role) not in accepted


def test_making_them_again_changes_nothing(tmp_path: Path) -> None:
    credentials.ensure(tmp_path / "s")
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    credentials.ensure(tmp_path / "s")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}


def test_without_them_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="greenroom up"):
        credentials.own_token(tmp_path, "api")
    with pytest.raises(SetupError):
        Verifier.load(tmp_path)


@pytest.mark.parametrize("content", ["", "\n", " \n", "short", "x" * 64, "0" * 63, "\xa0"])
def test_a_damaged_token_opens_nothing_and_is_made_anew(tmp_path: Path, content: str) -> None:
    credentials.ensure(tmp_path)
    (tmp_path / "operator.token").write_text(content, encoding="utf-8")
    with pytest.raises(SetupError, match="damaged"):
        credentials.own_token(tmp_path, "operator")
    credentials.ensure(tmp_path)
    verifier = Verifier.load(tmp_path)
    for offered in ("", " ", content, content.strip()):
        assert verifier.role_of(offered) is None
    assert verifier.role_of(credentials.own_token(tmp_path, "operator")) == "operator"


def test_even_a_list_that_accepts_the_empty_token_does_not(tmp_path: Path) -> None:
    assert Verifier({"operator": credentials.digest("")}).role_of("") is None
