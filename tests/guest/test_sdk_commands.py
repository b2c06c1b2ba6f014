"""What the published SDK's own tests expect of commands and terminals, by the SDK itself."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from e2b import AsyncSandbox, CommandExitException, PtySize, Sandbox, TimeoutException
from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
)

from tests.guest.conftest import Sdk, sandbox
from tests.guest.harness import ME, Agent, alive, eventually

pytestmark = pytest.mark.compat

SIZE = PtySize(rows=24, cols=80)


def background(sdk: Sdk, command: str, **options: Any) -> Any:
    return sdk.do(sdk.commands.run(command, background=True, **options))


def failure(sdk: Sdk, handle: Any) -> CommandExitException:
    with pytest.raises(CommandExitException) as caught:
        sdk.do(handle.wait())
    return caught.value


@pytest.mark.parametrize("text", ["Hello, World!", "!@#$%^&*()_+-='\"`~\\", "Hello,\nWorld!", "é ü 漢字 🙂"])
def test_run(sdk: Sdk, text: str) -> None:
    result = sdk.do(sdk.commands.run(f"echo {shlex.quote(text)}"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{text}\n", "")


def test_run_with_broken_utf8(sdk: Sdk) -> None:
    long = "a" * 8191
    result = sdk.do(sdk.commands.run(f"printf '%s' '{long}\\xe2'"))
    assert result.stdout.startswith(long)
    result = sdk.do(sdk.commands.run("printf 'ok\\342'"))
    assert result.stdout == "ok\N{REPLACEMENT CHARACTER}"


def test_callbacks_and_an_exit_code(sdk: Sdk) -> None:
    seen: list[tuple[str, str]] = []
    with pytest.raises(CommandExitException) as caught:
        sdk.do(
            sdk.commands.run(
                "echo out; echo err >&2; exit 3",
                on_stdout=lambda text: seen.append(("out", text)),
                on_stderr=lambda text: seen.append(("err", text)),
            )
        )
    assert (caught.value.exit_code, caught.value.stdout, caught.value.stderr) == (3, "out\n", "err\n")
    assert sorted(seen) == [("err", "err\n"), ("out", "out\n")]


def test_run_with_timeout(sdk: Sdk) -> None:
    assert sdk.do(sdk.commands.run("echo in time", timeout=10)).exit_code == 0
    assert sdk.do(sdk.commands.run("echo unlimited", timeout=0)).exit_code == 0


def test_run_with_too_short_timeout(sdk: Sdk) -> None:
    with pytest.raises(TimeoutException):
        sdk.do(sdk.commands.run("sleep 10", timeout=1))


def test_run_with_too_short_timeout_iterating(sdk: Sdk) -> None:
    if sdk.is_async:
        pytest.skip("only the sync handle is iterated")
    handle = background(sdk, "sleep 10", timeout=1)
    with pytest.raises(TimeoutException):
        list(handle)


def test_an_unknown_user_and_a_missing_directory(sdk: Sdk) -> None:
    with pytest.raises(AuthenticationException, match="invalid username: 'nosuchuser'"):
        sdk.do(sdk.commands.run("id", user="nosuchuser"))
    with pytest.raises(InvalidArgumentException, match="/no/such/directory"):
        sdk.do(sdk.commands.run("id", cwd="/no/such/directory"))


def test_environment(sdk: Sdk) -> None:
    result = sdk.do(
        sdk.commands.run("echo $FOO $SANDBOX_WIDE $E2B_SANDBOX $E2B_SANDBOX_ID", envs={"FOO": "bar"})
    )
    assert result.stdout == "bar yes true isdk\n"
    assert sdk.do(sdk.commands.run("echo ${FOO:-none}")).stdout == "none\n"
    script = "python3 -c 'import os; print(os.environ[\"FOO\"])'"
    assert sdk.do(sdk.commands.run(script, envs={"FOO": "bar"})).stdout == "bar\n"
    assert sdk.do(sdk.commands.run("echo $SANDBOX_WIDE", envs={"SANDBOX_WIDE": "no"})).stdout == "no\n"


def test_connect(sdk: Sdk) -> None:
    handle = background(sdk, "read line; echo got $line", stdin=True)
    again = sdk.do(sdk.commands.connect(handle.pid))
    assert again.pid == handle.pid
    sdk.do(sdk.commands.send_stdin(handle.pid, "this\n"))
    assert sdk.do(again.wait()).stdout == "got this\n"
    assert sdk.do(handle.wait()).exit_code == 0
    # Its end can still be asked for.
    late = sdk.do(sdk.commands.connect(handle.pid))
    assert sdk.do(late.wait()).exit_code == 0


def test_connect_to_nothing(sdk: Sdk) -> None:
    with pytest.raises(NotFoundException):
        sdk.do(sdk.commands.connect(4194000))


def test_disconnecting_kills_nothing(sdk: Sdk) -> None:
    handle = background(sdk, "sleep 600")
    sdk.do(handle.disconnect())
    assert alive(handle.pid)
    assert sdk.do(sdk.commands.kill(handle.pid)) is True
    eventually(lambda: not alive(handle.pid), "the command is gone")


def test_kill(sdk: Sdk) -> None:
    handle = background(sdk, "sleep 600")
    assert sdk.do(handle.kill()) is True
    killed = failure(sdk, handle)
    assert (killed.exit_code, killed.error) == (-1, "signal: killed")
    with pytest.raises(CommandExitException):
        sdk.do(sdk.commands.run(f"kill -0 {handle.pid}"))
    assert sdk.do(sdk.commands.kill(handle.pid)) is False
    assert sdk.do(sdk.commands.kill(4194000)) is False


def test_list(sdk: Sdk) -> None:
    first, second = background(sdk, "sleep 100"), background(sdk, "sleep 200", cwd="/", envs={"A": "b"})
    found = {process.pid: process for process in sdk.do(sdk.commands.list())}
    assert {first.pid, second.pid} <= set(found)
    shown = found[second.pid]
    assert (shown.cmd, shown.args, shown.envs, shown.cwd) == (
        "/bin/bash",
        ["-l", "-c", "sleep 200"],
        {"A": "b"},
        "/",
    )
    for handle in (first, second):
        sdk.do(handle.kill())


@pytest.mark.parametrize("data", ["Hello", b"Hello", "!@#$%^&*()_+", "one\ntwo\nthree", "", "é\N{SNOWMAN}"])
def test_stdin(sdk: Sdk, data: str | bytes) -> None:
    text = data.decode() if isinstance(data, bytes) else data
    handle = background(sdk, "cat", stdin=True)
    sdk.do(sdk.commands.send_stdin(handle.pid, data))
    sdk.do(handle.close_stdin())
    assert sdk.do(handle.wait()).stdout == text


def test_stdin_through_the_handle(sdk: Sdk) -> None:
    handle = background(sdk, "head -c 5", stdin=True)
    sdk.do(handle.send_stdin("Hello"))
    assert sdk.do(handle.wait()).stdout == "Hello"


def test_closing_stdin_twice(sdk: Sdk) -> None:
    handle = background(sdk, "cat; echo end", stdin=True)
    sdk.do(sdk.commands.close_stdin(handle.pid))
    sdk.do(sdk.commands.close_stdin(handle.pid))
    assert sdk.do(handle.wait()).stdout == "end\n"
    with pytest.raises(SandboxException):
        sdk.do(sdk.commands.send_stdin(handle.pid, "late"))


def stream_input(sdk: Sdk, module: Any, pid: int, pieces: list[str | bytes]) -> None:
    """Ordered input: an iterable for the sync half, a handle with an open stream for the async one."""
    if not sdk.is_async:
        module.stream_input(pid, iter(pieces))
        return

    async def send() -> None:
        handle = module.stream_input(pid)
        for piece in pieces:
            await handle.send(piece)
        await handle.close()

    sdk.do(send())


def test_streamed_stdin(sdk: Sdk) -> None:
    handle = background(sdk, "head -c 12", stdin=True)
    stream_input(sdk, sdk.commands, handle.pid, ["one,", b"two,", "tri,"])
    assert sdk.do(handle.wait()).stdout == "one,two,tri,"
    with pytest.raises(NotFoundException):
        stream_input(sdk, sdk.commands, 4194000, ["x"])


def test_much_output(sdk: Sdk) -> None:
    result = sdk.do(sdk.commands.run("seq 1 200000"))
    assert result.stdout == "".join(f"{number}\n" for number in range(1, 200_001))


def test_a_wrong_token(sdk: Sdk, secured_agent: Agent) -> None:
    async def make() -> Any:
        return sandbox(AsyncSandbox, secured_agent, "wrong")

    other = sdk.do(make()) if sdk.is_async else sandbox(Sandbox, secured_agent, "wrong")
    with pytest.raises(AuthenticationException):
        sdk.do(other.commands.run("true"))


# -- terminals --------------------------------------------------------------------------------------------


class Terminal:
    """A terminal by either half of the SDK, with what it has shown."""

    def __init__(self, sdk: Sdk, **options: Any) -> None:
        self.sdk = sdk
        self.shown = b""
        if sdk.is_async:
            self.handle = sdk.do(sdk.pty.create(SIZE, on_data=self.take, **options))
        else:
            self.handle = sdk.do(sdk.pty.create(SIZE, **options))

    def take(self, data: bytes) -> None:
        self.shown += data

    def type(self, text: str) -> None:
        self.sdk.do(self.sdk.pty.send_stdin(self.handle.pid, text.encode()))

    def wait(self) -> Any:
        if self.sdk.is_async:
            return self.sdk.do(self.handle.wait())
        return self.handle.wait(on_pty=self.take)


def test_a_terminal(sdk: Sdk, folder: Path) -> None:
    terminal = Terminal(sdk, envs={"ABC": "123"}, cwd=str(folder))
    terminal.type("echo $ABC-$TERM-$LANG; pwd; exit\n")
    assert terminal.wait().exit_code == 0
    assert b"123-xterm-256color-C.UTF-8" in terminal.shown
    assert str(folder).encode() in terminal.shown


def test_a_terminal_is_connected_to_again(sdk: Sdk) -> None:
    terminal = Terminal(sdk, envs={"FOO": "bar"})
    sdk.do(terminal.handle.disconnect())
    assert alive(terminal.handle.pid)
    again: Any
    if sdk.is_async:
        again = sdk.do(sdk.pty.connect(terminal.handle.pid, on_data=terminal.take))
    else:
        again = sdk.do(sdk.pty.connect(terminal.handle.pid))
    assert again.pid == terminal.handle.pid
    terminal.handle = again
    terminal.type("echo $FOO$FOO; exit 0\n")
    assert terminal.wait().exit_code == 0
    assert b"barbar" in terminal.shown


def test_a_terminal_is_resized(sdk: Sdk) -> None:
    terminal = Terminal(sdk)
    terminal.type("echo $(tput cols)x$(tput lines)\n")
    sdk.do(sdk.pty.resize(terminal.handle.pid, PtySize(cols=100, rows=42)))
    terminal.type("echo $(tput cols)x$(tput lines); exit\n")
    terminal.wait()
    assert b"100x42" in terminal.shown


def test_a_terminal_is_killed(sdk: Sdk) -> None:
    terminal = Terminal(sdk)
    assert sdk.do(sdk.pty.kill(terminal.handle.pid)) is True
    with pytest.raises(CommandExitException):
        terminal.wait()
    eventually(lambda: not alive(terminal.handle.pid), "the terminal's shell is gone")
    assert sdk.do(sdk.pty.kill(terminal.handle.pid)) is False


def test_input_is_streamed_to_a_terminal(sdk: Sdk) -> None:
    terminal = Terminal(sdk)
    stream_input(sdk, sdk.pty, terminal.handle.pid, ["echo str", b"eamed-$((1 + 1))\n", "exit\n"])
    assert terminal.wait().exit_code == 0
    assert b"streamed-2" in terminal.shown


def test_the_exit_code_of_a_terminal(sdk: Sdk) -> None:
    terminal = Terminal(sdk)
    terminal.type("exit 5\n")
    with pytest.raises(CommandExitException) as caught:
        terminal.wait()
    assert caught.value.exit_code == 5


def test_a_terminal_for_another_user(sdk: Sdk) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act for another user")
    terminal = Terminal(sdk, user=ME)
    terminal.type("id -un; exit\n")
    assert terminal.wait().exit_code == 0
    assert ME.encode() in terminal.shown
