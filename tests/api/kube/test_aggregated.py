"""The dialect behind a front proxy: who is let in, who is not, and kubectl through it."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from greenroom.api.kube.aggregated import caller_of, common_name
from greenroom.config import AggregatedConfig, KubeConfig
from greenroom.store.records import EVERYTHING
from tests.support.cluster import QUICK, Cluster, cluster
from tests.support.front_proxy import Authority, FrontProxy
from tests.support.kube_server import KUBECTL, Kubectl

LISTING = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxwarmpools"
MASTERS = ["system:masters", "system:authenticated"]


class Behind:
    """An api with the listener for a front proxy."""

    def __init__(self, made: Cluster, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory)
        aggregated = AggregatedConfig(
            listen="127.0.0.1", port=0, requestheader_client_ca_file=str(self.authority.file)
        )
        settings = msgspec.structs.replace(QUICK, kube=KubeConfig(aggregated=aggregated))
        made.master()
        api = made.api(settings)
        self.url: str = api.detail["aggregated_url"]
        self.plain = api.url
        self._trusted = str(made.state / "tls" / "aggregated" / "ca.pem")

    def tls(self, authority: Authority | None, name: str = "front-proxy-client") -> ssl.SSLContext:
        """As a client with a certificate by an authority of this common name, or without any."""
        context = ssl.create_default_context(cafile=self._trusted)
        if authority is not None:
            context.load_cert_chain(*authority.client(name))
        return context


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    with cluster(tmp_path_factory.mktemp("aggregated")) as made:
        yield Behind(made, made.state / "front")


async def asked(url: str, tls: ssl.SSLContext | None, headers: dict[str, str]) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers, ssl=tls if tls is not None else True) as answer,
    ):
        body = await answer.text()
        return answer.status, json.loads(body) if body.startswith("{") else body


ADMIN = {"X-Remote-User": "admin", "X-Remote-Group": "system:masters"}


async def test_the_front_proxy_names_the_user(behind: Behind) -> None:
    status, told = await asked(behind.url + LISTING, behind.tls(behind.authority), ADMIN)
    assert (status, told["kind"]) == (200, "SandboxWarmPoolList")


async def test_a_user_of_no_allowed_group_may_look_at_what_there_is_but_do_nothing(behind: Behind) -> None:
    tls = behind.tls(behind.authority)
    headers = {"X-Remote-User": "jane", "X-Remote-Group": "system:authenticated"}
    assert (await asked(f"{behind.url}/apis/extensions.agents.x-k8s.io/v1beta1", tls, headers))[0] == 200
    status, told = await asked(behind.url + LISTING, tls, headers)
    assert (status, told["reason"]) == (403, "Forbidden")
    assert 'User "jane" cannot list resource "sandboxwarmpools"' in told["message"]


@pytest.mark.parametrize("path", [LISTING, "/apis", "/openapi/v3"])
async def test_without_a_certificate_of_an_allowed_name_headers_name_nobody(
    behind: Behind, path: str
) -> None:
    assert (await asked(behind.url + path, behind.tls(None), ADMIN))[0] == 401
    assert (await asked(behind.url + path, behind.tls(behind.authority, "somebody"), ADMIN))[0] == 401


async def test_a_certificate_of_another_authority_ends_the_handshake(behind: Behind, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "front-proxy-ca")
    with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
        await asked(behind.url + LISTING, behind.tls(stranger), ADMIN)


async def test_a_front_proxy_that_names_nobody_is_told_so(behind: Behind) -> None:
    status, told = await asked(behind.url + LISTING, behind.tls(behind.authority), {})
    assert (status, told["reason"]) == (401, "Unauthorized")


async def test_probes_need_no_certificate(behind: Behind) -> None:
    assert await asked(behind.url + "/livez", behind.tls(None), {}) == (200, "ok")


async def test_the_ordinary_port_believes_no_header(behind: Behind) -> None:
    assert (await asked(behind.plain + LISTING, None, ADMIN))[0] == 401


async def test_e2b_is_not_served_behind_a_front_proxy(behind: Behind) -> None:
    status, told = await asked(behind.url + "/sandboxes", behind.tls(behind.authority), ADMIN)
    assert (status, told["kind"]) == (404, "Status")


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine")
async def test_kubectl_through_a_front_proxy(behind: Behind, tmp_path: Path) -> None:
    users = {"root": ("admin", MASTERS), "jane": ("jane", ["system:authenticated"])}
    front = FrontProxy(behind.url, behind.tls(behind.authority), users)
    async with front.running(tmp_path) as proxy:
        kubectl = Kubectl(proxy.url, tmp_path)
        _configure(tmp_path, proxy, "root")
        pool = {
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxWarmPool",
            "metadata": {"name": "front"},
            "spec": {"sandboxTemplateRef": {"name": "none"}},
        }
        assert "created" in await kubectl.run("apply", "-f", "-", given=pool)
        assert "front" in await kubectl.run("get", "swp")
        assert "TemplateNotFound" in await kubectl.run("describe", "swp", "front")
        assert "admin" in await kubectl.run("auth", "whoami")
        _configure(tmp_path, proxy, "jane")
        assert 'User "jane" cannot list resource' in await kubectl.run("get", "swp", status=1)
        _configure(tmp_path, proxy, "root")
        assert "deleted" in await kubectl.run("delete", "swp", "front")


def _configure(home: Path, proxy: FrontProxy, token: str) -> None:
    config = json.loads((home / "kubeconfig").read_text())
    config["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(
        proxy.authority
    ).decode()
    config["users"][0]["user"] = {"token": token}
    (home / "kubeconfig").write_text(json.dumps(config))


def test_users_groups_and_what_else_is_told_of_them() -> None:
    config = AggregatedConfig()
    headers = [
        ("x-remote-user", "jane"),
        ("x-remote-group", "a"),
        ("x-remote-group", "system:masters"),
        ("x-remote-extra-scopes%2fx", "one"),
        ("x-remote-extra-scopes%2fx", "two"),
    ]
    caller = caller_of(headers, config)
    assert caller is not None
    assert (caller.user, caller.groups) == ("jane", ["a", "system:masters"])
    assert caller.extra == {"scopes/x": ["one", "two"]}
    assert list(caller.rules) == [EVERYTHING]
    plain = [("x-remote-user", "jane"), ("x-remote-group", "a")]
    assert caller_of(plain, config).rules == []  # type: ignore[union-attr]
    trusting = AggregatedConfig(authorize="trust")
    assert caller_of(plain, trusting).rules == [EVERYTHING]  # type: ignore[union-attr]
    assert caller_of([("x-remote-group", "system:masters")], config) is None


def test_the_common_name_is_found_in_what_ssl_tells() -> None:
    told = {"subject": ((("organizationName", "k8s"),), (("commonName", "front-proxy-client"),))}
    assert common_name(told) == "front-proxy-client"
    assert common_name({}) == ""
