"""Schemas prune, fill in defaults and refuse, with the texts that Kubernetes has for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.kinds import KINDS, SANDBOX, WARM_POOL, Kind
from greenroom.api.kube.objects import copied
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.validation import (
    changes_refused,
    defaulted,
    field_validation,
    pruned,
    strictness,
    violations,
    warning_header,
    without_nulls,
)
from tests.support.schema_values import full, values


def pool(**spec: Any) -> dict[str, Any]:
    return {"spec": {"sandboxTemplateRef": {"name": "t"}, **spec}}


def lines(value: Any, kind: Kind = WARM_POOL) -> list[str]:
    return [cause.line() for cause in violations(value, kind.schema)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_object_with_every_field_is_accepted_and_nothing_of_it_is_lost(kind: Kind) -> None:
    value = full(kind.schema)
    kept, unknown = pruned(value, kind.schema)
    assert (kept, unknown) == (value, [])
    assert violations(kept, kind.schema) == []
    assert defaulted(copied(kept), kind.schema) == value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_fits_the_schema_stays_and_defaults_are_filled_in_once(
    kind: Kind, data: st.DataObject
) -> None:
    value = data.draw(values(kind.schema))
    assert pruned(value, kind.schema) == (value, [])
    assert violations(value, kind.schema) == []
    filled = defaulted(copied(value), kind.schema)
    assert violations(filled, kind.schema) == []
    assert defaulted(copied(filled), kind.schema) == filled


def test_unknown_fields_go_and_are_named_but_not_within_what_is_kept_as_it_is() -> None:
    value = {
        "spec": {
            "podTemplate": {"spec": {"containers": [{"name": "a", "new": 1}], "hostPID": True}, "odd": 1},
            "operatingMod": "Running",
        },
        "extra": 1,
    }
    kept, unknown = pruned(value, SANDBOX.schema)
    assert unknown == ["spec.podTemplate.odd", "spec.operatingMod", "extra"]
    assert kept == {
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "a", "new": 1}], "hostPID": True}}}
    }


def test_defaults_replace_nothing_but_a_null() -> None:
    assert defaulted(pool(), WARM_POOL.schema)["spec"]["replicas"] == 1
    assert defaulted(pool(replicas=None), WARM_POOL.schema)["spec"]["replicas"] == 1
    assert defaulted(pool(replicas=0), WARM_POOL.schema)["spec"]["replicas"] == 0
    assert "updateStrategy" not in defaulted(pool(), WARM_POOL.schema)["spec"]
    assert defaulted(pool(updateStrategy={}), WARM_POOL.schema)["spec"]["updateStrategy"] == {
        "type": "OnReplenish"
    }


def test_nulls_count_as_absent_unless_the_schema_has_them() -> None:
    value = {"metadata": {"creationTimestamp": None, "labels": None}, **pool(updateStrategy=None)}
    assert without_nulls(value, WARM_POOL.schema) == {"metadata": {"creationTimestamp": None}, **pool()}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({}, "spec: Required value"),
        ({"spec": {}}, "spec.sandboxTemplateRef: Required value"),
        (
            pool(replicas=-1),
            "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal to 0",
        ),
        (
            pool(replicas="3"),
            'spec.replicas: Invalid value: "string": spec.replicas in body must be of type integer: "string"',
        ),
        (
            pool(replicas=True),
            'spec.replicas: Invalid value: "boolean": spec.replicas in body must be of type integer: "boolean"',
        ),
        (
            pool(replicas=2**31),
            "spec.replicas: Invalid value: 2147483648: spec.replicas in body should be of int32",
        ),
        (
            pool(updateStrategy={"type": "Never"}),
            'spec.updateStrategy.type: Unsupported value: "Never": supported values: "Recreate", "OnReplenish"',
        ),
        (
            {"spec": {"sandboxTemplateRef": {"name": ""}}},
            'spec.sandboxTemplateRef.name: Invalid value: "": spec.sandboxTemplateRef.name in body should be at least '
            "1 chars long",
        ),
        (
            {"metadata": [], **pool()},
            'metadata: Invalid value: "array": metadata in body must be of type object: "array"',
        ),
    ],
    ids=["no-spec", "no-ref", "minimum", "type", "bool", "int32", "enum", "length", "object"],
)
def test_refusals_read_as_in_kubernetes(value: Any, line: str) -> None:
    assert lines(value) == [line]


def test_lists_know_what_is_there_twice() -> None:
    containers = [{"name": "a", "ports": [{"containerPort": 1}, {"containerPort": 1, "protocol": "TCP"}]}]
    value = {"spec": {"podTemplate": {"spec": {"containers": [*containers, {"name": "a"}]}}}}
    assert lines(value, SANDBOX) == [
        'spec.podTemplate.spec.containers[0].ports[1]: Duplicate value: {"containerPort": 1, "protocol": "TCP"}',
        'spec.podTemplate.spec.containers[1]: Duplicate value: {"name": "a"}',
    ]


AMOUNTS: dict[Any, bool] = {
    1: True,
    "500m": True,
    "2Gi": True,
    "1e3": True,
    "-1": True,
    "2GiB": False,
    "": False,
    1.5: False,
    "1\n": False,
}


@pytest.mark.parametrize(("amount", "fits"), AMOUNTS.items(), ids=repr)
def test_amounts(amount: Any, fits: bool) -> None:
    container = {"name": "a", "resources": {"requests": {"cpu": amount}}}
    found = lines({"spec": {"podTemplate": {"spec": {"containers": [container]}}}}, SANDBOX)
    assert (found == []) == fits


@pytest.mark.parametrize(
    ("instant", "fits"),
    [
        ("2026-12-01T00:00:00Z", True),
        ("2026-12-01T00:00:00.123456789+01:00", True),
        ("2026-12-01", False),
        ("2026-13-01T00:00:00Z", False),
        ("2026-12-01T00:00:00", False),
        ("٢026-12-01T00:00:00Z", False),
    ],
    ids=["utc", "offset", "day", "month", "no-zone", "digits"],
)
def test_instants(instant: str, fits: bool) -> None:
    value = {"spec": {"podTemplate": {"spec": {"containers": [{"name": "a"}]}}, "shutdownTime": instant}}
    assert (lines(value, SANDBOX) == []) == fits


def test_what_never_changes_is_refused_when_it_does() -> None:
    old = {"spec": {"volumeClaimTemplates": [{"spec": {}}], "operatingMode": "Running"}}
    new = {"spec": {"volumeClaimTemplates": [], "operatingMode": "Suspended"}}
    assert [cause.field for cause in changes_refused(new, old, SANDBOX.schema)] == [
        "spec.volumeClaimTemplates"
    ]
    assert [cause.field for cause in changes_refused({}, old, SANDBOX.schema)] == [
        "spec.volumeClaimTemplates"
    ]
    assert changes_refused(copied(old), old, SANDBOX.schema) == []


def test_field_validation_levels() -> None:
    assert field_validation(None) == field_validation("") == "Warn"
    assert strictness("Ignore", ["a"], ["b"]) == []
    assert strictness("Warn", ["a"], ["b"]) == ['unknown field "a"', 'duplicate field "b"']
    with pytest.raises(StatusError, match='strict decoding error: unknown field "a", duplicate field "b"'):
        strictness("Strict", ["a"], ["b"])
    with pytest.raises(StatusError, match="Unsupported value"):
        field_validation("strict")
    assert len(strictness("Warn", [str(n) for n in range(9999)], [])) == 64


def test_warnings_cannot_break_out_of_their_header() -> None:
    assert warning_header('unknown field "a"\r\nX: é') == '299 - "unknown field \\"a\\"??X: ?"'
