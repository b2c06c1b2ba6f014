"""What a caller may ask about itself: who it is (`kubectl auth whoami`), and what it may do (`kubectl auth can-i`).

Reviews are answered and not kept. Sources: the API reference of `authentication.k8s.io/v1` (SelfSubjectReview) and
`authorization.k8s.io/v1` (SelfSubjectAccessReview, SelfSubjectRulesReview).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from greenroom.api.kube import negotiation, protobufs
from greenroom.api.kube.access import Access
from greenroom.api.kube.decoding import decoded_object
from greenroom.api.kube.negotiation import JSON
from greenroom.api.kube.objects import Object
from greenroom.api.kube.resources import Resource
from greenroom.api.kube.status import Subject, bad_request
from greenroom.api.rules import Action, Caller, refusal
from greenroom.wire.serving import read_body

BODY: Final = 64 << 10
AUTHENTICATION: Final = "authentication.k8s.io"
AUTHORIZATION: Final = "authorization.k8s.io"


class Reviews:
    """The handlers."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def routes(self) -> list[Route]:
        """Their paths."""
        table: dict[str, tuple[str, str, Callable[[Caller, Object], Object]]] = {
            "selfsubjectreviews": (AUTHENTICATION, "SelfSubjectReview", who),
            "selfsubjectaccessreviews": (AUTHORIZATION, "SelfSubjectAccessReview", may),
            "selfsubjectrulesreviews": (AUTHORIZATION, "SelfSubjectRulesReview", rules),
        }
        return [
            Route(
                f"/apis/{group}/v1/{plural}",
                Resource(Subject(group, plural), {"POST": self._handler(group, kind, answer)}),
            )
            for plural, (group, kind, answer) in table.items()
        ]

    def _handler(self, group: str, kind: str, answer: Callable[[Caller, Object], Object]) -> Any:
        async def review(request: Request) -> Response:
            caller = await self._access.caller_of(request)
            accepted = (JSON, protobufs.MEDIA_TYPE)
            form = negotiation.body_type(request.headers.get("content-type", ""), accepted)
            sent = await read_body(request, BODY)
            body = protobufs.decoded(sent, kind) if form == protobufs.MEDIA_TYPE else decoded_object(sent)[0]
            spec = body.get("spec") or {}
            if not isinstance(spec, dict):
                raise bad_request("spec: an object is needed")
            made = {
                "kind": kind,
                "apiVersion": f"{group}/v1",
                "metadata": {"creationTimestamp": None},
                **({"spec": spec} if spec else {}),
                "status": answer(caller, spec),
            }
            return Response(msgspec.json.encode(made), 201, media_type=JSON)

        return review


def who(caller: Caller, _spec: Object) -> Object:
    """The status of a SelfSubjectReview."""
    info: Object = {"username": caller.user, "groups": list(caller.groups)}
    if caller.uid:
        info["uid"] = caller.uid
    if caller.extra:
        info["extra"] = caller.extra
    return {"userInfo": info}


def may(caller: Caller, spec: Object) -> Object:
    """The status of a SelfSubjectAccessReview. Raises 400."""
    resource, path = spec.get("resourceAttributes"), spec.get("nonResourceAttributes")
    if isinstance(resource, dict) == isinstance(path, dict):
        raise bad_request("spec: one of resourceAttributes and nonResourceAttributes is needed")
    if isinstance(path, dict):
        action = Action(verb=_text(path, "verb"), path=_text(path, "path"))
    else:
        assert isinstance(resource, dict)  # noqa: S101
        action = Action(
            verb=_text(resource, "verb"),
            group=_text(resource, "group"),
            resource=_text(resource, "resource"),
            part=_text(resource, "subresource"),
            namespace=_text(resource, "namespace"),
            name=_text(resource, "name"),
        )
    allowed = caller.may(action)
    return {"allowed": allowed} if allowed else {"allowed": False, "reason": refusal(caller, action)}


def rules(caller: Caller, spec: Object) -> Object:
    """The status of a SelfSubjectRulesReview."""
    namespace = _text(spec, "namespace")
    told = []
    for rule in caller.rules:
        if "*" not in rule.namespaces and namespace not in rule.namespaces:
            continue
        for resource in rule.resources:
            named, slash, part = resource.partition("/")
            plural, dot, group = named.partition(".")
            told.append(
                {
                    "verbs": list(rule.verbs),
                    "apiGroups": [group if dot else "*"],
                    "resources": [f"{plural}{slash}{part}"],
                }
            )
    anything = {"verbs": ["get"], "nonResourceURLs": ["*"]}
    return {"resourceRules": told, "nonResourceRules": [anything], "incomplete": False}


def _text(source: Object, name: str) -> str:
    value = source.get(name) or ""
    if not isinstance(value, str):
        raise bad_request(f"{name}: a text is needed")
    return value
