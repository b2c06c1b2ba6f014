"""`python -m greenroom.egress CHANNEL UID REPLICA LEVEL HOME`: started by a node, and of no use to anybody else.

CHANNEL is the descriptor of the node's socket, UID what to become before anything is read from a sandbox, REPLICA and
LEVEL are for the log, HOME shows people whose process it is.
"""

from __future__ import annotations

import asyncio
import codecs
import concurrent.futures.thread  # noqa: F401 - see `rehearse`
import logging
import os
import resource
import sys

import uvloop

from greenroom.egress import privileges, service
from greenroom.errors import GreenroomError
from greenroom.wire.logs import setup_logging

# What other roles take from `wire.process` is written here: it would bring an HTTP server along, 8 MB for nothing.
EX_USAGE = 2
_log = logging.getLogger("greenroom.egress")


def rehearse() -> None:
    """Have Python load what it loads only when it first needs it.

    Afterwards it may not be able to: the checkout, or Python itself, may lie where only root can enter.
    """
    for name in ("ascii", "latin-1", "utf-8", "idna"):
        codecs.lookup(name)
    uvloop.run(asyncio.sleep(0))
    try:
        raise RuntimeError("an error that is told nobody")
    except RuntimeError:
        record = _log.makeRecord(_log.name, logging.ERROR, __file__, 1, "%s", ("",), sys.exc_info())
        for handler in logging.getLogger().handlers:
            handler.format(record)


def main(arguments: list[str]) -> int:
    """Exit status 0 once the node lets go, 78 when the process could not become harmless."""
    if len(arguments) != 5:
        print("this program is started by a node (python -m greenroom.node)", file=sys.stderr)
        return EX_USAGE
    channel, uid, replica, level, _ = arguments
    setup_logging("egress", int(replica), level)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rehearse()
    try:
        privileges.drop(int(uid))
        uvloop.run(service.run(int(channel)))
    except GreenroomError as error:
        _log.critical("%s", error.message)
        return os.EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
