"""A full snapshot taken as if its disk alone had been saved, so that what is restored from it boots.

The files stay as they are and are checked as ever; those of the memory are neither read nor needed, which also makes
this the way back to a sandbox whose memory cannot be used any more. It is loaded apart from the whole snapshot: its
VMs must not keep a RAM in memory that they do not have.
"""

from __future__ import annotations

import msgspec

from greenroom.runtime.engine import disk_of
from greenroom.runtime.snapshots import Manifest, Store


class DiskAloneStore(Store):
    """The same snapshots as `store` has, each without its memory."""

    def __init__(self, store: Store) -> None:
        # All that it knows is the other's too: a digest that one has read is not read again by the other.
        self.__dict__ = store.__dict__

    def manifest(self, name: str) -> Manifest:
        """See `Store.manifest`. What comes of it must not be taken for a VM that was restored with the memory."""
        whole = super().manifest(name)
        if whole.snapshot.kind == "filesystem":
            return whole
        return msgspec.structs.replace(
            whole, snapshot=disk_of(whole.snapshot), build=f"{whole.build}-disk-alone"
        )
