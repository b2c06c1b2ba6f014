"""A platform for the length of a benchmark: started for it, and stopped whatever happens in it."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir

STOP_DEADLINE = 180.0
"""Seconds for an orderly stop; a full pool takes a while to end."""


@contextlib.contextmanager
def own_platform(
    interrupts: Interrupts,
    state_dir: Path,
    cache_dir: Path,
    *,
    warm: int = 0,
    engine: str | None = None,
    settings: Path | None = None,
    prepare: Callable[[StateDir], None] = lambda _state: None,
) -> Iterator[StateDir]:
    """A platform of its own on `state_dir`, which must not be there yet.

    It has the `config.toml` of the state directory `settings`, if that has one; `prepare` gets its state directory
    before the start. Raises RuntimeFailure when it could not be started, or not be stopped clean.
    """
    from greenroom.cli.launch import bring_up, take_down
    from greenroom.cli.leftovers import describe
    from greenroom.cli.output import warn
    from greenroom.cli.plans import UpOptions
    from greenroom.cli.records import StateDir
    from greenroom.cli.reports import reporter_for
    from greenroom.errors import GreenroomError, RuntimeFailure

    state = StateDir(state_dir)
    state.root.mkdir(mode=0o700)
    own = state.root / "config.toml"
    if settings is not None and (settings / "config.toml").exists():
        shutil.copyfile(settings / "config.toml", own)
    else:
        own.touch()  # marks the directory as ours
    prepare(state)
    reporter = reporter_for(sys.stderr)
    options = UpOptions(state_dir=str(state.root), cache_dir=str(cache_dir), port=0, warm=warm, engine=engine)
    try:
        bring_up(options, reporter, interrupts)
        interrupts.release()
        yield state
    except GreenroomError:
        for line in _ended(state):
            warn(line)
        raise
    finally:
        interrupts.hold()
        try:
            stopped = take_down(state, STOP_DEADLINE, reporter)
        finally:
            reporter.close()
        if not stopped.clean:
            raise RuntimeFailure(
                "the platform that was started for this left something behind\n"
                + "\n".join(describe(swept) for swept in stopped.swept)
            )
    # Whatever asked to stop while this one was being stopped counts before anything else is begun.
    interrupts.release()


def _ended(state: StateDir) -> list[str]:
    """Roles that ended by themselves, with the last that each said: their logs go with the directory."""
    return [
        f"{role.name} {role.last_exit}; the end of its log: {state.log_tail(role.name, lines=2)}"
        for role in state.roles()
        if role.last_exit
    ]
