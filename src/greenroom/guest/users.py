"""Who runs a command or owns a file: accounts of the guest, and the user a request names.

Read from the account database with the ``pwd`` and ``grp`` modules and kept until ``/etc/passwd`` or
``/etc/group`` changes, so that a request costs two ``stat`` calls instead of a parse.
"""

from __future__ import annotations

import binascii
import grp
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import AgentError

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class User:
    """One account; ``groups`` holds the ids of all its groups, the primary one included."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


class UserDirectory:
    """Looks accounts up by name, and names up by id."""

    def __init__(self) -> None:
        self._version: tuple[int, ...] = ()
        self._users: dict[str, User] = {}
        self._user_names: dict[int, str] = {}
        self._group_names: dict[int, str] = {}

    def find(self, name: str) -> User:
        """The account of that name. Raises ``unauthenticated``, the contract's word for an unknown one."""
        self._refresh()
        user = self._users.get(name)  # threads may clear the cache meanwhile
        if user is None:
            user = _look_up(name)
            if user is None:
                raise AgentError("unauthenticated", f"invalid username: '{name[:_MAX_NAME]}'")
            if len(self._users) > 1000:
                self._users.clear()
            self._users[name] = user
        return user

    def user_name(self, uid: int) -> str:
        """Name of a user id, or the number where nobody has it."""
        name = self._user_names.get(uid)
        if name is None:
            try:
                name = pwd.getpwuid(uid).pw_name
            except (KeyError, OverflowError):
                name = str(uid)
            self._remember(self._user_names, uid, name)
        return name

    def group_name(self, gid: int) -> str:
        """Name of a group id, or the number where none has it."""
        name = self._group_names.get(gid)
        if name is None:
            try:
                name = grp.getgrgid(gid).gr_name
            except (KeyError, OverflowError):
                name = str(gid)
            self._remember(self._group_names, gid, name)
        return name

    def refresh(self) -> None:
        """Forget cached names if the account files have changed."""
        self._refresh()

    def _refresh(self) -> None:
        version = _file_version("/etc/passwd") + _file_version("/etc/group")
        if version != self._version:
            self._version = version
            self._users.clear()
            self._user_names.clear()
            self._group_names.clear()

    @staticmethod
    def _remember(names: dict[int, str], number: int, name: str) -> None:
        if len(names) > 1000:
            names.clear()
        names[number] = name


def requested_name(headers: Mapping[str, str], default: str) -> str:
    """The user a call names in ``Authorization: Basic base64("<user>:")``, else the default one.

    The password part is ignored: authority comes from the access token, the header only names a user.
    Raises ``unauthenticated`` when the header cannot be read.
    """
    header = headers.get("authorization")
    if header is None:
        return default
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() != "basic":
        return default
    try:
        decoded = binascii.a2b_base64(credentials.strip(), strict_mode=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise AgentError("unauthenticated", "the Authorization header is not Basic base64(user:)") from None
    return decoded.partition(":")[0] or default


def _look_up(name: str) -> User | None:
    if not name or "\0" in name or len(name) > _MAX_NAME:
        return None
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        return None
    groups = tuple(sorted({entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)}))
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir or "/")


def _file_version(path: str) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (info.st_mtime_ns, info.st_ino, info.st_size)
