"""`doctor`: what it says about machines that lack things, and that it changes nothing unless told to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli import checks
from greenroom.cli.main import run
from greenroom.config import VmConfig


def findings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> tuple[int, dict[str, Any]]:
    status = run(["doctor", "--json", "--state-dir", str(tmp_path / "s"), "--cache-dir", str(tmp_path / "c")])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (status == 0)
    return status, {finding["name"]: finding for finding in told["findings"]}


def test_it_looks_at_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _status, found = findings(capsys, tmp_path)
    for name in (
        "root", "kernel", "architecture", "/dev/kvm", "/dev/net/tun", "qemu-system-x86_64", "qemu-img", "nft", "ip",
        "mmdebstrap", "mke2fs", "setpriv", "nsenter", "prlimit", "cpio", "libnftables.so.1",
        "network namespaces", "user namespaces", "cgroups", "memory", "state directory", "cache directory",
        "python", "python packages", "envoy", "uids for VMs",
    ):  # fmt: skip
        assert name in found, name
    assert not (tmp_path / "s").exists()


def test_missing_tools_come_with_the_command_that_helps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SEARCH_PATH", str(tmp_path))
    status, found = findings(capsys, tmp_path)
    assert status == 1
    assert found["mmdebstrap"]["fix"] == "apt-get install --no-install-recommends mmdebstrap"
    assert found["mmdebstrap"]["state"] == "missing"
    assert found["nft"]["state"] == "note", "VMs run without it"
    assert run(["doctor", "--state-dir", str(tmp_path / "s")]) == 1
    assert "Real sandboxes cannot run here yet" in capsys.readouterr().out


def test_no_kvm_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) != "/dev/kvm" and real(self))
    kvm = next(finding for finding in checks.devices() if finding.name == "/dev/kvm")
    assert kvm.state == "note"
    assert "emulated" in kvm.found


def test_an_account_in_the_uid_range_is_named() -> None:
    (finding,) = checks.accounts(VmConfig(uid_base=0))
    assert finding.state == "missing"
    assert "root" in finding.found
    assert "uid_base" in finding.fix


def test_fix_installs_what_is_missing_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def apt(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        if command[0] == "apt-get":
            commands.append(command)
            return subprocess.CompletedProcess(command, 0)
        return real(command, **_options)  # type: ignore[call-overload,no-any-return]

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", apt)
    monkeypatch.setattr(checks, "SEARCH_PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    run(["doctor", "--fix", "--state-dir", str(tmp_path / "s")])
    (command,) = commands
    assert command[:4] == ["apt-get", "install", "--yes", "--no-install-recommends"]
    assert "qemu-system-x86" in command
    assert command.count("util-linux") == 1
    assert f"running: {' '.join(command)}" in capsys.readouterr().err


def test_fix_without_root_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SEARCH_PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(["doctor", "--fix", "--state-dir", str(tmp_path / "s")]) == 1
    assert "sudo greenroom doctor --fix" in capsys.readouterr().err
