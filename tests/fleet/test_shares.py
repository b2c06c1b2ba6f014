"""How a number is divided: the properties of largest remainder."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from greenroom.fleet.shares import split

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)
targets = st.integers(0, 10_000)
weighted = st.dictionaries(names, st.integers(0, 1000), min_size=1, max_size=30)
equal = st.sets(names, min_size=1, max_size=30)


@given(targets, weighted)
def test_shares_add_up_and_are_quotas_rounded(target, weights):
    shares = split(target, weights)
    total = sum(weights.values())
    assert shares.keys() == weights.keys()
    assert sum(shares.values()) == (target if total else 0)
    for name, share in shares.items():
        quota = Fraction(target * weights[name], total) if total else Fraction(0)
        assert abs(share - quota) < 1


@given(targets, weighted, st.randoms())
def test_the_order_of_nodes_does_not_matter(target, weights, random):
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    assert split(target, dict(shuffled), "pool") == split(target, weights, "pool")


@given(targets, weighted)
def test_a_larger_remainder_is_never_passed_over(target, weights):
    total = sum(weights.values())
    if not total:
        return
    shares = split(target, weights)
    rest = {name: Fraction(target * weight, total) % 1 for name, weight in weights.items()}
    up = [name for name in weights if shares[name] > Fraction(target * weights[name], total)]
    down = [name for name in weights if shares[name] <= Fraction(target * weights[name], total)]
    if up and down:
        assert min(rest[name] for name in up) >= max(rest[name] for name in down)


@given(st.integers(1, 29), equal, names)
def test_a_node_that_comes_takes_members_and_moves_none_between_the_others(target, nodes, newcomer):
    before = split(target, dict.fromkeys(nodes, 1), "pool")
    after = split(target, dict.fromkeys(nodes | {newcomer}, 1), "pool")
    assert all(after[name] <= before[name] for name in nodes - {newcomer})


def test_small_pools_do_not_all_lie_on_the_same_node():
    nodes = dict.fromkeys(["node-0", "node-1", "node-2"], 1)
    homes = {name for pool in range(30) for name, share in split(1, nodes, f"t{pool}/small").items() if share}
    assert homes == set(nodes)
