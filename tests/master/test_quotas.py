"""Quotas, and what an owner has, on its way and in the view."""

from __future__ import annotations

from fractions import Fraction

import pytest

from greenroom.errors import QuotaExceeded
from greenroom.fleet.usage import Amount
from greenroom.master.quotas import COUNT, CPU, MEMORY, Quota, check
from greenroom.wire.podsizes import MIB


def test_what_is_within_every_quota_is_allowed() -> None:
    quotas = [Quota("a", {COUNT: Fraction(2)}), Quota("b", {CPU: Fraction(4), "pods": Fraction(0)})]
    check(quotas, Amount(1, 2, 512), Amount(1, 2, 512))
    check([], Amount(10**6, 1, 1), Amount(1, 1, 1))


@pytest.mark.parametrize(
    ("hard", "says"),
    [
        (
            {CPU: Fraction(4)},
            "exceeded quota: q, requested: requests.cpu=2, used: requests.cpu=3, limited: requests.cpu=4",
        ),
        (
            {CPU: Fraction(9, 2)},
            "exceeded quota: q, requested: requests.cpu=2, used: requests.cpu=3, limited: requests.cpu=4500m",
        ),
        (
            {COUNT: Fraction(0), MEMORY: Fraction(1536 * MIB), CPU: Fraction(5)},
            "exceeded quota: q, requested: count/sandboxes.agents.x-k8s.io=1,requests.memory=1Gi, "
            "used: count/sandboxes.agents.x-k8s.io=3,requests.memory=1Gi, "
            "limited: count/sandboxes.agents.x-k8s.io=0,requests.memory=1536Mi",
        ),
    ],
    ids=["cpu", "a part of one", "several"],
)
def test_a_refusal_names_what_is_exceeded_as_kubernetes_does(hard: dict[str, Fraction], says: str) -> None:
    with pytest.raises(QuotaExceeded) as caught:
        check([Quota("q", hard)], Amount(3, 3, 1024), Amount(1, 2, 1024))
    assert caught.value.message == says
