"""A benchmark's processes: ready or told why not, and gone with whoever started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from greenroom.bench import kube_bare
from greenroom.bench.kube_bare import BareSpec
from greenroom.bench.processes import Running, started
from greenroom.errors import RuntimeFailure
from tests.support.waiting import until_true

BARE = "greenroom.bench.kube_bare"
STARTER = """
import asyncio, pathlib, sys
from greenroom.bench.kube_bare import BareSpec
from greenroom.bench.processes import started

async def main():
    async with started("bare", "greenroom.bench.kube_bare", BareSpec(), pathlib.Path(sys.argv[1])) as running:
        print(running.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_hops_pass_a_request_on_and_answer(tmp_path: Path) -> None:
    async with kube_bare.hops(tmp_path) as url:
        channel = kube_bare.connecting(url)
        for _ in range(2):
            answer = await channel.ask(channel.request("POST", "/", b"{}"))
            assert (answer.status, len(answer.body)) == (200, kube_bare.ANSWER)
        channel.close()
        found = await kube_bare.trips(url, 7, 3)
        assert (len(found), [sample.error for sample in found]) == (7, [""] * 7)


async def test_so_many_bytes_come(tmp_path: Path) -> None:
    async with kube_bare.answering(tmp_path, 3_000_000) as channel:
        answer = await channel.ask(channel.request("GET", "/"))
        assert len(answer.body) == 3_000_000


async def test_a_process_ends_with_its_block(tmp_path: Path) -> None:
    async with started("bare", BARE, BareSpec(), tmp_path) as running:
        assert running.url.startswith("http://127.0.0.1:")
        assert not running.ended
    assert running.ended


async def test_what_goes_wrong_in_the_block_is_told_and_the_process_ends(tmp_path: Path) -> None:
    held: list[Running] = []

    async def wrong() -> None:
        async with started("bare", BARE, BareSpec(), tmp_path) as running:
            held.append(running)
            raise ValueError("what is told is this")

    with pytest.raises(ValueError, match="told"):
        await wrong()
    assert held[0].ended


class Nonsense(msgspec.Struct):
    """What no process understands."""

    answer: str = "many"


async def test_one_that_does_not_get_ready_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"did not get ready.*ValidationError"):
        async with started("bare", BARE, Nonsense(), tmp_path):
            raise AssertionError("it cannot have started")


async def test_one_that_ended_by_itself_is_told(tmp_path: Path) -> None:
    async def killed() -> None:
        async with started("bare", BARE, BareSpec(), tmp_path) as running:
            os.kill(running.pid, signal.SIGKILL)
            until_true(lambda: running.ended)

    with pytest.raises(RuntimeFailure, match="ended by itself"):
        await killed()


def test_it_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert starter.stdout is not None
    with starter.stdout:
        pid = int(starter.stdout.readline())
    assert psutil.pid_exists(pid)
    starter.kill()
    starter.wait()
    until_true(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
