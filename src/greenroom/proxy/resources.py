"""Envoy's configuration as documents: the static bootstrap, the entry listener, and the clusters.

Pure: settings in, JSON out. Paths in it are relative to Envoy's working directory (`proxy.envoy` says why).
Field names and meanings: https://www.envoyproxy.io/docs/envoy/v1.40.0/api-v3/api.
"""

from __future__ import annotations

import importlib.resources
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from greenroom.config import ProxyConfig
from greenroom.errors import SetupError
from greenroom.proxy.replies import local_replies

Document = dict[str, Any]

BOOTSTRAP, XDS, RUN = "bootstrap.json", "xds", "run"
CLUSTERS, LISTENERS = f"{XDS}/clusters.json", f"{XDS}/listeners.json"
ADMIN_SOCKET = f"{RUN}/admin.sock"
CERTIFICATE = f"{XDS}/certificate.json"
CONTROL_CERTIFICATE = f"{XDS}/control.json"
"""Of the listener for Kubernetes' clients, which know the entry by its address."""
ENTRY, API, CONTROLLER = "entry", "api", "controller"
API_KUBE = "api_kube"
"""The same replicas for Kubernetes' clients. Versions belong to the process that shows them, so that a client that is
sent from one to the other cannot go on from what it has: one credential stays at one replica while that lives."""
ENTRY_TLS, ENTRY_CONTROL = "entry_tls", "entry_control"

BUFFER = 1 << 20
"""Bytes that Envoy buffers per connection and direction before it stops reading."""
HEADERS_KIB = 64
MAX_HEADERS = 200
CONNECT_TIMEOUT = "3s"
REQUEST_HEADERS_TIMEOUT = "15s"
API_IDLE = "30s"
"""Pooled connections to an api are closed before the api does it (75 s), so that none is used as it closes."""

_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_TYPES = "type.googleapis.com/envoy"
_HCM = f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_CONNECTIONS_MONITOR = "envoy.resource_monitors.global_downstream_max_connections"

_FORWARDED_FOR = {
    "header": {"key": "x-forwarded-for", "value": "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%"},
    "append_action": "APPEND_IF_EXISTS_OR_ADD",
}


class Relay(msgspec.Struct, frozen=True, order=True):
    """Where a node's relay listens, and its API."""

    host: str
    port: int
    api_url: str = ""


def bootstrap(config: ProxyConfig, replica: int = 0) -> Document:
    """The static part: admin on a socket that only Envoy's user (and root) can open, and where xDS lies."""

    def watched(path: str) -> Document:
        return {
            "resource_api_version": "V3",
            "path_config_source": {"path": path, "watched_directory": {"path": XDS}},
        }

    return {
        "node": {"id": "greenroom-proxy", "cluster": "greenroom"},
        "admin": {"address": {"pipe": {"path": ADMIN_SOCKET, "mode": 0o600}}},
        "application_log_config": {"log_format": {"json_format": _log_line(replica)}},
        "dynamic_resources": {"lds_config": watched(LISTENERS), "cds_config": watched(CLUSTERS)},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": _CONNECTIONS_MONITOR,
                    "typed_config": {
                        "@type": f"{_TYPES}.extensions.resource_monitors.downstream_connections.v3."
                        "DownstreamConnectionsConfig",
                        "max_active_downstream_connections": config.max_connections,
                    },
                }
            ]
        },
    }


def _log_line(replica: int) -> Document:
    """A line of Envoy's own log in the form of the roles' (`wire.logs`); it shares the proxy's."""
    return {
        "time": "%Y-%m-%dT%T.%eZ",
        "level": "%l",
        "role": "proxy",
        "replica": replica,
        "logger": "envoy.%n",
        "message": "%j",
    }


def discovery(version: str, resources: Iterable[Document]) -> bytes:
    """The contents of an xDS file."""
    return msgspec.json.encode({"version_info": version, "resources": list(resources)})


def entry_listener(
    *, host: str, port: int, domain: str, relay_token: str, config: ProxyConfig, name: str = ENTRY
) -> Document:
    """The listener for both planes, or one of its twins with TLS by its `name`: ENTRY_TLS shows the certificate of the
    domain, ENTRY_CONTROL that of the control plane. Raises SetupError for a domain that is no host name."""
    chain: Document = {
        "filters": [{"name": "http", "typed_config": _manager(domain, relay_token, config, name)}]
    }
    if name != ENTRY:
        chain["transport_socket"] = _tls(CERTIFICATE if name == ENTRY_TLS else CONTROL_CERTIFICATE)
    return {
        "@type": f"{_TYPES}.config.listener.v3.Listener",
        "name": name,
        "address": {"socket_address": {"address": host, "port_value": port}},
        # With SO_REUSEPORT a second proxy of the same user would share the port instead of being told.
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": BUFFER,
        # A watch may be silent for as long as it likes, so that a client has gone must be found out in another way.
        "socket_options": [
            _socket_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            _socket_option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
            _socket_option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
            _socket_option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ],
        "filter_chains": [chain],
    }


