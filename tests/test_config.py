"""Settings: what is misspelt or makes no sense is refused with its name, not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom import config
from greenroom.config import Config
from greenroom.errors import SetupError


def settings(tmp_path: Path, text: str) -> Config:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    return config.load(tmp_path)


def test_without_a_file_all_is_as_documented(tmp_path: Path) -> None:
    assert config.load(tmp_path) == Config()


def test_a_setting_is_taken_and_the_rest_stays(tmp_path: Path) -> None:
    loaded = settings(tmp_path, '[claims]\nqueue_wait = 5\n[vm]\naccelerator = "tcg"\n')
    assert loaded.claims.queue_wait == 5
    assert loaded.vm.accelerator == "tcg"
    assert loaded.pools == Config().pools


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[pools]\ndefault_targett = 2\n", "default_targett"),
        ("[poools]\n", "poools"),
        ("[pools]\ndefault_target = -5\n", "default_target"),
        ("[vm]\nboot_deadline = -1\n", "boot_deadline"),
        ("[vm]\nboot_deadline = nan\n", "boot_deadline"),
        ("[vm]\nboot_deadline = inf\n", "boot_deadline"),
        ("[api]\nmax_timeout = 31622401\n", "max_timeout"),
        ("[vm]\nengine = 'xen'\n", "engine"),
        ("[proxy]\nport = 70000\n", "port"),
        ("[claims]\nqueue_wait = 'long'\n", "queue_wait"),
        ("[claims\n", "config.toml"),
        ("\x00", "config.toml"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SetupError, match=named):
        settings(tmp_path, text)


def test_every_class_of_settings_refuses_unknown_names() -> None:
    for name in Config.__struct_fields__:
        assert getattr(Config(), name).__struct_config__.forbid_unknown_fields, name
