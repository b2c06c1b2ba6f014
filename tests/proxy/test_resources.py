"""Envoy's configuration as documents; whether Envoy takes them is seen where it runs."""

from __future__ import annotations

import pytest

from greenroom.config import ProxyConfig
from greenroom.errors import SetupError
from greenroom.proxy import resources

CONFIG = ProxyConfig()


def entry(**changes: str) -> str:
    settings = {"host": "127.0.0.1", "domain": "localhost", "relay_token": "t", **changes}
    return str(resources.entry_listener(port=1, config=CONFIG, **settings))


@pytest.mark.parametrize("domain", ['x"; os.exit()', "a b", "-x", "x-", "a\nb", ":8700x\\", "[::1]"])
def test_a_domain_that_is_no_host_name_is_a_setup_error(domain: str) -> None:
    with pytest.raises(SetupError, match="domain"):
        entry(domain=domain)


@pytest.mark.parametrize(
    ("domain", "name"),
    [
        ("Example.Test:8700", "example.test"),
        ("", "localhost"),
        ("x.test.", "x.test"),
        ("localhost", "localhost"),
    ],
)
def test_domain_is_compared_in_lower_case_without_port(domain: str, name: str) -> None:
    assert f'local DOMAIN = "{name}"' in entry(domain=domain)


def test_percent_in_the_credential_is_no_command() -> None:
    assert "100%%secure" in entry(relay_token="100%secure")


@pytest.mark.parametrize("url", ["https://a:1", "http://a", "a:1", "http://:1", "http://a:99999", ""])
def test_api_address_out_of_form_is_a_setup_error(url: str) -> None:
    with pytest.raises(SetupError, match="http://host:port"):
        resources.api_clusters([url], CONFIG)


def test_clusters_of_names_are_resolved_and_of_addresses_are_not() -> None:
    assert resources.node_cluster("abcd", resources.Relay("node.test", 1), CONFIG)["type"] == "STRICT_DNS"
    assert resources.node_cluster("abcd", resources.Relay("::1", 1), CONFIG)["type"] == "STATIC"
