"""Who may call whom: one random bearer token per role, made by `greenroom up`.

`<state>/secrets/<role>.token` (mode 0600) holds a role's own token; `accepted.json` maps each role to the
SHA-256 of its token, so a role that only *checks* credentials holds none of them. The tokens have 256 random
bits, so a plain hash is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

import msgspec

from greenroom.errors import SetupError

_TOKEN = re.compile(r"[0-9a-f]{64}")
ROLES = ("api", "master", "node", "proxy", "operator", "metrics")
"""Callers. `operator` is the command line; `metrics` may read metrics and nothing else."""


def digest(token: str) -> str:
    """Hex SHA-256 of a token, the only form in which a callee keeps it."""
    return hashlib.sha256(token.encode()).hexdigest()


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` atomically with mode 0600, whatever the umask is."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        # Renamed before its content is on disk, a power cut would leave an empty file in its place.
        os.fsync(stream.fileno())
    temporary.replace(path)


def ensure(secrets_dir: Path) -> None:
    """Make the tokens that are missing or damaged. Good ones stay, so running roles keep working."""
    secrets_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    secrets_dir.chmod(0o700)
    accepted: dict[str, str] = {}
    for role in ROLES:
        path = secrets_dir / f"{role}.token"
        if _read_token(path) is None:
            write_private(path, secrets.token_hex(32) + "\n")
        accepted[role] = digest(own_token(secrets_dir, role))
    write_private(secrets_dir / "accepted.json", msgspec.json.encode(accepted).decode())


def own_token(secrets_dir: Path, role: str) -> str:
    """The token with which `role` calls others. Raises SetupError when `greenroom up` never made it."""
    token = _read_token(secrets_dir / f"{role}.token")
    if token is None:
        raise SetupError(
            f"the {role} credential in {secrets_dir} is missing, damaged or not readable by this user; "
            "start the platform with `greenroom up` and run this as the same user"
        )
    return token


def _read_token(path: Path) -> str | None:
    """The token in a file; None for anything that is not 64 hexadecimal digits, as an empty file is not."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _TOKEN.fullmatch(text) else None


class Verifier:
    """Tells which role a bearer token belongs to, in constant time."""

    def __init__(self, accepted: dict[str, str]) -> None:
        self._accepted = accepted

    @classmethod
    def load(cls, secrets_dir: Path) -> Verifier:
        """Read `accepted.json`. Raises SetupError when it is missing or unreadable."""
        try:
            raw = (secrets_dir / "accepted.json").read_bytes()
            return cls(msgspec.json.decode(raw, type=dict[str, str]))
        except (OSError, msgspec.DecodeError) as error:
            raise SetupError(f"cannot read the accepted credentials: {error}") from error

    def role_of(self, token: str) -> str | None:
        """The role whose token this is, or None. Compares with every role, whichever matches."""
        if not _TOKEN.fullmatch(token):
            return None
        offered = digest(token)
        found = None
        for role, expected in self._accepted.items():
            if hmac.compare_digest(offered, expected):
                found = role
        return found
