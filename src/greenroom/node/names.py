"""What owners call their sandboxes on this node: no two of one owner's have one name.

A name is taken from before a claim is first waited for until its sandbox is gone, and as long as that one is told of
after its end (`remains`). Followers hear of it at once, so that the name is known to be taken while nobody is shown its
sandbox yet.
"""

from __future__ import annotations

from greenroom.errors import NameTaken
from greenroom.node.changelog import ChangeLog
from greenroom.wire.changes import HeldName


class Names:
    """Use from one thread."""

    def __init__(self, changes: ChangeLog) -> None:
        self._changes = changes
        self._holders: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def holder(self, owner: str, name: str) -> str | None:
        """The id of the sandbox that has an owner's name, or is to have it. Nothing has the empty name."""
        return self._holders.get((owner, name))

    def refuse_taken(self, owner: str, name: str) -> None:
        """Raise NameTaken where a new sandbox cannot have this name."""
        if name and (owner, name) in self._holders:
            raise NameTaken(f"a sandbox named {name!r} exists already; delete it, or choose another name")

    def take(self, sandbox_id: str, owner: str, name: str) -> None:
        """Let a sandbox have a name that is free or its own. Nothing is done for one without a name."""
        if name:
            self._holders[owner, name] = sandbox_id
            self._changes.hold(HeldName(sandbox_id=sandbox_id, owner=owner, name=name))

    def free(self, sandbox_id: str, owner: str, name: str) -> None:
        """A sandbox needs its name no more. Nothing is done for a name that is another's."""
        if name and self._holders.get((owner, name)) == sandbox_id:
            del self._holders[owner, name]
            self._changes.drop(sandbox_id)
