"""Who asks the Kubernetes dialect, and whether it may: API keys as bearer tokens, or users whom a front proxy names.

A front proxy's users come with the request's scope (`aggregated` puts them there, once it has looked at the proxy's
certificate); headers alone name nobody.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from greenroom.api.keys import KeyRing
from greenroom.api.kube.kinds import NAMESPACE
from greenroom.api.kube.resources import VISIBLE, Attempt
from greenroom.api.kube.status import Subject, forbidden, unauthorized
from greenroom.api.rules import Action, Caller, of_key, refusal
from greenroom.errors import Unauthorized

CALLER: Final = "greenroom.caller"
"""Under this name a request's scope has its `Caller`, once that is known."""


class Access:
    """What `rest.application` asks before it answers (`Admit`)."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def admit(self, request: Request, attempt: Attempt) -> None:
        """Let a request pass. Raises 401, 403."""
        caller = await self.caller_of(request)
        if attempt.kind is NAMESPACE:
            request.scope[VISIBLE] = caller.namespaces()
        action = action_of(attempt, request.url.path)
        if not caller.may(action):
            kind = attempt.kind
            subject = Subject("", "path") if kind is None else kind.subject(attempt.name)
            raise forbidden(subject, refusal(caller, action))

    async def caller_of(self, request: Request) -> Caller:
        """Who asks. Raises 401."""
        found = request.scope.get(CALLER)
        if isinstance(found, Caller):
            return found
        try:
            caller = of_key(await self._keys.key_of(request))
        except Unauthorized:
            raise unauthorized() from None
        request.scope[CALLER] = caller
        return caller


def action_of(attempt: Attempt, path: str) -> Action:
    """What an attempt is in the words of the rules."""
    kind = attempt.kind
    if kind is None:
        return Action(verb=attempt.verb, path=path)
    # As in Kubernetes: a namespace itself is in that namespace.
    namespace = attempt.name if kind is NAMESPACE else attempt.namespace
    return Action(
        verb=attempt.verb,
        group=kind.group,
        resource=kind.plural,
        part=attempt.part,
        namespace=namespace,
        name=attempt.name,
    )
