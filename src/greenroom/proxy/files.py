"""The directory that Envoy runs in, and who may see what in it.

    <home>/                 0700 root: nobody else gets in by name
    <home>/envoy/           0750 root, Envoy's group: Envoy's working directory
        bootstrap.json      0640, and so is all that follows
        xds/*.json          clusters and listeners; they hold the credential for the relays
        run/admin.sock      0600, in a 0700 directory of Envoy's own

Envoy can read its configuration and not change it. Without root everything belongs to the one user there is.
Files are replaced by rename, because Envoy watches the directory and does not notice writing in place.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from greenroom.errors import SetupError
from greenroom.proxy.resources import ADMIN_SOCKET, RUN, XDS


class Identity(msgspec.Struct, frozen=True):
    """The user and group that Envoy runs as."""

    uid: int
    gid: int


def envoy_identity(uid_base: int) -> Identity | None:
    """Envoy's own user when we are root, else None: it then runs as the user we are.

    It is the uid below those of the VMs. A shared one such as `nobody` would let any other process of that
    user signal Envoy, trace it and read the credential in its memory.
    """
    return Identity(uid_base - 1, uid_base - 1) if os.geteuid() == 0 else None


class EnvoyFiles:
    """Makes the directory and replaces the files in it."""

    def __init__(self, home: Path, identity: Identity | None) -> None:
        self.directory = home / "envoy"
        self.identity = identity
        self._home = home

    def prepare(self) -> None:
        """Make the directories with their owners and modes. Raises SetupError when that is not allowed."""
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._home.chmod(0o700)
            for path in (self.directory, self.directory / XDS):
                path.mkdir(exist_ok=True)
                self._own(path, 0o750)
            run = self.directory / RUN
            run.mkdir(exist_ok=True)
            if self.identity is not None:
                os.chown(run, self.identity.uid, self.identity.gid)
            run.chmod(0o700)
        except OSError as error:
            raise SetupError(f"cannot prepare {self.directory}: {error.strerror}") from error

    def forget_admin_socket(self) -> None:
        """Remove what an Envoy that died left, so that nobody takes it for a new one's."""
        with contextlib.suppress(FileNotFoundError):
            (self.directory / ADMIN_SOCKET).unlink()

    def write(self, name: str, content: bytes) -> None:
        """Replace `name` (relative to the directory) atomically."""
        path = self.directory / name
        temporary = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(content)
        self._own(temporary, 0o640)
        temporary.rename(path)

    def _own(self, path: Path, mode: int) -> None:
        if self.identity is not None:
            os.chown(path, 0, self.identity.gid)
        # Without root the group is the user's, which may have other members.
        path.chmod(mode if self.identity is not None else mode & 0o700)
