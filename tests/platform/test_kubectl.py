"""kubectl against real microVMs: what it prints, and what becomes of the machines.

One platform for the module, with few VMs; each test makes what it needs under names of its own. What is about the
control plane alone is asked of the simulated engine (`test_kubernetes`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from e2b import Sandbox

from tests.support.kubectl import KUBECTL, Kubectl
from tests.support.platform import Platform, running
from tests.support.waiting import until_true as until

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine"),
]
GROUP = "agents.x-k8s.io/v1beta1"
EXTENSIONS = "extensions.agents.x-k8s.io/v1beta1"
BOXES = f"/apis/{GROUP}/namespaces/default/sandboxes"


def pod(**container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "image": "base", **container}]}}


def sandbox(
    name: str, container: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    return {
        "apiVersion": GROUP,
        "kind": "Sandbox",
        "metadata": {"name": name, **(metadata or {})},
        "spec": {"podTemplate": pod(**(container or {})), **spec},
    }


def claim(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": EXTENSIONS,
        "kind": "SandboxClaim",
        "metadata": {"name": name},
        "spec": {"warmPoolRef": {"name": "python"}, **spec},
    }


TEMPLATE = {
    "apiVersion": EXTENSIONS,
    "kind": "SandboxTemplate",
    "metadata": {"name": "python"},
    "spec": {
        "envVarsInjectionPolicy": "Allowed",
        "podTemplate": pod(env=[{"name": "FROM_TEMPLATE", "value": "yes"}]),
    },
}
POOL = {
    "apiVersion": EXTENSIONS,
    "kind": "SandboxWarmPool",
    "metadata": {"name": "python"},
    "spec": {"replicas": 1, "sandboxTemplateRef": {"name": "python"}},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A running platform with real microVMs."""
    with running(tmp_path_factory.mktemp("kubectl"), "--warm", "2") as made:
        yield made


@pytest.fixture(scope="module")
def environment(cluster: Platform) -> dict[str, str]:
    """What `greenroom env` exports; there is the pool `python`."""
    exported = cluster.env()
    Kubectl(Path(exported["KUBECONFIG"])).run("apply", "-f", "-", given=[TEMPLATE, POOL])
    return exported


@pytest.fixture
def kubectl(cluster: Platform, environment: dict[str, str]) -> Iterator[Kubectl]:
    """kubectl; whatever sandboxes a test made are gone after it."""
    made = Kubectl(Path(environment["KUBECONFIG"]))
    try:
        yield made
    finally:
        made.run("delete", "sandboxes", "--all")
    for role in ("api-0", "master-0", "node-0"):
        assert "Traceback" not in cluster.log(role)


