"""Kubernetes' clients against a platform as users start it: the kubeconfig of `greenroom env`, through the entry's TLS.

On the simulated engine: what is asked here is about the control plane.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from tests.support.platform import Platform
from tests.support.waiting import until_true as until

KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine")
GROUP, VERSION = "extensions.agents.x-k8s.io", "v1beta1"
TEMPLATES = (GROUP, VERSION, "default", "sandboxtemplates")
POOLS = (GROUP, VERSION, "default", "sandboxwarmpools")

TEMPLATE: dict[str, Any] = {
    "apiVersion": f"{GROUP}/{VERSION}",
    "kind": "SandboxTemplate",
    "metadata": {"name": "py"},
    "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "base"}]}}},
}


def pool(name: str, replicas: int = 2) -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "SandboxWarmPool",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": "py"}},
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A running platform without VMs."""
    made = Platform(tmp_path_factory.mktemp("kubernetes"))
    made.up("--engine", "simulated", "--warm", "2")
    try:
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def kubeconfig(cluster: Platform) -> Path:
    """The file that `greenroom env` writes."""
    return Path(cluster.env()["KUBECONFIG"])


@pytest.fixture
def api(kubeconfig: Path) -> Iterator[client.CustomObjectsApi]:
    """The Kubernetes client for Python, set up by the file alone; what a test made is removed."""
    with config.new_client_from_config(str(kubeconfig)) as made:
        found = client.CustomObjectsApi(made)
        yield found
        for place in (POOLS, TEMPLATES):
            found.delete_collection_namespaced_custom_object(*place)


