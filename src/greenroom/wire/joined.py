"""A connection's transport that joins small writes: the head of an answer and its body leave in one piece.

uvicorn writes them one after the other. On connections without Nagle's delay each would be a packet of its own, wake
the other side by itself and cost a system call: half of what answering a small request costs here.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

MOST: Final = 64 << 10
"""Bytes that are held back, at most: what is larger is not small."""


class Joined:
    """Stands for an `asyncio.Transport`. What is written in one turn of the loop is sent together, at `flush` or at the
    beginning of the next turn."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] = []
        self._size = 0

    def __repr__(self) -> str:
        return f"<Joined {self._transport!r} held={self._size}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send, soon."""
        if not data:
            return
        if not self._held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._held.append(data)
        self._size += len(data)
        if self._size > MOST:
            self.flush()

    def writelines(self, pieces: Any) -> None:
        """Send, soon."""
        self.write(b"".join(pieces))

    def flush(self) -> None:
        """Send what is held back, now."""
        if self._held:
            held, self._held, self._size = self._held, [], 0
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def write_eof(self) -> None:
        """Send the rest, and that nothing follows."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Send the rest and end."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """End at once; what is held back is not sent."""
        self._held, self._size = [], 0
        self._transport.abort()
