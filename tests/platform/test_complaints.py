"""What people complain about elsewhere and what we do, with real microVMs. docs/complaints.md has all of it.

Each test names the complaint it answers; those that need no VM are in tests/api and tests/guest.
"""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest
from e2b import AsyncSandbox, CommandExitException, Sandbox
from e2b.exceptions import SandboxException, TimeoutException

from tests.platform.test_faults import vm_of
from tests.support.platform import Platform

pytestmark = [pytest.mark.vm, pytest.mark.compat]


@pytest.fixture
def box(sdk: Platform):
    with Sandbox.create(timeout=300) as made:
        yield made


def test_a_command_in_a_sandbox_that_cannot_be_reached_ends_at_its_deadline(
    sdk: Platform, box: Sandbox
) -> None:
    """E2B#1128: commands.run hangs for ever when the sandbox cannot be reached."""
    pid = vm_of(sdk, box)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutException):
            box.commands.run("true", timeout=3)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert box.commands.run("echo on").stdout == "on\n"


async def test_a_sandbox_that_ends_under_its_streams_is_told_by_type(sdk: Platform) -> None:
    """E2B#1726: a raw transport error, instead of a typed one, when a sandbox ends in the middle of a stream."""
    box = await AsyncSandbox.create(timeout=300)
    handle = await box.commands.run("echo up; sleep 1000", background=True, timeout=0)
    watch = await box.files.watch_dir("/tmp", on_event=lambda _: None, timeout=0)
    await box.files.write("big", b"x" * (32 << 20))
    content = await box.files.read("big", format="stream")
    await anext(content)
    assert await box.kill() is True
    with pytest.raises(TimeoutException, match="killed or reached its end of life"):
        await handle.wait()
    # What the SDK makes of a file's broken stream is its own affair; half a file must never look like a whole one.
    with pytest.raises((SandboxException, httpx.HTTPError)):
        async for _ in content:
            pass
    await watch.stop()
    with pytest.raises(SandboxException):
        await box.commands.run("true")


@pytest.mark.parametrize("user", ["user", "root"])
def test_a_guest_without_memory_says_so_and_goes_on(box: Sandbox, user: str) -> None:
    """E2B#339, E2B#412: time-outs without any output once memory is used up. Who used it up is ended, nobody else."""
    bystander = box.commands.run("sleep 1000", background=True, timeout=0)
    hog = "x = []\nwhile True: x.append(b'x' * (8 << 20))"
    with pytest.raises(CommandExitException) as caught:
        box.commands.run(f'python3 -c "{hog}"', user=user, timeout=240)
    assert caught.value.exit_code != 0
    assert box.commands.run("echo on", timeout=120).stdout == "on\n"
    assert bystander.pid in [process.pid for process in box.commands.list()]


def test_a_busy_guest_answers(box: Sandbox) -> None:
    """E2B#412: nothing answers while the CPU is busy. The agent comes before what it has started."""
    for _ in range(3):
        box.commands.run("while :; do :; done", background=True, timeout=0)
    assert box.commands.run("echo on", timeout=120).stdout == "on\n"
    box.files.write("note", "written")
    assert box.files.read("note") == "written"


async def test_many_requests_at_the_same_time(sdk: Platform) -> None:
    """E2B#1418: HTTP/2 errors of closed connections at high concurrency. Here: 100 requests at once."""
    box = await AsyncSandbox.create(timeout=300)
    try:
        await box.files.write("note", "written")
        reads = [box.files.read("note") for _ in range(60)]
        stats = [box.files.exists("note") for _ in range(40)]
        found = await asyncio.gather(*reads, *stats)
        assert found == ["written"] * 60 + [True] * 40
    finally:
        await box.kill()


def test_template_commands_files_and_git_on_one_machine(box: Sandbox) -> None:
    """infra#2270, infra#864, infra#469, E2B#239: a few sandboxes on one machine, without any cloud, with git."""
    box.files.write("project/hello.py", "print('hello')\n")
    box.commands.run(
        "git init -q && git config user.email a@b.c && git config user.name a && git add . && git commit -qm first",
        cwd="/home/user/project", timeout=120,
    )  # fmt: skip
    assert (
        box.commands.run("python3 hello.py && git log --format=%s", cwd="project").stdout == "hello\nfirst\n"
    )


def test_without_internet_there_are_no_names_either(sdk: Platform) -> None:
    """TencentCloud/CubeSandbox#408: DNS still answered with internet access disabled."""
    ask = (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(3)\n"
        "try:\n"
        "    question = bytes([7]) + b'example' + bytes([3]) + b'com' + bytes([0, 0, 1, 0, 1])\n"
        "    s.sendto(bytes([18, 52, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]) + question, ('8.8.8.8', 53))\n"
        "    print('answered', s.recv(512))\n"
        "except OSError: print('nothing')\n"
        "try: print('found', socket.getaddrinfo('example.com', 80))\n"
        "except OSError: print('no name')\n"
    )
    with Sandbox.create(timeout=300, allow_internet_access=False) as box:
        box.files.write("ask.py", ask)
        assert box.commands.run("python3 ask.py", timeout=120).stdout == "nothing\nno name\n"
