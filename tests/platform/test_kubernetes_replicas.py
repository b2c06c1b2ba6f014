"""Kubernetes' clients of a platform with two apis: a client stays at one, and goes on at the other when that has gone.

On the simulated engine: what is asked here is about the control plane.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kubernetes import client, config, watch

from tests.platform.test_kubernetes import TEMPLATE, TEMPLATES, needs_kubectl, persist
from tests.support.informer import Informer
from tests.support.kubectl import Kubectl
from tests.support.platform import Platform, running
from tests.support.waiting import until_true as until

ROUNDS = 6
"""More than enough for requests in turn to meet both apis."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with two apis."""
    with running(tmp_path_factory.mktemp("replicas"), "--engine", "simulated", "--api", "2") as made:
        yield made


@pytest.fixture(scope="module")
def kubeconfig(cluster: Platform) -> Path:
    return Path(cluster.env()["KUBECONFIG"])


@pytest.fixture
def api(kubeconfig: Path) -> Iterator[client.CustomObjectsApi]:
    with config.new_client_from_config(str(kubeconfig)) as made:
        found = client.CustomObjectsApi(made)
        yield found
        persist(found.delete_collection_namespaced_custom_object, *TEMPLATES)


def template(number: int) -> dict[str, object]:
    return {**TEMPLATE, "metadata": {"name": f"t{number}"}}


def test_a_watch_goes_on_from_a_list(api: client.CustomObjectsApi) -> None:
    for number in range(ROUNDS):
        begin = api.list_namespaced_custom_object(*TEMPLATES)["metadata"]["resourceVersion"]
        api.create_namespaced_custom_object(*TEMPLATES, template(number))
        follower = watch.Watch()
        for event in follower.stream(
            api.list_namespaced_custom_object, *TEMPLATES, resource_version=begin, timeout_seconds=60
        ):
            assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", f"t{number}")
            follower.stop()


@needs_kubectl
def test_kubectl_watches_and_lists_in_pieces(kubeconfig: Path, api: client.CustomObjectsApi) -> None:
    kubectl = Kubectl(kubeconfig)
    for number in range(ROUNDS):
        api.create_namespaced_custom_object(*TEMPLATES, template(number))
    for _ in range(ROUNDS):
        listed = kubectl.run("get", "sbt", "--chunk-size=2", "--no-headers").splitlines()
        assert [line.split()[0] for line in listed] == [f"t{number}" for number in range(ROUNDS)]
    with kubectl.following("get", "sbt", "-w", "-o", "name") as watching:
        watching.until("sandboxtemplate.extensions.agents.x-k8s.io/t0")
        for number in range(ROUNDS, 2 * ROUNDS):
            api.create_namespaced_custom_object(*TEMPLATES, template(number))
            watching.until(f"sandboxtemplate.extensions.agents.x-k8s.io/t{number}")


def test_an_informer_goes_on_at_the_other_api_when_its_own_has_gone(
    cluster: Platform, api: client.CustomObjectsApi
) -> None:
    """The watch ends, what it went on from is told to be gone, and it lists anew, once."""
    api.create_namespaced_custom_object(*TEMPLATES, template(0))
    with Informer(api, *TEMPLATES) as informer:
        informer.until(lambda objects: "t0" in objects)
        home = home_of(cluster, api)
        assert informer.lists == 1
        pid = cluster.pid(home)
        assert pid is not None
        cluster.kill(pid)
        persist(api.create_namespaced_custom_object, *TEMPLATES, template(1))
        informer.until(lambda objects: {"t0", "t1"} <= set(objects))
        assert informer.lists == 2
        until(lambda: cluster.status()["state"] == "up")


def tag_of(version: str) -> int:
    """What tells the versions of one api process from another's."""
    return int(version) // 1_000_000 & 0xFFF


def home_of(cluster: Platform, api: client.CustomObjectsApi) -> str:
    """The api at which this client's requests end."""
    group, version, namespace, plural = TEMPLATES
    wanted = tag_of(api.list_namespaced_custom_object(*TEMPLATES)["metadata"]["resourceVersion"])
    headers = {"Authorization": f"Bearer {cluster.env()['E2B_API_KEY']}"}
    for name in ("api-0", "api-1"):
        url = f"{cluster.role(name)['url']}/apis/{group}/{version}/namespaces/{namespace}/{plural}"
        if tag_of(httpx.get(url, headers=headers).json()["metadata"]["resourceVersion"]) == wanted:
            return name
    raise AssertionError("neither")
