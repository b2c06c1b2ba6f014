"""The messages between roles: frozen records, JSON on the wire, decoded and validated by msgspec.

Times are Unix seconds as float (UTC) when they name an instant and seconds as float when they name a length.
Unknown fields are ignored when reading, so that replicas of two versions can talk during an upgrade.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# The bounds of what clients may send; the api enforces them before a message is built.
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
SandboxId = Annotated[str, msgspec.Meta(pattern=r"^i[a-z0-9]{19}$")]
ClaimKey = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,255}$")]
PortNumber = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
ObjectName = Annotated[str, msgspec.Meta(pattern=r"\A([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?\Z")]
"""What a client calls a sandbox: an RFC 1123 subdomain, or empty."""
MaskHost = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._:$\{\}\[\]-]{1,255}\Z")]
"""A value for the Host field, in which `${PORT}` stands for the port of the request."""


class Size(msgspec.Struct, frozen=True):
    """What one microVM is given: virtual CPUs, memory in MiB, disk in MiB."""

    name: str
    cpus: int
    memory_mib: int
    disk_mib: int


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A template as the store keeps it. `template_id` is opaque and stable, `name` is what people write."""

    template_id: str
    name: str
    size: Size
    created_at: float


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A declared warm pool, or one node's share of it: keep `target` members of `template` in `size` warm.

    `warm` says how members wait: `paused` right after the restore, so that they have never run (no CPU, no
    identity yet), or `running`, with an identity of their own before they count as warm.
    """

    template: str
    size: Size
    target: int
    warm: Literal["paused", "running"] = "paused"


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox may reach, as its owner wrote it; `wire.network` checks it and says what it means.

    `allow_out` has addresses, CIDR blocks, host names and `*.domain`, `deny_out` addresses and CIDR blocks. The
    first wins. `allow_internet_access=False` means the same as 0.0.0.0/0 in `deny_out`.
    """

    allow_out: list[str] = []
    deny_out: list[str] = []
    allow_internet_access: bool | None = None
    dns_servers: list[str] | None = None
    """Where the names that `allow_out` lists are looked up for the guest: None for the platform's own resolvers, an
    empty list for nowhere. Of no effect without a name in `allow_out`."""


class Inbound(msgspec.Struct, frozen=True, kw_only=True):
    """How what comes from outside reaches a sandbox's ports. The agent's port has a token of its own and is exempt."""

    public: bool = True
    """If not, a request needs the sandbox's traffic token."""
    mask_host: MaskHost | None = None
    """What requests name as their host, whatever the client wrote."""
    https_ports: tuple[PortNumber, ...] = ()
    """Ports on which services in the guest speak TLS."""


class Lifespan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens at a sandbox's time-out: it ends, or is paused. E2B's `autoPause` and `autoResume`."""

    auto_pause: bool = False
    pause_memory: bool = True
    """What is in its memory is kept; else its disk alone, and it boots when it is resumed."""
    auto_resume: bool = False
    """A request for it resumes it."""


class Declared(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the Kubernetes dialect keeps of a sandbox in its node's journal. Nodes understand the fields here, and pass
    the document on as it is."""

    document: msgspec.Raw
    """JSON: `{"sandbox": {"metadata": …, "spec": …}, "claim": {"metadata": …, "spec": …}}`; the latter where it was
    made by a SandboxClaim. Statuses, names and versions are not in it."""
    revision: int = 1
    """Rises by one with every change of this record; a change names the one it was made from."""
    retain: bool = False
    """When it ends by itself (not by being deleted) it stays listed, `ended`, until it is deleted."""
    retain_for: float | None = None
    """Seconds for which it stays then; None for as long as nobody deletes it."""
    held: bool = False
    """Somebody's finalizer keeps the object: it stays listed, whatever ended the sandbox, until that is gone."""
    shutdown_at: float | None = None
    """When it ends, running or paused (Unix seconds). None: a running one at its time-out, a paused one never."""


class DeclaredChange(msgspec.Struct, frozen=True):
    """Replace what is declared of a sandbox, if `expect` is the revision it has (0: nothing is declared of it yet).

    The node sets the new revision to `expect + 1`, whatever the record says.
    """

    expect: int
    declared: Declared


