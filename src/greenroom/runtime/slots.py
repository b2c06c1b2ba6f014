"""Owner records: what a VM takes of the host, written down *before* any of it exists.

A slot is a directory `<node home>/vms/<n>` with `owner.json`, and later, for a node that comes after this one,
`control` (the secret that the guest knows its node by), `inherited` (what a snapshot's guest knows instead),
`vm.json` (what the VM was restored from, once it was), `claimed` (from the moment it belongs to a claim) and
`pausing` (while a capture has stopped it). All names follow from the node's tag (a hash of
its home's real path) and the slot's number, so that the record is enough to find and remove everything, and
nothing without the tag is ever touched: other people's QEMUs and a second Greenroom on the machine are safe.
Processes are found through the slot's cgroup, which they are in before they are exec'ed.

Uids come in blocks: each tag claims one block of the configured range in a machine-wide registry
(`/run/greenroom/uids`), so that two Greenrooms never run VMs under the same uid.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from greenroom.errors import RuntimeFailure, SetupError
from greenroom.wire.messages import Size

UIDS_PER_NODE = 4096
VMS_PER_NODE = UIDS_PER_NODE - 1
"""The last uid of a node's block is for what it runs beside its VMs."""
_REGISTRY = Path("/run/greenroom/uids")
_BLOCKS = 256


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner record of one VM."""

    home: str
    """The node's home directory, which is the owner."""
    tag: str
    number: int
    uid: int
    netns: str
    cgroup: str
    """Path below each controller's mount point."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a VM was restored from, and how it waits; on disk from the moment it counts as a member."""

    golden: str
    template: str
    size: Size
    introduced: bool = False
    """It runs and has an identity, as members of a pool that is kept running have."""
    build: str = ""
    """Of the golden; empty in a record of an earlier version, when a digest had one build."""
    snapshot: str = ""
    """Name of the snapshot that it was restored from, if it was, and which of that name."""
    snapshot_build: str = ""


class Slot(msgspec.Struct, frozen=True):
    """A slot whose record is on disk."""

    owner: Owner
    directory: Path

    @property
    def name(self) -> str:
        return self.owner.netns

    @property
    def control(self) -> str:
        """The secret with which the node introduces this VM's guest, for the VM's whole life."""
        return (self.directory / "control").read_text(encoding="ascii")

    def inherit(self, controls: Sequence[str]) -> None:
        """The guest comes from a snapshot and knows one of these secrets, until it is introduced."""
        path = self.directory / ".inherited"
        path.write_bytes(msgspec.json.encode(list(controls)))
        path.rename(self.directory / "inherited")

    def inherited(self) -> list[str]:
        """What `inherit` wrote down and `forget_inherited` has not taken back."""
        try:
            return msgspec.json.decode((self.directory / "inherited").read_bytes(), type=list[str])
        except (OSError, msgspec.DecodeError):
            return []

    def forget_inherited(self) -> None:
        """The guest has learnt `control` and knows nothing else any more."""
        (self.directory / "inherited").unlink(missing_ok=True)

    def begin_pause(self) -> None:
        """A running VM is stopped for a moment: who finds it so after a crash lets it go on."""
        (self.directory / "pausing").touch()

    def end_pause(self) -> None:
        (self.directory / "pausing").unlink(missing_ok=True)

    @property
    def in_pause(self) -> bool:
        """A pause was begun and not ended: the VM is one that runs."""
        return (self.directory / "pausing").exists()

    def remember(self, origin: Origin) -> None:
        """Write down what the VM was restored from."""
        temporary = self.directory / ".vm"
        temporary.write_bytes(msgspec.json.encode(origin))
        temporary.rename(self.directory / "vm.json")

    def origin(self) -> Origin | None:
        """What `remember` wrote; None for a VM that was not finished."""
        try:
            return msgspec.json.decode((self.directory / "vm.json").read_bytes(), type=Origin)
        except (OSError, msgspec.DecodeError):
            return None

    def hand_out(self) -> None:
        """From now on the VM belongs to a claim and can never be warm again."""
        (self.directory / "claimed").touch()

    @property
    def handed_out(self) -> bool:
        return (self.directory / "claimed").exists()


def tag_of(home: Path) -> str:
    """Eight hex digits that name this node's resources on this machine."""
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]


