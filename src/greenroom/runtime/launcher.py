"""Starting a QEMU behind its fence (see `command.fenced` for the chain of tools that it is made of).

Starting one costs about 40 ms of CPU, of which some 12 go into the dynamic linker. Forking VMs from one that is
linked already would spare those, but all of them would share one address layout; each has its own instead, and
what should be quick comes from a stock of QEMUs started ahead (`stock`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from greenroom.runtime import namespaces
from greenroom.runtime.command import Descriptors, fenced

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A QEMU to start. All descriptors are the caller's and stay its own."""

    command: Callable[[Descriptors], list[str]]
    """QEMU's arguments, given the descriptors it inherits."""
    fds: Descriptors
    uid: int
    handle: int
    """Descriptor of the VM's network namespace."""
    cgroup_files: Sequence[Path]
    disk_mib: int
    log: int


def launch(order: Order) -> subprocess.Popen[bytes]:
    """Start QEMU; the child joins its cgroup before anything else of it runs. Blocks for some milliseconds.

    It is started by a thread that is in its namespace already, which it inherits: one program fewer in the chain.
    """
    argv = fenced(
        order.command(order.fds), uid=order.uid, cgroup_files=order.cgroup_files, disk_mib=order.disk_mib
    )

    def start() -> subprocess.Popen[bytes]:
        namespaces.enter(order.handle)
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=order.log,
            stderr=order.log,
            pass_fds=order.fds.all(),
            start_new_session=True,
            cwd="/",
            env=_ENVIRONMENT,
        )

    return namespaces.in_thread(start)
