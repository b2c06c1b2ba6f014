"""What a node and its egress process say to each other, and the channel that carries it.

The channel is a pair of connected `SOCK_SEQPACKET` sockets: whole messages, in order, with descriptors beside them
(SCM_RIGHTS, unix(7)). It ends with either process, which is how each learns of the other's end. Nothing here ever
blocks: what the kernel does not take now waits in a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from greenroom.config import NetworkConfig
from greenroom.wire.messages import Network

LARGEST = 256 << 10
"""Bytes of one message; the rules of one sandbox are bounded far below it (`wire.network`)."""
OUTLETS = 3
"""Descriptors that an `Open` brings: TCP listener, DNS by UDP, DNS by TCP."""


class Settings(msgspec.Struct, frozen=True, tag="settings"):
    """The first order, once."""

    number: int
    network: NetworkConfig


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Serve a VM by these rules, at the sockets that come with this order; instead of what it had, if any.

    `vm` is its name. A sandbox has several in its life, at times two; its id is for the log.
    """

    number: int
    vm: str
    sandbox_id: str
    network: Network


class Change(msgspec.Struct, frozen=True, tag="change"):
    """Judge a VM by other rules, its open connections too."""

    number: int
    vm: str
    network: Network


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Reset all connections of a VM and forget it. Nothing if it is not known."""

    number: int
    vm: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Show that you are alive; the answer has counts."""

    number: int


Order = Settings | Open | Change | Close | Ping


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What the egress process has counted since it started; `open` is how it stands now."""

    connections: dict[str, int] = {}
    dns: dict[str, int] = {}
    open: int = 0
    bytes_out: int = 0
    """From sandboxes to the world; `bytes_in` the other way."""
    bytes_in: int = 0


class Done(msgspec.Struct, frozen=True):
    """The order with this number was carried out, or could not be because of `error`."""

    number: int
    error: str = ""
    counts: Counts | None = None


class Channel:
    """One end. `received` gets each message with its descriptors, which are its own; `lost` is called once.

    Belongs to one event loop, from `start` to `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        received: Callable[[bytes, list[int]], None],
        lost: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = received
        self._lost = lost
        self._queue: deque[tuple[bytes, Sequence[socket.socket]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Channel {'closed' if self._closed else 'open'} queued={len(self._queue)}>"

    def start(self) -> None:
        """Begin to receive."""
        self._loop.add_reader(self._sock, self._readable)

    def send(self, payload: bytes, sockets: Sequence[socket.socket] = ()) -> None:
        """Send a message now, or when the other side has taken what is before it. `sockets` stay the caller's;
        a message whose sockets are closed before it is sent is dropped. Nothing happens once the channel has ended.
        """
        if self._closed:
            return
        self._queue.append((payload, sockets))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue and not self._closed:
            payload, sockets = self._queue[0]
            numbers = [sock.fileno() for sock in sockets]
            if -1 not in numbers:
                try:
                    socket.send_fds(self._sock, [payload], numbers)
                except (BlockingIOError, InterruptedError):
                    self._loop.add_writer(self._sock, self._flush)
                    return
                except OSError:
                    self.close()
                    return
            self._queue.popleft()
        if not self._closed:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        for _ in range(64):
            if self._closed:
                return
            try:
                payload, fds, flags, _ = socket.recv_fds(
                    self._sock, LARGEST, OUTLETS, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.close()
                return
            if not payload or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                for fd in fds:
                    os.close(fd)
                self.close()
                return
            self._received(payload, fds)

    def close(self) -> None:
        """End it, on both sides. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._sock.close()
        self._queue.clear()
        self._lost()


def pair() -> tuple[socket.socket, socket.socket]:
    """The two sockets of a new channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        # A message must fit as a whole; the kernel counts its own overhead, too.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LARGEST)
    return ends
