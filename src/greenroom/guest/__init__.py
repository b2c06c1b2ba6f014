"""The agent inside every Greenroom microVM: commands, files and identity over HTTP.

It speaks the data plane that the published E2B SDKs expect on port 49983, plus two control routes for
the node daemon outside. Nothing here imports anything but the standard library and its own siblings,
because the package is copied into the guest as ``/usr/lib/greenroom/agent/`` and started there with
``python3 -m agent``; on a workstation the same code starts as ``python -m greenroom.guest``.

Bottom to top::

    errors, tasks, messages, settings   words everybody shares
    parsing, multipart             bytes in, events out, no I/O
    exchange, server               HTTP/1.1 requests, and the connections that carry them
    connect                        Connect-RPC envelopes and errors
    users, paths, entries, workers who, where and what a file is; threads for what blocks
    spawning, processes            starting commands, following them
    signing, machine               may they; what this machine is
    commands, filesystem, uploads, downloads, identity, metrics   one service each
    app                            routes and authority
"""

from __future__ import annotations

VERSION = "0.1.0"
"""Version of the agent itself; the control plane reports its own ``envdVersion`` to clients."""
