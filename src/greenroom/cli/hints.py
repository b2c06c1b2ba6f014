"""Commands that a message names, made so that they work when they are pasted into a shell.

Messages name commands as `greenroom down` or "$(greenroom env)", also those of the floors below, which do not
know where the platform lies. `pasteable` puts the state directory in.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from greenroom.cli.records import StateDir
from greenroom.config import default_state_dir

_NAMED = re.compile(r"(?<=[`(])greenroom (?=[a-z])")


def is_default(state_dir: Path) -> bool:
    """Whether commands find this directory by themselves.

    What $GREENROOM_STATE_DIR names does not count: the shell that the command is pasted into may not have it.
    """
    return "GREENROOM_STATE_DIR" not in os.environ and state_dir == default_state_dir().absolute()


def pasteable(text: str, state_dir: Path) -> str:
    """`text` with `--state-dir` in every `greenroom` command that lacks it, unless it is the default one."""
    if is_default(state_dir):
        return text
    return _NAMED.sub(lambda _match: f"greenroom --state-dir {shlex.quote(str(state_dir))} ", text)


def kubectl_hint(state: StateDir, port: int | None) -> str | None:
    """How kubectl finds a platform that is up with this port for it; None where it cannot."""
    if port is None or not state.kubeconfig.exists():
        return None
    return f"kubectl: export KUBECONFIG={shlex.quote(str(state.kubeconfig.absolute()))}"
