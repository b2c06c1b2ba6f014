"""A real master process: names that are given once, and quotas that hold, whichever node has the sandboxes."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable

import msgspec
import pytest

from greenroom.errors import (
    GreenroomError,
    JournalUnavailable,
    NameTaken,
    NodeUnavailable,
    OutcomeUnknown,
    PoolDry,
    QuotaExceeded,
    RuntimeFailure,
)
from greenroom.store.records import StoredObject
from greenroom.wire.messages import Sandbox, Size
from tests.support.cluster import Cluster
from tests.support.fake_node import DEADLINE, FakeNode
from tests.support.waiting import until_true

Claim = Callable[..., Sandbox]
BOX = {"owner": "ns", "name": "box"}


def confirm(plane: Cluster, node: FakeNode, sandbox: Sandbox) -> None:
    plane.call("api", "POST", f"{node.url}/v1/sandboxes/{sandbox.sandbox_id}/confirm", Sandbox)


def test_a_name_is_given_once_for_each_owner(plane: Cluster, node: FakeNode, claim: Claim) -> None:
    made = claim("auto-1", **BOX)
    assert (made.owner, made.name) == ("ns", "box")
    with pytest.raises(NameTaken, match="sandbox 'box' exists already in namespace 'ns'"):
        claim("auto-2", **BOX)
    confirm(plane, node, made)
    with pytest.raises(NameTaken):
        claim("auto-3", **BOX)
    claim("auto-4", owner="other", name="box")
    claim("auto-5", owner="ns", name="box-2")
    assert len(node.claims) == 3


def test_of_two_at_once_one_wins(plane: Cluster, node: FakeNode, claim: Claim) -> None:
    plane.node("node-1")
    node.hold_claims.clear()
    plane.nodes[1].hold_claims.clear()
    found: list[Sandbox | NameTaken] = []

    def ask(number: int) -> None:
        try:
            found.append(claim(f"auto-{number}", **BOX))
        except NameTaken as error:
            found.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for each in plane.nodes:
        each.hold_claims.set()
    for thread in threads:
        thread.join(20)
    assert sorted(type(each).__name__ for each in found) == ["NameTaken"] * 3 + ["Sandbox"]
    assert sum(len(each.sandboxes) for each in plane.nodes) == 1


@pytest.mark.parametrize("confirmed", [True, False], ids=["confirmed", "held"])
def test_a_name_is_known_to_the_next_master(
    plane: Cluster, node: FakeNode, claim: Claim, confirmed: bool
) -> None:
    made = claim("auto-1", **BOX)
    if confirmed:
        confirm(plane, node, made)
    assert plane.masters[0].stop(signal.SIGKILL) == -signal.SIGKILL
    plane.masters[0] = plane.master()
    with pytest.raises(NameTaken):
        claim("auto-2", **BOX)
    node.masters[:] = [plane.masters[0].url]
    assert claim("auto-3", owner="ns", name="another").name == "another"


def test_a_claim_that_fails_frees_its_name(node: FakeNode, claim: Claim) -> None:
    node.claim_error = RuntimeFailure("the guest did not answer")
    with pytest.raises(RuntimeFailure):
        claim("auto-1", **BOX)
    node.claim_error = None
    assert claim("auto-2", **BOX).name == "box"


def test_a_name_is_free_again_after_its_sandbox(plane: Cluster, node: FakeNode, claim: Claim) -> None:
    made = claim("auto-1", **BOX)
    confirm(plane, node, made)
    del node.sandboxes[made.sandbox_id]

    def made_again() -> bool:
        try:
            return claim("auto-2", **BOX).name == "box"
        except NameTaken:
            return False

    until_true(made_again, DEADLINE)


def test_a_name_is_free_again_when_its_sandbox_was_never_confirmed(
    plane: Cluster, node: FakeNode, claim: Claim
) -> None:
    made = claim("auto-1", **BOX)
    plane.call("api", "DELETE", f"{node.url}/v1/sandboxes/{made.sandbox_id}", type(None))

    def made_again() -> bool:
        try:
            return claim("auto-2", **BOX).name == "box"
        except NameTaken:
            return False

    until_true(made_again, DEADLINE)


def test_the_same_key_again_is_no_second_sandbox_of_that_name(node: FakeNode, claim: Claim) -> None:
    made = claim("mine", **BOX)
    assert claim("mine", **BOX) == made


def test_after_a_lost_answer_nobody_knows_whether_the_name_is_taken(node: FakeNode, claim: Claim) -> None:
    node.drop_claim_answers = 1
    with pytest.raises(OutcomeUnknown):
        claim("mine", **BOX)
    with pytest.raises(NodeUnavailable, match="not known yet whether sandbox 'box' exists"):
        claim("auto-2", **BOX)
    assert claim("mine", **BOX).name == "box"


def test_a_name_waits_for_a_node_that_is_not_seen_until_it_is_or_has_lost_its_lease(
    plane: Cluster, node: FakeNode, claim: Claim
) -> None:
    other = plane.node("node-1", warm=1)
    assert claim("auto-1", owner="ns", name="first").name == "first"
    other.list_error = RuntimeFailure("its disk is full")
    done = threading.Event()

    def ask() -> None:
        claim("auto-2", **BOX)
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    # Without a name nothing is waited for.
    claim("auto-3")
    assert not done.is_set()
    other.list_error = None
    asking.join(20)
    assert done.is_set()
    other.stop()
    assert claim("auto-4", owner="ns", name="third").node == "node-0"


def test_one_that_requires_a_warm_pool_is_told_where_there_is_none(plane: Cluster, claim: Claim) -> None:
    with pytest.raises(PoolDry, match="no node keeps base sandboxes of size small warm; declare") as caught:
        claim("auto-1", warm="require", wait=0.1)
    assert caught.value.retry_after == 2.0
    with pytest.raises(
        PoolDry, match=r"no node keeps the base .* of SandboxWarmPool 'p' yet; its conditions"
    ):
        claim("auto-2", warm="require", wait=0.1, pool="p")


def test_a_dry_pool_is_named_where_the_claim_came_by_one(node: FakeNode, claim: Claim) -> None:
    node.claim_error = PoolDry("none came free", retry_after=7)
    with pytest.raises(PoolDry, match=r"^SandboxWarmPool 'p': none came free$") as caught:
        claim("auto-1", pool="p")
    assert caught.value.retry_after == 7.0


def test_a_quota_holds_over_all_nodes_before_any_is_asked(
    plane: Cluster, node: FakeNode, claim: Claim
) -> None:
    document = {"metadata": {"name": "few"}, "spec": {"hard": {"requests.cpu": "3"}}}
    quota = StoredObject(
        resource="resourcequotas",
        namespace="ns",
        name="few",
        document=msgspec.Raw(msgspec.json.encode(document)),
    )
    plane.stored(lambda store: store.put_object(quota, 0))
    made: list[Sandbox] = []
    numbers = itertools.count()

    def refused() -> GreenroomError | None:
        try:
            made.append(claim(f"auto-{next(numbers)}", owner="ns"))
        except QuotaExceeded as error:
            return error
        return None

    errors: list[GreenroomError] = []
    while not errors and len(made) < 100:
        # The master reads the quota a moment after it was written.
        errors += [error] if (error := refused()) else []
    assert len(made) >= 3
    assert "exceeded quota: few, requested: requests.cpu=1, used: requests.cpu=" in str(errors[0])
    asked = len(node.claims)
    with pytest.raises(QuotaExceeded, match=r"limited: requests\.cpu=3"):
        claim("auto-x", owner="ns", size=Size("medium", 2, 1024, 4096))
    assert len(node.claims) == asked
    claim("auto-y", owner="somebody-else")
    for sandbox in made:
        confirm(plane, node, sandbox)
        del node.sandboxes[sandbox.sandbox_id]
    made.clear()
    until_true(lambda: refused() is None, DEADLINE)


def test_a_node_whose_journal_is_full_leaves_claims_to_the_others(
    plane: Cluster, node: FakeNode, claim: Claim
) -> None:
    other = plane.node("node-1")
    node.claim_error = JournalUnavailable(
        "the node cannot use its journal now (disk is full); free disk space"
    )
    made = [claim(f"auto-{number}", owner="ns", name=f"box-{number}") for number in range(6)]
    assert {each.node for each in made} == {"node-1"}
    other.claim_error = node.claim_error
    with pytest.raises(JournalUnavailable, match="free disk space"):
        claim("auto-last")