@pytest.fixture
def sdk(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The E2B SDK finds the platform, by the key of the same namespace."""
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def said(kubectl: Kubectl, name: str, command: str) -> str:
    """What a command prints in the sandbox that Kubernetes knows by this name."""
    found = kubectl.run("get", "sandbox", name, "-o", "jsonpath={.status.sandboxID}")
    return Sandbox.connect(found).commands.run(command).stdout.strip()


def soon(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def table(text: str) -> list[dict[str, str]]:
    """The rows of what `kubectl get` prints, by the names of the columns."""
    names, *rows = ([cell.strip() for cell in re.split(r" {2,}", line)] for line in text.strip().splitlines())
    return [dict(zip(names, row, strict=False)) for row in rows]


def test_the_version_is_the_one_that_is_promised(kubectl: Kubectl) -> None:
    told = kubectl.json("version")
    assert told["serverVersion"]["gitVersion"].startswith("v1.32.")
    client = told["clientVersion"]["gitVersion"]
    if not client.startswith("v1.32."):
        pytest.skip(f"kubectl here is {client}, not 1.32: the other tests are of what this one prints")


def test_get_shows_a_sandbox_in_every_form(kubectl: Kubectl) -> None:
    labelled = sandbox("forms", metadata={"labels": {"team": "forms"}})
    assert kubectl.run("apply", "-f", "-", given=labelled) == "sandbox.agents.x-k8s.io/forms created\n"
    (plain,) = table(kubectl.run("get", "sandboxes"))
    assert list(plain) == ["NAME", "READY", "REASON", "AGE"]
    assert (plain["NAME"], plain["READY"], plain["REASON"]) == ("forms", "True", "DependenciesReady")
    (wide,) = table(kubectl.run("get", "sbx", "forms", "-o", "wide"))
    assert (wide["NODE"], wide["ID"][0]) == ("node-0", "i")
    (everywhere,) = table(kubectl.run("get", "sbx", "-A"))
    assert everywhere["NAMESPACE"] == "default"
    whole = yaml.safe_load(kubectl.run("get", "sbx", "forms", "-o", "yaml"))
    assert whole["spec"]["podTemplate"] == labelled["spec"]["podTemplate"]
    assert whole["spec"]["operatingMode"] == "Running"
    assert (
        whole["metadata"]["labels"]["sandbox.greenroom.dev/id"] == wide["ID"] == whole["status"]["sandboxID"]
    )
    assert whole["metadata"]["labels"]["sandbox.greenroom.dev/launch"] in ("warm", "cold")
    names = ("get", "sbx", "-o", "name")
    assert kubectl.run(*names, "-l", "team=forms") == "sandbox.agents.x-k8s.io/forms\n"
    assert kubectl.run(*names, "-l", "team in (a, b)") == ""
    assert kubectl.run(*names, "--field-selector", "status.phase=Running,status.nodeName=node-0") != ""
    assert kubectl.run(*names, "--field-selector", "status.phase=Paused") == ""
    assert "sandbox.agents.x-k8s.io/forms" in kubectl.run("get", "all")
    (node,) = kubectl.json("get", "nodeinventories")["items"]
    assert [entry["name"] for entry in node["entries"]] == ["default/forms"]


def test_describe_shows_what_it_is_and_what_happened_to_it(kubectl: Kubectl) -> None:
    kubectl.run("apply", "-f", "-", given=sandbox("told"))
    told = kubectl.run("describe", "sandbox", "told")
    assert re.search(r"^Spec:\n  Operating Mode:  Running$", told, re.M)
    assert re.search(r"^    Reason: +DependenciesReady$", told, re.M)
    assert re.search(
        r"Normal +Created +\S+ +greenroom +Sandbox i\w{19} of template base on node node-0: ", told
    )
    events = table(kubectl.run("get", "events", "--field-selector", "involvedObject.name=told"))
    assert [(event["TYPE"], event["REASON"], event["OBJECT"]) for event in events] == [
        ("Normal", "Created", "sandbox/told")
    ]


def test_explain_knows_the_fields(kubectl: Kubectl) -> None:
    mode = kubectl.run("explain", "sandbox.spec.operatingMode")
    assert re.search(r"FIELD: operatingMode <string>\nENUM:\n    Running\n    Suspended\n", mode)
    assert "the sandbox is paused, memory and all" in mode
    deep = kubectl.run("explain", "sandboxclaim", "--recursive")
    assert re.search(r"warmPoolRef\t<Object> -required-\n\s+name\t<string> -required-", deep)


def test_apply_and_diff_from_the_client_and_from_the_server(kubectl: Kubectl) -> None:
    apply, server = ("apply", "-f", "-"), ("apply", "--server-side", "-f", "-")
    name = "sandbox.agents.x-k8s.io/applied"
    plain = sandbox("applied")
    labelled = sandbox("applied", metadata={"labels": {"team": "a"}})
    new = kubectl.run("diff", "-f", "-", given=plain, status=1)
    assert "+kind: Sandbox" in new
    assert kubectl.run("get", "sandboxes", "-o", "name") == ""
    assert kubectl.run(*apply, given=plain) == f"{name} created\n"
    assert kubectl.run(*apply, given=plain) == f"{name} unchanged\n"
    assert kubectl.run("diff", "-f", "-", given=plain) == ""
    assert "+    team: a" in kubectl.run("diff", "-f", "-", given=labelled, status=1)
    assert kubectl.run(*apply, given=labelled) == f"{name} configured\n"
    assert kubectl.run(*apply, given=plain) == f"{name} configured\n"
    assert "team" not in kubectl.json("get", "sbx", "applied")["metadata"]["labels"]
    mine = sandbox("applied", metadata={"annotations": {"note": "mine"}})
    other = sandbox("applied", metadata={"annotations": {"note": "other"}})
    assert kubectl.run(*server, "--field-manager=one", given=mine) == f"{name} serverside-applied\n"
    refused = kubectl.run(*server, "--field-manager=two", given=other, status=1)
    assert 'Apply failed with 1 conflict: conflict with "one": .metadata.annotations.note' in refused
    forced = (*server, "--field-manager=two", "--force-conflicts")
    assert kubectl.run(*forced, given=other) == f"{name} serverside-applied\n"
    # None of it was another machine.
    assert (
        kubectl.run("get", "events", "-o", "name", "--field-selector", "reason=Created").count("applied") == 1
    )


def test_patches_of_each_kind_labels_and_annotations(kubectl: Kubectl) -> None:
    kubectl.run("apply", "-f", "-", given=sandbox("patched"))
    patched = "sandbox.agents.x-k8s.io/patched patched\n"

    def metadata() -> dict[str, Any]:
        return kubectl.json("get", "sbx", "patched")["metadata"]  # type: ignore[no-any-return]

    patch = ("patch", "sandbox", "patched")
    assert kubectl.run(*patch, "-p", '{"metadata":{"labels":{"strategic":"yes"}}}') == patched
    assert kubectl.run(*patch, "--type=merge", "-p", '{"metadata":{"labels":{"merge":"yes"}}}') == patched
    path = "/metadata/labels/merge"
    by_json = json.dumps([{"op": "test", "path": path, "value": "yes"}, {"op": "remove", "path": path}])
    assert kubectl.run(*patch, "--type=json", "-p", by_json) == patched
    assert "no change" in kubectl.run(*patch, "--type=merge", "-p", '{"spec":{"operatingMode":"Running"}}')
    assert kubectl.run("label", "sbx", "patched", "tier=one") == "sandbox.agents.x-k8s.io/patched labeled\n"
    assert (
        kubectl.run("annotate", "sbx", "patched", "note=hello")
        == "sandbox.agents.x-k8s.io/patched annotated\n"
    )
    now = metadata()
    given = {key: value for key, value in now["labels"].items() if "/" not in key}
    assert given == {"strategic": "yes", "tier": "one"}
    assert now["annotations"]["note"] == "hello"
    assert "unlabeled" in kubectl.run("label", "sbx", "patched", "tier-")
    assert "tier" not in metadata()["labels"]
    other = '[{"op":"replace","path":"/spec/podTemplate/spec/containers/0/image","value":"other"}]'
    refused = kubectl.run(*patch, "--type=json", "-p", other, status=1)
    assert 'The Sandbox "patched" is invalid: spec.podTemplate: Forbidden: field is immutable' in refused
    refused = kubectl.run(*patch, "--type=merge", "-p", '{"spec":{"operatingMode":"Off"}}', status=1)
    assert 'spec.operatingMode: Unsupported value: "Off": supported values: "Running", "Suspended"' in refused


def test_a_pool_is_scaled_waited_for_and_shown(kubectl: Kubectl) -> None:
    waited = ("wait", "swp/python", "--for=jsonpath={.status.readyReplicas}=1", "--timeout=60s")
    assert kubectl.run(*waited) == "sandboxwarmpool.extensions.agents.x-k8s.io/python condition met\n"
    assert "scaled" in kubectl.run("scale", "swp", "python", "--replicas=2")
    ready = kubectl.run("wait", "swp/python", "--for=jsonpath={.status.readyReplicas}=2", "--timeout=60s")
    assert "condition met" in ready
    (row,) = table(kubectl.run("get", "swp", "-o", "wide"))
    assert (row["NAME"], row["READY"], row["DESIRED"], row["TEMPLATE"]) == ("python", "2", "2", "python")
    assert re.search(r"Message: +2 of 2 are ready", kubectl.run("describe", "swp", "python"))
    assert "error" in kubectl.run("scale", "swp", "python", "--replicas=1", "--current-replicas=7", status=1)
    assert "scaled" in kubectl.run("scale", "swp", "python", "--replicas=1", "--current-replicas=2")
    until(lambda: kubectl.json("get", "swp", "python")["status"]["replicas"] == 1)


def test_a_watch_tells_of_all_that_happens(kubectl: Kubectl) -> None:
    with kubectl.following("get", "sandboxes", "-w", "--output-watch-events") as watch:
        kubectl.run("apply", "-f", "-", given=sandbox("watched"))
        watch.until("ADDED", "watched", "True", "DependenciesReady")
        kubectl.run("patch", "sbx", "watched", "--type=merge", "-p", '{"spec":{"operatingMode":"Suspended"}}')
        watch.until("MODIFIED", "watched", "False", "SandboxSuspended")
        kubectl.run("delete", "sbx", "watched")
        watch.until("DELETED", "watched")
    told = [line[0] for line in watch.words() if line[1:2] == ["watched"]]
    assert (told[0], told[-1]) == ("ADDED", "DELETED")
    assert set(told[1:-1]) == {"MODIFIED"}


def test_what_finalizers_hold_goes_when_they_go(kubectl: Kubectl, sdk: None) -> None:
    kubectl.run("apply", "-f", "-", given=sandbox("held", metadata={"finalizers": ["example.com/backup"]}))
    assert 'sandbox.agents.x-k8s.io "held" deleted' in kubectl.run("delete", "sbx", "held", "--wait=false")
    assert kubectl.json("get", "sbx", "held")["metadata"]["deletionTimestamp"]
    # Whoever holds it can still look at what is in it.
    assert said(kubectl, "held", "echo here") == "here"
    with kubectl.following("wait", "sbx/held", "--for=delete", "--timeout=60s") as waiting:
        kubectl.run("patch", "sbx", "held", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
        assert waiting.ended() == 0
    assert 'sandboxes.agents.x-k8s.io "held" not found' in kubectl.run("get", "sbx", "held", status=1)


def test_pause_and_resume_by_the_mode_and_by_the_actions(kubectl: Kubectl, sdk: None) -> None:
    kubectl.run("apply", "-f", "-", given=sandbox("sleeper"))
    assert said(kubectl, "sleeper", "(sleep 600 & echo $! > pid) > /dev/null 2>&1; cat pid").isdigit()
    mode = ("patch", "sbx", "sleeper", "--type=merge", "-p")
    kubectl.run(*mode, '{"spec":{"operatingMode":"Suspended"}}')
    assert "condition met" in kubectl.run("wait", "sbx/sleeper", "--for=condition=Suspended", "--timeout=60s")
    (row,) = table(kubectl.run("get", "sbx", "sleeper"))
    assert (row["READY"], row["REASON"]) == ("False", "SandboxSuspended")
    resumed = kubectl.raw(f"{BOXES}/sleeper/resume", {})
    assert (resumed["spec"]["operatingMode"], resumed["status"]["phase"]) == ("Running", "Running")
    assert said(kubectl, "sleeper", "kill -0 $(cat pid) && echo runs") == "runs"
    with kubectl.following("proxy", "--port=0") as proxy:
        proxy.until("Starting", "to", "serve", "on")
        url = f"http://{proxy.words()[0][4]}"
        paused = httpx.post(f"{url}{BOXES}/sleeper/pause", json={}, timeout=60, trust_env=False)
        assert (paused.status_code, paused.json()["spec"]["operatingMode"]) == (201, "Suspended")
    kubectl.run(*mode, '{"spec":{"operatingMode":"Running"}}')
    assert said(kubectl, "sleeper", "kill -0 $(cat pid) && echo runs") == "runs"
    events = table(kubectl.run("get", "events", "--field-selector", "involvedObject.name=sleeper"))
    assert sorted(event["REASON"] for event in events) == ["Created", *["Resumed"] * 2, *["Suspended"] * 2]


def test_forks_and_snapshots_go_on_where_it_stood(kubectl: Kubectl, sdk: None) -> None:
    kubectl.run("apply", "-f", "-", given=sandbox("origin", metadata={"labels": {"team": "a"}}))
    assert said(kubectl, "origin", "echo state > f; cat f") == "state"
    forked = kubectl.raw(f"{BOXES}/origin/fork", {"count": 2, "labels": {"copy": "yes"}})
    names = [each["name"] for each in forked["sandboxes"]]
    listed = kubectl.run("get", "sbx", "-l", "copy=yes,team=a", "-o", "name").split()
    assert listed == sorted(f"sandbox.agents.x-k8s.io/{name}" for name in names)
    assert said(kubectl, names[0], "cat f") == "state"
    kubectl.run("delete", "sbx", *names)
    taken = kubectl.raw(f"{BOXES}/origin/snapshot", {"name": "kept"})
    assert taken["name"] == "kept"
    kubectl.run("delete", "sbx", "origin")
    kubectl.run("apply", "-f", "-", given=sandbox("again", {"image": "kept"}))
    assert said(kubectl, "again", "cat f") == "state"


def test_a_claim_gets_a_warm_sandbox_with_its_environment(kubectl: Kubectl, sdk: None) -> None:
    kubectl.run("wait", "swp/python", "--for=condition=Ready", "--timeout=60s")
    made = kubectl.run("apply", "-f", "-", given=claim("job", env=[{"name": "A", "value": "hello there"}]))
    assert made == "sandboxclaim.extensions.agents.x-k8s.io/job created\n"
    assert "condition met" in kubectl.run("wait", "sbc/job", "--for=condition=Ready", "--timeout=10s")
    (row,) = table(kubectl.run("get", "sandboxclaims"))
    assert (row["NAME"], row["READY"], row["SANDBOX"]) == ("job", "True", "job")
    box = kubectl.json("get", "sandbox", "job")
    assert [each["kind"] for each in box["metadata"]["ownerReferences"]] == ["SandboxClaim"]
    assert said(kubectl, "job", "echo $A, $FROM_TEMPLATE") == "hello there, yes"
    described = kubectl.run("describe", "sbc", "job")
    assert re.search(r"Normal +Claimed .*: a warm one was handed over", described)
    assert 'sandboxclaims.extensions.agents.x-k8s.io "job" already exists' in kubectl.run(
        "create", "-f", "-", given=claim("job"), status=1
    )
    refused = kubectl.run(
        "create", "-f", "-", given=claim("more", env=[{"name": "FROM_TEMPLATE", "value": "no"}]), status=1
    )
    assert (
        'The SandboxClaim "more" is invalid: spec.env: Forbidden: the template has FROM_TEMPLATE' in refused
    )
    assert "deleted" in kubectl.run("delete", "sbc", "job")
    assert kubectl.run("get", "sandboxes,sandboxclaims", "-o", "name") == ""


def test_what_is_made_in_one_dialect_is_seen_and_ended_in_the_other(kubectl: Kubectl, sdk: None) -> None:
    theirs = Sandbox.create(timeout=120)
    (row,) = table(kubectl.run("get", "sandboxes"))
    assert (row["NAME"], row["READY"]) == (theirs.sandbox_id, "True")
    assert kubectl.json("get", "sbx", theirs.sandbox_id)["spec"]["shutdownPolicy"] == "Delete"
    kubectl.run("label", "sbx", theirs.sandbox_id, "seen=yes")
    assert theirs.commands.run("echo still here").stdout == "still here\n"
    kubectl.run("delete", "sandbox", theirs.sandbox_id)
    assert not theirs.is_running()
    kubectl.run("apply", "-f", "-", given=sandbox("ours"))
    (found,) = Sandbox.list().next_items()
    assert found.sandbox_id == kubectl.json("get", "sbx", "ours")["status"]["sandboxID"]
    assert Sandbox.kill(found.sandbox_id)
    until(lambda: kubectl.run("get", "sandboxes", "-o", "name") == "")


def test_the_end_of_its_time_keeps_the_object_or_takes_it_along(kubectl: Kubectl, sdk: None) -> None:
    at = soon(12)
    keep = sandbox("keep", shutdownTime=at)
    drop = sandbox("drop", shutdownTime=at, shutdownPolicy="Delete")
    kubectl.run("apply", "-f", "-", given=[keep, drop])
    assert kubectl.json("get", "sbx", "keep")["spec"]["shutdownTime"] == at
    # The other dialect tells the same end.
    assert {f"{each.end_at:%Y-%m-%dT%H:%M:%SZ}" for each in Sandbox.list().next_items()} == {at}
    assert "condition met" in kubectl.run("wait", "sbx/keep", "--for=condition=Finished", "--timeout=60s")
    kubectl.run("wait", "sbx/drop", "--for=delete", "--timeout=60s")
    (row,) = table(kubectl.run("get", "sandboxes"))
    assert (row["NAME"], row["READY"], row["REASON"]) == ("keep", "False", "SandboxExpired")
    assert Sandbox.list().next_items() == []
    told = kubectl.run(
        "patch", "sbx", "keep", "--type=merge", "-p", '{"spec":{"operatingMode":"Suspended"}}', status=1
    )
    assert "the sandbox has ended; all that can be done is to delete it" in told
    past = sandbox("late", shutdownTime="2020-01-01T00:00:00Z")
    assert "it has passed already" in kubectl.run("apply", "-f", "-", given=past, status=1)


def test_a_watch_that_loses_its_api_says_so_and_the_next_one_has_all(
    cluster: Platform, kubectl: Kubectl
) -> None:
    kubectl.run("apply", "-f", "-", given=sandbox("before"))
    watch = ("get", "sandboxes", "-w", "--output-watch-events")
    with kubectl.following(*watch) as first:
        first.until("ADDED", "before")
        cluster.strike("api-0")
        # As against Kubernetes: kubectl watches once. Informers list anew (see `test_kubernetes`).
        first.ended()
    until(lambda: "before" in kubectl_or_nothing(kubectl))
    with kubectl.following(*watch) as second:
        kubectl.run("apply", "-f", "-", given=sandbox("after"))
        second.until("ADDED", "after", "True")
        kubectl.run("delete", "sandbox", "before")
        second.until("DELETED", "before")
    assert kubectl.run("get", "sbx", "-o", "name") == "sandbox.agents.x-k8s.io/after\n"


def kubectl_or_nothing(kubectl: Kubectl) -> str:
    """The names of the sandboxes; nothing while the api comes back."""
    try:
        return kubectl.run("get", "sbx", "-o", "name")
    except AssertionError:
        return ""
