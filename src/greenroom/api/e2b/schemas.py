"""E2B's bodies: what comes in is checked and becomes a message between roles, what goes out is made from one.

Names and required fields follow the E2B API that the SDKs (Python 2.45 to 2.63, JavaScript 2.51) speak. What
Greenroom cannot honour yet is refused with 400 and a text that says so, never ignored: an agent that asked
for a fence must not run without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from greenroom.api.e2b.errors import ErrorBody
from greenroom.config import ApiConfig, NetworkConfig
from greenroom.errors import BadRequest
from greenroom.wire.ids import node_code_of
from greenroom.wire.messages import (
    Lifespan,
    Listed,
    LogEntry,
    Network,
    Sample,
    Sandbox,
    SnapshotInfo,
    Template,
)
from greenroom.wire.network import check as check_network
from greenroom.wire.network import closed

ENVD_VERSION = "0.6.13"
"""Version of E2B's in-guest daemon whose protocol our agent speaks. SDKs switch features off below 0.6.4."""

MAX_METADATA_KEY = 256
MAX_METADATA_VALUE = 4096
MAX_ENV_KEY = 256
MAX_ENV_VALUE = 64 << 10
"""Characters, at most."""
MAX_REFRESH = 3600
"""Seconds, E2B's bound for a refresh."""

_TEMPLATE_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,200}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CONTROL_BUT_SPACE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class AutoResume(msgspec.Struct, frozen=True):
    """`autoResume` of a create."""

    enabled: bool


class NetworkUpdate(msgspec.Struct, frozen=True, rename="camel"):
    """The body of `PUT /network`: all of a sandbox's egress rules, what is absent is cleared."""

    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    dns_servers: list[str] | None = None
    egress_proxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)


class NetworkOptions(msgspec.Struct, frozen=True, rename="camel"):
    """`network` of a create."""

    allow_public_traffic: bool | None = None
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    dns_servers: list[str] | None = None
    egress_proxy: dict[str, Any] | None = None
    mask_request_host: str | None = None
    https_ports: list[int] | None = None
    rules: dict[str, Any] | None = None


