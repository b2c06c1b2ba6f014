"""API keys: shown once, kept as a digest, revoked for good."""

from __future__ import annotations

import re

import pytest

from greenroom.errors import BadRequest, KeyConflict
from greenroom.store.keys import (
    create_api_key,
    digest_of,
    is_secret,
    list_api_keys,
    recognise,
    revoke_api_key,
)
from greenroom.store.sqlite import SqliteStore


@pytest.fixture
async def store(tmp_path):
    opened = await SqliteStore.open(tmp_path / "store.db")
    yield opened
    await opened.close()


async def test_a_secret_has_the_form_that_sdks_check(store):
    key, secret = await create_api_key(store, "ci", "me")
    assert re.fullmatch(r"e2b_[0-9a-f]{40}", secret)
    assert secret.endswith(key.hint)
    assert await recognise(store, secret) == key


async def test_the_secret_is_in_no_file(store, tmp_path):
    _key, secret = await create_api_key(store, "ci", "me")
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        assert secret.encode() not in content
        assert secret.removeprefix("e2b_").encode() not in content


async def test_what_is_no_key_is_not_recognised(store):
    _key, secret = await create_api_key(store, "ci", "me")
    for text in ("", secret[:-1], secret + "0", secret.upper(), "e2b_" + "0" * 40, digest_of(secret)):
        assert await recognise(store, text) is None


async def test_revoking(store):
    key, secret = await create_api_key(store, "ci", "me")
    assert await revoke_api_key(store, key.key_id) is True
    assert await revoke_api_key(store, key.key_id) is False
    assert await revoke_api_key(store, "no-such-id") is False
    assert await recognise(store, secret) is None
    [listed] = await list_api_keys(store)
    assert listed.revoked_at is not None
    assert listed.key_id == key.key_id


async def test_listing_by_owner(store):
    mine, _ = await create_api_key(store, "a", "me")
    other, _ = await create_api_key(store, "b", "you")
    assert await list_api_keys(store) == [mine, other]
    assert await list_api_keys(store, "you") == [other]


@pytest.mark.parametrize(
    ("name", "owner"),
    [("", "me"), ("a\nb", "me"), ("x" * 101, "me"), ("a", ""), ("a", "A-b"), ("a", "x" * 65)],
)
async def test_names_and_owners_have_bounds(store, name, owner):
    with pytest.raises(BadRequest):
        await create_api_key(store, name, owner)


async def test_a_digest_is_kept_once(store):
    key, secret = await create_api_key(store, "a", "me")
    with pytest.raises(KeyConflict):
        await store.add_api_key(key, digest_of(secret))


def test_forms():
    assert is_secret("e2b_" + "0a" * 20)
    assert not is_secret("e2b_" + "0A" * 20)
    assert not is_secret("e2b_" + "0a" * 20 + "\n")
