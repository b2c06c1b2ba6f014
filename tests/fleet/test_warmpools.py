"""What pools and templates say: numbers that are wanted, members that can be made, and the words where none can."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from greenroom.fleet.warmpools import (
    Autoscaling,
    Bounds,
    Members,
    PoolDocument,
    Templates,
    bounds,
    members_of,
    wish_of,
)
from greenroom.wire.messages import PoolName, Size, Template

OWN = Size("own", 3, 700, 4096)
KNOWN = Templates([Template(template_id="t" * 20, name="base", size=OWN, created_at=0.0)])


@pytest.mark.parametrize(
    ("replicas", "lowest", "highest", "least", "most"),
    [
        (3, None, 1, 1, 1),
        (3, None, 9, 3, 9),
        (0, None, 4, 0, 4),
        (3, 0, 9, 0, 9),
        (3, 5, 9, 5, 9),
        (3, 9, 5, 5, 5),
        (3, None, None, 3, 3),
        (1, 4, None, 4, 4),
        (-2, None, 4, 0, 4),
        (10**9, None, None, 10**6, 10**6),
    ],
)
def test_a_maximum_holds_and_replicas_are_the_minimum_where_none_is_named(
    replicas: int, lowest: int | None, highest: int | None, least: int, most: int
) -> None:
    assert bounds(replicas, Autoscaling(lowest, highest)) == Bounds(least, most)


def test_without_autoscaling_the_replicas_are_wanted() -> None:
    assert bounds(3, None) == Bounds(3, 3)


def test_a_document_is_a_wish_and_nothing_is_wanted_of_one_that_goes() -> None:
    document: dict[str, Any] = {
        "metadata": {"name": "p", "generation": 4},
        "spec": {
            "sandboxTemplateRef": {"name": "t"},
            "updateStrategy": {"type": "Recreate"},
            "autoscaling": {"maxReplicas": 5},
        },
    }
    wish = wish_of(msgspec.convert(document, PoolDocument))
    assert (wish.template, wish.generation, wish.replicas, wish.recreate) == ("t", 4, 1, True)
    assert wish.bounds == Bounds(1, 5)
    document["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert wish_of(msgspec.convert(document, PoolDocument)).bounds == Bounds(0, 0)


def pod(image: Any, **requests: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"image": image, "resources": {"requests": requests}}]}}


def test_members_are_of_the_image_and_the_size_that_is_enough() -> None:
    for image in ("base", "base:default", "t" * 20):
        assert members_of(pod(image), "x", "ns", KNOWN) == Members(PoolName("base", "own"), OWN)
    assert members_of(pod("base", cpu="2"), "x", "ns", KNOWN).key == PoolName("base", "medium")


@pytest.mark.parametrize(
    ("template", "reason", "text"),
    [
        (None, "TemplateNotFound", "there is no SandboxTemplate 'x' in namespace 'ns'; create it"),
        ({}, "InvalidTemplate", "SandboxTemplate 'x': podTemplate.spec.containers: one container"),
        (pod("other"), "ImageNotFound", "SandboxTemplate 'x': there is no template 'other'; name one"),
        (pod("base:other"), "ImageNotFound", "there is no template 'base:other'"),
        (pod("base", cpu="99"), "NoSize", "SandboxTemplate 'x': resources: no size has cpu 99"),
    ],
    ids=["none", "empty", "image", "tag", "size"],
)
def test_why_there_can_be_no_members(template: Any, reason: str, text: str) -> None:
    made = members_of(template, "x", "ns", KNOWN)
    assert (made.key, made.size, made.reason) == (None, None, reason)
    assert text in made.problem