FOREVER = 100 * 365 * 86400.0
"""The time to live, in seconds, of a sandbox that only ends when it is deleted."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a master (and it a node) for one sandbox. `key` makes repeating it safe."""

    key: ClaimKey
    template: str
    size: Size
    ttl: float
    metadata: dict[str, str] = {}
    env: dict[str, str] = {}
    secure: bool = True
    owner: str = ""
    """Id of the API key's owner; listings are filtered by it."""
    inbound: Inbound = Inbound()
    wait: float = 10.0
    """Seconds the claim may stand in a dry pool's queue."""
    network: Network = Network()
    lifespan: Lifespan = Lifespan()
    snapshot: str = ""
    """Id of the snapshot to start from, instead of a template's pool; its id names its node."""
    name: ObjectName = ""
    """What its owner calls it, unique among the owner's; empty where there is no wish to."""
    declared: Declared | None = None
    warm: Literal["never", "prefer", "require"] = "prefer"
    """`require`: a member of a declared pool, for which it is waited; `never`: one made for this claim alone."""
    pool: ObjectName = ""
    """The SandboxWarmPool that it was claimed by, for errors to name; empty where it was not."""


class Listed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What all who may know of a sandbox may know: no secret is in it. Streams and views of the fleet have this.

    A view has many of them, and none can be part of a cycle: the garbage collector need not look at each.
    """

    sandbox_id: str
    template: str
    size: Size
    state: Literal["running", "paused", "ended"]
    """`ended` only where `declared` says that it is retained: no VM is left of it, nor anything on disk."""
    started_at: float
    ends_at: float
    node: str
    metadata: dict[str, str] = {}
    owner: str = ""
    lifespan: Lifespan = Lifespan()
    paused_memory: bool | None = None
    """While it is paused: whether its memory was kept."""
    name: str = ""
    """What its owner called it; empty where there was no wish to."""
    declared: Declared | None = None
    ended_at: float | None = None
    end_reason: str = ""
    """Of an `ended` one."""
    launch: Literal["", "warm", "cold"] = ""
    """Whether its VM came out of a pool's warm stock, or was made for it. Empty where that was not written down."""

    @property
    def last_at(self) -> float:
        """When it ends at the latest, if it runs (Unix seconds): at its time-out, or earlier if so declared."""
        if self.declared is None or self.declared.shutdown_at is None:
            return self.ends_at
        return min(self.ends_at, self.declared.shutdown_at)


class Sandbox(Listed, frozen=True, kw_only=True, gc=True):
    """A sandbox as its node reports it. `token` is its envd access token and `traffic_token` what opens its ports
    where they are not public: only for the api, never logged."""

    token: str | None = None
    inbound: Inbound = Inbound()
    traffic_token: str | None = None
    claim_ms: dict[str, float] = {}
    """Milliseconds each step of the claim took (queue, start, agent, identity, clock, total)."""
    confirm_by: float | None = None
    """While it is provisional: when it ends unless its claim is confirmed before. None once it is."""
    clock_offset_ms: float | None = None
    """Guest clock minus host clock as measured at the hand-over, and half the round trip it was measured in."""
    clock_error_ms: float | None = None
    network: Network = Network()


_TOLD = Listed.__struct_fields__


def listed(sandbox: Listed) -> Listed:
    """What may be told of a sandbox; whatever else its record has stays behind."""
    return Listed(**{field: getattr(sandbox, field) for field in _TOLD})


class PauseRequest(msgspec.Struct, frozen=True):
    """Pause a sandbox, with its memory or with its disk alone."""

    memory: bool = True


class ResumeRequest(msgspec.Struct, frozen=True):
    """Let a paused sandbox run for `ttl` seconds, and a running one for at least as long.

    Without `memory` a paused one boots from its disk, and what was kept of its memory is gone.
    """

    ttl: float
    memory: bool = True


class Resumed(msgspec.Struct, frozen=True):
    """The answer to it. `resumed` is False when the sandbox was running."""

    sandbox: Sandbox
    resumed: bool


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Take a snapshot of a running sandbox, which goes on."""

    name: str = ""
    memory: bool = True


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that a user took, as its node keeps it."""

    snapshot_id: str
    name: str
    owner: str
    sandbox_id: str
    template: str
    size: Size
    created_at: float
    memory: bool


class SnapshotList(msgspec.Struct, frozen=True):
    """A node's snapshots."""

    snapshots: list[SnapshotInfo]


class RollbackRequest(msgspec.Struct, frozen=True):
    """Let a sandbox go on from a snapshot that was taken of it."""

    snapshot_id: str


MOST_FORKS = 20
"""Forks that are made at once; E2B's clients ask for no more."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make sandboxes that go on where a running one stands, one for each of `keys`; it goes on too."""

    keys: list[ClaimKey]
    ttl: float
    names: list[ObjectName] = []
    """What they are called, one for each key; or none has a name."""
    declared: list[Declared] = []
    """What is declared of them, one for each key; or nothing is of any."""


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one of them."""

    sandbox: Sandbox | None = None
    error: str = ""


class ForkList(msgspec.Struct, frozen=True):
    """All of them, in the order of the keys."""

    forks: list[Fork]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """How loaded a guest was at an instant. Memory and disk in bytes, `cpu_used_pct` of all its CPUs together."""

    timestamp: float
    cpu_count: int
    cpu_used_pct: float
    mem_total: int
    mem_used: int
    mem_cache: int
    disk_used: int
    disk_total: int


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that became of a sandbox."""

    timestamp: float
    message: str
    level: Literal["debug", "info", "warn", "error"] = "info"
    fields: dict[str, str] = {}


