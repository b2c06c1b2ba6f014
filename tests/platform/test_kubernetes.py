"""Kubernetes' clients against a platform as users start it: the kubeconfig of `greenroom env`, through the entry's TLS.

On the simulated engine: what is asked here is about the control plane.
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.support.informer import Informer
from tests.support.kubectl import KUBECTL, Kubectl
from tests.support.platform import Platform, running
from tests.support.waiting import until_true as until

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine")
GROUP, VERSION = "extensions.agents.x-k8s.io", "v1beta1"
SANDBOXES = ("agents.x-k8s.io", VERSION, "default", "sandboxes")
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


def sandbox(name: str) -> dict[str, Any]:
    return {
        "apiVersion": f"agents.x-k8s.io/{VERSION}",
        "kind": "Sandbox",
        "metadata": {"name": name},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "base"}]}}},
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A running platform without VMs."""
    with running(tmp_path_factory.mktemp("kubernetes"), "--engine", "simulated", "--warm", "2") as made:
        yield made


@pytest.fixture(scope="module")
def kubeconfig(cluster: Platform) -> Path:
    """The file that `greenroom env` writes."""
    return Path(cluster.env()["KUBECONFIG"])


@pytest.fixture
def kubectl(kubeconfig: Path) -> Kubectl:
    """kubectl with that file."""
    return Kubectl(kubeconfig)


@pytest.fixture
def api(kubeconfig: Path) -> Iterator[client.CustomObjectsApi]:
    """The Kubernetes client for Python, set up by the file alone; what a test made is removed."""
    with config.new_client_from_config(str(kubeconfig)) as made:
        found = client.CustomObjectsApi(made)
        yield found
        for place in (SANDBOXES, POOLS, TEMPLATES):
            found.delete_collection_namespaced_custom_object(*place)


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


def test_up_names_the_kubeconfig_and_writes_it_anew_for_other_ports(tmp_path: Path) -> None:
    made = Platform(tmp_path / "again")
    servers = []
    try:
        for _ in range(2):
            told = made.up("--engine", "simulated").stderr
            path = made.state / "kubeconfig"
            assert f"kubectl: export KUBECONFIG={path}" in told
            servers.append(
                yaml.safe_load(path.read_text(encoding="utf-8"))["clusters"][0]["cluster"]["server"]
            )
            with config.new_client_from_config(str(path)) as one:
                assert client.CustomObjectsApi(one).list_namespaced_custom_object(*SANDBOXES)["items"] == []
            made.down()
        assert servers[0] != servers[1]
        made.up("--engine", "simulated", "--kube-port", "none")
    finally:
        made.down()


def test_keys_of_a_namespace_see_it(cluster: Platform, tmp_path: Path) -> None:
    key = tmp_path / "own.key"
    key.write_text(cluster.command("keys", "create", "own", "--owner", "team-b").stdout, encoding="utf-8")
    place = tmp_path / "own"
    cluster.command("env", "--key-file", str(key), "--kubeconfig", str(place))
    with config.new_client_from_config(str(place)) as one:
        found = client.CoreV1Api(one)
        (only,) = found.list_namespace().items
        assert only.metadata.name == "team-b"
        assert only.metadata.creation_timestamp is not None
        assert found.read_namespace("team-b").metadata.name == "team-b"
        with pytest.raises(ApiException) as refused:
            found.read_namespace("default")
        assert refused.value.status == 403


def test_a_typed_client_keeps_quotas(kubeconfig: Path) -> None:
    with config.new_client_from_config(str(kubeconfig)) as one:
        found = client.CoreV1Api(one)
        quota = client.V1ResourceQuota(
            metadata=client.V1ObjectMeta(name="typed"),
            spec=client.V1ResourceQuotaSpec(hard={"requests.cpu": "4"}),
        )
        assert found.create_namespaced_resource_quota("default", quota).spec.hard == {"requests.cpu": "4"}
        assert found.delete_namespaced_resource_quota("typed", "default").metadata.name == "typed"


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


def test_status_tells_sandboxes_by_their_names(cluster: Platform, api: client.CustomObjectsApi) -> None:
    api.create_namespaced_custom_object(*SANDBOXES, sandbox("named"))
    (told,) = cluster.status()["sandboxes"]
    assert (told["owner"], told["name"]) == ("default", "named")
    (line,) = (line for line in cluster.command("status").stdout.splitlines() if told["sandbox_id"] in line)
    assert line.split()[1] == "default/named"
    assert line.rstrip().endswith("when it is deleted")


