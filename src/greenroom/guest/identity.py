"""The control routes ``/init``, ``/clock`` and ``/sync``: the node daemon makes this clone of a snapshot somebody,
and has it write its disk out before that alone is kept.

Nobody else may use them: once a control token is set they look like unknown paths to whoever does not have
it. ``machine`` does the changes, ``settings`` keeps the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from .connect import UNARY_TYPE
from .errors import AgentError
from .exchange import Request, Response
from .machine import Machine
from .messages import Message, base64, decode, encode, integer, text, text_map
from .settings import Settings
from .signing import same

CONTROL_HEADER = "x-greenroom-control"
MIN_ENTROPY = 32
MAX_ENTROPY = 512
MAX_TOKEN = 4096

_MACHINE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}))*", re.ASCII)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """A validated ``/init`` body; what is None is left as it is. Tokens stay out of the representation."""

    access_token: str | None
    control_token: str | None
    sandbox_id: str | None
    template_id: str | None
    environment: dict[str, str]
    entropy: bytes | None
    machine_id: str | None
    hostname: str | None
    timestamp_ns: int | None
    default_user: str | None
    default_workdir: str | None

    def __repr__(self) -> str:
        return f"<Identity of {self.sandbox_id}>"


class ControlService:
    """Serves the node daemon."""

    def __init__(self, settings: Settings, machine: Machine) -> None:
        self._settings = settings
        self._machine = machine
        self._busy = asyncio.Lock()

    def authorize(self, request: Request) -> None:
        """Raise ``not_found`` unless the request has the control token (or none is set yet)."""
        token = self._settings.control_token
        if token is not None and not same(request.headers.get(CONTROL_HEADER, ""), token):
            raise AgentError("not_found", "not found")

    async def init(self, request: Request, response: Response) -> None:
        """``POST /init``: take on an identity, all of it or none of its tokens."""
        self.authorize(request)
        arrived = time.monotonic_ns()
        identity = parse_identity(decode(await request.body.read_all()))
        async with self._busy:
            self.authorize(request)  # another /init may have set the token meanwhile
            apply(identity, self._settings, self._machine, arrived)
        response.send(200, encode({"nowNs": self._machine.now_ns()}), UNARY_TYPE)

    async def clock(self, request: Request, response: Response) -> None:
        """``GET /clock`` tells the time, ``POST /clock`` moves it by ``adjustNs`` nanoseconds."""
        self.authorize(request)
        if request.method == "POST":
            offset = integer(decode(await request.body.read_all()), "adjustNs")
            try:
                now = self._machine.adjust_clock(offset)
            except (OSError, OverflowError, ValueError) as error:
                raise AgentError("internal", f"the clock could not be set: {error}") from None
        else:
            now = self._machine.now_ns()
        response.send(200, encode({"nowNs": now}), UNARY_TYPE)

    async def sync(self, request: Request, response: Response) -> None:
        """``POST /sync``: answer when all that was written is on the disk."""
        self.authorize(request)
        await request.body.read_all()
        await asyncio.to_thread(os.sync)
        response.send(200, b"{}", UNARY_TYPE)


def parse_identity(message: Message) -> Identity:
    """Check a whole ``/init`` body before anything is changed. Raises ``invalid_argument``."""
    entropy = None
    if message.get("entropy") is not None:
        entropy = base64(text(message, "entropy"), "entropy")
        if not MIN_ENTROPY <= len(entropy) <= MAX_ENTROPY:
            raise _invalid("entropy", f"must be {MIN_ENTROPY} to {MAX_ENTROPY} bytes")
    timestamp = integer(message, "timestampNs") if message.get("timestampNs") is not None else None
    if timestamp is not None and not 0 < timestamp < 1 << 63:
        raise _invalid("timestampNs", "is not a time")
    environment = text_map(message, "envVars")
    if any(not name or "=" in name or "\0" in name + value for name, value in environment.items()):
        raise _invalid("envVars", "has a name or value no process can have")
    return Identity(
        access_token=_token(message, "accessToken"),
        control_token=_token(message, "controlToken"),
        sandbox_id=_optional(message, "sandboxId"),
        template_id=_optional(message, "templateId"),
        environment=environment,
        entropy=entropy,
        machine_id=_matching(message, "machineId", _MACHINE_ID, "must be 32 lower-case hexadecimal digits"),
        hostname=_matching(message, "hostname", _HOSTNAME, "is not a host name"),
        timestamp_ns=timestamp,
        default_user=_optional(message, "defaultUser"),
        default_workdir=_optional(message, "defaultWorkdir"),
    )


def apply(identity: Identity, settings: Settings, machine: Machine, arrived_ns: int) -> None:
    """Apply in the order that is safe to fail in: entropy first, tokens last.

    ``arrived_ns`` is the monotonic time at which ``timestamp_ns`` was true enough; what has passed since is
    added. Raises ``internal`` naming the failed step, with the tokens as they were.
    """
    steps: list[tuple[str, Callable[[], None]]] = []
    if (seed := identity.entropy) is not None:
        steps.append(("entropy", lambda: machine.add_entropy(seed)))
    if (timestamp := identity.timestamp_ns) is not None:
        steps.append(("clock", lambda: machine.set_clock(timestamp + time.monotonic_ns() - arrived_ns)))
    if (machine_id := identity.machine_id) is not None:
        steps.append(("machineId", lambda: machine.set_machine_id(machine_id)))
    if (hostname := identity.hostname) is not None:
        steps.append(("hostname", lambda: machine.set_hostname(hostname)))
    updated = _updated(identity, settings)
    steps.append(("settings", lambda: machine.keep(updated.dump())))
    for name, step in steps:
        try:
            step()
        except (OSError, ValueError, OverflowError) as error:
            _log.error("init failed at step %s: %s", name, error)
            raise AgentError("internal", f"init failed at step {name}: {error}") from None
    settings.take(updated)


def _updated(identity: Identity, settings: Settings) -> Settings:
    """The settings as they will be."""
    environment = {**settings.environment, **identity.environment, "E2B_SANDBOX": "true"}
    if identity.sandbox_id is not None:
        environment["E2B_SANDBOX_ID"] = identity.sandbox_id
    if identity.template_id is not None:
        environment["E2B_TEMPLATE_ID"] = identity.template_id
    return Settings(
        access_token=identity.access_token or settings.access_token,
        control_token=identity.control_token or settings.control_token,
        environment=environment,
        default_user=identity.default_user or settings.default_user,
        default_workdir=identity.default_workdir or settings.default_workdir,
    )


def _optional(message: Message, name: str) -> str | None:
    value = text(message, name)
    if "\0" in value:
        raise _invalid(name, "must not contain a zero byte")
    return value or None


def _token(message: Message, name: str) -> str | None:
    token = _optional(message, name)
    if token is not None and not (len(token) <= MAX_TOKEN and token.isascii() and token.isprintable()):
        raise _invalid(name, f"must be printable ASCII of at most {MAX_TOKEN} characters")
    return token


def _matching(message: Message, name: str, pattern: re.Pattern[str], complaint: str) -> str | None:
    value = _optional(message, name)
    if value is not None and (pattern.fullmatch(value) is None or len(value) > 64):
        raise _invalid(name, complaint)
    return value


def _invalid(name: str, complaint: str) -> AgentError:
    return AgentError("invalid_argument", f"field {name!r} {complaint}")
