"""A network namespace per VM: a tap, rules for what the guest starts (`firewall`), and nothing else in it.

All clones of a golden have the same MAC and address, which is why each needs a namespace. There is no veth:
the node reaches the guest through sockets made *inside* the namespace (`open_socket`), so a guest has, by
construction, no way to the host's network or to another guest; what it starts ends at sockets made the same way
(`open_outlets`), if there are any. The nftables rules (family `inet`, because an `ip` table would leave the tap's
IPv6 link-local address open) keep it from the namespace's own addresses too.

Namespaces are per thread, so everything here runs in a thread that is thrown away, except `open_socket`, which
changes over and back without a step between in which other code could run.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import fcntl
import gc
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from pyroute2 import IPRoute

from greenroom.errors import SetupError
from greenroom.runtime.firewall import DNS_PORT, NOTHING, TCP_PORT

GUEST_ADDRESS = "10.0.2.15"
HOST_ADDRESS = "10.0.2.2"
GUEST_MAC = "52:54:00:47:52:15"
HOST_MAC = "52:54:00:47:52:02"
"""Fixed, because the golden's guest remembers it: a fresh one would cost an ARP time-out at each restore."""
DIRECTORY = Path("/run/netns")

_CLONE_NEWNET = 0x40000000
_CLONE_FILES = 0x400
_MS_BIND = 4096
_MNT_DETACH = 2
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.close_range.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
_rules_turn = threading.Lock()
T = TypeVar("T")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, which then ends: whatever namespace it entered dies with it."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=run, name="greenroom-netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def create(name: str, rules: str = NOTHING) -> int:
    """Make the namespace `name` with its tap and nftables rules; returns the tap's descriptor, for QEMU.

    Blocks some milliseconds. On failure nothing of it is left. Raises SetupError with what to do.
    """
    try:
        return in_thread(lambda: _create(name, rules))
    except OSError as error:
        remove(name)
        if error.errno in (errno.EPERM, errno.EACCES):
            raise SetupError(f"cannot make network namespaces ({error}); run as root") from error
        raise SetupError(f"cannot make the network namespace of a VM: {error}") from error


def _create(name: str, rules: str) -> int:
    _check(_libc.unshare(_CLONE_NEWNET), "unshare")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    place = DIRECTORY / name
    place.touch(exist_ok=False)
    _check(_libc.mount(b"/proc/thread-self/ns/net", str(place).encode(), b"none", _MS_BIND, None), "mount")
    with contextlib.suppress(OSError):
        # The rules drop IPv6 anyway; without it the tap needs no link-local address at all.
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1", encoding="ascii")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1", encoding="ascii")
    apply_rules(rules)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"tap0", flags))
        index = socket.if_nametoindex("tap0")
        with IPRoute() as route:
            route.link("set", index=index, address=HOST_MAC)
            route.addr("add", index=index, address=HOST_ADDRESS, prefixlen=24)
            route.link("set", index=index, state="up")
            route.neigh("add", dst=GUEST_ADDRESS, lladdr=GUEST_MAC, ifindex=index, state="permanent")
    except BaseException:
        os.close(tap)
        raise
    return tap


def apply_rules(ruleset: str) -> None:
    """Load nftables rules into the calling thread's namespace through libnftables. Raises OSError.

    libnftables waits with select(2), and glibc ends the whole process when one of its descriptors is 1024 or
    above, as it would be on a node with some 340 VMs. So it runs in a thread that has a table of descriptors of
    its own, with nothing in it.
    """
    library = _libnftables()
    command = ruleset.encode()
    # An object that the collector finalised in that thread would close its descriptor in the wrong table.
    with _rules_turn:
        collecting = gc.isenabled()
        gc.disable()
        try:
            in_thread(lambda: _apply_alone(library, command))
        finally:
            if collecting:
                gc.enable()


