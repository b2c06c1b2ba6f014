"""The published `e2b` package, unmodified, against `greenroom up`: the main job."""

from __future__ import annotations

import asyncio
import hashlib
import random
import subprocess
import sys
import time

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import AuthenticationException, SandboxException

from tests.support.platform import Platform

pytestmark = [pytest.mark.vm, pytest.mark.compat]


@pytest.fixture
def box(sdk: Platform):
    with Sandbox.create(timeout=300) as made:
        yield made


def test_a_command_gives_output_errors_and_exit_code(box: Sandbox) -> None:
    result = box.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("echo before; exit 7")
    assert (caught.value.exit_code, caught.value.stdout) == (7, "before\n")


def test_output_streams_while_the_command_runs(box: Sandbox) -> None:
    box.commands.run("mkfifo /tmp/gate")
    seen: list[str] = []

    def on_stdout(text: str) -> None:
        seen.append(text)
        if "first" in text:
            # The command waits for this: it can only end if its first line arrived while it ran.
            box.commands.run("echo go > /tmp/gate")

    result = box.commands.run("echo first; cat /tmp/gate; echo last", on_stdout=on_stdout, timeout=60)
    assert result.stdout == "first\ngo\nlast\n"
    assert seen[0] == "first\n"


def test_a_background_command_is_listed_and_killed(box: Sandbox) -> None:
    handle = box.commands.run("sleep 1000", background=True)
    assert handle.pid in [process.pid for process in box.commands.list()]
    assert box.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException) as caught:
        handle.wait()
    assert caught.value.exit_code != 0
    assert handle.pid not in [process.pid for process in box.commands.list()]
    assert box.commands.kill(handle.pid) is False


def test_killing_a_command_kills_its_children(box: Sandbox) -> None:
    handle = box.commands.run("sleep 4711 & sleep 4712 & wait", background=True)
    box.commands.run("until pgrep -f 'sleep 471[12]' >/dev/null; do :; done", timeout=60)
    handle.kill()
    assert box.commands.run("pgrep -fx 'sleep 471[12]' || true").stdout == ""


def test_stdin_reaches_a_command_and_can_be_closed(box: Sandbox) -> None:
    handle = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(handle.pid, "to the cat\n")
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "to the cat\n"


def test_environment_user_and_directory(sdk: Platform) -> None:
    with Sandbox.create(timeout=300, envs={"WHO": "sandbox"}) as box:
        assert box.commands.run("echo $WHO $E2B_SANDBOX_ID").stdout == f"sandbox {box.sandbox_id}\n"
        assert box.commands.run("echo $WHO", envs={"WHO": "command"}).stdout == "command\n"
        assert box.commands.run("whoami; pwd; sudo whoami").stdout == "user\n/home/user\nroot\n"
        assert box.commands.run("whoami; pwd", user="root", cwd="/tmp").stdout == "root\n/tmp\n"
        assert box.commands.run("hostname").stdout == box.sandbox_id + "\n"


