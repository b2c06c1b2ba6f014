"""The mirror is the one that the machine uses: another may be out of reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.images import rootfs


@pytest.mark.parametrize(
    ("name", "text", "mirror"),
    [
        ("sources.list", "deb http://m.example/debian bookworm main\n", "http://m.example/debian"),
        ("sources.list", "deb [arch=amd64 signed-by=/k] https://m.example/debian/ bookworm main\n",
         "https://m.example/debian"),
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://m.example/debian\nSuites: bookworm\n",
         "http://m.example/debian"),
        ("sources.list", "# deb http://off.example/debian bookworm main\n", "http://deb.debian.org/debian"),
        ("sources.list", "deb http://s.example/debian-security bookworm-security main\n",
         "http://deb.debian.org/debian"),
    ],
)  # fmt: skip
def test_mirror(tmp_path: Path, name: str, text: str, mirror: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    assert rootfs.mirror(tmp_path) == mirror


def test_without_any_source_it_is_debians_own(tmp_path: Path) -> None:
    assert rootfs.mirror(tmp_path) == "http://deb.debian.org/debian"