def _socket_option(level: int, name: int, value: int) -> Document:
    return {"level": level, "name": name, "int_value": value}


def _tls(certificate_file: str) -> Document:
    """TLS as clients of today speak it. The certificate is a file of its own, which Envoy reads anew when it is
    replaced; connections that are open go on with the old one."""
    secret = {
        "name": certificate_file,
        "sds_config": {
            "resource_api_version": "V3",
            "path_config_source": {"path": certificate_file, "watched_directory": {"path": XDS}},
        },
    }
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {
                "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
                "tls_certificate_sds_secret_configs": [secret],
                "alpn_protocols": ["h2", "http/1.1"],
            },
        },
    }


def certificate(chain: bytes, key: bytes, name: str = CERTIFICATE) -> Document:
    """What a TLS listener shows: a certificate (with its chain) and its key, both PEM. `name` is that of its file."""
    return {
        "@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.Secret",
        "name": name,
        "tls_certificate": {
            "certificate_chain": {"inline_string": chain.decode()},
            "private_key": {"inline_string": key.decode()},
        },
    }


def _manager(domain: str, relay_token: str, config: ProxyConfig, name: str) -> Document:
    idle = _seconds(config.idle_timeout)
    return {
        "@type": _HCM,
        "stat_prefix": ENTRY,
        "codec_type": "AUTO",
        "server_name": "greenroom",
        "use_remote_address": True,
        # Envoy would write the machine's main address for clients on loopback; the routes add the true one.
        "skip_xff_append": True,
        # The routing filter replaces one that is no sane token.
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        # Guests get the path as it was sent; the relay looks through its disguises itself.
        "normalize_path": False,
        "merge_slashes": False,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
        "max_request_headers_kb": HEADERS_KIB,
        "common_http_protocol_options": {"idle_timeout": idle, "max_headers_count": MAX_HEADERS},
        "http2_protocol_options": {
            "max_concurrent_streams": 1024,
            "initial_stream_window_size": 256 << 10,
            "initial_connection_window_size": BUFFER,
            "allow_connect": True,
        },
        "stream_idle_timeout": idle,
        "request_headers_timeout": REQUEST_HEADERS_TIMEOUT,
        "request_timeout": "0s",
        # From telling a client to go until its idle connection is closed; the default is longer than our drain.
        "drain_timeout": "0.5s",
        # A client learns of a stream that was cut, a killed sandbox's for one, only after this time (the default
        # is 1 s). It is there so that an answer to a client that still sends is read before the reset.
        "delayed_close_timeout": "0.2s",
        # For all routes, since Envoy decides before the filter has found the route.
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "local_reply_config": local_replies(),
        "http_filters": [
            {
                "name": "routing",
                "typed_config": {
                    "@type": f"{_TYPES}.extensions.filters.http.lua.v3.Lua",
                    "default_source_code": {"inline_string": _filter(domain, relay_token)},
                },
            },
            {
                "name": "router",
                "typed_config": {
                    "@type": f"{_TYPES}.extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            },
        ],
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes(relay_token, name)}],
            "validate_clusters": False,
        },
    }


def _filter(domain: str, token: str) -> str:
    name, colon, port = (domain or "localhost").lower().partition(":")
    name = name.removesuffix(".")
    if not _DOMAIN.fullmatch(name) or (colon and not port.isdigit()):
        raise SetupError(f"the domain {domain!r} is not a host name (with an optional :port)")
    source = importlib.resources.files("greenroom.proxy").joinpath("routing.lua").read_text(encoding="utf-8")
    # The credential is made of hexadecimal digits; in quotes as Lua escapes them it could be anything.
    quoted = "".join(f"\\{byte:03d}" for byte in token.encode())
    return f'local DOMAIN = "{name}"\nlocal CREDENTIAL = "{quoted}"\n{source}'


def _routes(relay_token: str, name: str) -> list[Document]:
    def marked(header: str) -> Document:
        return {"prefix": "/", "headers": [{"name": header, "present_match": True}]}

    return [
        *(
            {
                "match": {
                    "prefix": "/",
                    "headers": [{"name": "x-greenroom-status", "string_match": {"exact": str(status)}}],
                },
                "direct_response": {"status": status},
                "response_headers_to_add": []
                if status == 401
                else [{"header": {"key": "retry-after", "value": "1"}}],
            }
            for status in (401, 429, 503)
        ),
        {"match": marked("x-greenroom-refusal"), "direct_response": {"status": 400}},
        {
            "match": marked("x-greenroom-cluster"),
            "route": {
                "cluster_header": "x-greenroom-cluster",
                "cluster_not_found_response_code": "SERVICE_UNAVAILABLE",
                "timeout": "0s",
            },
            "request_headers_to_add": [
                {
                    # `%` begins a command in header values.
                    "header": {"key": "x-greenroom-relay", "value": relay_token.replace("%", "%%")},
                    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                },
                _FORWARDED_FOR,
            ],
        },
        # The api's own metrics are not for clients; it refuses them too, whatever the path is disguised as.
        {
            "match": {"path": "/metrics"},
            "direct_response": {"status": 404, "body": {"inline_string": "no such path"}},
        },
        # Kubernetes' clients watch for as long as nothing happens; the api bounds that itself.
        *(
            _to_api({"path_separated_prefix": path}, **_STICKY, idle_timeout="0s")
            for path in ("/apis", "/api", "/openapi")
        ),
        # Beside E2B's, `/healthz` is the one of all roles; Kubernetes' clients want theirs.
        *(
            [_to_api({"path": "/healthz"}, **_STICKY, prefix_rewrite="/livez")]
            if name == ENTRY_CONTROL
            else []
        ),
        _to_api({"prefix": "/"}, **(_STICKY if name == ENTRY_CONTROL else {"cluster": API})),
    ]


