"""`python -m greenroom.node [--sweep] SPEC.json`: run a node, or clear away what a dead one left."""

from __future__ import annotations

import sys

import msgspec

from greenroom.config import RoleSpec
from greenroom.node import service
from greenroom.wire.process import run_process


def main(arguments: list[str]) -> int:
    """Exit status 0 at a normal end, 78 when the machine lacks something, 1 when a sweep left something."""
    if arguments[:1] != ["--sweep"]:
        return run_process("node", service.run, arguments)
    left = 0

    async def sweep(spec: RoleSpec) -> None:
        nonlocal left
        counts = await service.sweep(spec)
        left = sum(counts["left"].values())
        print(msgspec.json.encode(counts).decode())

    return run_process("node", sweep, arguments[1:]) or int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
