"""Server-side apply: who owns what, what conflicts, what goes."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.kinds import CLAIM, SANDBOX, WARM_POOL
from greenroom.api.kube.objects import copied
from greenroom.api.kube.patching.applying import (
    ANCIENT,
    UPDATERS_LIMIT,
    Author,
    applied,
    entries_of,
    manager_of,
    updated,
)
from greenroom.api.kube.patching.fieldsets import flattened
from greenroom.api.kube.status import StatusError
from tests.support.schema_values import values

NOW = datetime(2026, 12, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def by(manager: str, now: datetime = NOW, subresource: str = "") -> Author:
    return Author(manager=manager, now=now, subresource=subresource)


def apply(live: Any, config: Any, manager: str = "a", *, force: bool = False, now: datetime = NOW) -> Any:
    return applied(live, config, WARM_POOL, by(manager, now), force=force)


def pool(labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "p"}
    if labels is not None:
        metadata["labels"] = labels
    return {"metadata": metadata, **({"spec": spec} if spec else {})}


def owners(obj: Any) -> dict[str, dict[str, Any]]:
    return {each["manager"]: each["fieldsV1"] for each in obj["metadata"].get("managedFields", [])}


def plain(obj: Any) -> Any:
    """An object without what the server keeps about its managers."""
    left = copied(obj)
    left.get("metadata", {}).pop("managedFields", None)
    return left


def test_an_apply_creates_and_owns_what_it_names() -> None:
    made = apply(None, pool(replicas=3))
    assert plain(made) == pool(replicas=3)
    assert made["metadata"]["managedFields"] == [
        {
            "manager": "a",
            "operation": "Apply",
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "time": "2026-12-01T00:00:00Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
        }
    ]


def test_the_same_again_changes_nothing_not_even_the_time() -> None:
    made = apply(None, pool(replicas=3))
    assert apply(made, pool(replicas=3), now=LATER) == made


def test_what_is_not_named_any_more_goes_and_what_others_set_stays() -> None:
    made = apply(None, pool({"x": "1", "y": "2"}, replicas=3, updateStrategy={"type": "Recreate"}))
    other = apply(made, pool({"z": "3"}), "b")
    left = apply(other, pool({"x": "1"}))
    assert plain(left) == pool({"x": "1", "z": "3"})
    assert owners(left) == {
        "a": {"f:metadata": {"f:labels": {"f:x": {}}}},
        "b": {"f:metadata": {"f:labels": {"f:z": {}}}},
    }


def test_a_field_that_two_own_stays_until_both_have_left_it() -> None:
    both = apply(apply(None, pool(replicas=3)), pool(replicas=3), "b")
    assert owners(both)["a"] == owners(both)["b"]
    one = apply(both, pool())
    assert plain(one)["spec"] == {"replicas": 3}
    assert "replicas" not in plain(apply(one, pool(), "b")).get("spec", {})


def test_changing_what_another_owns_is_a_conflict_that_names_it() -> None:
    made = apply(None, pool({"x": "1"}, replicas=3))
    with pytest.raises(StatusError) as refused:
        apply(made, pool({"x": "2"}, replicas=4), "b")
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert [cause.field for cause in refused.value.causes] == [".metadata.labels.x", ".spec.replicas"]
    assert {cause.reason for cause in refused.value.causes} == {"FieldManagerConflict"}
    assert refused.value.causes[0].message == 'conflict with "a"'


def test_force_takes_what_conflicts() -> None:
    made = apply(None, pool({"x": "1"}, replicas=3))
    taken = apply(made, pool(replicas=4), "b", force=True)
    assert plain(taken) == pool({"x": "1"}, replicas=4)
    assert owners(taken) == {
        "a": {"f:metadata": {"f:labels": {"f:x": {}}}},
        "b": {"f:spec": {"f:replicas": {}}},
    }


def test_an_update_takes_what_it_changes() -> None:
    made = apply(None, pool({"x": "1"}, replicas=3))
    new = copied(made)
    new["spec"]["replicas"] = 5
    updated(made, new, WARM_POOL, by("kubectl-edit", LATER))
    assert owners(new) == {
        "a": {"f:metadata": {"f:labels": {"f:x": {}}}},
        "kubectl-edit": {"f:spec": {"f:replicas": {}}},
    }
    with pytest.raises(StatusError) as refused:
        apply(new, pool({"x": "1"}, replicas=3))
    assert refused.value.causes[0].message == (
        'conflict with "kubectl-edit" using extensions.agents.x-k8s.io/v1beta1 at 2026-12-01T01:00:00Z'
    )


def test_what_an_update_removes_nobody_owns() -> None:
    made = apply(None, pool({"x": "1"}, replicas=3))
    new = copied(made)
    del new["metadata"]["labels"]
    updated(made, new, WARM_POOL, by("b"))
    assert owners(new) == {"a": {"f:spec": {"f:replicas": {}}}}


def test_an_update_keeps_forgets_or_repairs_managed_fields() -> None:
    made = apply(None, pool(replicas=3))
    for told, kept in [(None, True), ([], False), ([{}], False), ([{"operation": "Guess"}], True)]:
        new = copied(made)
        if told is None:
            del new["metadata"]["managedFields"]
        else:
            new["metadata"]["managedFields"] = told
        updated(made, new, WARM_POOL, by("b"))
        assert ("a" in owners(new)) == kept, told


def test_lists_by_key_and_sets_are_shared_items() -> None:
    def sandbox(*containers: dict[str, Any], finalizers: list[str] | None = None) -> dict[str, Any]:
        return {
            "metadata": {"name": "s", "finalizers": finalizers or []},
            "spec": {"podTemplate": {"spec": {"containers": list(containers)}}},
        }

    one = applied(
        None, sandbox({"name": "a", "image": "i"}, finalizers=["a.b/1"]), SANDBOX, by("x"), force=False
    )
    two = applied(
        one, sandbox({"name": "b", "image": "j"}, finalizers=["a.b/2"]), SANDBOX, by("y"), force=False
    )
    assert plain(two) == sandbox(
        {"name": "a", "image": "i"}, {"name": "b", "image": "j"}, finalizers=["a.b/1", "a.b/2"]
    )
    env = {"name": "E", "value": "1"}
    more = applied(two, sandbox({"name": "a", "env": [env]}), SANDBOX, by("z"), force=False)
    assert more["spec"]["podTemplate"]["spec"]["containers"][0] == {"name": "a", "image": "i", "env": [env]}
    gone = applied(more, sandbox(finalizers=[]), SANDBOX, by("y"), force=False)
    assert [each["name"] for each in gone["spec"]["podTemplate"]["spec"]["containers"]] == ["a"]
    assert gone["metadata"]["finalizers"] == ["a.b/1"]


def test_atomic_lists_have_one_owner() -> None:
    def claim(*names: str) -> dict[str, Any]:
        return {"metadata": {"name": "c"}, "spec": {"env": [{"name": name, "value": ""} for name in names]}}

    one = applied(None, claim("A"), CLAIM, by("x"), force=False)
    with pytest.raises(StatusError, match=r"\.spec\.env"):
        applied(one, claim("A", "B"), CLAIM, by("y"), force=False)
    two = applied(one, claim("B"), CLAIM, by("y"), force=True)
    assert [each["name"] for each in two["spec"]["env"]] == ["B"]
    assert set(owners(two)) == {"y"}


def test_an_empty_map_becomes_a_full_one() -> None:
    made = apply(None, pool(updateStrategy={}))
    assert plain(apply(made, pool(updateStrategy={"type": "Recreate"}))) == pool(
        updateStrategy={"type": "Recreate"}
    )


def test_managed_fields_may_not_be_applied_and_keys_must_be_there() -> None:
    with pytest.raises(StatusError, match="managedFields must be nil"):
        apply(None, {"metadata": {"name": "p", "managedFields": [{"manager": "x"}]}})
    config = {"spec": {"podTemplate": {"spec": {"containers": [{"image": "i"}]}}}}
    with pytest.raises(StatusError, match="has no name"):
        applied(None, config, SANDBOX, by("x"), force=False)


def test_managers_of_updates_are_bounded() -> None:
    live = apply(None, pool({}, replicas=0))
    for number in range(UPDATERS_LIMIT + 5):
        new = copied(live)
        new["metadata"].setdefault("labels", {})[f"l{number}"] = "x"
        updated(live, new, WARM_POOL, by(f"m{number:02}", NOW + timedelta(minutes=number)))
        live = new
    managers = [entry.manager for entry in entries_of(live) if entry.operation == "Update"]
    assert len(managers) == UPDATERS_LIMIT
    assert {ANCIENT, "m14"} <= set(managers)
    owned = set().union(*(entry.fields for entry in entries_of(live)))
    assert {("f:metadata", "f:labels", f"f:l{number}") for number in range(15)} <= owned


def test_names_of_managers() -> None:
    assert manager_of("me") == "me"
    assert manager_of(None, "kubectl/v1.32 (linux)") == "kubectl"
    assert manager_of("", "") == "unknown"
    for name in ("x" * 129, "a\nb"):
        with pytest.raises(StatusError):
            manager_of(name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_applies_of_one_manager_leave_exactly_what_was_applied_last(data: st.DataObject) -> None:
    first, second = data.draw(values(CLAIM.schema)), data.draw(values(CLAIM.schema))
    for config in (first, second):
        config.setdefault("metadata", {}).pop("managedFields", None)
    one = applied(None, first, CLAIM, by("a"), force=False)
    two = applied(one, second, CLAIM, by("a", LATER), force=False)

    def owned(obj: Any) -> dict[Any, Any]:
        # An empty list is nothing that can be owned, so it is not missed, and what is empty without it is not either.
        unowned = {"f:apiVersion", "f:kind", "f:metadata"}
        whole = flattened(plain(obj), CLAIM.schema)
        return {path: value for path, value in whole.items() if path[0] not in unowned and value != {}}

    assert owned(two) == owned(second)
    again = applied(two, second, CLAIM, by("a", LATER), force=False)
    assert owned(again) == owned(two)
    # An empty list may have gone with what was owned around it, and come back: from here on nothing changes.
    assert applied(again, second, CLAIM, by("a", LATER), force=False) == again


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_forced_apply_always_gets_what_it_names_and_an_unforced_one_never_changes_others(
    data: st.DataObject,
) -> None:
    configs = [data.draw(values(CLAIM.schema)) for _ in range(3)]
    for config in configs:
        config.setdefault("metadata", {}).pop("managedFields", None)
    live = applied(
        applied(None, configs[0], CLAIM, by("a"), force=False), configs[1], CLAIM, by("b"), force=True
    )
    whole = flattened(plain(live), CLAIM.schema)
    for path, value in flattened(configs[1], CLAIM.schema).items():
        assert value == {} or whole[path] == value
    owned_by_b = {entry.manager: entry.fields for entry in entries_of(live)}.get("b", frozenset())
    after = live
    with contextlib.suppress(StatusError):
        after = applied(live, configs[2], CLAIM, by("c"), force=False)
    left = flattened(plain(after), CLAIM.schema)
    # Whoever owns an empty map owns nothing of what others put into it.
    assert all(left[path] == whole[path] for path in owned_by_b if whole.get(path, {}) != {})
