"""The interface every VM engine keeps, and the records it deals in.

Life of a VM: `restore` (paused, has never run) → `start` → (`pause` ⇄ `resume`) → `stop`. `stop` may come at
any time, is idempotent and returns only when nothing of the VM is left on the host.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from greenroom.runtime.namespaces import Outlets
from greenroom.wire.messages import Size
from greenroom.wire.network import Rules

Progress = Callable[[str, float | None], None]
"""Told the present step in plain words and, where known, how much of it is done (0 to 1)."""


def quiet(_step: str, _done: float | None) -> None:
    """A Progress that tells nobody."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is on this machine. `reason` says why this accelerator was chosen."""

    engine: str
    accelerator: str
    version: str
    reason: str
    detail: dict[str, str] = {}
    """For each golden in use, how its VMs get their RAM and why."""


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """A template's snapshot, ready to be restored from. `digest` names image, size, engine and CPU model."""

    digest: str
    template: str
    size: Size
    build: str = ""
    """Drawn when it was made: two goldens of one digest have different RAM, and the state of one only fits its own."""
    ram_bytes: int = 0
    """Resident bytes of the golden RAM that all restored VMs share."""
    state_bytes: int = 0
    """Bytes of device state that each restore loads."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A captured VM on this node's disk, from which any number of VMs can be restored."""

    name: str
    kind: Literal["full", "filesystem"]
    """`full` has memory and devices and goes on where it was; `filesystem` has the disk alone and boots."""
    template: str
    size: Size
    golden: str
    """Digest of the golden that it holds the differences to."""
    created_at: float
    """Unix seconds."""
    parent: str = ""
    """Name of the snapshot that its VM had been restored from; it is not needed any more."""
    ram_bytes: int = 0
    """Bytes of memory in which it differs from the golden."""
    disk_bytes: int = 0
    """Bytes of its disk's layers above the golden's, those included that it shares with its VM and its parent."""


def disk_of(snapshot: Snapshot) -> Snapshot:
    """The same without its memory, whether it has any or not: what is restored from it boots."""
    return msgspec.structs.replace(snapshot, kind="filesystem", ram_bytes=0)


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """A capture that is on disk, and what it took."""

    snapshot: Snapshot
    pause_ms: float
    """Milliseconds that the guest stood still; 0 for one that was paused already or keeps running."""
    stages: dict[str, float]
    """Milliseconds of each stage, in order: `prepare`; `stop`, `state`, `scan`, `read`, `freeze`, `cont` in the
    pause; `write` and `publish` after it."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a VM somebody. Absent fields are left as they are in the guest.

    `entropy` and `machine_id` are drawn by the host for this one VM; `token` is the sandbox's envd token.
    """

    entropy: bytes
    machine_id: str | None = None
    hostname: str | None = None
    sandbox_id: str | None = None
    template_id: str | None = None
    env: dict[str, str] | None = None
    token: str | None = None


class ClockReading(msgspec.Struct, frozen=True):
    """Guest clock minus host clock in milliseconds, true to within ± `error_ms` (half the round trip)."""

    offset_ms: float
    error_ms: float
    answer_s: float = 0.0
    """Seconds of the introduction until the agent's first answer, tries before it listened included."""
    identity_s: float = 0.0
    """Seconds of the one request that gave the identity; `clock_s` of measuring and setting the clock."""
    clock_s: float = 0.0


class VmInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine tells about one VM."""

    name: str
    state: str
    pid: int | None
    uid: int | None
    netns: str | None


@runtime_checkable
class Vm(Protocol):
    """One VM of an engine."""

    @property
    def name(self) -> str:
        """Unique on this machine; names the VM's namespace and cgroup."""

    @property
    def ended(self) -> asyncio.Event:
        """Set when the VM's process has ended, for whatever reason."""

    async def connect(self, port: int, deadline: float = 10.0) -> socket.socket:
        """A connected non-blocking TCP socket to a port in the guest. Raises OSError when it is closed."""

    async def connect_inside(self, port: int) -> socket.socket:
        """The same, but to what listens on the guest's loopback, by way of its agent.

        Raises ConnectionRefusedError when nothing does, or the agent does not know such a way.
        """

    def describe(self) -> VmInfo:
        """Facts for operators and tests."""


class Adopted(NamedTuple):
    """A VM of an earlier run of this node that still lives."""

    vm: Vm
    template: str
    size: Size
    claimed: bool
    """It was given to a claim; the journal knows which."""
    introduced: bool
    """It runs and has an identity; an unclaimed one without waits paused."""