class Past(msgspec.Struct, frozen=True):
    """What a node can tell of a sandbox's past, oldest first."""

    samples: list[Sample]
    entries: list[LogEntry]


class SignedUrl(msgspec.Struct, frozen=True):
    """Ask a node whose signature the raw `query` of a `/files` URL holds, made for one of `operations`."""

    query: Annotated[str, msgspec.Meta(max_length=32_768)]
    operations: tuple[str, ...]


class SignatureOwner(msgspec.Struct, frozen=True):
    """The node's answer: its sandbox, or None."""

    sandbox_id: str | None


class TimeoutRequest(msgspec.Struct, frozen=True):
    """Let a sandbox end `ttl` seconds from now; with `extend_only`, never earlier than it would already."""

    ttl: float
    extend_only: bool = False


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pool on one node. `waiting` claims stand in its queue; `failed` counts members that never got ready."""

    template: str
    size: str
    target: int
    warm: int
    starting: int
    waiting: int
    failed: int = 0
    reason: str = ""
    """Why refill is held back, in plain words; empty when it is not."""
    failing: bool = False
    """The last try to make a member, or its golden snapshot, came to nothing."""
    make_seconds: float | None = None
    """How long making one member takes, as measured lately; None before one was made."""
    refill_rate: float | None = None
    """Members that can be made a second at that, all of the node's refill working for this pool."""
    member_mib: int | None = None
    """Memory that a waiting member takes, as measured; None where it was not."""


class PoolCounts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The numbers of one pool on one node, as they change with every claim."""

    template: str
    size: str
    target: int
    warm: int
    starting: int
    waiting: int


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells about itself at registration and in each heartbeat."""

    name: str
    code: str
    api_url: str
    relay_host: str
    relay_port: int
    engine: str
    accelerator: str = ""
    pools: list[PoolStatus] = []
    sandboxes: int = 0
    """All that live here, the paused ones too."""
    paused: int = 0
    snapshots: int = 0
    """That users took; a paused sandbox is none."""
    draining: bool = False
    room_mib: int | None = None
    """MiB of memory that more warm members may take before refill stops; None where members take nothing."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the master lists it. `live` is False when no heartbeat came within the lease."""

    status: NodeStatus
    live: bool
    last_seen: float


class NodeList(msgspec.Struct, frozen=True):
    """All known nodes at `revision`, which grows with each change of membership, address or liveness."""

    revision: int
    nodes: list[NodeInfo]


class Registered(msgspec.Struct, frozen=True):
    """The master's answer to a registration or heartbeat: this node's share of every pool."""

    pools: list[PoolSpec]


class PoolName(msgspec.Struct, frozen=True):
    """What tells one pool from another: a template's name and a size's."""

    template: str
    size: str


class DrivenPool(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a declared SandboxWarmPool: what it means for the nodes' pools."""

    namespace: str
    name: str
    key: PoolName | None
    """The pool that it fills; None where its template says none, and `problem` why."""
    size: Size | None = None
    """Of `key`."""
    old_keys: list[PoolName] = []
    """What it filled before its template changed, and has members of still. A claim by the pool tries these first, in
    this order, and `key` last."""
    targets: list[int] = []
    """Members wanted of each of `old_keys`, and last of `key`: of those that several pools share, this one's part."""
    desired: int = 0
    """Members wanted in all: its replicas, or what autoscaling makes of them."""
    unplaced: int = 0
    """So many of them fit on no node."""
    problem: str = ""
    """What is wrong with it, in plain words that say what to do; empty when nothing is."""
    observed_generation: int = 0


class DrivenPools(msgspec.Struct, frozen=True):
    """All declared SandboxWarmPools by namespace and name, at `revision`, which grows with each change."""

    revision: int
    pools: list[DrivenPool]


class SandboxList(msgspec.Struct, frozen=True):
    """A node's (or, from a master, every node's) sandboxes; `missing` names nodes that could not be read."""

    sandboxes: list[Sandbox]
    missing: list[str] = []


class MasterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `greenroom status` shows of the fleet."""

    nodes: list[NodeInfo]
    pools: list[PoolSpec]
    templates: list[Template]
