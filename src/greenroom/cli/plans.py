"""From `greenroom up`'s options to the roles that will run: which, with which settings, in which place."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal, cast

import msgspec

from greenroom.cli.supervision import BACKOFF_LAST, RolePlan
from greenroom.cli.words import load_settings, plain_setting
from greenroom.config import Config, ProxyConfig, RoleSpec
from greenroom.errors import BadRequest, SetupError

START_DEADLINE = 120.0
"""Seconds for a role to get ready. It takes about one, but far longer on a loaded machine."""
NODE_START_DEADLINE = 1800.0
"""The same for a node, whose first start builds an image and boots it; counts anew from each progress."""
STOP_DEADLINE = 30.0
"""Seconds from SIGTERM to SIGKILL."""
NODE_STOP_DEADLINE = 60.0
"""The same for a node, which first ends or saves its VMs."""

ROLE_MODULE = "greenroom.{role}"
"""Where the real roles are."""

DEFAULT_TLS_DOMAIN = "sandbox.localhost"
"""Names below `localhost` are this machine's own (RFC 6761): browsers and curl know that by themselves, and so does
every program where systemd-resolved or nss-myhostname resolves."""
HTTPS_PORT = 443
DEFAULT_KUBE_PORT = 8701

Role = Literal["api", "master", "node", "proxy"]


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `greenroom up` was asked for; None leaves a setting to `config.toml` and its default."""

    state_dir: str
    cache_dir: str
    api: int = 1
    master: int = 1
    proxy: int = 1
    nodes: int = 1
    store: str = "sqlite"
    port: int | None = None
    domain: str | None = None
    tls_port: int | None = None
    kube_port: int | Literal["none"] | None = None
    warm: int | None = None
    engine: str | None = None
    accelerator: str | None = None
    role_module: str = ROLE_MODULE
    """Module that runs a role; only tests change it, to start stand-ins."""
    restart_pause: float = BACKOFF_LAST
    """Seconds a role that died waits for its restart, at most; the fault run, which kills on purpose, waits less."""

    def check(self) -> None:
        """Raise BadRequest for what cannot be done, in words for the user."""
        for option, count in (("--master", self.master), ("--proxy", self.proxy)):
            if count > 1:
                raise BadRequest(f"{option} {count}: more than one is not possible yet; leave it at 1")
        if self.store == "etcd":
            raise BadRequest("--store etcd is not there yet; leave it at sqlite")
        if self.store != "sqlite":
            raise BadRequest(f"--store {self.store} is unknown; the stores are sqlite and etcd")
        counts = {"--api": self.api, "--master": self.master, "--proxy": self.proxy, "--nodes": self.nodes}
        for option, count in counts.items():
            if not 1 <= count <= 64:
                raise BadRequest(f"{option} {count}: choose between 1 and 64")
        if self.warm is not None and not 0 <= self.warm <= 4096:
            raise BadRequest(f"--warm {self.warm}: choose between 0 and 4096")
        kube_port = None if self.kube_port == "none" else self.kube_port
        ports = {"--port": self.port, "--tls-port": self.tls_port, "--kube-port": kube_port}
        taken: dict[int, str] = {}
        for option, number in ports.items():
            if number is not None and not 0 <= number <= 65535:
                raise BadRequest(f"{option} {number}: choose between 0 (any free port) and 65535")
            if number and taken.setdefault(number, option) != option:
                raise BadRequest(f"{option} {number}: {taken[number]} has it already; choose another")
        if self.domain is not None and not _is_domain(self.domain):
            raise BadRequest(f"--domain {self.domain}: not a host name (with an optional :port)")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The platform to start: one spec for each role process, and where clients will reach it."""

    specs: list[RoleSpec]
    entry_url: str
    domain: str
    tls_port: int | None = None
    kube_port: int | None = None

    def role_plans(self) -> list[RolePlan]:
        """What the supervision needs to know of them."""
        return [
            RolePlan(
                name=spec.name,
                kind=spec.role,
                start_deadline=NODE_START_DEADLINE if spec.role == "node" else START_DEADLINE,
                stop_deadline=NODE_STOP_DEADLINE if spec.role == "node" else STOP_DEADLINE,
            )
            for spec in self.specs
        ]


def make_plan(options: UpOptions) -> Plan:
    """Settle every setting. Raises BadRequest for a bad option, SetupError for a bad file or a taken port."""
    options.check()
    config = _merge(load_settings(Path(options.state_dir)), options)
    host = config.proxy.host
    port = claim_port(host, config.proxy.port)
    tls_port = config.proxy.tls_port
    if tls_port is not None:
        tls_port = claim_port(host, tls_port, "--tls-port")
    kube_port = settle_kube_port(config.proxy)
    domain = settle_domain(options.domain or config.proxy.domain, port, tls_port)
    proxy = msgspec.structs.replace(
        config.proxy,
        port=port,
        tls_port=tls_port,
        kube_port="none" if kube_port is None else kube_port,
        domain=domain,
    )
    config = msgspec.structs.replace(config, proxy=proxy)
    counts: list[tuple[Role, int]] = [
        ("master", options.master),
        ("node", options.nodes),
        ("api", options.api),
        ("proxy", options.proxy),
    ]
    specs = [
        RoleSpec(
            role=role,
            replica=replica,
            state_dir=options.state_dir,
            cache_dir=options.cache_dir,
            domain=domain,
            config=config,
        )
        for role, count in counts
        for replica in range(count)
    ]
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host  # noqa: S104
    literal = f"[{reachable}]" if ":" in reachable else reachable
    return Plan(
        specs=specs,
        entry_url=f"http://{literal}:{port}",
        domain=domain,
        tls_port=tls_port,
        kube_port=kube_port,
    )


def settle_kube_port(proxy: ProxyConfig) -> int | None:
    """The port for Kubernetes' clients, or None for none. One that nobody named is free where the entry's is, too.

    Raises SetupError when it cannot be had.
    """
    if proxy.kube_port == "none":
        return None
    wanted = proxy.kube_port
    if wanted is None:
        wanted = DEFAULT_KUBE_PORT if proxy.port else 0
    return claim_port(proxy.host, wanted, "--kube-port")


def settle_domain(named: str, port: int, tls_port: int | None) -> str:
    """The domain as clients write it, with the port they need.

    Raises BadRequest when there is to be TLS and no certificate can be made for the name.
    """
    if tls_port is None:
        # The SDKs split host names at the first dot, so a numeric address would not do as a domain.
        return named or f"localhost:{port}"
    # Slow to import, and needed by nobody else.
    from greenroom.wire.certificates import host_of

    domain = named or DEFAULT_TLS_DOMAIN
    host_of(domain)
    # A port that was named counts: there may be a forwarder in front.
    return domain if ":" in domain or tls_port == HTTPS_PORT else f"{domain}:{tls_port}"


def _merge(config: Config, options: UpOptions) -> Config:
    """The file's settings with the command line's on top."""
    replace = msgspec.structs.replace
    if options.port is not None:
        config = replace(config, proxy=replace(config.proxy, port=options.port))
    if options.tls_port is not None:
        config = replace(config, proxy=replace(config.proxy, tls_port=options.tls_port))
    if options.kube_port is not None:
        config = replace(config, proxy=replace(config.proxy, kube_port=options.kube_port))
    if options.warm is not None:
        config = replace(config, pools=replace(config.pools, base_target=options.warm))
    if options.engine is not None:
        engine = cast("Literal['qemu', 'simulated']", options.engine)
        config = replace(config, vm=replace(config.vm, engine=engine))
    if options.accelerator is not None:
        accelerator = cast("Literal['auto', 'kvm', 'tcg']", options.accelerator)
        config = replace(config, vm=replace(config.vm, accelerator=accelerator))
    try:
        return msgspec.convert(msgspec.to_builtins(config), Config)
    except msgspec.ValidationError as error:
        raise BadRequest(f"invalid option: {plain_setting(str(error))}") from error


def check_user(options: UpOptions) -> None:
    """Raise SetupError when this user cannot run the VMs that are asked for; nothing was touched then.

    Stand-ins of a test's own need no root.
    """
    if os.geteuid() == 0 or options.role_module != ROLE_MODULE:
        return
    if (options.engine or load_settings(Path(options.state_dir)).vm.engine) != "simulated":
        raise SetupError(
            "microVMs need root (namespaces, uids and cgroups)\n"
            "Run this as root, or try the control plane without VMs: --engine simulated"
        )


def claim_port(host: str, port: int, option: str = "--port") -> int:
    """The port the entry will use: `port` if it can be had, a free one for 0.

    The number must be settled before the proxy starts, because the api tells clients the domain. It is free
    again until the proxy takes it; if another program is faster, the proxy says so and the start fails.
    Raises SetupError when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SetupError(
                f"cannot listen on {host}:{port}: {error.strerror}\n"
                f"Choose another port with {option} (0 takes a free one); with make: "
                f'make run DEMO_ARGS="{option} 0"'
            ) from error
        return int(probe.getsockname()[1])


def _is_domain(text: str) -> bool:
    name, colon, port = text.partition(":")
    if colon and not (port.isdigit() and 0 < int(port) <= 65535):
        return False
    labels = name.split(".")
    return len(name) <= 253 and all(
        0 < len(label) <= 63 and label.replace("-", "a").isalnum() and label.isascii() for label in labels
    )
