"""Giving up every privilege, for good, before the first byte of a guest is read.

The process does this itself, after it has imported all it needs: a chain of tools before it would leave Python unable
to read a checkout or virtual environment that only root can enter. What was done is looked at afterwards, in the
kernel's own words, and a process that kept anything does not serve.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

from greenroom.errors import SetupError

# prctl(2)
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 1, 24, 38

THREADS = 16
"""Tasks that its uid may have, the kernel's word for processes and threads: libuv keeps four threads for what it cannot
do otherwise, and aborts the process when it gets none."""


def drop(uid: int) -> None:
    """Become `uid`, without groups, capabilities, or a way to get any. Raises SetupError when something is left.

    The process also dies with its parent's thread that started it, even while it is stopped, may start few
    others, and leaves no core dump.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        if libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # After the change of uid, which clears it.
    libc.prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (THREADS, THREADS))
    left = kept(uid)
    if left:
        raise SetupError(f"the egress process could not give up: {', '.join(left)}")


def kept(uid: int) -> list[str]:
    """What this process has beyond a plain process of `uid`: empty after `drop`."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    facts = {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}
    wrong = [name for name in ("Uid", "Gid") if any(value != str(uid) for value in facts[name])]
    wrong += [name for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(facts[name][0], 16)]
    if facts["Groups"]:
        wrong.append("Groups")
    if facts["NoNewPrivs"] != ["1"]:
        wrong.append("NoNewPrivs")
    return wrong