@pytest.mark.slow
def test_an_informer_misses_nothing_while_apis_die(cluster: Platform, api: client.CustomObjectsApi) -> None:
    """It lists anew, and then has what has come, changed and gone meanwhile, and no more."""
    api.create_namespaced_custom_object(*TEMPLATES, TEMPLATE)

    def make(name: str) -> None:
        persist(api.create_namespaced_custom_object, *SANDBOXES, sandbox(name))

    with Informer(api, *SANDBOXES) as informer:
        for name in ("stays", "changes", "goes"):
            make(name)
        informer.until(lambda objects: set(objects) == {"stays", "changes", "goes"})
        for number in ("0", "1"):
            api_process = cluster.pid("api-0")
            assert api_process is not None
            cluster.kill(api_process)
            make(f"after-{number}")
            label = {"metadata": {"labels": {"round": number}}}
            persist(api.patch_namespaced_custom_object, *SANDBOXES, "changes", label)
            persist(api.delete_namespaced_custom_object, *SANDBOXES, "goes")
            informer.until(partial(has_come_to, number))
        informer.until(lambda objects: set(objects) == {"stays", "changes", "after-0", "after-1"})
        assert informer.lists >= 3
        truth = {
            each["metadata"]["name"]: each for each in api.list_namespaced_custom_object(*SANDBOXES)["items"]
        }
        assert informer.objects == truth
        assert informer.told["goes"][0] == "ADDED"
        assert informer.told["goes"][-1] == "DELETED"
        assert all(told[0] == "ADDED" for told in informer.told.values())


def persist(deed: Callable[..., object], *arguments: object) -> None:
    """Do something as a controller does: again, until an api has done it, now or before."""

    def done() -> bool:
        try:
            deed(*arguments)
        except ApiException as error:
            return error.status in (404, 409)
        except HTTPError:
            return False
        return True

    until(done)


def has_come_to(number: str, objects: Mapping[str, dict[str, Any]]) -> bool:
    """Whether an informer knows of all that was done in this round."""
    changed = objects["changes"]["metadata"]["labels"].get("round")
    return f"after-{number}" in objects and changed == number and "goes" not in objects


@needs_kubectl
def test_kubectl_applies_shows_changes_and_removes(kubectl: Kubectl, api: client.CustomObjectsApi) -> None:
    difference = kubectl.run("diff", "-f", "-", given=TEMPLATE, status=1)
    assert "+kind: SandboxTemplate" in difference
    assert "sandboxtemplate.extensions.agents.x-k8s.io/py created" in kubectl.run(
        "apply", "-f", "-", given=TEMPLATE
    )
    assert "configured" in kubectl.run(
        "apply", "-f", "-", given={**TEMPLATE, "metadata": {"name": "py", "labels": {"a": "b"}}}
    )
    kubectl.run("apply", "--server-side", "-f", "-", given=pool("swp1", 1))
    kubectl.run("wait", "swp/swp1", "--for=jsonpath={.status.observedGeneration}=1", "--timeout=20s")
    listing = kubectl.run("get", "swp").splitlines()
    assert listing[0].split() == ["NAME", "READY", "DESIRED", "AGE"]
    assert listing[1].split()[0] == "swp1"
    assert "scaled" in kubectl.run("scale", "swp", "swp1", "--replicas=3")
    assert kubectl.run("get", "swp", "swp1", "-o", "jsonpath={.spec.replicas}") == "3"
    assert "sandboxTemplateRef" in kubectl.run("explain", "swp.spec")
    assert "Sandbox Template Ref" in kubectl.run("describe", "swp", "swp1")
    refused = kubectl.run(
        "apply", "-f", "-", status=1,
        given={**TEMPLATE, "metadata": {"name": "bad"}, "spec": {
            "podTemplate": {"spec": {"containers": [{"name": "main", "image": "nope"}]}}}},
    )  # fmt: skip
    assert "spec.podTemplate.spec.containers[0].image" in refused
    assert "deleted" in kubectl.run("delete", "swp", "swp1")


@needs_kubectl
def test_kubectl_says_who_one_is_and_what_one_may(kubectl: Kubectl) -> None:
    assert "key:default" in kubectl.run("auth", "whoami")
    assert kubectl.run("auth", "can-i", "create", "sandboxtemplates").strip() == "yes"
    assert "*.*" in kubectl.run("auth", "can-i", "--list")


@needs_kubectl
def test_kubectl_shows_quotas(kubectl: Kubectl) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "bound"},
        "spec": {"hard": {"count/sandboxes.agents.x-k8s.io": "10", "requests.memory": "8Gi"}},
    }
    kubectl.run("apply", "-f", "-", given=quota)
    shown = kubectl.run("get", "quota", "bound")
    assert "count/sandboxes.agents.x-k8s.io: 0/10, requests.memory: 0/8Gi" in shown
    kubectl.run("delete", "quota", "bound")
    assert "created" in kubectl.run("create", "quota", "typed", "--hard=requests.cpu=4,requests.memory=8Gi")
    assert "requests.cpu: 0/4" in kubectl.run("get", "quota", "typed")
    kubectl.run("delete", "quota", "typed")


@needs_kubectl
def test_kubectl_says_that_there_is_no_such_kind_and_is_told_the_health(kubectl: Kubectl) -> None:
    unknown = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}}
    assert 'no matches for kind "Deployment"' in kubectl.run("apply", "-f", "-", given=unknown, status=1)
    for path in ("/healthz", "/livez", "/readyz"):
        assert kubectl.run("get", "--raw", path) == "ok"


@needs_kubectl
def test_kubectl_watches_through_the_entry(kubectl: Kubectl, api: client.CustomObjectsApi) -> None:
    with kubectl.following("get", "sbt", "-w", "-o", "name") as watching:
        api.create_namespaced_custom_object(*TEMPLATES, TEMPLATE)
        watching.until("sandboxtemplate.extensions.agents.x-k8s.io/py")


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
