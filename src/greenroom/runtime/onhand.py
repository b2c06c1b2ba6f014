"""The goldens that are loaded, and those that can be: what pools use, and what snapshots and adopted VMs stand on.

A snapshot needs just the golden that its VM was restored from, which a later version of the image or of QEMU may have
replaced in the pools. It is looked for in the cache by its digest, and must be of the same build.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from greenroom.errors import RuntimeFailure, SnapshotDamaged
from greenroom.images.base import Image
from greenroom.images.collect import note_use
from greenroom.runtime.command import Machine
from greenroom.runtime.engine import Golden
from greenroom.runtime.golden import Loaded, MadeOf
from greenroom.runtime.slots import Origin
from greenroom.runtime.threads import in_own_thread


class Goldens:
    """Belongs to one event loop. `close` it at the end."""

    def __init__(self, cache: Path, holders: Callable[[], list[int]]) -> None:
        """`holders` names processes that may hold a golden's RAM already."""
        self._cache = cache
        self._holders = holders
        self.current: dict[str, Loaded] = {}
        """Those of pools, by digest."""
        self._older: dict[str, Loaded] = {}

    def _loaded(self, digest: str, build: str) -> Loaded | None:
        """An empty `build` stands for any."""
        for known in (self.current, self._older):
            found = known.get(digest)
            if found is not None and build in ("", found.golden.build):
                return found
        return None

    def has(self, digest: str) -> bool:
        """Whether a golden of no pool is loaded that may be the one a pool asks for now."""
        return digest in self._older

    async def of(self, golden: Golden, image: Image, machine: Machine) -> Loaded:
        """The golden that was made so, loaded from the cache if it is not yet. Raises SnapshotDamaged."""
        if (found := self._loaded(golden.digest, golden.build)) is not None:
            return found
        directory = self._cache / golden.digest
        try:
            present = msgspec.json.decode((directory / "golden.json").read_bytes(), type=Golden)
            if present.build != golden.build:
                raise SnapshotDamaged(f"the golden {golden.digest} that it stands on was made anew since")
            loaded = await in_own_thread(
                lambda: Loaded(present, directory, rooted(image, self._cache), machine, self._holders()),
                f"load {golden.digest}",
            )
        except (OSError, msgspec.DecodeError) as error:
            raise SnapshotDamaged(
                f"the golden {golden.digest} that it stands on is not in this node's cache any more"
            ) from error
        if (
            found := self._loaded(golden.digest, golden.build)
        ) is not None:  # asked for twice at the same time
            loaded.close()
            return found
        self._older[golden.digest] = loaded
        return loaded

    async def below(self, origin: Origin) -> Loaded:
        """The golden at the bottom of a VM. Raises RuntimeFailure, SnapshotDamaged."""
        if (found := self._loaded(origin.golden, origin.build)) is not None:
            return found
        directory = self._cache / origin.golden
        try:
            golden = msgspec.json.decode((directory / "golden.json").read_bytes(), type=Golden)
            made_of = msgspec.json.decode((directory / "made-of.json").read_bytes(), type=MadeOf)
        except (OSError, msgspec.DecodeError) as error:
            raise RuntimeFailure(
                f"the golden {origin.golden} below the VM is not in this node's cache any more"
            ) from error
        if origin.build:
            golden = msgspec.structs.replace(golden, build=origin.build)
        return await self.of(golden, made_of.image, made_of.machine)

    def note_use(self, golden: Golden, image: Image) -> None:
        """Keep what a snapshot stands on from being collected for a while; see `images.collect`."""
        names = (golden.digest, Path(image.disk).parent.name, Path(image.kernel).parent.name)
        for directory in (self._cache / name for name in names):
            if directory.is_dir():
                note_use(directory)

    def close(self) -> None:
        for known in (self.current, self._older):
            for loaded in known.values():
                loaded.close()
            known.clear()


def rooted(image: Image, cache: Path) -> Image:
    """The image's files as they lie in `cache`, which may have another place than when they were written down."""
    files = {
        name: str(cache.joinpath(*Path(getattr(image, name)).parts[-2:]))
        for name in ("disk", "kernel", "initramfs")
    }
    return msgspec.structs.replace(image, **files)
