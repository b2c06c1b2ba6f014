"""Sizes that satisfy what a pod template asks for, and the quantities it is written in."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import BadRequest
from greenroom.wire.messages import Size
from greenroom.wire.podsizes import MIB, SIZES, image_of, quantity, resources_of, size_for

OWN = Size("own", cpus=3, memory_mib=700, disk_mib=9000)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("2", Fraction(2)),
        (2, Fraction(2)),
        (0.5, Fraction(1, 2)),
        ("500m", Fraction(1, 2)),
        ("1.5", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("2.", Fraction(2)),
        ("512Mi", Fraction(512 * MIB)),
        ("1G", Fraction(10**9)),
        ("1Gi", Fraction(2**30)),
        ("1e3", Fraction(1000)),
        ("1E3", Fraction(1000)),
        ("12e-1", Fraction(6, 5)),
        ("1E", Fraction(10**18)),
        ("7Ei", Fraction(7 * 2**60)),
        ("100u", Fraction(1, 10_000)),
        ("100n", Fraction(1, 10**7)),
        ("-1", Fraction(-1)),
        ("+1k", Fraction(1000)),
    ],
)
def test_a_quantity_means_what_kubernetes_means_by_it(text: object, means: Fraction) -> None:
    assert quantity(text) == means


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "1 Gi",
        "1gi",
        "Mi",
        "1e",
        "1e999",
        "8Ei",
        "1K",
        "x",
        "1" * 65,
        "٣",
        "1\n",
        None,
        True,
        [],
        1e300,
    ],
)
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(BadRequest, match="quantity"):
        quantity(text)


@pytest.mark.parametrize(
    ("resources", "name"),
    [
        ({"requests": {"cpu": "1", "memory": "512Mi"}}, "small"),
        ({"requests": {"cpu": "100m"}}, "small"),
        ({"requests": {"cpu": "1001m"}}, "medium"),
        ({"requests": {"memory": "513Mi"}}, "medium"),
        ({"requests": {"memory": "1G"}}, "medium"),
        ({"requests": {"cpu": 4, "memory": "4Gi"}}, "large"),
        ({"requests": {"cpu": "1", "memory": "5Gi"}}, "xlarge"),
        ({"requests": {"cpu": 8}}, "2xlarge"),
        ({"limits": {"cpu": 2}}, "medium"),
        ({"requests": {"cpu": 1}, "limits": {"cpu": 4}}, "small"),
        ({"requests": {"cpu": 1}, "limits": {"memory": "4Gi"}}, "large"),
        ({"requests": {"ephemeral-storage": "4Gi"}}, "small"),
        ({"requests": {"nvidia.com/gpu": "0"}}, "small"),
        ({"requests": {"cpu": "0"}}, "small"),
        ({}, "own"),
        ({"requests": {}, "limits": None}, "own"),
    ],
)
def test_the_smallest_size_that_satisfies_both(resources: dict[str, Any], name: str) -> None:
    assert size_for(resources, OWN).name == name


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"requests": {"cpu": "9"}}, "no size has cpu 9; .*small: 1 CPU, 512Mi memory.*2xlarge"),
        ({"requests": {"cpu": "8100m"}}, "cpu 8100m"),
        ({"requests": {"memory": "17Gi"}}, "memory 17408Mi"),
        ({"requests": {"ephemeral-storage": "5Gi"}}, "ephemeral-storage 5120Mi"),
        ({"requests": {"nvidia.com/gpu": 1}}, "no size has nvidia.com/gpu; sizes have cpu, memory"),
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}, "requests.cpu: 2 is more than its limit, 1"),
        ({"requests": {"cpu": "-1"}}, r"requests.cpu: it cannot be less than 0"),
        ({"requests": {"cpu": "two"}}, "requests.cpu: 'two' is no quantity"),
        ({"requests": [1]}, "requests: an object is needed"),
    ],
)
def test_what_no_size_satisfies_is_refused_with_the_table(resources: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        size_for(resources, OWN)


@given(st.integers(0, 10_000), st.integers(0, 20_000))
def test_a_size_is_never_less_than_what_is_asked_for(millicpus: int, mebibytes: int) -> None:
    resources = {"requests": {"cpu": f"{millicpus}m", "memory": f"{mebibytes}Mi"}}
    fitting = [size for size in SIZES if size.cpus * 1000 >= millicpus and size.memory_mib >= mebibytes]
    if not fitting:
        with pytest.raises(BadRequest):
            size_for(resources, OWN)
    else:
        assert size_for(resources, OWN) == fitting[0]


def test_the_first_container_counts() -> None:
    first = {"name": "a", "image": "base", "resources": {"requests": {"cpu": "1"}}}
    pod = {"spec": {"containers": [first, {"name": "b", "image": "other"}]}}
    assert image_of(pod) == "base"
    assert resources_of(pod) == {"requests": {"cpu": "1"}}
    assert resources_of({"spec": {"containers": [{"image": "base"}]}}) == {}


@pytest.mark.parametrize(
    ("pod", "says"),
    [
        ({}, "one container"),
        ({"spec": None}, "one container"),
        ({"spec": {"containers": []}}, "one container"),
        ({"spec": {"containers": ["x"]}}, "one container"),
        ({"spec": {"containers": [{"name": "a"}]}}, "image"),
        ({"spec": {"containers": [{"image": ""}]}}, "image"),
    ],
)
def test_a_pod_that_names_no_template_is_refused(pod: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        image_of(pod)


def test_resources_have_a_shape() -> None:
    with pytest.raises(BadRequest, match="resources"):
        resources_of({"spec": {"containers": [{"image": "base", "resources": 3}]}})
