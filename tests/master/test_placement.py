"""Which node a claim goes to, and how hints follow what nodes answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from greenroom.master.placement import Candidate, Hints, choose
from greenroom.wire.messages import NodeStatus, PoolStatus

POOL = ("base", "small")
counts = st.integers(0, 50)
candidates = st.lists(
    st.builds(
        Candidate,
        name=st.text("abcdef", min_size=1, max_size=6),
        keeps_pool=st.booleans(),
        warm=counts,
        starting=counts,
        waiting=counts,
        sandboxes=counts,
    ),
    unique_by=lambda candidate: candidate.name,
    max_size=8,
)


def report(name: str, warm: int = 0, waiting: int = 0, starting: int = 0, sandboxes: int = 0) -> NodeStatus:
    pool = PoolStatus(template="base", size="small", target=4, warm=warm, starting=starting, waiting=waiting)
    return NodeStatus(
        name=name,
        code="aaaa",
        api_url="http://h",
        relay_host="h",
        relay_port=1,
        engine="qemu",
        pools=[pool],
        sandboxes=sandboxes,
    )


@given(candidates, st.randoms())
def test_the_choice_is_the_best_and_does_not_depend_on_order(nodes, random):
    best = choose(nodes)
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert choose(shuffled) == best
    if not nodes:
        assert best is None
        return
    assert best.warm == max(node.warm for node in nodes)
    rivals = [node for node in nodes if node.warm == best.warm]
    assert best.keeps_pool == any(node.keeps_pool for node in rivals)
    peers = [node for node in rivals if node.keeps_pool == best.keeps_pool]
    assert best.waiting - best.starting == min(node.waiting - node.starting for node in peers)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_claims_between_two_reports_take_every_warm_member_once(warm):
    hints = Hints()
    for number, count in enumerate(warm):
        hints.reported(report(f"n{number}", warm=count))
    names = [f"n{number}" for number in range(len(warm))]
    taken = dict.fromkeys(names, 0)
    for _ in range(sum(warm)):
        name = hints.choose(names, POOL)
        hints.sent(name, POOL)
        taken[name] += 1
    assert list(taken.values()) == warm
    assert hints.choose(names, POOL, warm_only=True) is None
    assert hints.choose(names, POOL) is not None


def test_the_shortest_queue_when_all_are_dry():
    hints = Hints()
    hints.reported(report("n0", waiting=3))
    hints.reported(report("n1", waiting=1))
    assert hints.choose(["n0", "n1"], POOL) == "n1"
    for _ in range(3):
        hints.sent("n1", POOL)
    assert hints.choose(["n0", "n1"], POOL) == "n0"


def test_a_node_without_the_pool_only_when_no_other_is_left():
    hints = Hints()
    hints.reported(report("n1", waiting=9, sandboxes=9))
    assert hints.choose(["n0", "n1"], POOL) == "n1"
    assert hints.choose(["n0", "n1"], POOL, tried=["n1"]) == "n0"
    assert hints.choose(["n0", "n1"], POOL, tried=["n0", "n1"]) is None


def test_a_dry_answer_counts_until_the_next_report():
    hints = Hints()
    hints.reported(report("n0", warm=9))
    hints.reported(report("n1", warm=1))
    hints.dry("n0", POOL)
    assert hints.choose(["n0", "n1"], POOL) == "n1"
    hints.reported(report("n0", warm=2))
    assert hints.choose(["n0", "n1"], POOL) == "n0"


def test_a_claim_that_was_not_taken_gives_its_member_back():
    hints = Hints()
    hints.reported(report("n0", warm=1))
    hints.sent("n0", POOL)
    hints.not_taken("n0", POOL)
    hints.not_taken("n0", POOL)
    assert hints.candidate("n0", POOL).warm == 1
    hints.forget("n0")
    assert hints.candidate("n0", POOL).keeps_pool is False
