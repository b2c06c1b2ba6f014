"""One caller's watches do not take everybody's connections."""

from __future__ import annotations

import pytest

from greenroom.api.kube.crowd import AGAIN, ALL, EACH, Crowd
from greenroom.api.kube.status import StatusError
from greenroom.wire.guarded import CONNECTIONS


def refused(crowd: Crowd, who: str) -> bool:
    with pytest.raises(StatusError) as told:
        crowd.enter(who)
    return (told.value.code, told.value.reason, told.value.retry_after) == (429, "TooManyRequests", AGAIN)


def test_each_caller_has_a_bound_and_all_have_one() -> None:
    crowd = Crowd(each=2, everyone=3)
    crowd.enter("a")
    crowd.enter("a")
    assert refused(crowd, "a")
    crowd.enter("b")
    assert refused(crowd, "b")
    assert refused(crowd, "c")
    crowd.leave("a")
    crowd.enter("c")
    for who in "abc":
        crowd.leave(who)
    for _ in range(2):
        crowd.enter("a")


def test_connections_are_left_for_all_else() -> None:
    assert EACH < ALL < CONNECTIONS


def test_who_never_entered_cannot_leave() -> None:
    with pytest.raises(KeyError):
        Crowd().leave("a")
