"""What is declared of a sandbox: kept by its node and passed on as it is, and changed only from what was read.

A node understands when the sandbox is to be shut down and what stays of it then; the document is its writers'. Two of
them who change it at once are kept apart by its revision: the second is told that it has read an older one.
"""

from __future__ import annotations

import msgspec

from greenroom.errors import BadRequest, StaleObject
from greenroom.node import lifecycle
from greenroom.node.residents import Residents
from greenroom.wire.messages import FOREVER, Declared, DeclaredChange, Sandbox

MOST_BYTES = 1 << 20
"""Bytes of a document, without the space between its parts."""
LAST_INSTANT = 253_402_300_799.0
"""The last second of the year 9999 (Unix seconds): what comes after has no date that can be written."""


def checked(declared: Declared) -> Declared:
    """What is declared as it is kept: its document on one line and of bounded size. Raises BadRequest."""
    try:
        document = msgspec.json.format(bytes(declared.document), indent=-1)
    except msgspec.DecodeError as error:
        raise BadRequest("declared.document is not valid JSON") from error
    if not document.startswith(b"{"):
        raise BadRequest("declared.document must be an object")
    if len(document) > MOST_BYTES:
        raise BadRequest(f"declared.document has {len(document)} bytes; at most {MOST_BYTES} are allowed")
    if declared.shutdown_at is not None and not 0 <= declared.shutdown_at <= LAST_INSTANT:
        raise BadRequest("declared.shutdown_at must lie between the years 1970 and 9999")
    if declared.retain_for is not None and not 0 <= declared.retain_for <= FOREVER:
        raise BadRequest(f"declared.retain_for: 0 to {FOREVER:.0f} seconds are allowed")
    if declared.revision < 1:
        raise BadRequest("declared.revision: the first is 1")
    return msgspec.structs.replace(declared, document=msgspec.Raw(document))


class Declaring(Residents):
    """Residents of which what is declared can be replaced."""

    async def declare(self, sandbox_id: str, change: DeclaredChange) -> Sandbox:
        """Replace what is declared of a sandbox, running, paused or ended, if it has the revision `change.expect`.

        Raises StaleObject where it has another, UnknownSandbox, BadRequest, JournalUnavailable.
        """
        declared = msgspec.structs.replace(checked(change.declared), revision=change.expect + 1)
        now = self._now()
        ended = self.remains.get(sandbox_id)
        sandbox = self.known(sandbox_id).sandbox if ended is None else ended
        revision = 0 if sandbox.declared is None else sandbox.declared.revision
        if revision != change.expect:
            raise StaleObject(
                f"what is declared of {sandbox_id} has revision {revision}, not {change.expect}; read it again, "
                "and change that"
            )
        # Nothing gives way from here on: what was compared is what is replaced.
        if ended is not None:
            changed = self.remains.declare(sandbox_id, declared, now)
            self._set_drop(sandbox_id)
            return changed
        live = self.known(sandbox_id)
        after, _ = live.life.handle(lifecycle.ShutDownAt(declared.shutdown_at), now)
        changed = msgspec.structs.replace(live.sandbox, declared=declared)
        self._journal.save(live.key, changed, now)
        live.sandbox = changed
        live.life = after
        self._set_deadline(live)
        return changed
