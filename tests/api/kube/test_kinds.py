"""The registry is consistent: schemas are structural and described, columns and selectors find their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.api.kube.kinds import CORE, KINDS, Kind, groups
from greenroom.api.kube.schemas.building import INT_OR_STRING, LIST_KEYS, LIST_TYPE, MERGE_KEY, PRESERVE
from greenroom.api.kube.schemas.pools import SCALE


def schemas() -> list[tuple[str, dict[str, Any]]]:
    """All schemas of the registry by name."""
    found = [(kind.name, kind.schema) for kind in (*KINDS, *CORE)]
    found += [(action.takes, action.schema) for kind in KINDS for action in kind.actions]
    found += [
        (action.gives, action.gives_schema)
        for kind in KINDS
        for action in kind.actions
        if action.gives_schema
    ]
    return [*found, ("Scale", SCALE)]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all within it, with their paths."""
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from nodes(each, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from nodes(schema[name], f"{path}[]")


@pytest.mark.parametrize(
    ("name", "schema"), schemas(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_schemas_are_structural_and_every_field_is_described(name: str, schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        assert "type" in node or node.get(INT_OR_STRING), f"{name}{path} has no type"
        if not path.endswith("[]"):
            assert node["description"].endswith("."), f"{name}{path} has no description"
        if node.get("type") == "array":
            assert node[LIST_TYPE] in ("atomic", "set", "map"), f"{name}{path} does not say how it merges"
        if node.get(LIST_TYPE) == "map":
            known = node["items"]["properties"]
            assert set(node[LIST_KEYS]) <= known.keys()
            assert node[MERGE_KEY] in node[LIST_KEYS]
            required = node["items"].get("required", [])
            assert all(key in required or "default" in known[key] for key in node[LIST_KEYS])
        if node.get("type") == "object":
            assert node.keys() & {"properties", "additionalProperties", PRESERVE}, f"{name}{path} has nothing"
            assert set(node.get("required", [])) <= node.get("properties", {}).keys()
        if "enum" in node and "default" in node:
            assert node["default"] in node["enum"]


def reaches(schema: dict[str, Any], path: str) -> bool:
    """Whether a JSONPath or a selector's field leads to a field of the schema."""
    node: dict[str, Any] | None = schema
    for name in re.sub(r"\[[^]]*\]", ".[]", path).strip(".").split("."):
        node = (node or {}).get("items") if name == "[]" else (node or {}).get("properties", {}).get(name)
    return node is not None


@pytest.mark.parametrize("kind", [*KINDS, *CORE], ids=lambda kind: kind.name)
def test_columns_selectors_and_scale_name_fields_that_there_are(kind: Kind) -> None:
    paths = [column.path for column in kind.columns] + list(kind.selectable)
    if kind.scale:
        paths += [".".join(path) for path in (kind.scale.spec, kind.scale.status, kind.scale.selector)]
    assert [path for path in paths if not reaches(kind.schema, path)] == []
    assert kind.has_status <= ("status" in kind.root_fields)


def test_no_name_means_two_kinds() -> None:
    names = [name for kind in (*KINDS, *CORE) for name in (kind.plural, kind.singular, *kind.short_names)]
    assert len(names) == len(set(names))
    assert {group: list(versions) for group, versions in groups().items()} == {
        "agents.x-k8s.io": ["v1beta1"],
        "extensions.agents.x-k8s.io": ["v1beta1"],
        "sandbox.greenroom.dev": ["v1beta1"],
    }


def test_errors_name_the_resource_or_the_kind() -> None:
    assert str(KINDS[0].subject("box")) == "sandboxes.agents.x-k8s.io"
    assert str(KINDS[0].subject_of_kind("box")) == "Sandbox.agents.x-k8s.io"