class Runtime(Protocol):
    """A VM engine."""

    async def describe(self, progress: Progress = quiet) -> EngineInfo:
        """Which engine and accelerator this is. The first call may build boot files and take a probe boot."""

    async def prepare_image(self, template: str, progress: Progress) -> None:
        """Have the template's image on this machine. Raises SetupError when it cannot be had."""

    async def snapshot_golden(self, template: str, size: Size, progress: Progress) -> Golden:
        """The golden snapshot of `template` in `size`: loaded if it was made before, else booted and saved."""

    async def restore(self, source: Golden | Snapshot) -> Vm:
        """A new VM, paused. One from a snapshot of kind `filesystem`, or from the `disk_of` one, boots when it is
        started.

        Raises RuntimeFailure after giving back what it had taken; UnknownSnapshot; SnapshotDamaged for one that is
        not as it was written, or that does not fit this machine any more.
        """

    async def start(self, vm: Vm) -> None:
        """Let a restored VM run for the first time."""

    async def introduce(self, vm: Vm, identity: Identity, deadline: float) -> ClockReading:
        """Give a running VM its identity and the right time. Raises RuntimeFailure past `deadline` seconds.

        May be repeated. What outlives this process of it is noted by the engine before it returns.
        """

    async def pause(self, vm: Vm) -> None:
        """Stop the VM's CPUs; its memory stays."""

    async def resume(self, vm: Vm) -> None:
        """Undo `pause`. The guest's clock is behind by the length of the pause until it is set."""

    @property
    def service_uid(self) -> int:
        """A uid of this node's own that no VM has."""

    def confine(self, name: str, pid: int, memory: int) -> None:
        """Bound a process that the node runs beside its VMs to `memory` bytes. Raises SetupError.

        What that takes of the host is removed by `close` and `detach`, or by the `sweep` of a later run.
        """

    async def restrict(self, vm: Vm, rules: Rules) -> None:
        """Refuse in the VM's own namespace what these network rules deny by address; nothing if they are in force.

        Connections that are open stay so. Raises RuntimeFailure.
        """

    def open_outlets(self, vm: Vm) -> Outlets | None:
        """New sockets at which ends what the guest starts; until there are any, it is refused everything.

        None where the engine has no network. Raises RuntimeFailure.
        """

    async def capture(self, vm: Vm, name: str, *, memory: bool = True, durable: bool = True) -> CaptureResult:
        """Save a running or paused VM as the snapshot `name`; it then goes on as before.

        Memory, devices and disk are those of one instant, for which the guest stands still. Without `memory` only
        the disk is saved, as the guest has written it: sync the guest's file systems first. The snapshot is on disk
        for good when this returns, or, if it is not to be `durable`, until a power cut; whatever goes wrong, there is
        none and the VM goes on. VMs restored from it have the identity of the captured one until they are introduced.

        Raises RuntimeFailure when there is no room for it, the VM ended or the name is taken.
        """

    async def sync(self, vm: Vm, deadline: float) -> None:
        """Have the guest of an introduced VM write its file systems to its disk.

        Raises RuntimeFailure when it does not within `deadline` seconds.
        """

    async def snapshots(self) -> list[Snapshot]:
        """The snapshots on this node's disk, by name; damaged ones are left out."""

    async def snapshot(self, name: str) -> Snapshot:
        """One of them. Raises UnknownSnapshot, SnapshotDamaged."""

    async def delete_snapshot(self, name: str) -> None:
        """Remove a snapshot. VMs restored from it go on. Raises UnknownSnapshot."""

    async def hold(self, snapshot: Snapshot) -> None:
        """Keep a snapshot in memory, and VMs of it in stock, until as many calls of `let_go`; raises like `restore`.

        Without, it is in memory as long as a VM that was restored from it lives.
        """

    async def let_go(self, snapshot: Snapshot) -> None:
        """Undo one `hold`."""

    def disk_use(self, vm: Vm) -> int:
        """Bytes that the VM's overlay takes on the host's disk."""

    async def revive(self, vm: Vm) -> bool:
        """Let a VM go on that was stopped because the host's disk had no room for a write; True if it was."""

    async def stop(self, vm: Vm) -> None:
        """End the VM and remove everything of it from the host."""

    async def hand_out(self, vm: Vm) -> None:
        """Note, before anyone is told, that the VM belongs to a claim from now on."""

    async def adopt(self) -> list[Adopted]:
        """Take over the VMs that an earlier run of this node left alive. Call once, before `sweep`."""

    def interrupt(self) -> None:
        """Give up a golden snapshot that is being made: the process is about to leave. Never blocks."""

    async def detach(self) -> None:
        """Let go of every VM and leave all of them as they are, for the next run to adopt."""

    async def sweep(self) -> dict[str, int]:
        """Remove what earlier runs of this node left and nobody adopted; counts by kind of resource."""

    async def close(self) -> None:
        """Stop every VM and give back what the engine itself holds."""
