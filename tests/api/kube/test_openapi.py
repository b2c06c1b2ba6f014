"""The description has every kind, every path and every field, and refers to nothing that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.api.kube.kinds import CORE, KINDS, Kind, groups
from greenroom.api.kube.openapi import GVK, component, document, documents, index

ALL = (*KINDS, *CORE)


def references(node: Any) -> Iterator[str]:
    """All `$ref` of a document."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for each in node.values():
            yield from references(each)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def of(kind: Kind) -> dict[str, Any]:
    return document(groups(ALL)[kind.group][kind.version])


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_kinds_are_found_by_their_paths_as_explain_does(kind: Kind) -> None:
    made = of(kind)
    scope = "/namespaces/{namespace}" if kind.namespaced else ""
    operation = made["paths"][f"{kind.prefix}{scope}/{kind.plural}"]["get"]
    assert operation[GVK] == {"group": kind.group, "version": kind.version, "kind": kind.name}
    schema = made["components"]["schemas"][component(kind.group, kind.version, kind.name)]
    assert schema[GVK] == [operation[GVK]]
    assert schema["properties"] == kind.schema["properties"]
    one = made["paths"][f"{kind.prefix}{scope}/{kind.plural}/{{name}}"]
    assert ("patch" in one) == ("patch" in kind.verbs)
    if "patch" in one:
        # Clients look here for whether the server checks fields itself.
        assert "fieldValidation" in {each["name"] for each in one["patch"]["parameters"]}


def test_nothing_refers_to_what_is_not_there_and_operations_have_names_of_their_own() -> None:
    for versions in groups(ALL).values():
        for kinds in versions.values():
            made = document(kinds)
            names = {f"#/components/schemas/{name}" for name in made["components"]["schemas"]}
            assert set(references(made)) <= names
            ids = [
                operation["operationId"]
                for path in made["paths"].values()
                for method, operation in path.items()
                if method != "parameters"
            ]
            assert len(ids) == len(set(ids))


def test_documents_are_named_with_their_hashes() -> None:
    known = documents(ALL)
    assert set(index(known)["paths"]) == {
        "api/v1",
        "apis/agents.x-k8s.io/v1beta1",
        "apis/extensions.agents.x-k8s.io/v1beta1",
        "apis/sandbox.greenroom.dev/v1beta1",
    }
    one = known["api/v1"]
    assert index(known)["paths"]["api/v1"]["serverRelativeURL"] == f"/openapi/v3/api/v1?hash={one.hash}"
    assert json.loads(one.body)["openapi"] == "3.0.0"
    assert {name: each.hash for name, each in documents(ALL).items()} == {
        name: each.hash for name, each in known.items()
    }
