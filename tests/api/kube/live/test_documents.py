"""Every field of an object that somebody may write survives the record, and nothing that is derived is kept in it."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.kinds import CLAIM, KINDS, SANDBOX, Kind
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.conditions import Facts
from greenroom.api.kube.live.documents import Document
from greenroom.api.kube.live.instants import seconds_of
from greenroom.api.kube.live.shelves import ClaimRow, SandboxRow
from greenroom.api.kube.objects import copied
from greenroom.api.kube.validation import pruned, violations
from greenroom.wire.messages import FOREVER, Listed
from tests.support.kube_fleet import record
from tests.support.schema_values import values

AT = 1_700_000_000.0


def facts(listed: Listed, *, reachable: bool = True) -> Facts:
    return Facts(listed, "node-1", reachable, AT, 12_345_000_001)


def declared(listed: Listed, document: Document, ends: Any = None) -> Listed:
    kept = documents.declared_of(document, revision=1, retain=True, shutdown_at=seconds_of(ends))
    return msgspec.structs.replace(listed, declared=kept, ends_at=AT + FOREVER)


METADATA = st.fixed_dictionaries(
    {},
    optional={
        "labels": st.dictionaries(
            st.sampled_from(["a", "example.com/b"]), st.text("abc", min_size=1), min_size=1
        ),
        "annotations": st.dictionaries(st.sampled_from(["c", "d"]), st.text(min_size=1), min_size=1),
        "finalizers": st.just(["example.com/f"]),
        "ownerReferences": st.just([{"apiVersion": "v1", "kind": "X", "name": "x", "uid": "u"}]),
        "generateName": st.just("box-"),
        "deletionTimestamp": st.just("2026-01-01T00:00:00Z"),
        "managedFields": st.just([{"manager": "m", "operation": "Update"}]),
        "generation": st.integers(1, 9),
    },
)
MODES = st.sampled_from(["running", "paused"])


def spec_of(kind: Kind) -> st.SearchStrategy[Any]:
    return values(kind.schema["properties"]["spec"])


@settings(max_examples=60, deadline=None)
@given(METADATA, spec_of(SANDBOX), MODES)
def test_a_sandbox_comes_back_as_it_was_written(metadata: Any, spec: Any, state: Any) -> None:
    spec["operatingMode"] = "Suspended" if state == "paused" else "Running"
    spec.setdefault("shutdownPolicy", "Retain")
    written = {"metadata": copied(metadata), "spec": copied(spec)}
    base = record(state=state, name="box")
    listed = declared(base, Document(documents.sandbox_part(written)), spec.get("shutdownTime"))
    shown = documents.sandbox_object(facts(listed))
    assert shown["spec"] == spec
    for field, value in metadata.items():
        given_back = shown["metadata"][field]
        if field == "labels":
            own = documents.own_labels(listed, "node-1")
            given_back = {key: each for key, each in given_back.items() if key not in own}
        assert given_back == value
    # And what is shown, written again, is the same record.
    again = documents.sandbox_part(shown)
    assert Document(again) == documents.document_of(listed)


@settings(max_examples=60, deadline=None)
@given(METADATA, spec_of(CLAIM), METADATA)
def test_a_claim_comes_back_as_it_was_written(metadata: Any, spec: Any, other: Any) -> None:
    written = {"metadata": copied(metadata), "spec": copied(spec)}
    document = Document(
        documents.sandbox_part({"metadata": other, "spec": {}}), documents.claim_part(written)
    )
    ends = (spec.get("lifecycle") or {}).get("shutdownTime")
    listed = declared(record(name="job"), document, ends)
    shown = documents.claim_object(facts(listed))
    assert shown["spec"] == spec
    for field, value in metadata.items():
        assert shown["metadata"][field] == value
    assert documents.claim_part(shown) == documents.document_of(listed).claim
    owned = documents.sandbox_object(facts(listed))
    assert owned["metadata"]["ownerReferences"][0]["uid"] == shown["metadata"]["uid"]
    assert documents.sandbox_part(owned)["metadata"] == documents.document_of(listed).sandbox["metadata"]


RECORDS = st.builds(
    record,
    state=st.sampled_from(["running", "paused", "ended"]),
    name=st.sampled_from(["", "box"]),
    owner=st.sampled_from(["", "team"]),
    launch=st.sampled_from(["", "warm", "cold"]),
    ended_at=st.sampled_from([None, AT + 5]),
    end_reason=st.sampled_from(["", "its time was up", "its VM ended by itself"]),
    started_at=st.floats(AT, AT + 1000),
    ends_at=st.sampled_from([AT + 2000, AT + FOREVER + 2000]),
)


@settings(max_examples=60, deadline=None)
@given(RECORDS, st.booleans(), st.booleans())
def test_what_is_shown_is_of_the_schema_and_the_pieces_are_the_object(
    listed: Listed, reachable: bool, claimed: bool
) -> None:
    if claimed:
        part = {"metadata": {"generation": 1}, "spec": {"warmPoolRef": {"name": "warm"}}}
        pod = {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "base"}]}}}
        listed = declared(listed, Document({"metadata": {"generation": 1}, "spec": pod}, part))
    rows = [SandboxRow(facts(listed, reachable=reachable))]
    if claimed:
        rows.append(ClaimRow(facts(listed, reachable=reachable)))  # type: ignore[arg-type]
    for row in rows:
        shown = row.object()
        kind = next(kind for kind in KINDS if kind.name == shown["kind"])
        assert violations(shown, kind.schema) == []
        assert pruned(shown, kind.schema)[1] == []
        assert msgspec.json.decode(b"".join(row.json())) == shown
        assert msgspec.json.decode(row.metadata()) == shown["metadata"]
        assert dict(row.labels()) == (shown["metadata"].get("labels") or {})


def test_a_document_that_cannot_be_read_is_none() -> None:
    listed = msgspec.structs.replace(
        record(), declared=documents.declared_of(Document(), revision=1, retain=False)
    )
    broken = msgspec.structs.replace(
        listed, declared=msgspec.structs.replace(listed.declared, document=msgspec.Raw(b"[]"))
    )
    assert documents.document_of(broken) == documents.NOTHING
    assert not documents.claimed(broken)
