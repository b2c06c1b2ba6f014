"""What stored objects say, and what becomes of those that say nothing that can be understood."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from greenroom.fleet.warmpools import Autoscaling, Templates
from greenroom.master.declared import QUOTAS, TEMPLATES, WARM_POOLS, Declarations, DeclaredPool
from greenroom.store.records import StoredObject
from greenroom.wire.messages import PoolName, Size, Template

OWN = Size("own", 3, 700, 4096)
BASE = Template(template_id="x" * 20, name="base", size=OWN, created_at=0.0)


KNOWN = Templates([BASE])


def stored(resource: str, name: str, version: int = 1, **document: Any) -> StoredObject:
    raw = msgspec.Raw(msgspec.json.encode({"metadata": {"name": name, "generation": 3}, **document}))
    return StoredObject(resource=resource, namespace="ns", name=name, version=version, document=raw)


def template(image: Any = "base", **resources: Any) -> StoredObject:
    container = {"name": "main", "image": image, "resources": resources}
    return stored(TEMPLATES, "t", spec={"podTemplate": {"spec": {"containers": [container]}}})


def pool(**spec: Any) -> StoredObject:
    return stored(WARM_POOLS, "p", spec={"sandboxTemplateRef": {"name": "t"}, **spec})


def only(*objects: StoredObject) -> DeclaredPool:
    declared = Declarations()
    declared.read(objects)
    [found] = declared.pools(KNOWN)
    return found


def test_a_pool_fills_what_its_template_names() -> None:
    assert only(template(), pool()) == DeclaredPool(
        namespace="ns", name="p", generation=3, replicas=1, key=PoolName("base", "own"), size=OWN
    )
    found = only(
        template(BASE.template_id, requests={"cpu": "2"}),
        pool(
            replicas=7,
            updateStrategy={"type": "Recreate"},
            autoscaling={"minReplicas": 1, "maxReplicas": 9},
        ),
    )
    assert (found.key, found.replicas, found.recreate) == (PoolName("base", "medium"), 7, True)
    assert found.autoscaling == Autoscaling(1, 9)


@pytest.mark.parametrize(
    ("objects", "says"),
    [
        ([pool()], "there is no SandboxTemplate 't' in namespace 'ns'; create it"),
        ([template("other"), pool()], "SandboxTemplate 't': there is no template 'other'"),
        ([template(None), pool()], "SandboxTemplate 't': .*image"),
        ([template(requests={"cpu": "99"}), pool()], "SandboxTemplate 't': .*no size has cpu 99"),
        ([stored(TEMPLATES, "t", spec=3), pool()], "SandboxTemplate 't': .*cannot be understood"),
        ([stored(WARM_POOLS, "p", spec={})], "cannot be understood"),
    ],
    ids=["no template", "no such image", "no image", "no size", "no document", "no pool"],
)
def test_a_pool_that_cannot_be_filled_says_why(objects: list[StoredObject], says: str) -> None:
    found = only(*objects)
    assert found.key is None
    assert re.search(says, found.problem)


def test_a_pool_that_is_being_deleted_wants_nothing() -> None:
    raw = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {}}
    going = msgspec.json.decode(bytes(pool(replicas=5, autoscaling={"maxReplicas": 9}).document))
    going["metadata"] |= raw["metadata"]
    gone = StoredObject(
        resource=WARM_POOLS, namespace="ns", name="p", document=msgspec.Raw(msgspec.json.encode(going))
    )
    found = only(template(), gone)
    assert (found.replicas, found.autoscaling) == (0, None)


def test_quotas_by_namespace_without_what_is_no_quantity() -> None:
    declared = Declarations()
    hard = {"requests.cpu": "1500m", "requests.memory": "1Gi", "pods": "many"}
    declared.read(
        [stored(QUOTAS, "q", spec={"hard": hard}), stored(QUOTAS, "r"), stored(QUOTAS, "s", spec=1)]
    )
    [quota, other] = declared.quotas()["ns"]
    assert quota.hard == {"requests.cpu": Fraction(3, 2), "requests.memory": Fraction(2**30)}
    assert other.hard == {}


def test_only_what_has_another_version_is_read_again() -> None:
    declared = Declarations()
    declared.read([template(), pool(replicas=1)])
    declared.read([template(), pool(replicas=2)])
    assert [each.replicas for each in declared.pools(KNOWN)] == [1]
    declared.read([template(), msgspec.structs.replace(pool(replicas=2), version=2)])
    assert [each.replicas for each in declared.pools(KNOWN)] == [2]
    declared.read([template()])
    assert declared.pools(KNOWN) == []
