"""Tables have the kind's columns, and ages read as kubectl's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from greenroom.api.kube.kinds import KINDS, SANDBOX, WARM_POOL, Kind
from greenroom.api.kube.tables import age, human_duration, lookup, table
from tests.support.schema_values import full

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
AGES = {
    -5: "<invalid>",
    -1: "0s",
    0: "0s",
    119: "119s",
    120: "2m",
    121: "2m1s",
    599: "9m59s",
    600: "10m",
    3 * 3600 - 1: "179m",
    3 * 3600: "3h",
    3 * 3600 + 1200: "3h20m",
    8 * 3600: "8h",
    47 * 3600: "47h",
    48 * 3600: "2d",
    50 * 3600: "2d2h",
    9 * 86400: "9d",
    800 * 86400: "2y70d",
    9 * 365 * 86400: "9y",
}


@pytest.mark.parametrize(("seconds", "text"), AGES.items(), ids=AGES.values())
def test_ages(seconds: int, text: str) -> None:
    assert human_duration(seconds) == text


def test_an_age_that_is_not_known() -> None:
    assert age(None, NOW) == "<unknown>"
    assert age("2026-12-01T11:59:18Z", NOW) == "42s"


def test_a_table_of_sandboxes() -> None:
    box: dict[str, Any] = {
        "metadata": {"name": "box", "creationTimestamp": "2026-12-01T11:00:00Z"},
        "status": {
            "conditions": [{"type": "Other"}, {"type": "Ready", "status": "True", "reason": "Running"}]
        },
    }
    made = table([box, {"metadata": {"name": "bare"}}], SANDBOX, NOW, metadata={"resourceVersion": "7"})
    assert [each["name"] for each in made["columnDefinitions"]] == [
        "Name",
        "Ready",
        "Reason",
        "Node",
        "ID",
        "Age",
    ]
    assert [each["cells"] for each in made["rows"]] == [
        ["box", "True", "Running", "", "", "60m"],
        ["bare", "", "", "", "", "<unknown>"],
    ]
    assert made["rows"][0]["object"] == {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": box["metadata"],
    }
    assert made["metadata"] == {"resourceVersion": "7"}


def test_rows_include_what_was_asked_for() -> None:
    pool = {"metadata": {"name": "p"}, "spec": {}, "status": {"desiredReplicas": 3}}
    whole = table([pool], WARM_POOL, NOW, include="Object", headed=False)
    assert whole["columnDefinitions"] == []
    assert whole["rows"] == [{"cells": ["p", None, 3, "", "<unknown>"], "object": pool}]
    assert table([pool], WARM_POOL, NOW, include="None")["rows"] == [
        {"cells": ["p", None, 3, "", "<unknown>"]}
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_column_has_a_value_in_an_object_with_every_field(kind: Kind) -> None:
    value = full(kind.schema)
    for condition in value.get("status", {}).get("conditions", []):
        condition["type"] = "Ready"
    assert all(lookup(value, column.path) is not None for column in kind.columns)
    assert len(table([value], kind, NOW)["rows"][0]["cells"]) == 1 + len(kind.columns)


def test_paths_that_columns_cannot_have() -> None:
    with pytest.raises(ValueError, match="no path"):
        lookup({}, "..name")
    assert lookup({"a": 1}, ".a.b[0]") is None
