"""`python -m greenroom.proxy SPEC.json`: run the proxy role."""

from __future__ import annotations

import sys

from greenroom.proxy.controller import serve
from greenroom.wire.process import run_process

if __name__ == "__main__":
    # asyncio's own loop: the controller watches a child process and carries no traffic itself.
    sys.exit(run_process("proxy", serve, sys.argv[1:], fast_loop=False))
