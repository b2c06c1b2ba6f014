"""All synthesized kinds of a process, over one view: what the process that serves them makes and closes."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.api.kube.live.claims import Pools, SandboxClaimStorage
from greenroom.api.kube.live.events import EventStorage
from greenroom.api.kube.live.inventories import InventoryStorage
from greenroom.api.kube.live.namespaces import NamespaceStorage, Others, nothing
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.operating import Operating, Platform
from greenroom.api.kube.live.sandboxes import SandboxStorage
from greenroom.api.kube.storage import Storage
from greenroom.api.kube.versions import Clock


class Synthesized:
    """See the module. `clock` is that of all kinds of the process, the stored ones too; `others` names namespaces that
    keys and stored objects have; `queue_wait` is how long a claim may stand in a dry pool's queue, and `resume_ttl` how
    long one of the other dialect runs when it is resumed in this one, both in seconds."""

    def __init__(
        self,
        platform: Platform,
        pools: Pools,
        clock: Clock,
        *,
        queue_wait: float,
        resume_ttl: float,
        others: Others = nothing,
    ) -> None:
        self.platform = platform
        self.live = Live(platform.seen.view, clock)
        self.operating = Operating(platform, self.live, wait=queue_wait, resume_ttl=resume_ttl)
        current = self.operating.current
        self.sandboxes = SandboxStorage(self.operating)
        self.claims = SandboxClaimStorage(self.operating, pools)
        self.inventories = InventoryStorage(self.live, current, self.operating.url_of)
        self.namespaces = NamespaceStorage(self.live, current, others)
        self.events = EventStorage(self.live, current)

    def storages(self) -> Sequence[Storage]:
        """One for each kind."""
        return (self.sandboxes, self.claims, self.inventories, self.namespaces, self.events)

    def close(self) -> None:
        """Tell nobody any more."""
        self.live.close()
        self.inventories.close()