def kubectl(kubeconfig: Path, *arguments: str, given: object = None, status: int = 0) -> str:
    """Run kubectl to its end; what it wrote, to either stream."""
    assert KUBECTL is not None
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(kubeconfig.parent),
        "KUBECONFIG": str(kubeconfig),
    }
    done = subprocess.run(
        [KUBECTL, *arguments],
        input=json.dumps(given) if given is not None else "",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_kubeconfig_is_private_and_holds_all_that_a_client_needs(
    cluster: Platform, kubeconfig: Path
) -> None:
    assert stat.S_IMODE(kubeconfig.stat().st_mode) == 0o600
    told = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    assert told["contexts"][0]["context"]["namespace"] == "default"
    assert told["clusters"][0]["cluster"]["server"].startswith("https://127.0.0.1:")
    authority = base64.b64decode(told["clusters"][0]["cluster"]["certificate-authority-data"])
    assert authority.startswith(b"-----BEGIN CERTIFICATE-----")
    shell = cluster.command("env").stdout
    assert f"export KUBECONFIG={kubeconfig}" in shell
    assert shell.count(told["users"][0]["user"]["token"]) == 1


def test_a_kubeconfig_for_another_key_is_of_its_owners_namespace(cluster: Platform, tmp_path: Path) -> None:
    key = tmp_path / "ci.key"
    key.write_text(cluster.command("keys", "create", "ci", "--owner", "team-a").stdout, encoding="utf-8")
    elsewhere = tmp_path / "deep" / "config"
    told = cluster.command("env", "--key-file", str(key), "--kubeconfig", str(elsewhere), "--json").stdout
    assert json.loads(told)["KUBECONFIG"] == str(elsewhere)
    made = yaml.safe_load(elsewhere.read_text(encoding="utf-8"))
    assert made["contexts"][0]["context"]["namespace"] == "team-a"
    with config.new_client_from_config(str(elsewhere)) as one:
        found = client.CustomObjectsApi(one)
        assert (
            found.list_namespaced_custom_object(GROUP, VERSION, "team-a", "sandboxtemplates")["items"] == []
        )
        with pytest.raises(ApiException) as refused:
            found.list_namespaced_custom_object(*TEMPLATES)
        assert refused.value.status == 403
        assert json.loads(refused.value.body)["reason"] == "Forbidden"


def test_objects_are_made_listed_changed_scaled_and_removed(api: client.CustomObjectsApi) -> None:
    made = api.create_namespaced_custom_object(*TEMPLATES, TEMPLATE)
    assert made["metadata"]["uid"]
    api.create_namespaced_custom_object(*POOLS, pool("one"))
    names = [each["metadata"]["name"] for each in api.list_namespaced_custom_object(*POOLS)["items"]]
    assert names == ["one"]
    changed = api.patch_namespaced_custom_object(*POOLS, "one", {"metadata": {"labels": {"team": "x"}}})
    assert changed["metadata"]["labels"] == {"team": "x"}
    assert changed["metadata"]["generation"] == 1
    scale = api.patch_namespaced_custom_object_scale(*POOLS, "one", {"spec": {"replicas": 1}})
    assert scale["spec"]["replicas"] == 1
    assert scale["status"]["selector"] == "agents.x-k8s.io/warm-pool=one"
    current = api.get_namespaced_custom_object(*POOLS, "one")
    assert current["metadata"]["generation"] == 2
    assert current["status"]["observedGeneration"] == 2
    with pytest.raises(ApiException) as conflict:
        api.replace_namespaced_custom_object(*POOLS, "one", made | pool("one") | {"metadata": {
            "name": "one", "resourceVersion": "1"}})  # fmt: skip
    assert (conflict.value.status, json.loads(conflict.value.body)["reason"]) == (409, "Conflict")
    api.delete_namespaced_custom_object(*POOLS, "one")
    with pytest.raises(ApiException) as gone:
        api.get_namespaced_custom_object(*POOLS, "one")
    assert gone.value.status == 404


def test_a_watch_goes_on_from_a_version_and_tells_of_every_change(api: client.CustomObjectsApi) -> None:
    begin = api.list_namespaced_custom_object(*POOLS)["metadata"]["resourceVersion"]
    api.create_namespaced_custom_object(*TEMPLATES, TEMPLATE)
    api.create_namespaced_custom_object(*POOLS, pool("seen"))
    api.patch_namespaced_custom_object(*POOLS, "seen", {"spec": {"replicas": 5}})
    api.delete_namespaced_custom_object(*POOLS, "seen")
    told: list[tuple[str, int]] = []
    follower = watch.Watch()
    for event in follower.stream(
        api.list_namespaced_custom_object, *POOLS, resource_version=begin, timeout_seconds=60
    ):
        told.append((event["type"], event["object"]["spec"]["replicas"]))
        if event["type"] == "DELETED":
            follower.stop()
    assert told[0] == ("ADDED", 2)
    assert ("MODIFIED", 5) in told
    assert told[-1] == ("DELETED", 5)


def test_a_watch_outlasts_an_api_that_dies_by_listing_anew(
    cluster: Platform, api: client.CustomObjectsApi
) -> None:
    """As informers do: a version of the process that died is answered 410, and then all is there."""
    api.create_namespaced_custom_object(*TEMPLATES, TEMPLATE)
    version = api.list_namespaced_custom_object(*TEMPLATES)["metadata"]["resourceVersion"]
    cluster.strike("api-0")

    def listed() -> bool:
        try:
            return bool(api.list_namespaced_custom_object(*TEMPLATES)["items"])
        except ApiException:
            return False

    until(listed)
    with pytest.raises(ApiException) as gone:
        for _ in watch.Watch().stream(
            api.list_namespaced_custom_object, *TEMPLATES, resource_version=version, timeout_seconds=30
        ):
            pass
    assert gone.value.status == 410


@needs_kubectl
def test_kubectl_applies_shows_changes_and_removes(kubeconfig: Path, api: client.CustomObjectsApi) -> None:
    difference = kubectl(kubeconfig, "diff", "-f", "-", given=TEMPLATE, status=1)
    assert "+kind: SandboxTemplate" in difference
    assert "sandboxtemplate.extensions.agents.x-k8s.io/py created" in kubectl(
        kubeconfig, "apply", "-f", "-", given=TEMPLATE
    )
    assert "configured" in kubectl(
        kubeconfig, "apply", "-f", "-", given={**TEMPLATE, "metadata": {"name": "py", "labels": {"a": "b"}}}
    )
    kubectl(kubeconfig, "apply", "--server-side", "-f", "-", given=pool("swp1", 1))
    kubectl(kubeconfig, "wait", "swp/swp1", "--for=jsonpath={.status.observedGeneration}=1", "--timeout=20s")
    listing = kubectl(kubeconfig, "get", "swp").splitlines()
    assert listing[0].split() == ["NAME", "READY", "DESIRED", "AGE"]
    assert listing[1].split()[0] == "swp1"
    assert "scaled" in kubectl(kubeconfig, "scale", "swp", "swp1", "--replicas=3")
    assert kubectl(kubeconfig, "get", "swp", "swp1", "-o", "jsonpath={.spec.replicas}") == "3"
    assert "sandboxTemplateRef" in kubectl(kubeconfig, "explain", "swp.spec")
    assert "Sandbox Template Ref" in kubectl(kubeconfig, "describe", "swp", "swp1")
    refused = kubectl(
        kubeconfig, "apply", "-f", "-", status=1,
        given={**TEMPLATE, "metadata": {"name": "bad"}, "spec": {
            "podTemplate": {"spec": {"containers": [{"name": "main", "image": "nope"}]}}}},
    )  # fmt: skip
    assert "spec.podTemplate.spec.containers[0].image" in refused
    assert "deleted" in kubectl(kubeconfig, "delete", "swp", "swp1")


@needs_kubectl
def test_kubectl_says_who_one_is_and_what_one_may(kubeconfig: Path) -> None:
    assert "key:default" in kubectl(kubeconfig, "auth", "whoami")
    assert kubectl(kubeconfig, "auth", "can-i", "create", "sandboxtemplates").strip() == "yes"
    assert "*.*" in kubectl(kubeconfig, "auth", "can-i", "--list")


@needs_kubectl
def test_kubectl_shows_quotas(kubeconfig: Path) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "bound"},
        "spec": {"hard": {"count/sandboxes.agents.x-k8s.io": "10", "requests.memory": "8Gi"}},
    }
    kubectl(kubeconfig, "apply", "-f", "-", given=quota)
    shown = kubectl(kubeconfig, "get", "quota", "bound")
    assert "count/sandboxes.agents.x-k8s.io: 0/10, requests.memory: 0/8Gi" in shown
    kubectl(kubeconfig, "delete", "quota", "bound")


