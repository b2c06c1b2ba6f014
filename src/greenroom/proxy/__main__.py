"""`python -m greenroom.proxy SPEC.json`: run the proxy role."""

from __future__ import annotations

import asyncio
import sys

from greenroom.errors import SetupError
from greenroom.proxy.controller import serve
from greenroom.wire.serving import read_spec, setup_logging


def main(arguments: list[str]) -> int:
    """Exit status 0 after an orderly end, 78 (EX_CONFIG) when the machine or the settings lack something."""
    if len(arguments) != 1:
        print("usage: python -m greenroom.proxy SPEC.json", file=sys.stderr)
        return 2
    setup_logging()
    try:
        asyncio.run(serve(read_spec(arguments[0])))
    except SetupError as error:
        print(f"greenroom proxy: {error.message}", file=sys.stderr)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
