"""A real master process placing claims on fake nodes: what is repeated elsewhere, and what never is."""

from __future__ import annotations

import threading

import pytest

from greenroom.errors import (
    Forbidden,
    KeyConflict,
    NodeUnavailable,
    OutcomeUnknown,
    PoolDry,
    RuntimeFailure,
    UnknownTemplate,
)
from greenroom.wire.messages import NodeList, Sandbox, Template


def test_a_claim_reaches_the_node_with_its_templates_name(plane, node, claim):
    [template] = plane.call("api", "GET", f"{plane.masters[0].url}/v1/templates", list[Template])
    for number, ref in enumerate((template.template_id, "base", "base:default")):
        sandbox = claim(f"auto-{number}", template=ref)
        assert sandbox == node.sandboxes[sandbox.sandbox_id]
    assert {entry.template for entry in node.claims} == {"base"}


def test_an_unknown_template(claim, node):
    for ref in ("nothing", "base:other"):
        with pytest.raises(UnknownTemplate):
            claim("auto-1", template=ref)
    assert node.claims == []


def test_without_any_node(claim):
    with pytest.raises(NodeUnavailable):
        claim("auto-1")


def test_a_draining_node_gets_nothing(plane, node, claim):
    other = plane.node("node-1", warm=1)
    node.draining = True
    node.shares.clear()
    node.wait_until(lambda: node.shares and not next(iter(node.shares.values())).pools)
    assert claim("auto-1").node == "node-1"
    assert node.claims == []
    assert other.warm == 0


def test_the_node_with_most_warm_members_is_asked_first(plane, node, claim):
    node.warm = 0
    other = plane.node("node-1", warm=1)
    node.shares.clear()
    node.wait_registered()
    assert claim("auto-1").node == "node-1"
    assert node.claims == []
    assert len(other.claims) == 1


def test_a_dry_node_is_left_for_one_that_has_members(plane, node, claim):
    plane.node("node-1", warm=1)
    node.heartbeats = node.tells_stock = False  # its report of 100 stands, and is wrong
    node.warm = 0
    assert claim("auto-1").node == "node-1"
    assert len(node.claims) == 1


def test_dry_everywhere(node, claim):
    node.warm = 0
    with pytest.raises(PoolDry) as caught:
        claim("auto-1")
    assert caught.value.retry_after == 2.5


def test_a_node_that_cannot_be_reached_is_left_for_another(plane, node, claim):
    plane.node("node-1", warm=1)
    node.stop()  # within its lease it still counts as alive, and has the most members
    assert claim("auto-1").node == "node-1"


def test_other_errors_are_passed_on(plane, node, claim):
    other = plane.node("node-1", warm=1)
    node.claim_error = RuntimeFailure("the guest did not answer")
    with pytest.raises(RuntimeFailure, match="guest"):
        claim("auto-1")
    assert other.claims == []


def test_a_lost_answer_is_never_sent_to_another_node(plane, node, claim):
    other = plane.node("node-1", warm=1)
    node.drop_claim_answers = 1
    with pytest.raises(OutcomeUnknown):
        claim("mine")
    assert other.claims == []
    sandbox = claim("mine")
    assert list(node.sandboxes) == [sandbox.sandbox_id]
    assert other.claims == []


def test_the_same_key_with_another_body(node, claim):
    sandbox = claim("mine")
    assert claim("mine", wait=0.7) == sandbox
    with pytest.raises(KeyConflict):
        claim("mine", ttl=61.0)


def test_another_master_finds_the_key_by_asking(plane, node, claim):
    sandbox = claim("mine")
    node.masters.append(plane.master().url)
    second = plane.node("node-1", warm=200)
    plane.masters[0], plane.masters[1] = plane.masters[1], plane.masters[0]
    assert claim("mine") == sandbox
    assert second.claims == []
    assert "GET /v1/claims/mine" in second.calls


def test_a_key_waits_while_a_live_node_cannot_be_asked(plane, node, claim):
    silent = plane.node("node-1", warm=1)
    silent.stop()
    with pytest.raises(NodeUnavailable, match="idempotency key"):
        claim("mine")
    assert node.claims == []
    watched = plane.masters[0].url
    node.wait_until(
        lambda: all(info.live == (info.status.name == "node-0") for info in nodes_of(plane, watched))
    )
    assert claim("mine").node == "node-0"


def nodes_of(plane, url):
    return plane.call("api", "GET", f"{url}/v1/nodes", NodeList).nodes


def test_keys_drawn_by_the_api_are_not_asked_for(node, claim):
    claim("auto-1")
    assert not any(call.startswith("GET /v1/claims/") for call in node.calls)


def test_equal_keys_at_the_same_time_make_one_sandbox(node, claim):
    node.hold_claims.clear()
    found: list[Sandbox] = []
    threads = [threading.Thread(target=lambda: found.append(claim("mine"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    node.wait_until(lambda: node.claims)
    node.hold_claims.set()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    assert {sandbox.sandbox_id for sandbox in found} == set(node.sandboxes)
    assert len(node.sandboxes) == 1


def test_only_the_api_may_claim(plane, node):
    with pytest.raises(Forbidden):
        plane.call("node", "POST", f"{plane.masters[0].url}/v1/claims", Sandbox, {})