class NewSandbox(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The body of a create, v1 and v2 (`secure` is v1's)."""

    template_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = msgspec.field(name="templateID")
    timeout: int | None = None
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: NetworkOptions | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[Any] | None = None


class TimeoutBody(msgspec.Struct, frozen=True):
    """The body of `/timeout`: seconds from now."""

    timeout: int


class ConnectBody(msgspec.Struct, frozen=True):
    """The body of `/connect`. Without `memory` a paused sandbox boots from its disk; a running one has nothing to
    resume."""

    timeout: int | None = None
    memory: bool | None = None


class PauseBody(msgspec.Struct, frozen=True, rename="camel"):
    """The body of `/pause`. Without `memory` the disk alone is kept. A guest that does not answer is paused all the
    same, unless `require_healthy_guest` says not to."""

    memory: bool | None = None
    require_healthy_guest: bool | None = None


class ResumeBody(msgspec.Struct, frozen=True, rename="camel"):
    """The body of the older `/resume`."""

    timeout: int | None = None
    auto_pause: bool | None = None
    memory: bool | None = None


class ForkBody(msgspec.Struct, frozen=True):
    """The body of `/fork`: so many sandboxes, each for so many seconds."""

    timeout: int | None = None
    count: int | None = None


class RollbackBody(msgspec.Struct, frozen=True):
    """The body of `/rollback`, which E2B does not have: a snapshot that was taken of the sandbox, by id or name."""

    snapshot_id: str = msgspec.field(name="snapshotID")


class SnapshotBody(msgspec.Struct, frozen=True):
    """The body of `/snapshots`."""

    name: str | None = None
    memory: bool | None = None


class SnapshotAnswer(msgspec.Struct, frozen=True):
    """E2B's `SnapshotInfo`."""

    snapshot_id: str = msgspec.field(name="snapshotID")
    names: list[str]


class RefreshBody(msgspec.Struct, frozen=True):
    """The body of `/refreshes`: the sandbox lives at least this many seconds from now."""

    duration: int | None = None


class SandboxBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """E2B's `Sandbox`, the answer to create and connect."""

    template_id: str = msgspec.field(name="templateID")
    sandbox_id: str = msgspec.field(name="sandboxID")
    client_id: str = msgspec.field(name="clientID")
    envd_version: str = ENVD_VERSION
    alias: str
    envd_access_token: str | msgspec.UnsetType = msgspec.UNSET
    traffic_access_token: str | None = None
    domain: str | None = None


class ForkEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one fork."""

    sandbox: SandboxBody | None = None
    error: ErrorBody | None = None


class ListedBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """E2B's `ListedSandbox`."""

    template_id: str = msgspec.field(name="templateID")
    sandbox_id: str = msgspec.field(name="sandboxID")
    client_id: str = msgspec.field(name="clientID")
    envd_version: str = ENVD_VERSION
    alias: str
    started_at: str
    end_at: str
    cpu_count: int
    memory_mb: int = msgspec.field(name="memoryMB")
    disk_size_mb: int = msgspec.field(name="diskSizeMB")
    state: Literal["running", "paused"]
    metadata: dict[str, str]


class Lifecycle(msgspec.Struct, frozen=True, rename="camel"):
    """What happens at a sandbox's end."""

    auto_resume: bool = False
    on_timeout: str = "kill"


class NetworkBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """E2B's `SandboxNetworkConfig` as it stands; a list that was not given is not told."""

    allow_out: list[str] = []
    deny_out: list[str] = []
    dns_servers: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetailBody(ListedBody, frozen=True, kw_only=True, rename="camel"):
    """E2B's `SandboxDetail`.

    `allow_internet_access` is the truth about the guest, not the wish at create: false when there is no way out.
    """

    envd_access_token: str | msgspec.UnsetType = msgspec.UNSET
    domain: str | None = None
    allow_internet_access: bool
    network: NetworkBody
    lifecycle: Lifecycle = Lifecycle()
    pause_mode: Literal["full", "filesystem"] | msgspec.UnsetType = msgspec.UNSET


class MetricBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """E2B's `SandboxMetric`: bytes, and percent of all CPUs together."""

    timestamp: str
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


class LogBody(msgspec.Struct, frozen=True):
    """E2B's `SandboxLogEntry`."""

    timestamp: str
    message: str
    level: str
    fields: dict[str, str]


class LogsBody(msgspec.Struct, frozen=True):
    """The answer of `/v2/…/logs`."""

    logs: list[LogBody]


class LineBody(msgspec.Struct, frozen=True):
    """E2B's `SandboxLog`, the older form of an entry."""

    timestamp: str
    line: str


class OldLogsBody(msgspec.Struct, frozen=True, rename="camel"):
    """E2B's `SandboxLogs`, the answer of `/logs`: the same entries in both forms."""

    logs: list[LineBody]
    log_entries: list[LogBody]


class LatestBody(msgspec.Struct, frozen=True):
    """The answer of `/sandboxes/metrics`: the last sample of each sandbox that has one, by id."""

    sandboxes: dict[str, MetricBody]


class TemplateBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """E2B's `Template`."""

    template_id: str = msgspec.field(name="templateID")
    build_id: str = msgspec.field(name="buildID", default="00000000-0000-0000-0000-000000000000")
    cpu_count: int
    memory_mb: int = msgspec.field(name="memoryMB")
    disk_size_mb: int = msgspec.field(name="diskSizeMB")
    public: bool = True
    aliases: list[str]
    names: list[str]
    created_at: str
    updated_at: str
    created_by: None = None
    last_spawned_at: None = None
    spawn_count: int = 0
    build_count: int = 1
    envd_version: str = ENVD_VERSION
    build_status: str = "ready"


class AliasBody(msgspec.Struct, frozen=True):
    """The answer for a template's alias."""

    template_id: str = msgspec.field(name="templateID")
    public: bool = True


def check_create(body: NewSandbox, config: ApiConfig) -> None:
    """Refuse what is wrong or cannot be honoured. Raises BadRequest naming the field."""
    if _TEMPLATE_REF.fullmatch(body.template_id) is None:
        raise BadRequest("templateID: this is not a template id or name")
    if body.timeout is not None:
        check_timeout(body.timeout, 1, config.max_timeout)
    for field, problem in _REFUSED.items():
        if problem(body):
            raise BadRequest(f"{field} is not supported by this server yet")
    check_network(network_of(body))
    if body.auto_pause_memory is False and not body.auto_pause:
        raise BadRequest("autoPauseMemory: false is only of use with autoPause")
    if body.auto_pause_memory is False and body.auto_resume is not None and body.auto_resume.enabled:
        raise BadRequest(
            "autoPauseMemory: false cannot be had with autoResume: a request cannot wait for a boot"
        )
    check_pairs("metadata", body.metadata or {}, config.max_metadata, MAX_METADATA_KEY, MAX_METADATA_VALUE)
    check_pairs("envVars", body.env_vars or {}, config.max_metadata, MAX_ENV_KEY, MAX_ENV_VALUE)
    for name in body.env_vars or {}:
        if "=" in name:
            raise BadRequest("envVars: the name of an environment variable cannot contain '='")


_REFUSED: dict[str, Callable[[NewSandbox], bool]] = {
    "volumeMounts": lambda body: bool(body.volume_mounts),
    "iam": lambda body: bool(body.iam),
    "network.egressProxy": lambda body: _network(body).egress_proxy is not None,
    "network.rules": lambda body: bool(_network(body).rules),
}
"""Each option that would have to be kept and cannot be, with what tells that it was asked for."""

_NO_NETWORK_OPTIONS = NetworkOptions()


def _network(body: NewSandbox) -> NetworkOptions:
    return body.network or _NO_NETWORK_OPTIONS


def network_of(body: NewSandbox) -> Network:
    """The egress rules of a create."""
    options = _network(body)
    return Network(
        allow_out=options.allow_out or [],
        deny_out=options.deny_out or [],
        allow_internet_access=body.allow_internet_access,
        dns_servers=options.dns_servers,
    )


def changed_network(body: NetworkUpdate) -> Network:
    """The egress rules of an update. Raises BadRequest naming the field that is wrong or cannot be honoured."""
    for field, wanted in (
        ("egressProxy", body.egress_proxy is not None),
        ("rules", bool(body.rules)),
    ):
        if wanted:
            raise BadRequest(f"network.{field} is not supported by this server yet; leave it out")
    network = Network(
        allow_out=body.allow_out or [],
        deny_out=body.deny_out or [],
        allow_internet_access=body.allow_internet_access,
        dns_servers=body.dns_servers,
    )
    check_network(network)
    return network


def check_timeout(timeout: int, least: int, most: int) -> None:
    """Raise BadRequest unless a timeout in seconds is within its bounds."""
    if not least <= timeout <= most:
        raise BadRequest(f"timeout: {least} to {most} seconds are allowed")


def check_pairs(field: str, pairs: dict[str, str], count: int, key_length: int, value_length: int) -> None:
    """Raise BadRequest unless names and values are within their bounds and free of control characters.

    Values may contain tab, line feed and carriage return (certificates do); names may not.
    """
    if len(pairs) > count:
        raise BadRequest(f"{field}: at most {count} entries are allowed")
    for key, value in pairs.items():
        if not 1 <= len(key) <= key_length:
            raise BadRequest(f"{field}: a name has 1 to {key_length} characters")
        if len(value) > value_length:
            raise BadRequest(f"{field}: a value has at most {value_length} characters")
        if _CONTROL.search(key) or _CONTROL_BUT_SPACE.search(value):
            raise BadRequest(f"{field}: control characters are not allowed")


def micros(seconds: float) -> int:
    """Unix time in whole microseconds, the grain at which E2B compares start times."""
    return round(seconds * 1_000_000)


def timestamp(seconds: float) -> str:
    """Unix time as RFC 3339 in UTC with microseconds, such as `2026-01-31T12:00:00.000000Z`."""
    whole, fraction = divmod(micros(seconds), 1_000_000)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:06d}Z"


def sandbox_body(sandbox: Sandbox, template: Template | None, domain: str) -> SandboxBody:
    """The answer to create and connect; `template` is None when it was removed meanwhile."""
    return SandboxBody(
        template_id=sandbox.template if template is None else template.template_id,
        sandbox_id=sandbox.sandbox_id,
        client_id=node_code_of(sandbox.sandbox_id),
        alias=sandbox.template,
        envd_access_token=sandbox.token or msgspec.UNSET,
        traffic_access_token=sandbox.traffic_token,
        domain=domain or None,
    )


def listed_body(sandbox: Listed, template: Template | None) -> ListedBody:
    """One entry of a list. An ended sandbox does not exist for this API: no list has it."""
    return ListedBody(
        template_id=sandbox.template if template is None else template.template_id,
        sandbox_id=sandbox.sandbox_id,
        client_id=node_code_of(sandbox.sandbox_id),
        alias=sandbox.template,
        started_at=timestamp(sandbox.started_at),
        end_at=timestamp(sandbox.last_at),
        cpu_count=sandbox.size.cpus,
        memory_mb=sandbox.size.memory_mib,
        disk_size_mb=sandbox.size.disk_mib,
        state="paused" if sandbox.state == "paused" else "running",
        metadata=sandbox.metadata,
    )


def detail_body(
    sandbox: Sandbox, template: Template | None, domain: str, settings: NetworkConfig
) -> DetailBody:
    """The answer for one sandbox, on a platform with these network settings."""
    network = sandbox.network
    return DetailBody(
        **msgspec.structs.asdict(listed_body(sandbox, template)),
        envd_access_token=sandbox.token or msgspec.UNSET,
        domain=domain or None,
        allow_internet_access=not closed(network, settings),
        network=NetworkBody(
            allow_out=network.allow_out,
            deny_out=network.deny_out,
            dns_servers=msgspec.UNSET if network.dns_servers is None else network.dns_servers,
        ),
        lifecycle=Lifecycle(
            auto_resume=sandbox.lifespan.auto_resume,
            on_timeout="pause" if sandbox.lifespan.auto_pause else "kill",
        ),
        pause_mode=msgspec.UNSET
        if sandbox.paused_memory is None
        else ("full" if sandbox.paused_memory else "filesystem"),
    )


def lifespan_of(body: NewSandbox) -> Lifespan:
    """What a create says about the sandbox's time-out."""
    return Lifespan(
        auto_pause=bool(body.auto_pause),
        pause_memory=body.auto_pause_memory is not False,
        auto_resume=body.auto_resume is not None and body.auto_resume.enabled,
    )


def snapshot_answer(snapshot: SnapshotInfo) -> SnapshotAnswer:
    """E2B's answer for a snapshot."""
    return SnapshotAnswer(snapshot.snapshot_id, [snapshot.name] if snapshot.name else [])


def metric_body(sample: Sample) -> MetricBody:
    """E2B's answer for one sample."""
    return MetricBody(
        timestamp=timestamp(sample.timestamp),
        timestamp_unix=int(sample.timestamp),
        cpu_count=sample.cpu_count,
        cpu_used_pct=sample.cpu_used_pct,
        mem_used=sample.mem_used,
        mem_total=sample.mem_total,
        mem_cache=sample.mem_cache,
        disk_used=sample.disk_used,
        disk_total=sample.disk_total,
    )


def log_body(entry: LogEntry) -> LogBody:
    """E2B's answer for one line of a log."""
    return LogBody(timestamp(entry.timestamp), entry.message, entry.level, entry.fields)


def template_body(template: Template) -> TemplateBody:
    """One entry of the list of templates."""
    created = timestamp(template.created_at)
    return TemplateBody(
        template_id=template.template_id,
        cpu_count=template.size.cpus,
        memory_mb=template.size.memory_mib,
        disk_size_mb=template.size.disk_mib,
        aliases=[template.name],
        names=[template.name],
        created_at=created,
        updated_at=created,
    )
