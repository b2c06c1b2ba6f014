"""Every knob of the platform, grouped by theme, each with its unit and its reason.

A *setting* is a value an operator may change; it comes from `<state>/config.toml` (tables named as the
classes' fields in `Config`, for example `[claims] queue_wait = 5`) and from `greenroom up`'s options, which win.
`RoleSpec` is what the supervisor hands to one role process: the settings plus that process's place.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from greenroom.errors import SetupError

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Length = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
"""A length of time that cannot be nothing, in the unit that the field's text names."""
Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
LONGEST_TIMEOUT = 366 * 86_400
"""Seconds: a year. A node refuses to let a sandbox live longer, so no setting may promise it."""


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the E2B dialect accepts from clients."""

    max_body: Positive = 1 << 20
    """Bytes of a request body; a larger one is answered 413 before it is parsed."""
    default_timeout: Positive = 300
    """Seconds a sandbox lives when a v2 create names no timeout (E2B's default)."""
    default_timeout_v1: Positive = 15
    """The same for v1, whose contract had this shorter default."""
    max_timeout: Annotated[int, msgspec.Meta(ge=1, le=LONGEST_TIMEOUT)] = 86_400
    """Seconds; E2B's largest plan allows one day. A year (366 days) is the most there is."""
    max_metadata: Count = 64
    """Pairs of metadata, and separately of environment variables, in one create."""
    page_limit: Positive = 100
    """Sandboxes on one page of a list, at most."""
    call_deadline: Length = 10.0
    """Seconds for a call to another role that does not start a sandbox."""
    move_deadline: Length = 55.0
    """Seconds for pausing, resuming, saving and forking one; E2B's clients give up after 60."""


class ClaimsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a claim waits and is handed over."""

    queue_wait: Amount = 10.0
    """Seconds a claim may stand in a dry pool's queue before 503 with Retry-After."""
    queue_length: Count = 256
    """Claims that may stand in one pool's queue; one more is refused at once."""
    handover_deadline: Length = 45.0
    """Seconds from leaving the queue to an answering guest with its identity; then the VM is destroyed."""
    confirm_within: Length = 20.0
    """Seconds after the hand-over in which the api must confirm a claim; an unconfirmed sandbox is destroyed."""
    parallel_handovers: Count = 0
    """Guests that start at the same time; 0 means twice the CPU count. More only makes all of them later."""
    clock_tolerance_ms: Length = 20.0
    """Guest clock error aimed at before hand-over (the promise is 50 ms)."""
    retention: Amount = 3600.0
    """Seconds an ended claim's key is remembered, so that a late retry learns its outcome."""


class PoolsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How warm pools are filled."""

    default_target: Count = 4
    """Members of the pool that the first `greenroom up` declares for the base template."""
    base_target: Count | None = None
    """The same at every start, whatever was declared before; what `greenroom up --warm` sets."""
    default_warm: Literal["paused", "running"] = "paused"
    """How its members wait (see `wire.messages.PoolSpec`)."""
    refill_parallel: Count = 0
    """Restores at the same time on one node; 0 means the CPU count."""
    backoff_first: Length = 0.25
    """Seconds refill pauses after a failed member; doubles with each further failure."""
    backoff_last: Length = 30.0
    """Upper bound of that pause, seconds."""
    memory_floor_mib: Count = 1024
    """Refill stops while less host memory than this is available."""
    disk_floor_mib: Count = 2048
    """Refill stops while the state directory's disk has less free than this."""
    disk_emergency_mib: Count = 512
    """Below this the node ends the sandbox that has written most, to save all others."""


class VmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The VM engine and the fence around each VM."""

    engine: Literal["qemu", "simulated"] = "qemu"
    """`simulated` runs no VM at all; it is never chosen unless asked for by this name."""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    """`auto` boots a probe on KVM and falls back to TCG when that does not prove it usable."""
    probe_deadline: Length = 8.0
    """Seconds for the KVM probe boot."""
    boot_deadline: Length = 240.0
    """Seconds for the one cold boot that makes a golden snapshot."""
    qmp_deadline: Length = 20.0
    """Seconds for one QMP command."""
    cpu_model_tcg: str = "Nehalem"
    """SSE4.2 without AVX, which is dear to emulate (hashing 1.9 times faster than with `max`)."""
    tcg_cache_mib: Positive = 256
    """Translated code that one VM keeps under TCG, MiB, counted into its memory limit on top of the rest. QEMU would
    let it grow to 1 GiB; below 128 a guest that runs Python translates the same code again and again."""
    uid_base: Positive = 200_000
    """First uid of the range from which each VM gets one of its own; no account may lie in it."""
    memory_overhead_mib: Count = 192
    """Added to twice the guest's RAM for the cgroup limit: QEMU's own heap."""
    pids_max: Positive = 128
    """Threads of one QEMU; it runs on 5 to 8."""
    cpu_headroom: Amount = 0.25
    """CPUs above the guest's count that QEMU may use for its I/O thread."""
    cpu_shares: Positive = 256
    """Weight of one VM's CPU time against other VMs, and against one that is just being made (1024). What all VMs
    together weigh against the host's own work follows from its CPUs (`runtime.cgroups`)."""
    restore_mode: Literal["auto", "cow", "copy"] = "auto"
    """How a VM gets its RAM (see `runtime.modes`): `cow` shares the golden's until it is written, `copy` gives each
    VM all of it; `auto` measures both once for each golden and picks."""
    stock_slots: Count = 4
    """Places for VMs (namespace, tap, cgroup, overlay) made ahead for each golden snapshot; 0 for none."""
    stock_waiting: Count = 2
    """QEMUs started ahead for each golden, waiting for their state; each holds about 16 MB. 0 for none."""
    stock_most: Count = 32
    """Bound of both together, over all goldens of a node; the golden used longest ago goes without first."""
    cache_keep_days: Length = 14.0
    """Days after which an image or golden that nobody has in use is removed from the cache."""


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast the engine without VMs makes them, where it is asked for (`[vm] engine`)."""

    rate: Amount = 0.0
    """Members that one node makes a second, one after the other; 0 makes each at once."""
    variation: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Coefficient of variation of the time that one takes: standard deviation over mean."""
    seed: Count = 0
    """What these times are drawn from, together with the node's name."""


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes and masters keep in touch."""

    heartbeat: Length = 1.0
    """Seconds between a node's heartbeats."""
    lease: Length = 6.0
    """Seconds without a heartbeat after which a node gets no new work."""
    sample_interval: Amount = 5.0
    """Seconds between two samples of a sandbox's CPU, memory and disk, at least; 0 takes none."""
    relay_head_limit: Positive = 64 << 10
    """Bytes of a request head on the relay."""
    relay_head_deadline: Length = 15.0
    """Seconds in which a request head must arrive."""
    relay_connect_deadline: Length = 10.0
    """Seconds for connecting to a port in the guest."""
    relay_wake_deadline: Length = 60.0
    """Seconds that a request waits for a paused sandbox that it wakes."""
    relay_connections: Positive = 4096
    """Relayed connections on one node; one more is answered 503."""
    relay_connections_per_owner: Positive = 2048
    """The same for all sandboxes of one owner together, answered 429."""
    relay_connections_per_sandbox: Positive = 512
    """The same for one sandbox, answered 429."""
    relay_idle_timeout: Length = 660.0
    """Seconds a relayed connection may be silent; longer than the proxy's, so that the proxy closes first."""


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entry point."""

    host: str = "127.0.0.1"
    """Address the entry listens on."""
    port: Port = 8700
    """Its port; 0 takes a free one."""
    domain: str = ""
    """`<port>-<sandbox>.<domain>` reaches a port of a sandbox; empty means `localhost:<port>`, and with TLS
    `sandbox.localhost`. With TLS it gets the TLS port (unless that is 443) if it names none."""
    tls_port: Port | None = None
    """Port of a second listener, with TLS for the domain's names (docs/tls.md); 0 takes a free one, None is none."""
    kube_port: Port | Literal["none"] | None = None
    """Port of a listener with TLS for Kubernetes' clients, which send no token without it (docs/kubernetes.md): 8701
    unless another is named, 0 takes a free one, "none" leaves it out."""
    kube_names: list[str] = []
    """Host names and addresses under which they reach it, besides localhost, the loopback addresses, `host` and
    `domain`; the certificate is for them too."""
    idle_timeout: Length = 640.0
    """Seconds a stream may be silent; longer than any keep-alive that E2B's clients ask for."""
    max_connections: Positive = 10_000
    """Client connections; one more is refused."""
    drain: Amount = 5.0
    """Seconds that running requests get when the proxy is told to stop."""


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What sandboxes may reach, and how much of it at a time (docs/network.md)."""

    egress_default: Literal["allow", "deny"] = "allow"
    """What becomes of connections that no rule of a sandbox speaks of. `deny` leaves only what `allowOut` names."""
    also_denied: list[str] = []
    """CIDR blocks that no sandbox may reach whatever its rules say, besides those that are always denied: public
    addresses of the operator's own network, for example."""
    resolvers: list[str] = []
    """DNS servers that sandboxes' questions are passed on to, `address` or `address:port`; empty for those in the
    host's /etc/resolv.conf. They may lie in ranges that sandboxes cannot reach."""
    connections_per_sandbox: Positive = 512
    """Connections out of one sandbox at the same time; one more is reset at once."""
    connections: Positive = 8192
    """The same for all sandboxes of a node together."""
    new_connections_per_second: Positive = 100
    """New connections of one sandbox, on average; twice as many may come at once. More are reset."""
    dns_per_second: Positive = 50
    """DNS questions of one sandbox, on average; twice as many may come at once. More get no answer."""
    dns_parallel: Positive = 64
    """DNS questions of one sandbox that wait for their answer; one more gets none."""
    dns_deadline: Length = 5.0
    """Seconds for looking a name up, all resolvers together."""
    dial_deadline: Length = 10.0
    """Seconds for connecting to one address."""
    peek_deadline: Length = 5.0
    """Seconds in which a connection that only a name can allow must name it (TLS ClientHello or HTTP head)."""
    idle_timeout: Length = 900.0
    """Seconds a connection may be silent in both directions."""
    egress_memory_mib: Positive = 1280
    """Memory of the process that carries these connections, MiB; above it, it is killed and started anew, which costs
    all open ones. As many as there may be fit, each with all that it can hold (128 KiB) and with some to spare."""


class AggregatedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A listener of each api for a kube-apiserver that passes requests on to it (docs/kubernetes.md)."""

    listen: str = ""
    """Address that it listens on; empty for no such listener."""
    port: Port = 8443
    """Its port; 0 takes a free one. Further apis on the same machine take the next ones."""
    requestheader_client_ca_file: str = ""
    """PEM file of the authority that signs the front proxy's client certificate."""
    allowed_names: tuple[str, ...] = ("front-proxy-client",)
    """Common names that this certificate may have. None at all would let everybody in whom the authority knows."""
    username_headers: tuple[str, ...] = ("X-Remote-User",)
    group_headers: tuple[str, ...] = ("X-Remote-Group",)
    extra_headers_prefix: tuple[str, ...] = ("X-Remote-Extra-",)
    authorize: Literal["groups", "trust"] = "groups"
    """`groups` lets those act who are in `allow_groups`; `trust` everybody whom the front proxy names, because
    kube-apiserver has asked its own RBAC already."""
    allow_groups: tuple[str, ...] = ("system:masters",)
    """Groups whose members may do everything."""
    cert_file: str = ""
    """PEM files of the certificate that it shows and of its key; empty for one of the platform's own authority."""
    key_file: str = ""
    names: list[str] = []
    """Host names and addresses that this certificate is for, besides localhost and the loopback addresses, as
    greenroom-api.greenroom.svc."""


class KubeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Kubernetes dialect."""

    aggregated: AggregatedConfig = AggregatedConfig()


class LogsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the roles log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below it are left out; `debug` has one line for each read and heartbeat."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings."""

    api: ApiConfig = ApiConfig()
    claims: ClaimsConfig = ClaimsConfig()
    pools: PoolsConfig = PoolsConfig()
    vm: VmConfig = VmConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    nodes: NodesConfig = NodesConfig()
    proxy: ProxyConfig = ProxyConfig()
    network: NetworkConfig = NetworkConfig()
    kube: KubeConfig = KubeConfig()
    logs: LogsConfig = LogsConfig()


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One role process: who it is, where its state lies, whom it talks to. Holds no secret."""

    role: Literal["api", "master", "node", "proxy"]
    replica: int
    state_dir: str
    cache_dir: str
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the role's own HTTP listener; 0 takes a free one, which the ready message then names."""
    master_urls: list[str] = []
    api_urls: list[str] = []
    domain: str = ""
    config: Config = Config()

    @property
    def name(self) -> str:
        """`<role>-<replica>`, unique in a cluster of one machine; names its log, record and node."""
        return f"{self.role}-{self.replica}"

    @property
    def state(self) -> Path:
        return Path(self.state_dir)

    @property
    def secrets(self) -> Path:
        """Directory of the roles' credentials."""
        return self.state / "secrets"

    @property
    def store(self) -> Path:
        """The SQLite store's file."""
        return self.state / "store.db"

    @property
    def home(self) -> Path:
        """This role's own directory."""
        return self.state / self.name

    @property
    def cache(self) -> Path:
        """Images and golden snapshots, shared by every state directory on the machine."""
        return Path(self.cache_dir)


def default_state_dir() -> Path:
    """`$GREENROOM_STATE_DIR`, else `/var/lib/greenroom` for root, else under the user's XDG state directory."""
    if named := os.environ.get("GREENROOM_STATE_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/greenroom")
    return Path(os.environ.get("XDG_STATE_HOME", str(Path.home() / ".local/state"))) / "greenroom"


def default_cache_dir() -> Path:
    """`$GREENROOM_CACHE_DIR`, else `/var/cache/greenroom` for root, else under the user's XDG cache directory."""
    if named := os.environ.get("GREENROOM_CACHE_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/cache/greenroom")
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "greenroom"


def load(state_dir: Path) -> Config:
    """Read `<state_dir>/config.toml` if it exists. Raises SetupError naming the wrong field."""
    path = state_dir / "config.toml"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Config()
    try:
        return msgspec.convert(tomllib.loads(raw.decode()), Config)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise SetupError(f"{path}: {error}") from error
