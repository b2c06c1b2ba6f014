"""Discovery tells every resource once, in both forms alike."""

from __future__ import annotations

import pytest

from greenroom.api.kube import discovery
from greenroom.api.kube.kinds import CORE, KINDS

ALL = (*KINDS, *CORE)
V2 = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
BETA = "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"


def test_groups() -> None:
    listed = discovery.group_list(ALL)
    assert [each["name"] for each in listed["groups"]] == [
        "agents.x-k8s.io",
        "extensions.agents.x-k8s.io",
        "sandbox.greenroom.dev",
    ]
    assert listed["groups"][0]["preferredVersion"] == {
        "groupVersion": "agents.x-k8s.io/v1beta1",
        "version": "v1beta1",
    }
    single = discovery.group("agents.x-k8s.io", ALL)
    assert single is not None
    assert single["kind"] == "APIGroup"
    assert discovery.group("apps", ALL) is None
    assert discovery.group("", ALL) is None
    assert discovery.core_versions(ALL)["versions"] == ["v1"]


def test_resources_of_a_version() -> None:
    listed = discovery.resource_list("extensions.agents.x-k8s.io", "v1beta1", ALL)
    assert listed is not None
    by_name = {each["name"]: each for each in listed["resources"]}
    assert by_name["sandboxwarmpools"]["shortNames"] == ["swp"]
    assert by_name["sandboxwarmpools/scale"] == {
        "name": "sandboxwarmpools/scale",
        "singularName": "",
        "namespaced": True,
        "kind": "Scale",
        "verbs": ["get", "patch", "update"],
        "group": "autoscaling",
        "version": "v1",
    }
    assert "sandboxtemplates/status" not in by_name
    sandboxes = discovery.resource_list("agents.x-k8s.io", "v1beta1", ALL)
    assert sandboxes is not None
    assert [each["name"] for each in sandboxes["resources"]] == [
        "sandboxes",
        "sandboxes/status",
        "sandboxes/pause",
        "sandboxes/resume",
        "sandboxes/fork",
        "sandboxes/snapshot",
    ]
    core = discovery.resource_list("", "v1", ALL)
    assert core is not None
    assert (core["groupVersion"], [each["name"] for each in core["resources"]]) == (
        "v1",
        ["namespaces", "events", "resourcequotas", "resourcequotas/status"],
    )
    assert discovery.resource_list("agents.x-k8s.io", "v1", ALL) is None


def test_both_forms_tell_the_same() -> None:
    for core in (True, False):
        told = discovery.aggregated(ALL, "v2", core=core)
        for item in told["items"]:
            for version in item["versions"]:
                older = discovery.resource_list(item["metadata"]["name"], version["version"], ALL)
                assert older is not None
                names = []
                for resource in version["resources"]:
                    names.append(resource["resource"])
                    names += [
                        f"{resource['resource']}/{each['subresource']}"
                        for each in resource.get("subresources", [])
                    ]
                assert names == [each["name"] for each in older["resources"]]


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (f"{V2},{BETA},application/json", "v2"),
        (f"{BETA},application/json", "v2beta1"),
        ("application/json", ""),
        ("", ""),
        (f"application/json,{V2}", ""),
        ("application/json;g=apidiscovery.k8s.io;v=v3;as=APIGroupDiscoveryList,application/json", ""),
    ],
    ids=["v2", "beta", "plain", "none", "plain-first", "unknown"],
)
def test_which_form_a_client_wants(accept: str, form: str) -> None:
    assert discovery.wants_aggregated(accept) == form


def test_the_version_is_one_that_clients_can_read() -> None:
    told = discovery.version()
    assert told["gitVersion"].startswith(f"v{told['major']}.{told['minor']}.0+")