@needs_kubectl
def test_kubectl_watches_through_the_entry(kubeconfig: Path, api: client.CustomObjectsApi) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(kubeconfig.parent),
        "KUBECONFIG": str(kubeconfig),
    }
    assert KUBECTL is not None
    running = subprocess.Popen(
        [KUBECTL, "get", "sbt", "-w", "-o", "name"], stdout=subprocess.PIPE, text=True, env=environment
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(running.stdout.readline, "")))  # type: ignore[union-attr]
    try:
        api.create_namespaced_custom_object(*TEMPLATES, TEMPLATE)
        reader.start()
        until(lambda: any("sandboxtemplate.extensions.agents.x-k8s.io/py" in line for line in lines))
    finally:
        running.terminate()
        running.wait(30)
        reader.join(30)
        assert running.stdout is not None
        running.stdout.close()


def test_the_control_certificate_is_for_this_machine_and_nothing_else(cluster: Platform) -> None:
    from cryptography import x509

    held = cluster.state / "tls" / "control"
    shown = x509.load_pem_x509_certificate((held / "cert.pem").read_bytes())
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    assert {str(each) for each in names.get_values_for_type(x509.IPAddress)} >= {"127.0.0.1", "::1"}
    authority = x509.load_pem_x509_certificate((held / "ca.pem").read_bytes())
    permitted = authority.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees
    assert permitted is not None
    assert {str(each.value) for each in permitted} >= {"localhost", "127.0.0.1/32", "::1/128"}
