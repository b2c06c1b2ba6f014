"""Listing: filters as E2B's clients encode them, and pages that survive what happens between them."""

from __future__ import annotations

import urllib.parse
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from greenroom.api.e2b.listing import (
    Query,
    cut,
    decode_cursor,
    encode_cursor,
    micros_of,
    parse_instant,
    parse_metadata,
    parse_query,
    position_of,
    select,
    sort,
)
from greenroom.api.e2b.schemas import micros, timestamp
from greenroom.errors import BadRequest
from greenroom.wire.messages import Sandbox, Size

SMALL = Size("small", 1, 512, 4096)
ids = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=19, max_size=19).map(lambda text: "i" + text)
# Few distinct start times, so that ties happen.
starts = st.one_of(st.integers(0, 3).map(float), st.floats(1.6e9, 4e9))
labels = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"), max_size=2)
texts = st.text(st.characters(codec="utf-8"), max_size=12)


def sandbox(sandbox_id: str, started_at: float, **changes: object) -> Sandbox:
    fields = {
        "sandbox_id": sandbox_id,
        "template": "base",
        "size": SMALL,
        "state": "running",
        "started_at": started_at,
        "ends_at": started_at + 300,
        "node": "node-0",
        "owner": "me",
    }
    return Sandbox(**fields | changes)


sandboxes = st.lists(
    st.builds(
        sandbox,
        ids,
        starts,
        state=st.sampled_from(["running", "paused"]),
        metadata=labels,
        owner=st.sampled_from(["me", "you"]),
    ),
    unique_by=lambda entry: entry.sandbox_id,
    max_size=25,
)


def sdk_encoding(metadata: dict[str, str]) -> str:
    """As the Python SDK builds the filter; HTTP's own encoding around it is undone by the server."""
    return urllib.parse.urlencode(
        {urllib.parse.quote(key): urllib.parse.quote(value) for key, value in metadata.items()}
    )


@given(st.dictionaries(texts, texts, max_size=6))
def test_a_metadata_filter_survives_both_encodings(metadata):
    query = urllib.parse.parse_qs(urllib.parse.urlencode({"metadata": sdk_encoding(metadata)}))
    assert parse_metadata(query.get("metadata", [""])[0]) == metadata


@given(st.text(max_size=40))
def test_any_metadata_filter_is_read_or_refused(text):
    try:
        pairs = parse_metadata(text)
    except BadRequest:
        return
    assert all(isinstance(part, str) for pair in pairs.items() for part in pair)


@pytest.mark.parametrize(
    "text", ["noequals", "a=%FF", "a=%25FF", "&".join(f"k{number}=v" for number in range(65)), "&"]
)
def test_a_broken_metadata_filter_is_refused(text):
    with pytest.raises(BadRequest, match="metadata"):
        parse_metadata(text)


@given(sandboxes, labels, st.sampled_from([frozenset({"running"}), frozenset({"running", "paused"})]))
def test_selection(found, metadata, states):
    query = Query(metadata=metadata, states=states)
    selected = select(found, query, "me")
    assert selected == sorted(selected, key=position_of, reverse=True)
    for entry in found:
        matches = (
            entry.owner == "me"
            and entry.state in states
            and all(entry.metadata.get(key) == value for key, value in metadata.items())
        )
        assert (entry in selected) == matches


@given(sandboxes, st.integers(1, 5), st.booleans(), st.data())
def test_pages_neither_repeat_nor_skip_whatever_ends_and_begins_meanwhile(found, limit, newest_first, data):
    mine = [entry for entry in found if entry.owner == "me"]
    lasting = {entry.sandbox_id for entry in mine if data.draw(st.booleans())}
    newcomers = data.draw(sandboxes)
    assume(not {entry.sandbox_id for entry in newcomers} & {entry.sandbox_id for entry in found})
    present, seen, token = mine, [], None
    for _ in range(len(mine) + len(newcomers) + 2):
        query = Query(
            limit=limit, newest_first=newest_first, after=None if token is None else decode_cursor(token)
        )
        page = cut(select(present, query, "me"), query)
        assert len(page.sandboxes) <= limit
        seen += page.sandboxes
        token = page.next_token
        if token is None:
            break
        # Between two pages some end, the one the page ended with among them, and some begin.
        present = [entry for entry in present if entry.sandbox_id in lasting or data.draw(st.booleans())]
        if newcomers:
            present = [*present, newcomers.pop()]
    assert token is None
    names = [entry.sandbox_id for entry in seen]
    assert len(names) == len(set(names))
    assert lasting <= set(names)
    assert seen == sorted(seen, key=position_of, reverse=newest_first)


