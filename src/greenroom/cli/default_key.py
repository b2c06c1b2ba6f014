"""The API key named `default`, which `greenroom up` makes so that `greenroom env` has one to print."""

from __future__ import annotations

from greenroom.cli.hints import pasteable
from greenroom.cli.records import StateDir
from greenroom.store.keys import create_api_key, list_api_keys, recognise
from greenroom.store.records import EVERYTHING, ApiKey
from greenroom.store.sqlite import SqliteStore
from greenroom.wire.credentials import write_private

NAME = "default"
OWNER = "default"
"""Owner of the keys made on the command line unless told otherwise: one person runs the platform."""
MAKE_ANOTHER = "`greenroom keys create default --default` makes another"
"""What to do where there is none, or none that is good."""


async def ensure_default_key(state: StateDir) -> str | None:
    """Make the default key when there is no key at all, or when the one on disk is not in this store.

    Returns a line for the user when one was made. A key that was revoked is not made again behind the
    operator's back: then other keys are in use, and `greenroom env --key-file` takes those.
    """
    store = await SqliteStore.open(state.store)
    try:
        kept = read_secret(state)
        found = None if kept is None else await recognise(store, kept)
        if found is not None:
            # One that was made before keys had rules. A key that was given some keeps them.
            if (found.name, found.owner) == (NAME, OWNER) and not found.rules:
                await store.set_api_key_rules(found.key_id, [EVERYTHING])
            return None
        keys = await list_api_keys(store)
        if any(key.revoked_at is None or key.name == NAME for key in keys):
            return None
        _key, secret = await create_api_key(store, NAME, OWNER, [EVERYTHING])
        keep_secret(state, secret)
        return pasteable(f"made the API key {NAME!r}; `greenroom env` prints it", state.root)
    finally:
        await store.close()


async def known(state: StateDir, secret: str) -> ApiKey | None:
    """The key that a secret is of, if the platform takes it: it is known and was not revoked."""
    store = await SqliteStore.open(state.store)
    try:
        return await recognise(store, secret)
    finally:
        await store.close()


def keep_secret(state: StateDir, secret: str) -> None:
    """Let this be the default key from now on."""
    write_private(state.default_key, secret + "\n")


def forget_secret(state: StateDir) -> None:
    """There is no default key any more."""
    state.default_key.unlink(missing_ok=True)


def read_secret(state: StateDir) -> str | None:
    """The default key's secret, or None when it is not there."""
    try:
        return state.default_key.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
