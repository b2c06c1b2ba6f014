"""How far the proxy believes a list of nodes, as a playbook of lists and times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from greenroom.proxy.nodes import DOUBT, Membership
from greenroom.proxy.resources import Relay
from greenroom.wire.messages import NodeList
from tests.support.proxying import node_info


def told(*codes: str, port: int = 1000) -> NodeList:
    return NodeList(1, [node_info(code, ("127.0.0.1", port)) for code in codes])


def test_first_list_is_taken() -> None:
    membership = Membership()
    membership.learn(told("aaaa", "bbbb"), 0)
    assert membership.relays == {
        "aaaa": Relay("127.0.0.1", 1000, "http://127.0.0.1:1"),
        "bbbb": Relay("127.0.0.1", 1000, "http://127.0.0.1:1"),
    }


def test_a_move_is_believed_at_once() -> None:
    membership = Membership()
    membership.learn(told("aaaa"), 0)
    membership.interrupted()
    membership.learn(told("aaaa", port=2000), 1)
    assert membership.relays["aaaa"].port == 2000


def test_a_familiar_master_may_remove_a_node() -> None:
    membership = Membership()
    membership.learn(told("aaaa", "bbbb"), 0)
    membership.learn(told("bbbb"), 1)
    assert list(membership.relays) == ["bbbb"]


def test_a_master_that_lost_its_memory_is_doubted() -> None:
    membership = Membership()
    membership.learn(told("aaaa", "bbbb"), 0)
    membership.interrupted()
    membership.learn(told(), 10)
    assert membership.next_decision == 10 + DOUBT
    membership.learn(told("aaaa"), 11)
    membership.settle(10 + DOUBT - 0.1)
    assert sorted(membership.relays) == ["aaaa", "bbbb"]
    membership.settle(10 + DOUBT)
    assert list(membership.relays) == ["aaaa"]
    assert membership.next_decision is None


def test_unusable_nodes_get_no_cluster() -> None:
    membership = Membership()
    bad = [node_info("AAAA", ("h", 1)), node_info("aaaaa", ("h", 1)), node_info("bbbb", ("h", 0))]
    membership.learn(NodeList(1, [*bad, node_info("cccc", ("", 1)), node_info("dddd", ("h", 1))]), 0)
    assert list(membership.relays) == ["dddd"]


@given(
    st.lists(
        st.one_of(st.none(), st.sets(st.sampled_from(["aaaa", "bbbb", "cccc"]))),
        max_size=12,
    )
)
def test_the_last_list_wins_in_the_end_and_no_listed_node_is_ever_missing(
    story: list[set[str] | None],
) -> None:
    membership, last = Membership(), None
    for moment, event in enumerate(story):
        if event is None:
            membership.interrupted()
        else:
            membership.learn(told(*event), moment)
            last = event
        assert (last or set()) <= membership.relays.keys()
    membership.settle(len(story) + DOUBT)
    assert membership.relays.keys() == (last or set())
