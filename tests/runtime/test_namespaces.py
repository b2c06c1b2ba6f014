"""Namespaces of real VMs' kind: with their rules, also in a process that has thousands of descriptors open."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from greenroom.config import NetworkConfig
from greenroom.runtime import namespaces
from greenroom.runtime.firewall import ruleset
from greenroom.wire.messages import Network
from greenroom.wire.network import parse

RULES = ruleset(parse(Network(), NetworkConfig()))
SCRIPT = """
import os, resource, sys
from greenroom.runtime import namespaces
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
null = os.open("/dev/null", os.O_RDONLY)
held = [os.dup(null) for _ in range(1100)]
tap = namespaces.create(sys.argv[1], sys.argv[2])
assert tap > 1024, tap
assert all(os.fstat(fd).st_rdev == os.fstat(null).st_rdev for fd in held)
print("made", flush=True)
"""
"""A process of its own, because what it is about does not raise but abort."""


@pytest.fixture
def name() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    made = f"gr-test-{secrets.token_hex(4)}"
    yield made
    namespaces.remove(made)


def test_rules_are_loaded_beyond_what_select_can_count(name: str) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1200:
        pytest.skip("this user may not open 1200 descriptors")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, RULES], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "made\n"
    handle = namespaces.open_handle(name)
    try:
        assert namespaces.in_thread(lambda: _refused(handle))
    finally:
        os.close(handle)


def _refused(handle: int) -> bool:
    """Whether the namespace has its rules: a table of that name cannot be made twice."""
    namespaces.enter(handle)
    try:
        namespaces.apply_rules("create table inet greenroom")
    except OSError as error:
        return "exists" in str(error)
    return False


def test_rules_that_make_no_sense_are_refused_and_descriptors_stay(name: str) -> None:
    tap = namespaces.create(name, RULES)
    before, collecting = sorted(os.listdir("/proc/self/fd")), gc.isenabled()
    handle = namespaces.open_handle(name)
    try:
        with pytest.raises(OSError, match="nftables refused"):
            namespaces.in_thread(lambda: (namespaces.enter(handle), namespaces.apply_rules("nonsense")))
        assert gc.isenabled() is collecting
    finally:
        os.close(handle)
    assert sorted(os.listdir("/proc/self/fd")) == before
    os.close(tap)
