"""The bare script's other end, with a script that only answers: what it is told, and how it starts and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.bench.lifecycle_bare import Bare, script
from greenroom.bench.supply import spec_size
from greenroom.config import RoleSpec
from greenroom.errors import RuntimeFailure
from tests.bench.results import Quiet

ANSWERING = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "grow":
        print("no room", file=sys.stderr, flush=True)
        sys.exit(1)
    answers = {
        "snapshot": {"ms": 5.0, "stop_ms": 4.0, "ram_mib": 3.0},
        "fork": {"ms": float(asked.get("children", 0)), "answer_ms": 1.0},
        "pause": {"error": "RuntimeError: it was told to"},
    }
    print(json.dumps(answers.get(asked["do"], {})), flush=True)
"""

HAMMER = """
import ctypes, sys, threading
from pathlib import Path
import uvloop
from tests.bench.test_lifecycle_bare import made

libc, over = ctypes.CDLL(None), threading.Event()

def with_descriptors_of_its_own():
    # As `namespaces.apply_rules` has them for a moment.
    libc.unshare(0x400)
    libc.close_range(3, 0xFFFFFFFF, 0)

def hammer():
    while not over.is_set():
        thread = threading.Thread(target=with_descriptors_of_its_own)
        thread.start()
        thread.join()

async def main():
    for number in range(40):
        async with made(Path(sys.argv[1]) / str(number), Path(sys.argv[2])):
            pass

threads = [threading.Thread(target=hammer) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    uvloop.run(main())
finally:
    over.set()
print("all started")
"""


def made(directory: Path, path: Path) -> Bare:
    spec = RoleSpec(role="node", replica=0, state_dir=str(directory), cache_dir="/nowhere")
    return Bare(path, spec, spec_size(256), 2, Quiet())


@pytest.fixture
def answering(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(ANSWERING, encoding="utf-8")
    return path


async def test_steps_are_asked_and_answered_line_by_line(tmp_path: Path, answering: Path) -> None:
    async with made(tmp_path / "own", answering) as bare:
        await bare.begin()
        taken = await bare.snapshot()
        assert (taken.ms, taken.stop_ms, taken.ram_mib, taken.answer_ms) == (5.0, 4.0, 3.0, None)
        assert (await bare.fork(3)).ms == 3.0
        with pytest.raises(RuntimeFailure, match="it was told to"):
            await bare.pause()
        await bare.end()


async def test_a_script_that_ends_is_told_with_its_last_words(tmp_path: Path, answering: Path) -> None:
    async with made(tmp_path / "own", answering) as bare:
        for _ in range(2):
            with pytest.raises(RuntimeFailure, match="has ended: no room"):
                await bare.grow(1)


async def test_a_script_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="No such file"):
        async with made(tmp_path / "own", tmp_path / "missing.py"):
            pass


def test_it_starts_beside_threads_that_make_namespaces(tmp_path: Path, answering: Path) -> None:
    # In a process of its own: should they wait for each other, nothing in it runs any more.
    (tmp_path / "starts").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", HAMMER, str(tmp_path / "starts"), str(answering)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "all started\n", done.stderr


def test_the_script_is_in_the_checkout() -> None:
    found = script()
    assert found is not None
    assert found.name == "bare_lifecycle.py"
