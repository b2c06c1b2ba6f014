"""API keys as all dialects know them: recognised, and believed for a moment without asking the store again."""

from __future__ import annotations

import time
from collections import OrderedDict

from starlette.requests import Request

from greenroom.errors import Unauthorized
from greenroom.store.keys import digest_of, is_secret
from greenroom.store.records import ApiKey, Store
from greenroom.wire import metrics

CACHED_FOR = 1.0
"""Seconds a key is believed without asking the store: so long a revoked one still works, at most."""
CACHED_KEYS = 4096
"""Keys in the cache, the least recently used leaves first."""
LOOKUPS = metrics.counter(
    "greenroom_api_key_lookups_total", "Requests with an API key, by what the cache knew", ("result",)
)


class KeyRing:
    """Recognises API keys, asking the store at most once per key and `CACHED_FOR`.

    Only found keys are cached: a flood of wrong ones cannot push the right ones out, and a key works the
    moment it is made. The cache is keyed by digest, so no secret stays in memory longer than its request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[str, tuple[ApiKey, float]] = OrderedDict()

    async def key_of(self, request: Request) -> ApiKey:
        """The request's API key (`X-API-Key`, or a bearer token). Raises Unauthorized."""
        secret = presented(request)
        if not secret:
            raise Unauthorized("an API key is needed: send it in the header X-API-Key")
        # What does not look like a key cannot be one: no need to ask the store.
        if not is_secret(secret):
            metrics.child(LOOKUPS, "malformed").inc()
            raise Unauthorized("this API key is not known")
        digest = digest_of(secret)
        now = time.monotonic()
        cached = self._cache.get(digest)
        if cached is not None and cached[1] > now:
            metrics.child(LOOKUPS, "hit").inc()
            return cached[0]
        key = await self._store.find_api_key(digest)
        if key is None or key.revoked_at is not None:
            metrics.child(LOOKUPS, "unknown").inc()
            self._cache.pop(digest, None)
            raise Unauthorized("this API key is not known")
        metrics.child(LOOKUPS, "miss").inc()
        # Counted from before the store was asked, so that a slow store does not stretch a revoked key's life.
        self._cache[digest] = (key, now + CACHED_FOR)
        self._cache.move_to_end(digest)
        if len(self._cache) > CACHED_KEYS:
            self._cache.popitem(last=False)
        return key


def presented(request: Request) -> str:
    """The secret that a request shows, or an empty text."""
    if secret := request.headers.get("x-api-key", "").strip():
        return secret
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
