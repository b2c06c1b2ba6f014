"""Who is asking (API keys) and which request this is (idempotency keys)."""

from __future__ import annotations

import hashlib
import re
import secrets

from starlette.requests import Request

from greenroom.api.e2b.permissions import action_of
from greenroom.api.keys import KeyRing
from greenroom.api.rules import of_key, refusal
from greenroom.errors import BadRequest, Forbidden

OPERATION = "greenroom.operation"
"""Under this name a request's scope has the path of the operation, as the paths table has it."""
_IDEMPOTENCY_KEY = re.compile(r"[a-z0-9-]{1,255}")


class Authenticator(KeyRing):
    """Tells whose a request is, and whether its key may do what it asks for."""

    async def owner_of(self, request: Request) -> str:
        """The owner of the request's API key, if the key's rules let it do what is asked for (`permissions`).

        Raises Unauthorized, Forbidden.
        """
        key = await self.key_of(request)
        action = action_of(request.method, request.scope.get(OPERATION, ""), key.owner)
        if action is not None and key.rules:
            caller = of_key(key)
            if not caller.may(action):
                raise Forbidden(refusal(caller, action))
        return key.owner


def claim_key(owner: str, header: str | None) -> str:
    """The claim key of a create: from the client's `Idempotency-Key`, or drawn for this request alone.

    A client's key is hashed, so that two owners' equal keys never meet and any length fits. Raises BadRequest
    when the header does not have E2B's form.
    """
    if header is None:
        return f"auto-{secrets.token_hex(16)}"
    if _IDEMPOTENCY_KEY.fullmatch(header) is None:
        raise BadRequest("Idempotency-Key: 1 to 255 of the characters a-z, 0-9 and - are needed")
    return f"idem-{owner}-{hashlib.sha256(header.encode()).hexdigest()[:40]}"