def test_a_command_past_its_timeout_is_ended(box: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        box.commands.run("sleep 300", timeout=2)


def test_unknown_user_is_an_authentication_error(box: Sandbox) -> None:
    with pytest.raises(AuthenticationException, match="nobody-here"):
        box.commands.run("true", user="nobody-here")


@pytest.mark.parametrize("size", [0, 1, 65_537, 10 << 20])
def test_files_come_back_as_they_went(box: Sandbox, size: int) -> None:
    content = random.Random(size).randbytes(size)  # noqa: S311 (the same bytes every time)
    box.files.write("data.bin", content)
    assert box.files.read("data.bin", format="bytes") == content
    digest = box.commands.run("sha256sum data.bin").stdout.split()[0]
    assert digest == hashlib.sha256(content).hexdigest()
    assert box.files.get_info("data.bin").size == size


@pytest.mark.parametrize(
    "name", ["ünïcødé.txt", "空 格/深い/文件.txt", "emoji-🦉.txt", "quo'te\"s & more?.txt"]
)
def test_unicode_names(box: Sandbox, name: str) -> None:
    box.files.write(name, f"in {name}")
    assert box.files.read(name) == f"in {name}"
    assert box.files.exists(name)
    listed = [entry.path for entry in box.files.list(".", depth=3)]
    assert f"/home/user/{name}" in listed


def test_directories_moves_and_removals(box: Sandbox) -> None:
    assert box.files.make_dir("deep/er") is True
    assert box.files.make_dir("deep/er") is False
    box.files.write("deep/er/a.txt", "a")
    box.files.rename("deep/er/a.txt", "deep/b.txt")
    assert [entry.name for entry in box.files.list("deep")] == ["b.txt", "er"]
    box.files.remove("deep")
    assert not box.files.exists("deep")
    with pytest.raises(FileNotFoundException):
        box.files.read("deep/b.txt")


def test_a_sandbox_is_listed_described_and_gone_after_its_kill(sdk: Platform) -> None:
    box = Sandbox.create(timeout=120, metadata={"purpose": "list me", "ü": "ö"})
    query = SandboxQuery(metadata={"purpose": "list me", "ü": "ö"})
    (listed,) = Sandbox.list(query=query).next_items()
    assert listed.sandbox_id == box.sandbox_id
    info = box.get_info()
    assert (info.state, info.metadata, info.name) == (
        SandboxState.RUNNING,
        {"purpose": "list me", "ü": "ö"},
        "base",
    )
    assert 100 < (info.end_at - info.started_at).total_seconds() <= 120
    assert box.is_running()
    assert box.kill() is True
    assert not box.is_running()
    assert box.kill() is False
    assert Sandbox.list(query=query).next_items() == []
    with pytest.raises(NotFoundException):
        Sandbox.get_info(box.sandbox_id)


def test_connect_from_another_client(box: Sandbox) -> None:
    box.files.write("note", "left here")
    again = Sandbox.connect(box.sandbox_id, timeout=60)
    assert again.files.read("note") == "left here"
    # Connecting never shortens what was asked for before.
    assert (again.get_info().end_at - again.get_info().started_at).total_seconds() > 250


def test_set_timeout_moves_the_end_and_it_is_kept(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300)
    before = box.get_info().end_at
    box.set_timeout(900)
    assert box.get_info().end_at > before
    box.set_timeout(0)
    deadline = time.monotonic() + 20
    while box.is_running():
        assert time.monotonic() < deadline, "the sandbox outlived its time-out"
    with pytest.raises(SandboxException):
        box.commands.run("true")


def test_a_sandbox_ends_by_itself_when_its_time_is_up(sdk: Platform) -> None:
    box = Sandbox.create(timeout=2)
    deadline = time.monotonic() + 30
    while any(item.sandbox_id == box.sandbox_id for item in Sandbox.list().next_items()):
        assert time.monotonic() < deadline, "the sandbox outlived its time-out"
    assert not box.is_running()


def test_a_command_under_way_learns_that_its_sandbox_was_killed(sdk: Platform) -> None:
    box = Sandbox.create(timeout=120)
    handle = box.commands.run("echo started; sleep 1000", background=True, timeout=0)
    Sandbox.kill(box.sandbox_id)
    with pytest.raises(TimeoutException, match="killed or reached its end of life"):
        handle.wait()


@pytest.mark.parametrize(
    "end", ["busybox poweroff -f", "busybox reboot -f", "sh -c 'echo c > /proc/sysrq-trigger'"]
)
def test_a_guest_that_ends_itself_is_gone_and_the_list_says_so(sdk: Platform, end: str) -> None:
    box = Sandbox.create(timeout=300)
    box.commands.run(f"sudo {end}", background=True, timeout=0)
    deadline = time.monotonic() + 60
    while any(item.sandbox_id == box.sandbox_id for item in Sandbox.list().next_items()):
        assert time.monotonic() < deadline, "a guest that has ended is still listed"
    assert not box.is_running()
    assert box.kill() is False


async def test_twenty_sandboxes_at_once_are_twenty_different_machines(sdk: Platform) -> None:
    async def one(number: int) -> tuple[str, ...]:
        box = await AsyncSandbox.create(timeout=300, metadata={"number": str(number)})
        try:
            await box.files.write("number", str(number))
            result = await box.commands.run(
                "cat number; echo; cat /etc/machine-id; cat /proc/sys/kernel/random/uuid; "
                "python3 -c 'import uuid; print(uuid.uuid4())'",
                timeout=120,
            )
            return (str(number), box.sandbox_id, *result.stdout.split())
        finally:
            await box.kill()

    rows = await asyncio.gather(*(one(number) for number in range(20)))
    assert [row[0] for row in rows] == [row[2] for row in rows]
    for column in (1, 3, 4, 5):
        assert len({row[column] for row in rows}) == 20


def test_the_clock_was_right_at_every_hand_over(sdk: Platform, box: Sandbox) -> None:
    stamps = []
    for _ in range(5):
        before = time.time()
        inside = float(box.commands.run("date +%s.%N").stdout)
        stamps.append((time.time() - before, inside - before))
    round_trip, offset = min(stamps)
    # The command's own start lies between; the node's finer measurement is in the claim's record.
    assert -0.05 <= offset <= round_trip + 0.05


def test_what_env_prints_is_all_a_program_needs(platform: Platform) -> None:
    program = (
        "from e2b import Sandbox; s = Sandbox.create(timeout=60); print(s.commands.run('echo ok').stdout)"
    )
    shell = f'eval "$({sys.executable} -m greenroom.cli.main --state-dir {platform.state} env)" && exec "$@"'
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-c", program],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout == "ok\n\n", done.stderr


def test_a_port_of_a_sandbox_is_reached_by_host_name(sdk: Platform, box: Sandbox) -> None:
    box.commands.run("python3 -m http.server 8000 --bind 0.0.0.0", background=True)
    url = platform_url(sdk)
    answer = None
    deadline = time.monotonic() + 60
    while answer is None or answer.status_code == 502:
        assert time.monotonic() < deadline
        answer = httpx.get(url, headers={"Host": box.get_host(8000)}, trust_env=False, timeout=30)
    assert answer.status_code == 200
    assert "Directory listing" in answer.text


def platform_url(platform: Platform) -> str:
    return platform.env()["E2B_API_URL"]
