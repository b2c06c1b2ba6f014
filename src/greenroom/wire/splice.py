"""Two sockets joined: bytes, end of stream and reset of one side arrive at the other.

Used on the way into a sandbox (`node.relay`) and on the way out of it (`egress`). The join works on plain
non-blocking sockets with `add_reader` and `add_writer`, not on asyncio transports:

* a reset is synchronous (`SO_LINGER` 0, then `close`), which a killed VM's connections need at once;
* a direction reads only after all it read before was written, so it holds 256 KiB at most, and only while its
  receiver is slower than its sender; idle connections hold nothing, since all share one scratch buffer;
* readers stay registered while bytes flow, so that a chunk costs `recv` and `send`, where `loop.sock_recv`
  would change the registration with each.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

CHUNK = 256 << 10
"""Bytes read at a time, and the most one direction holds."""

_CHUNKS_A_TURN = 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def reset(sock: socket.socket) -> None:
    """Close `sock` so that its peer gets RST, and without waiting for anything. Idempotent."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()


class Splice:
    """Joins `client` and `guest` from `start` until both directions have ended or one side broke.

    `first` is sent to the guest before anything that is read. Of what the client sends, `more` bytes are passed
    on (None: all) and the rest is thrown away. Without `half_close` the client's end of stream means that it has
    left: both sides are reset, so that a guest that goes on for ever holds nothing here. `ended` is called once,
    with both sockets closed. `scratch` is a buffer of CHUNK bytes that all splices of one event loop may share.
    """

    __slots__ = ("_closed", "_down", "_ended", "_half_close", "_loop", "_up", "client", "guest", "touched")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: socket.socket,
        guest: socket.socket,
        first: bytes,
        scratch: memoryview,
        ended: Callable[[], None],
        *,
        more: int | None = None,
        half_close: bool = True,
    ) -> None:
        self._loop = loop
        self._half_close = half_close
        self.client = client
        self.guest = guest
        self._ended = ended
        self._closed = False
        self.touched = loop.time()
        self._up = _Direction(self, loop, client, guest, scratch)
        self._down = _Direction(self, loop, guest, client, scratch)
        self._up.pending = memoryview(first)
        self._up.more = more

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"up={self._up.state} down={self._down.state}"
        return f"<Splice {state}>"

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that went to the guest and to the client."""
        return self._up.moved, self._down.moved

    @property
    def held(self) -> int:
        """Bytes read and not yet written, both directions together."""
        return len(self._up.pending) + len(self._down.pending)

    def start(self) -> None:
        """Begin. Everything else happens in callbacks of the event loop."""
        self._down.resume()
        if not self._closed:
            self._up.on_writable()

    def reset(self) -> None:
        """Close both sides with RST, now. Idempotent."""
        self._close(reset)

    def _close(self, how: Callable[[socket.socket], None]) -> None:
        if self._closed:
            return
        self._closed = True
        for sock in (self.client, self.guest):
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            how(sock)
        self._ended()

    def source_ended(self, direction: _Direction) -> bool:
        """`direction` reads end of stream: True if that is to be passed on, else everything is over."""
        if direction is self._up and not self._half_close and not self._down.finished:
            self.reset()
            return False
        return True

    def direction_ended(self) -> None:
        """A direction delivered its end of stream: when both have, the connection is over in good order."""
        if self._up.finished and self._down.finished:
            self._close(socket.socket.close)
        elif self._up.broken or self._down.broken:
            self.reset()

    def direction_broke(self, direction: _Direction) -> None:
        """Nothing more can be written to `direction`'s receiver.

        It may have answered before it broke (a server that refuses an upload closes with bytes unread, which
        resets), so what it sent is still delivered; then the other side is reset.
        """
        other = self._down if direction is self._up else self._up
        if other.finished:
            self.reset()
        else:
            direction.stop()


class _Direction:
    """Bytes from `source` to `sink`. Reads only while nothing is pending."""

    __slots__ = (
        "_loop",
        "_scratch",
        "_sink",
        "_source",
        "_splice",
        "_waiting",
        "broken",
        "finished",
        "more",
        "moved",
        "pending",
    )

    def __init__(
        self,
        splice: Splice,
        loop: asyncio.AbstractEventLoop,
        source: socket.socket,
        sink: socket.socket,
        scratch: memoryview,
    ) -> None:
        self._splice = splice
        self._loop = loop
        self._source = source
        self._sink = sink
        self._scratch = scratch
        self.pending = memoryview(b"")
        self._waiting = False
        self.finished = self.broken = False
        self.more: int | None = None
        self.moved = 0

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        return "broken" if self.broken else f"pending {len(self.pending)}" if self.pending else "flowing"

    def resume(self) -> None:
        self._loop.add_reader(self._source, self.on_readable)

    def stop(self) -> None:
        """Take no more from the source; its sink is broken."""
        self.broken = True
        self.pending = memoryview(b"")
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._sink)

    def on_readable(self) -> None:
        """Move what is there, until the source has no more for now or the sink takes no more.

        It must not stop earlier: uvloop reports an error condition (a reset behind queued bytes) once and
        then never again, so the call that learns of it is the one that reads on after the last byte.
        """
        self._splice.touched = self._loop.time()
        for _ in range(_CHUNKS_A_TURN):
            try:
                size = self._source.recv_into(self._scratch)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._splice.reset()
                return
            if size == 0:
                self._finish()
                return
            if self.more is not None:
                size = min(size, self.more)
                self.more -= size
                if size == 0:
                    continue
            chunk = self._scratch[:size]
            sent = self._send(chunk)
            if sent is None:
                return
            if sent < size:
                self.pending = memoryview(bytes(chunk[sent:]))
                self._loop.remove_reader(self._source)
                self._wait()
                return
        # Others want their turn; registering anew makes a pending error be reported again.
        self._loop.remove_reader(self._source)
        self._loop.add_reader(self._source, self.on_readable)

    def on_writable(self) -> None:
        sent = self._send(self.pending)
        if sent is None:
            return
        self._splice.touched = self._loop.time()
        self.pending = self.pending[sent:]
        if self.pending:
            self._wait()
            return
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._sink)
        self.resume()

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._loop.add_writer(self._sink, self.on_writable)

    def _send(self, data: memoryview) -> int | None:
        """Bytes the sink took now, or None when it broke."""
        try:
            sent = self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._splice.direction_broke(self)
            return None
        self.moved += sent
        return sent

    def _finish(self) -> None:
        """The source ended, and all it sent was written, since reading waits for that."""
        if not self._splice.source_ended(self):
            return
        self._loop.remove_reader(self._source)
        self.finished = True
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        self._splice.direction_ended()
