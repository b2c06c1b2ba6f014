"""Versions only grow, tell whose they are, and hold the revision of what is written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.status import StatusError
from greenroom.api.kube.versions import LONGEST, REVISIONS, Clock, revision_of
from greenroom.api.kube.watching import Cache, Change, version_parameter


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e10), st.integers(0, 10**9)), min_size=1), st.integers(0, 4095))
def test_versions_grow_whatever_the_clock_does(steps: list[tuple[float, int]], tag: int) -> None:
    times = iter([now for now, _ in steps])
    clock = Clock(tag, lambda: next(times))
    versions = [clock.next(revision) for _, revision in steps]
    assert versions == sorted(set(versions))
    for version, (_, revision) in zip(versions, steps, strict=True):
        assert revision_of(version) == revision_of(str(version)) == revision % REVISIONS
        assert not clock.foreign(version)
        assert Clock(tag ^ 1).foreign(version)
        assert len(str(version)) <= LONGEST
        assert version_parameter(str(version)) == version


def test_nothing_is_nobodys() -> None:
    assert not Clock(3).foreign(0)
    assert revision_of("x") == -1


def test_nobody_goes_on_from_another_processs_version() -> None:
    clock, other = Clock(1), Clock(2)
    cache = Cache(clock.next(), clock=clock)
    obj = {"metadata": {"name": "a"}}
    version = clock.next()
    cache.record(Change(version, None, obj))
    for ask in (cache.since, lambda each: cache.at(each, [obj]), lambda each: cache.watch(each, None, int)):
        with pytest.raises(StatusError, match="of another server") as refused:
            ask(other.next())
        assert refused.value.code == 410
    assert cache.since(version) == []
