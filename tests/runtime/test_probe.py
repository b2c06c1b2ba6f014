"""Choosing the accelerator: TCG when told, a verdict remembered, a clear refusal when KVM was demanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.errors import SetupError
from greenroom.runtime import probe


@pytest.fixture
def boots(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the probe boot says, one item a boot; QEMU's version is made up."""
    answers: list[str | None] = []
    monkeypatch.setattr(probe, "qemu_version", lambda: "7.2.0")
    monkeypatch.setattr(probe, "boots_on_kvm", lambda _files, _deadline: answers.pop(0))
    return answers


def test_tcg_on_demand_needs_no_probe(boots: list[str | None], tmp_path: Path) -> None:
    assert probe.choose("tcg", tmp_path, 1.0, tmp_path / "verdict").accelerator == "tcg"


def test_a_boot_proves_kvm_and_is_remembered(boots: list[str | None], tmp_path: Path) -> None:
    boots.append(None)
    assert probe.choose("auto", tmp_path, 1.0, tmp_path / "verdict").accelerator == "kvm"
    assert probe.choose("auto", tmp_path, 1.0, tmp_path / "verdict").accelerator == "kvm"
    assert not boots


def test_a_failed_boot_falls_back_and_says_why(boots: list[str | None], tmp_path: Path) -> None:
    boots.append("it hangs")
    verdict = probe.choose("auto", tmp_path, 1.0, tmp_path / "verdict")
    assert verdict.accelerator == "tcg"
    assert "it hangs" in verdict.reason


def test_kvm_on_demand_is_probed_anew_and_refused_clearly(boots: list[str | None], tmp_path: Path) -> None:
    boots.extend([None, "it hangs"])
    probe.choose("auto", tmp_path, 1.0, tmp_path / "verdict")
    with pytest.raises(SetupError, match="KVM was asked for but is not usable: it hangs"):
        probe.choose("kvm", tmp_path, 1.0, tmp_path / "verdict")


def test_another_qemu_needs_another_verdict(
    boots: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots.extend([None, "it hangs"])
    probe.choose("auto", tmp_path, 1.0, tmp_path / "verdict")
    monkeypatch.setattr(probe, "qemu_version", lambda: "8.0.0")
    assert probe.choose("auto", tmp_path, 1.0, tmp_path / "verdict").accelerator == "tcg"


def test_a_damaged_memory_is_no_verdict(boots: list[str | None], tmp_path: Path) -> None:
    boots.append(None)
    (tmp_path / "verdict").write_bytes(b"{")
    assert probe.choose("auto", tmp_path, 1.0, tmp_path / "verdict").accelerator == "kvm"
