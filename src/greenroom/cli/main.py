"""`greenroom`: the commands put together, and errors turned into one or two lines.

Command modules import only what their signatures need, the rest inside the commands, so that `--help` and
completion stay quick.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from greenroom.cli import bench, certs, doctor, env, keys, lifecycle, sandboxes, status
from greenroom.cli.hints import pasteable
from greenroom.cli.interrupts import Interrupted
from greenroom.cli.options import CacheDirOption, Globals, StateDirOption, examples
from greenroom.cli.output import EXIT_ERROR, EXIT_USAGE, OutputLost, drop_output, fail, guard_output
from greenroom.cli.words import plain_option

_DEBUG = "GREENROOM_DEBUG"

app = typer.Typer(
    name="greenroom",
    help="Self-hosted sandboxes for AI agents: a real microVM each, warmed up before it is asked for.",
    epilog=examples(
        "greenroom doctor                           # what this machine can do and what it lacks",
        "greenroom up --detach                      # start the platform",
        'eval "$(greenroom env)"                    # point the E2B SDK at it',
        "greenroom run -- python3 -c 'print(6*7)'   # one command in a sandbox of its own",
        "greenroom down                             # stop everything",
    ),
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _globals(
    context: typer.Context,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.ensure_object(Globals).take(state_dir, cache_dir)
    if debug:
        os.environ[_DEBUG] = "1"


@app.command(epilog=examples("greenroom version"))
def version() -> None:
    """Print the version."""
    from greenroom import __version__

    print(f"greenroom {__version__}")


lifecycle.register(app)
status.register(app)
env.register(app)
sandboxes.register(app)
keys.register(app)
certs.register(app)
doctor.register(app)
bench.register(app)


def main() -> None:
    """The console script. Ends the process with the command's exit status."""
    guard_output()
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()  # what was left of an answer that failed
    except OutputLost:
        drop_output()
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit status: 0, 1 (error), 2 (wrong usage) or the command's."""
    from greenroom.errors import GreenroomError

    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            # Sandboxes take texts in JSON, and a path that is no text could not be shown to anybody.
            fail(f"arguments must be UTF-8 text, which {os.fsencode(argument)!r} is not")
            return EXIT_USAGE
    command = typer.main.get_command(app)
    shared = Globals()
    try:
        result = command.main(args=arguments, prog_name="greenroom", standalone_mode=False, obj=shared)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _usage(error)
    except typer.Abort:
        return 130
    except Interrupted as interrupted:
        return interrupted.status
    except GreenroomError as error:
        if os.environ.get(_DEBUG):
            raise
        fail(error.message if shared.settled is None else pasteable(error.message, shared.settled))
        return EXIT_ERROR
    except (BrokenPipeError, OutputLost) as error:
        drop_output()
        if error.errno != errno.EPIPE:  # a reader that has left knows
            fail(f"cannot write the output: {error.strerror}")
        return EXIT_ERROR
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        fail(f"unexpected {type(error).__name__}: {error}\nRun it as `greenroom --debug …` for the details")
        return EXIT_ERROR
    return result if isinstance(result, int) else 0


def _usage(error: typer.TyperException) -> int:
    """Wrong usage, in our form; a bare `greenroom` has printed its help already."""
    context = getattr(error, "ctx", None)
    text = plain_option(getattr(error, "format_message", lambda: str(error))())
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text, file=sys.stderr)
        return EXIT_USAGE
    path = context.command_path if context is not None else "greenroom"
    fail(f"{text.strip().rstrip('.')}\nSee `{path} --help`")
    return int(getattr(error, "exit_code", EXIT_USAGE))


if __name__ == "__main__":
    main()
