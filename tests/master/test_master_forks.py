"""A real master process: forks take names and count for quotas as claims do, and are all let through or none."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable

import msgspec
import pytest

from greenroom.errors import Forbidden, NameTaken, QuotaExceeded, UnknownSandbox
from greenroom.store.records import StoredObject
from greenroom.wire.messages import ForkList, ForkRequest, Sandbox
from tests.support.cluster import Cluster
from tests.support.fake_node import DEADLINE, FakeNode

Claim = Callable[..., Sandbox]


def fork(plane: Cluster, sandbox_id: str, key: str, *names: str, count: int = 1) -> ForkList:
    keys = [f"{key}-{number}" for number in range(len(names) or count)]
    request = ForkRequest(keys=keys, ttl=60.0, names=list(names))
    return plane.call(
        "api", "POST", f"{plane.masters[0].url}/v1/sandboxes/{sandbox_id}/fork", ForkList, request
    )


def confirm(plane: Cluster, sandbox: Sandbox) -> Sandbox:
    plane.call("api", "POST", f"{plane.nodes[0].url}/v1/sandboxes/{sandbox.sandbox_id}/confirm", Sandbox)
    return sandbox


@pytest.fixture
def box(plane: Cluster, node: FakeNode, claim: Claim) -> Sandbox:
    """The first sandbox in a namespace that may have three."""
    document = {"spec": {"hard": {"count/sandboxes.agents.x-k8s.io": "3"}}}
    quota = StoredObject(
        resource="resourcequotas",
        namespace="ns",
        name="few",
        document=msgspec.Raw(msgspec.json.encode(document)),
    )
    plane.stored(lambda store: store.put_object(quota, 0))
    made: list[Sandbox] = []
    # The master reads the quota a moment after it was written.
    with contextlib.suppress(QuotaExceeded):
        while len(made) < 1000:
            made.append(claim(f"auto-{len(made)}", owner="ns"))
    assert 3 <= len(made) < 1000
    for sandbox in made:
        confirm(plane, sandbox)
    for sandbox in made[1:]:
        del node.sandboxes[sandbox.sandbox_id]
    return made[0]


def forked(plane: Cluster, sandbox: Sandbox, *names: str, count: int = 1) -> ForkList:
    """Once the master has seen that there is room for them."""
    ends = time.monotonic() + DEADLINE
    for number in itertools.count():
        try:
            return fork(plane, sandbox.sandbox_id, f"auto-room{number}", *names, count=count)
        except QuotaExceeded:
            assert time.monotonic() < ends, "there was no room in time"
    raise AssertionError


def test_forks_are_within_the_quota_or_none_is_made(plane: Cluster, node: FakeNode, box: Sandbox) -> None:
    with pytest.raises(QuotaExceeded, match="exceeded quota: few"):
        fork(plane, box.sandbox_id, "auto-many", count=3)
    made = forked(plane, box, count=2)
    assert all(each.sandbox is not None for each in made.forks)
    # They count from when they were let through, confirmed or not.
    with pytest.raises(QuotaExceeded):
        fork(plane, box.sandbox_id, "auto-more")
    assert len(node.sandboxes) == 3


def test_what_came_of_no_fork_does_not_count(plane: Cluster, node: FakeNode, box: Sandbox) -> None:
    node.fork_error = "no memory"
    assert [each.sandbox is None for each in forked(plane, box, count=2).forks] == [False, True]
    node.fork_error = None
    assert forked(plane, box).forks[0].sandbox is not None


def test_a_fork_that_is_asked_for_again_is_the_same_and_counts_once(
    plane: Cluster, node: FakeNode, box: Sandbox
) -> None:
    forked(plane, box)
    first = fork(plane, box.sandbox_id, "mine")
    assert len(node.sandboxes) == 3
    assert fork(plane, box.sandbox_id, "mine") == first
    assert len(node.sandboxes) == 3


def test_a_fork_takes_its_name_and_no_other_has_it(plane: Cluster, node: FakeNode, claim: Claim) -> None:
    other = claim("auto-1", owner="ns", name="box")
    confirm(plane, other)
    with pytest.raises(NameTaken):
        fork(plane, other.sandbox_id, "auto-a", "copy", "box")
    made = fork(plane, other.sandbox_id, "auto-b", "copy").forks[0].sandbox
    assert made is not None
    for again in (
        lambda: fork(plane, other.sandbox_id, "auto-c", "copy"),
        lambda: claim("auto-2", owner="ns", name="copy"),
    ):
        with pytest.raises(NameTaken):
            again()
    assert len(node.sandboxes) == 2


def test_what_cannot_be_forked(plane: Cluster, node: FakeNode) -> None:
    for sandbox_id in ("nothing", f"i{node.code}{'a' * 15}"):
        with pytest.raises(UnknownSandbox):
            fork(plane, sandbox_id, "auto-1")
    request = ForkRequest(keys=["auto-1"], ttl=60.0)
    with pytest.raises(Forbidden):
        plane.call("node", "POST", f"{plane.masters[0].url}/v1/sandboxes/x/fork", ForkList, request)
