"""`python -m greenroom.node [--sweep] SPEC.json`: run a node, or clear away what a dead one left."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from greenroom.errors import GreenroomError
from greenroom.node import service
from greenroom.wire.serving import raise_file_limit, read_spec, setup_logging


def main(arguments: list[str]) -> int:
    """Exit status 0 at a normal end, 78 (EX_CONFIG) when the machine or the settings lack something."""
    if not arguments or arguments[:-1] not in ([], ["--sweep"]):
        print("usage: python -m greenroom.node [--sweep] SPEC.json", file=sys.stderr)
        return 2
    setup_logging()
    raise_file_limit()
    try:
        spec = read_spec(arguments[-1])
        if arguments[0] == "--sweep":
            counts = uvloop.run(service.sweep(spec))
            print(msgspec.json.encode(counts).decode())
            return 1 if any(counts["left"].values()) else 0
        uvloop.run(service.run(spec))
    except asyncio.CancelledError:
        return 0
    except GreenroomError as error:
        print(f"greenroom node: {error.message}", file=sys.stderr)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
