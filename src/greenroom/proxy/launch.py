"""`python -m greenroom.proxy.launch PARENT DIRECTORY UID GID PROGRAM ARGUMENT...`: become Envoy, fenced.

A process of its own, because what it does between being born and becoming Envoy is more than a forked copy of
a process with threads may do. UID and GID `-` keep the user.

*Mount namespace.* Envoy resolves the real path of every file it reads, so its user must be able to walk there.
The platform's state is closed to all but root. Instead of opening it, Envoy gets a private view of the file
system in which its configuration directory is mounted on PLACES' first; nobody else sees that mount, and it
goes with the process. Where mounting is not allowed the directory is used as it lies.

*Death with the parent.* The kernel forgets `PR_SET_PDEATHSIG` when a process changes its user, so it is set
after that. A parent that was gone before is recognised by its pid.

Standard library only, and as little of it as possible: this runs at every start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PLACES = ("/mnt", "/media", "/srv", "/opt")
"""Directories that every file system hierarchy has and Envoy needs nothing from."""

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> None:
    """Replace this process by the program. Does not return."""
    parent, directory, uid, gid, program, *rest = arguments
    # Opened while we may: the program may lie where its user cannot go either.
    binary = os.open(program, os.O_RDONLY)
    if uid == "-":
        os.chdir(directory)
    else:
        os.chdir(_private_view(directory))
        os.setgroups([])
        os.setresgid(int(gid), int(gid), int(gid))
        os.setresuid(int(uid), int(uid), int(uid))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)
    os.execve(binary, ["envoy", *rest], dict(os.environ))  # noqa: S606


def _private_view(directory: str) -> str:
    """Where `directory` can be reached by any user in a mount namespace that is now ours."""
    place = next((place for place in PLACES if os.path.isdir(place)), None)
    if place is None or _libc.unshare(_CLONE_NEWNS) != 0:
        return directory
    # Private first, or the mount would spread to the rest of the machine.
    if _mount(None, "/", _MS_REC | _MS_PRIVATE) and _mount(directory, place, _MS_BIND):
        return place
    return directory


def _mount(source: str | None, target: str, flags: int) -> bool:
    what = None if source is None else os.fsencode(source)
    return bool(_libc.mount(what, os.fsencode(target), None, ctypes.c_ulong(flags), None) == 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main(sys.argv[1:])
