"""Errors keep their meaning across a role's boundary."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import greenroom
from greenroom import errors
from greenroom.errors import GreenroomError, InternalError, PermanentError, PoolDry, TemporaryError, from_wire


def every(root: type[GreenroomError]) -> list[type[GreenroomError]]:
    """All errors of the first floor; those of a single package never travel between roles."""
    return [
        cls
        for sub in root.__subclasses__()
        if sub.__module__ == errors.__name__
        for cls in (sub, *every(sub))
    ]


@pytest.mark.parametrize(
    "cls", [c for c in every(GreenroomError) if "kind" in vars(c)], ids=lambda cls: cls.kind
)
def test_there_and_back(cls: type[GreenroomError]) -> None:
    sent = cls("what happened")
    received = from_wire(sent.status, sent.to_wire())
    assert type(received) is cls
    assert received.message == "what happened"
    assert received.retry_after == sent.retry_after


def test_retry_after_travels() -> None:
    assert from_wire(503, PoolDry("dry", retry_after=7).to_wire()).retry_after == 7


def test_every_error_says_whether_to_retry() -> None:
    for cls in every(GreenroomError):
        assert issubclass(cls, PermanentError) != issubclass(cls, TemporaryError)


def test_kinds_are_unique() -> None:
    kinds = [cls.kind for cls in every(GreenroomError) if "kind" in vars(cls)]
    assert len(kinds) == len(set(kinds))


def test_what_a_later_release_calls_temporary_keeps_its_text() -> None:
    received = from_wire(503, {"error": {"kind": "something_new", "message": "free some space"}})
    assert type(received) is TemporaryError
    assert received.message == "free some space"


def test_errors_of_roles_travel() -> None:
    """What a role can answer with has to be known to all the others: it is defined on the first floor."""
    for role in ("node", "master", "egress", "runtime", "store", "fleet", "images"):
        for found in pkgutil.walk_packages([f"{greenroom.__path__[0]}/{role}"], f"greenroom.{role}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    here = {cls.__module__ for cls in _all(GreenroomError) if "kind" in vars(cls)}
    roles = [
        f"greenroom.{role}." for role in ("node", "master", "egress", "runtime", "store", "fleet", "images")
    ]
    assert not [module for module in here if module.startswith(tuple(roles))]


def _all(root: type[GreenroomError]) -> list[type[GreenroomError]]:
    return [cls for sub in root.__subclasses__() for cls in (sub, *_all(sub))]


@pytest.mark.parametrize("body", [None, [], {}, {"error": "text"}, {"error": {"kind": "?"}}, "x", 3])
def test_the_unreadable_is_internal(body: object) -> None:
    assert isinstance(from_wire(500, body), InternalError)


def test_messages_of_temporary_errors_do_not_break_on_odd_retry_times() -> None:
    assert (
        from_wire(503, {"error": {"kind": "pool_dry", "message": "m", "retry_after": "x"}}).retry_after == 1.0
    )
    assert errors.PoolDry("m").retry_after == 1.0