def _apply_alone(library: ctypes.CDLL, command: bytes) -> None:
    """What `apply_rules` does, in a thread that ends after it and has its caller's namespace."""
    _check(_libc.unshare(_CLONE_FILES), "unshare descriptors")
    _check(_libc.close_range(3, 0xFFFFFFFF, 0), "close_range")
    context = library.nft_ctx_new(0)
    if not context:
        raise OSError(errno.ENOMEM, "libnftables gives no context")
    try:
        library.nft_ctx_buffer_error(context)
        if library.nft_run_cmd_from_buffer(context, command) != 0:
            text = library.nft_ctx_get_error_buffer(context) or b""
            raise OSError(
                errno.EINVAL, f"nftables refused the rules: {text.decode(errors='replace').strip()}"
            )
    finally:
        library.nft_ctx_free(context)


def _libnftables() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnftables.so.1")
    except OSError as error:
        raise SetupError(
            "libnftables is not installed; run: apt-get install --no-install-recommends libnftables1"
        ) from error
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_ctx_free.argtypes = [ctypes.c_void_p]
    library.nft_ctx_free.restype = None
    library.nft_ctx_buffer_error.argtypes = [ctypes.c_void_p]
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.nft_ctx_get_error_buffer.argtypes = [ctypes.c_void_p]
    library.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
    return library


def remove(name: str) -> bool:
    """Remove the namespace's name; it dies with its last socket and process. True if it was there."""
    place = DIRECTORY / name
    if not place.exists():
        return False
    _libc.umount2(str(place).encode(), _MNT_DETACH)
    place.unlink(missing_ok=True)
    return True


def listing(prefix: str) -> list[str]:
    """Names of the namespaces that start with `prefix`."""
    try:
        return sorted(entry.name for entry in DIRECTORY.iterdir() if entry.name.startswith(prefix))
    except FileNotFoundError:
        return []


def open_handle(name: str) -> int:
    """A descriptor of the namespace, for `open_socket`; the caller closes it."""
    return os.open(DIRECTORY / name, os.O_RDONLY | os.O_CLOEXEC)


def enter(handle: int) -> None:
    """Move the calling thread, which should be one that `in_thread` throws away, into the namespace."""
    _check(_libc.setns(handle, _CLONE_NEWNET), "setns")


_own: int | None = None


def open_socket(handle: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A non-blocking IPv4 socket that lives in the namespace, made from the calling thread (17 µs).

    End a TCP one by `reset_on_close`: a namespace outlives its deletion while a socket in it retransmits.
    """
    global _own
    if _own is None:
        _own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    _check(_libc.setns(handle, _CLONE_NEWNET), "setns")
    try:
        sock = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    finally:
        _check(_libc.setns(_own, _CLONE_NEWNET), "setns back")
    if kind == socket.SOCK_STREAM:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Outlets(NamedTuple):
    """The sockets in a namespace at which ends what its guest starts."""

    tcp: socket.socket
    """Listening: every TCP connection but DNS."""
    dns_udp: socket.socket
    dns_tcp: socket.socket

    def close(self) -> None:
        """Close this process's descriptors of them. Idempotent."""
        for sock in self:
            sock.close()


BACKLOG = 128
"""Connections that may wait to be accepted, also while the egress process is started again."""


def open_outlets(handle: int) -> Outlets:
    """Make the sockets that `firewall`'s rules redirect to (43 µs for all three). Raises OSError."""
    made = Outlets(open_socket(handle), open_socket(handle, socket.SOCK_DGRAM), open_socket(handle))
    try:
        made.tcp.bind((HOST_ADDRESS, TCP_PORT))
        made.tcp.listen(BACKLOG)
        made.dns_udp.bind((HOST_ADDRESS, DNS_PORT))
        made.dns_tcp.bind((HOST_ADDRESS, DNS_PORT))
        made.dns_tcp.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def change_rules(name: str, rules: str) -> None:
    """Load nftables rules into the namespace `name` (12 to 16 ms, of which little is CPU). Blocks. Raises OSError."""
    handle = open_handle(name)

    def change() -> None:
        enter(handle)
        apply_rules(rules)

    try:
        in_thread(change)
    finally:
        os.close(handle)


def reset_on_close(sock: socket.socket) -> None:
    """Let closing the socket send a reset at once instead of lingering."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