@given(sandboxes)
def test_the_total_counts_running_ones_on_all_pages(found):
    query = Query(limit=1)
    page = cut(select(found, query, "me"), query)
    assert page.running == sum(entry.owner == "me" and entry.state == "running" for entry in found)
    assert (page.next_token is not None) == (sum(entry.owner == "me" for entry in found) > 1)


@given(st.integers(-(10**18), 10**18), ids)
def test_a_cursor_is_its_position(started, sandbox_id):
    token = encode_cursor((started, sandbox_id))
    assert decode_cursor(token) == (started, sandbox_id)
    assert urllib.parse.quote(token, safe="") == token


@given(st.text(max_size=60))
def test_any_other_text_is_no_cursor(token):
    try:
        position = decode_cursor(token)
    except BadRequest:
        return
    assert encode_cursor(position) == token


@given(st.floats(0, 4e9))
def test_the_start_time_that_was_shown_finds_its_sandbox(started_at):
    shown = timestamp(started_at)
    assert parse_instant(shown) == micros(started_at)
    entry = sandbox("i" + "a" * 19, started_at)
    at = Query(started_after=parse_instant(shown))
    beyond = Query(started_after=parse_instant(shown) + 1)
    assert select([entry], at, "me") == [entry]
    assert select([entry], beyond, "me") == []


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))])))
def test_instants_keep_their_microseconds_in_any_zone(instant):
    assert parse_instant(instant.isoformat()) == micros_of(instant)
    assert parse_instant(instant.isoformat().replace("+", " ")) == micros_of(instant)


@pytest.mark.parametrize("text", ["yesterday", "2026-01-01", "2026-01-01T00:00:00", "1700000000"])
def test_a_time_without_a_zone_is_refused(text):
    with pytest.raises(BadRequest, match="startedAfter"):
        parse_instant(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", "0"),
        ("limit", "101"),
        ("limit", "-1"),
        ("limit", "x"),
        ("limit", "١"),
        ("limit", "1" * 5000),
        ("order", "up"),
        ("nextToken", "abc"),
        ("nextToken", "é"),
        ("startedAfter", "soon"),
    ],
)
def test_wrong_parameters_are_refused_by_name(field, value):
    with pytest.raises(BadRequest, match=field):
        parse_query({field: value}, [], 100)


def test_states():
    both = frozenset({"running", "paused"})
    assert parse_query({}, [], 100).states == both
    assert parse_query({}, ["running,paused"], 100).states == both
    assert parse_query({}, ["running", "paused"], 100).states == both
    assert parse_query({}, [""], 100).states == both
    assert parse_query({}, [" paused"], 100).states == frozenset({"paused"})
    with pytest.raises(BadRequest, match="state"):
        parse_query({}, ["running,gone"], 100)


def test_empty_parameters_count_as_absent():
    params = {"order": "", "limit": "", "nextToken": "", "startedAfter": "", "template": "", "metadata": ""}
    assert parse_query(params, [], 100) == Query()


def test_a_template_that_is_not_there_matches_nothing():
    entry = sandbox("i" + "a" * 19, datetime.now(UTC).timestamp())
    assert select([entry], Query(template="gone"), "me", None) == []
    assert select([entry], Query(template="x"), "me", "base") == [entry]


@given(st.dictionaries(ids, st.integers(0, 60), max_size=25), st.floats(1.6e9, 4e9))
def test_start_times_that_nearly_agree_are_in_the_order_of_positions(steps, base):
    found = [sandbox(sandbox_id, base + step * 2.5e-7) for sandbox_id, step in steps.items()]
    expected = sorted(found, key=position_of)
    sort(found)
    assert found == expected
