"""The agent inside every Greenroom microVM: commands, files and identity over HTTP.

It speaks the data plane that the published E2B SDKs expect on port 49983, plus the control routes for
the node daemon outside. Nothing here imports anything but the standard library and its own siblings,
because the package is copied into the guest as ``/usr/lib/greenroom/agent/`` and started there with
``python3 -m agent``; on a workstation the same code starts as ``python -m greenroom.guest``.

Bottom to top::

    errors, tasks, messages, settings   words everybody shares
    parsing, multipart                  bytes in, events out, no I/O
    exchange, server                    HTTP/1.1 requests, and the connections that carry them
    connect, events                     Connect-RPC envelopes and errors; a command's events in them
    users, paths, entries, workers      who, where and what a file is; threads for what blocks
    sessions, terminals, spawning       who belongs to a command, what it runs on, starting it
    outputs, recording, inputs          what it has written (pure, then with its file), what it reads
    processes, executions, following    one command, all of them, and streams that follow one
    inotify, mounts, watchtree          the kernel's word about directories, and what it means
    signing, machine, reaping           may they; what this machine is; orphans
    commands, filesystem, watching, uploads, downloads, composing, identity, loopback, metrics
                                        one service each
    app                                 routes and authority
"""

from __future__ import annotations

VERSION = "0.1.0"
"""Version of the agent itself; the control plane reports its own ``envdVersion`` to clients."""