_STICKY: Document = {
    "cluster": API_KUBE,
    "hash_policy": [
        {"header": {"header_name": "authorization"}, "terminal": True},
        {"connection_properties": {"source_ip": True}},
    ],
}


def _to_api(match: Document, **more: Any) -> Document:
    return {
        "match": match,
        "route": {
            "timeout": "0s",
            **more,
            "retry_policy": {
                # Nothing of the request was sent in any of these cases.
                "retry_on": "connect-failure,refused-stream,reset-before-request",
                "num_retries": 2,
                "retry_host_predicate": [
                    {
                        "name": "previous_hosts",
                        "typed_config": {
                            "@type": f"{_TYPES}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        },
                    }
                ],
                # A choice by hash takes another host for each of these by chance.
                "host_selection_retry_max_attempts": "8",
                "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
            },
        },
        "request_headers_to_add": [_FORWARDED_FOR],
    }


def api_clusters(urls: Sequence[str], config: ProxyConfig) -> list[Document]:
    """All api replicas, the ones that answer their health check first: in turn, and by whoever asks.

    Raises SetupError for a URL that is not `http://host:port`.
    """
    return [_api_cluster(API, "ROUND_ROBIN", urls, config), _api_cluster(API_KUBE, "MAGLEV", urls, config)]


def _api_cluster(name: str, policy: str, urls: Sequence[str], config: ProxyConfig) -> Document:
    return {
        **_cluster(name, [_host_and_port(url) for url in urls], config),
        "lb_policy": policy,
        # With every replica failing its checks (a starved machine), trying one beats refusing at once.
        "common_lb_config": {"healthy_panic_threshold": {"value": 1.0}},
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "0.5s",
                "no_traffic_interval": "0.5s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/healthz"},
            }
        ],
        "typed_extension_protocol_options": {_HTTP_OPTIONS: _http_1({"idle_timeout": API_IDLE})},
    }


def controller_cluster(url: str, config: ProxyConfig) -> Document:
    """The controller's own listener, asked about signed URLs."""
    return {
        **_cluster(CONTROLLER, [_host_and_port(url)], config),
        "typed_extension_protocol_options": {_HTTP_OPTIONS: _http_1({"idle_timeout": API_IDLE})},
    }


def node_cluster(code: str, relay: Relay, config: ProxyConfig) -> Document:
    """The relay of the node with `code`. Each connection carries one request (`node.relay_heads` says why)."""
    return {
        **_cluster(f"node_{code}", [(relay.host, relay.port)], config),
        "typed_extension_protocol_options": {_HTTP_OPTIONS: _http_1({"max_requests_per_connection": 1})},
    }


def _cluster(name: str, hosts: Sequence[tuple[str, int]], config: ProxyConfig) -> Document:
    numeric = all(map(_is_address, (host for host, _port in hosts)))
    return {
        "@type": f"{_TYPES}.config.cluster.v3.Cluster",
        "name": name,
        "type": "STATIC" if numeric else "STRICT_DNS",
        "connect_timeout": CONNECT_TIMEOUT,
        "per_connection_buffer_limit_bytes": BUFFER,
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
                        for host, port in hosts
                    ]
                }
            ],
        },
        # Envoy's defaults (1024, but 3 for retries) would refuse long before the entry does.
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": config.max_connections,
                    "max_pending_requests": config.max_connections,
                    "max_requests": config.max_connections * 4,
                    "max_retries": 1024,
                }
            ]
        },
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 60, "keepalive_interval": 10}
        },
    }


def _http_1(common: Document) -> Document:
    return {
        "@type": f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "common_http_protocol_options": {
            "max_headers_count": MAX_HEADERS,
            "max_response_headers_kb": HEADERS_KIB,
            **common,
        },
        "explicit_http_config": {
            "http_protocol_options": {
                # Servers in sandboxes see `Host`, as behind E2B's proxies, not Envoy's `host`: names of HTTP/1 fields
                # have no case, but not everything that people run knows that.
                "header_key_format": {"proper_case_words": {}}
            }
        },
    }


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or not host or port is None:
        raise SetupError(f"the api's address {url!r} is not of the form http://host:port")
    return host, port


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _seconds(length: float) -> str:
    """A protobuf duration."""
    return f"{length:.3f}s"