class Slots:
    """Hands out slots of one node. Thread-safe: goldens are built beside the node's event loop."""

    def __init__(self, home: Path, uid_base: int) -> None:
        self.home = home.resolve()
        self.tag = tag_of(home)
        self._directory = self.home / "vms"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._first_uid = uid_base + claim_block(self.tag, str(self.home)) * UIDS_PER_NODE
        self._live: set[int] = {owner.number for owner, _ in self.recorded()}
        self._next = max(self._live, default=0) + 1
        self._lock = threading.Lock()
        self.own: set[int] = set()
        """Numbers that this process took and has not given back: whatever a sweep is for, it is not these."""

    @property
    def service_uid(self) -> int:
        """The uid for a process of the node that must not have root's rights; no VM ever has it."""
        return self._first_uid + VMS_PER_NODE

    def take(self) -> Slot:
        """A new slot: number and uid are not in use, and the record is on disk when this returns.

        Raises RuntimeFailure when all are in use.
        """
        with self._lock:
            return self._take()

    def _take(self) -> Slot:
        if len(self._live) >= VMS_PER_NODE:
            raise RuntimeFailure(f"all {VMS_PER_NODE} VM slots of this node are in use", retry_after=5)
        # Numbers only grow, because a namespace can outlive its deletion by seconds; uids come round again.
        taken = {number % VMS_PER_NODE for number in self._live}
        while self._next % VMS_PER_NODE in taken:
            self._next += 1
        number, self._next = self._next, self._next + 1
        name = f"gr-{self.tag}-{number}"
        owner = Owner(
            home=str(self.home),
            tag=self.tag,
            number=number,
            uid=self._first_uid + number % VMS_PER_NODE,
            netns=name,
            cgroup=f"greenroom/{self.tag}/{number}",
        )
        # Before the record, so that a sweep at the same time takes it for ours.
        self.own.add(number)
        directory = self._directory / str(number)
        directory.mkdir(mode=0o700)
        (directory / "control").write_text(secrets.token_hex(32), encoding="ascii")
        temporary = directory / ".owner"
        temporary.write_bytes(msgspec.json.encode(owner))
        temporary.rename(directory / "owner.json")
        self._live.add(number)
        return Slot(owner, directory)

    def give_back(self, slot: Slot) -> None:
        """Forget a slot whose resources are gone; its directory (overlay, socket) goes with it."""
        self.forget(slot.owner, slot.directory)

    def forget(self, owner: Owner, directory: Path) -> None:
        """As `give_back`, for a record of an earlier run."""
        shutil.rmtree(directory, ignore_errors=True)
        self._live.discard(owner.number)
        self.own.discard(owner.number)

    def recorded(self) -> Iterator[tuple[Owner, Path]]:
        """All records on disk, also of earlier runs. A directory without a record holds nothing yet."""
        for directory in sorted(self._directory.iterdir()):
            try:
                raw = (directory / "owner.json").read_bytes()
                owner = msgspec.json.decode(raw, type=Owner)
            except FileNotFoundError:
                # The record is the first thing made, so nothing else can exist.
                shutil.rmtree(directory, ignore_errors=True)
                continue
            except (msgspec.DecodeError, OSError, ValueError):
                continue
            if owner.tag == self.tag:
                yield owner, directory

    def release_block(self) -> None:
        """Give the node's uid block back; call when no slot is left."""
        release_block(self.tag)


def claim_block(tag: str, home: str, registry: Path = _REGISTRY) -> int:
    """The number of the uid block that `tag` owns on this machine, claiming the first free one if it has none."""
    registry.mkdir(parents=True, exist_ok=True, mode=0o755)
    with _locked(registry):
        held: dict[int, str] = {}
        for entry in registry.iterdir():
            if entry.name.isdigit():
                held[int(entry.name)] = entry.read_text(encoding="utf-8").partition("\n")[0]
        for number, owner in held.items():
            if owner == tag:
                return number
        for number in range(_BLOCKS):
            if number not in held:
                (registry / str(number)).write_text(f"{tag}\n{home}\n", encoding="utf-8")
                return number
    raise SetupError(f"all {_BLOCKS} uid blocks of this machine are taken; see {registry} for their owners")


def release_block(tag: str, registry: Path = _REGISTRY) -> None:
    """Give back the uid block of `tag`, if it has one."""
    if not registry.is_dir():
        return
    with _locked(registry):
        for entry in registry.iterdir():
            if entry.name.isdigit() and entry.read_text(encoding="utf-8").partition("\n")[0] == tag:
                entry.unlink()


@contextlib.contextmanager
def _locked(registry: Path) -> Iterator[None]:
    fd = os.open(registry / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
