"""`run` and `exec`: one command in a sandbox, as if it ran here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli.options import KeyFileOption, StateDirOption, examples, state_dir_of

if TYPE_CHECKING:
    from greenroom.cli.client import Client, SandboxHandle
    from greenroom.cli.target import Target

_COMMAND_LINE = {"ignore_unknown_options": False, "allow_interspersed_args": False}
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="K=V", help="An environment variable; may be given several times."),
]
TimeoutOption = Annotated[
    int, typer.Option("--timeout", metavar="S", min=1, help="Seconds the sandbox lives at least from now.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        context_settings=_COMMAND_LINE,
        epilog=examples(
            "greenroom run -- uname -a",
            "greenroom run --env NAME=world -- sh -c 'echo hello $NAME'",
            "greenroom run --timeout 3600 --keep -- sleep 1   # the sandbox stays; its id is printed",
        ),
    )(run)
    app.command(
        "exec",
        context_settings=_COMMAND_LINE,
        epilog=examples(
            "greenroom exec i1a2b3c4d5e6f7g8h9i0 -- ps aux",
            "greenroom exec --timeout 600 i1a2b3c4d5e6f7g8h9i0 -- bash -c 'ls | wc -l'",
        ),
    )(exec_)


def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="CMD ARGS...", help="What to run, after `--`.")],
    template: Annotated[str, typer.Option("--template", help="Template of the sandbox.")] = "base",
    timeout: TimeoutOption = 300,
    env: EnvOption = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the sandbox running until its timeout.")
    ] = False,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
) -> int:
    """Run one command in a new sandbox; output comes as it is written, the exit status is the command's.

    The sandbox is killed at the end, also after Ctrl-C, SIGTERM or the end of the terminal; with --keep these
    kill the command (SIGKILL) and the sandbox stays. Standard input is not passed on.
    """
    from greenroom.cli.hints import pasteable
    from greenroom.cli.output import warn
    from greenroom.cli.target import check_runs_commands, find_target

    line, variables = _command_line(command), _variables(env)
    place = state_dir_of(context, state_dir)
    target = find_target(place, key_file)
    check_runs_commands(place)

    async def work(client: Client) -> int:
        sandbox = await client.create(template, timeout, variables)
        try:
            return await _stream(client, sandbox, line, {}, sandbox_stays=keep)
        finally:
            if keep:
                use = f"`greenroom exec {sandbox.sandbox_id} -- …` uses it"
                warn(pasteable(f"sandbox {sandbox.sandbox_id} stays; {use}", place))
            else:
                await client.kill(sandbox.sandbox_id)

    return _run(target, work)


def exec_(
    context: typer.Context,
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="The sandbox's id.")],
    command: Annotated[list[str], typer.Argument(metavar="CMD ARGS...", help="What to run, after `--`.")],
    timeout: TimeoutOption = 300,
    env: EnvOption = None,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
) -> int:
    """Run one command in a sandbox that exists, whose remaining time is extended if need be, never cut.

    Ctrl-C, SIGTERM and the end of the terminal kill the command and what it started (SIGKILL); the sandbox
    stays. Standard input is not passed on.
    """
    from greenroom.cli.target import check_runs_commands, find_target

    line, variables = _command_line(command), _variables(env)
    place = state_dir_of(context, state_dir)
    target = find_target(place, key_file)
    check_runs_commands(place)

    async def work(client: Client) -> int:
        handle = await client.connect(sandbox, timeout)
        return await _stream(client, handle, line, variables, sandbox_stays=True)

    return _run(target, work)


def _command_line(words: list[str]) -> str:
    """One shell command line that runs `words` as they are; a `--` before them is not part of it."""
    import shlex

    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise typer.BadParameter("name a command after `--`")
    return shlex.join(words)


def _variables(pairs: list[str] | None) -> dict[str, str]:
    """`K=V` pairs as a dict. Raises BadParameter for one without a name."""
    found: dict[str, str] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--env {pair}: write NAME=VALUE")
        found[name] = value
    return found


def _run(target: Target, work: Callable[[Client], Awaitable[int]]) -> int:
    """Run `work` with an open client; a signal cancels it, so that its clean-up runs."""
    from greenroom.cli.client import Client
    from greenroom.cli.interrupts import Interrupts

    async def whole() -> int:
        async with Client(target) as client:
            return await work(client)

    with Interrupts() as interrupts:
        return interrupts.run(whole)


async def _stream(
    client: Client, sandbox: SandboxHandle, line: str, env: dict[str, str], *, sandbox_stays: bool
) -> int:
    """Run a command line, write its output as it comes, return its exit status.

    When we have to leave before its end (a signal, output that cannot be written) and its sandbox stays, the
    command is killed first.
    """
    import asyncio
    import contextlib
    import sys
    import uuid

    from greenroom.cli.frames import Ended, Output
    from greenroom.cli.output import OutputLost, warn, writing_output
    from greenroom.errors import NodeUnavailable

    tag = f"greenroom-cli-{uuid.uuid4().hex}"
    started = False
    try:
        async with contextlib.aclosing(client.run(sandbox, line, env, tag)) as messages:
            async for message in messages:
                started = True
                if isinstance(message, Output):
                    stream = sys.stderr.buffer if message.error else sys.stdout.buffer
                    with writing_output():
                        stream.write(message.data)
                        stream.flush()
                elif isinstance(message, Ended):
                    return message.status
    except (asyncio.CancelledError, OutputLost):
        if sandbox_stays and not await client.kill_command(sandbox, tag, started=started):
            warn(f"the command may still run in sandbox {sandbox.sandbox_id}")
        raise
    raise NodeUnavailable(f"sandbox {sandbox.sandbox_id} closed the stream before the command ended")
