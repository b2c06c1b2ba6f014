"""Routes and authority: which service answers a request, and whether the caller may ask.

With an access token set everything needs it, except ``/health``, ``/files`` (which also takes signatures)
and the control routes (which take the control token). Services raise :class:`AgentError`; here it becomes
a Connect error, a stream's last envelope, or the JSON of plain routes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from . import connect
from .commands import CommandService
from .composing import ComposeService
from .downloads import DownloadService
from .errors import AgentError, ClientGone
from .exchange import Request, Response
from .executions import ProcessTable
from .filesystem import FilesystemService
from .identity import ControlService
from .loopback import PREFIX as LOOPBACK_PREFIX
from .loopback import LoopbackService
from .machine import Machine
from .messages import encode
from .metrics import Metrics
from .settings import Settings
from .signing import TOKEN_HEADER, same
from .uploads import UploadService
from .users import UserDirectory
from .watching import WatchService
from .workers import Workers

_log = logging.getLogger(__name__)

PROCESS_PREFIX = "/process.Process/"
FILESYSTEM_PREFIX = "/filesystem.Filesystem/"

Route = Callable[[Request, Response], Awaitable[None]]


class App:
    """The agent as a request handler; :meth:`handle` is what ``server`` calls."""

    def __init__(self, settings: Settings, machine: Machine, workers: Workers, table: ProcessTable) -> None:
        users = UserDirectory()
        self._settings = settings
        self._metrics = Metrics()
        self._workers = workers
        commands = CommandService(settings, users, workers, table)
        filesystem = FilesystemService(settings, users, workers)
        watches = WatchService(settings, users, workers)
        self._unary: dict[str, Route] = {
            **{PROCESS_PREFIX + name: method for name, method in commands.unary.items()},
            **{FILESYSTEM_PREFIX + name: filesystem.route(name) for name in filesystem.methods},
            **{FILESYSTEM_PREFIX + name: method for name, method in watches.unary.items()},
        }
        self._streaming: dict[str, Route] = {
            **{PROCESS_PREFIX + name: method for name, method in commands.streaming.items()},
            **{FILESYSTEM_PREFIX + name: method for name, method in watches.streaming.items()},
        }
        control = ControlService(settings, machine)
        uploads = UploadService(settings, users, workers)
        downloads = DownloadService(settings, users, workers)
        self._open_routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": self._health, "HEAD": self._health},
            "/files": {"GET": downloads.get, "HEAD": downloads.get, "POST": uploads.post},
            "/init": {"POST": control.init},
            "/clock": {"GET": control.clock, "POST": control.clock},
            "/sync": {"POST": control.sync},
        }
        self._guarded_routes: dict[str, dict[str, Route]] = {
            "/envs": {"GET": self._envs},
            "/metrics": {"GET": self._read_metrics},
            "/files/compose": {"POST": ComposeService(settings, users, workers).post},
        }
        self._loopback = LoopbackService(control, settings)
        self._control = control

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request. Raises :class:`AgentError` for ``server`` to answer, or ClientGone."""
        if "origin" in request.headers:
            _allow_origin(request, response)
        if request.method == "OPTIONS":
            response.send(204)
            return
        path = request.path
        if path.startswith((PROCESS_PREFIX, FILESYSTEM_PREFIX)):
            await self._call(request, response)
            return
        methods = self._open_routes.get(path)
        if path.startswith(LOOPBACK_PREFIX):
            methods = {"GET": self._loopback.get}
            self._control.authorize(request)
        elif methods is None:
            self._check_token(request)
            methods = self._guarded_routes.get(path)
        elif path in ("/init", "/clock", "/sync"):
            self._control.authorize(request)
        if methods is None:
            raise AgentError("not_found", f"there is no {unquote(path)[:200]!r} here")
        route = methods.get(request.method)
        if route is None:
            raise AgentError("unimplemented", f"{request.method} is not allowed here", status=405)
        await route(request, response)

    async def _call(self, request: Request, response: Response) -> None:
        """One remote procedure call; its errors travel as the protocol wants."""
        streaming = False
        try:
            self._check_token(request)
            if request.method != "POST":
                raise AgentError("unimplemented", "calls are made with POST", status=405)
            path = request.path
            if (method := self._streaming.get(path)) is not None:
                connect.check_content_type(request, stream=True)
                streaming = True
            elif (method := self._unary.get(path)) is not None:
                connect.check_content_type(request, stream=False)
            else:
                raise AgentError("unimplemented", f"{path.lstrip('/')[:200]} is not supported")
            await method(request, response)
        except ClientGone:
            raise
        except AgentError as error:
            _reply_error(response, error, streaming)
        except Exception:
            _log.exception("call failed: %s", request.path)
            _reply_error(response, AgentError("internal", "the agent failed on this call"), streaming)

    def _check_token(self, request: Request) -> None:
        token = self._settings.access_token
        if token is not None and not same(request.headers.get(TOKEN_HEADER, ""), token):
            raise AgentError("unauthenticated", "the access token is missing or not valid")

    async def _health(self, request: Request, response: Response) -> None:
        response.send(204)

    async def _envs(self, request: Request, response: Response) -> None:
        response.send(200, encode(self._settings.environment))

    async def _read_metrics(self, request: Request, response: Response) -> None:
        response.send(200, encode(await self._workers.files(self._metrics.read)))


def _reply_error(response: Response, error: AgentError, streaming: bool) -> None:
    if streaming:
        if not response.finished:
            connect.stream_error(response, error)
    elif not response.started:
        connect.reply_error(response, error)


def _allow_origin(request: Request, response: Response) -> None:
    """Browsers may call from any page: authority is a token in a header, never a cookie."""
    response.extra_headers += [("Access-Control-Allow-Origin", "*"), ("Access-Control-Expose-Headers", "*")]
    if request.method == "OPTIONS":
        wanted = request.headers.get("access-control-request-headers", "*")
        response.extra_headers += [
            ("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
            ("Access-Control-Allow-Headers", wanted),
            ("Access-Control-Max-Age", "7200"),
        ]
