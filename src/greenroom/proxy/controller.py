"""The proxy role's life: configure Envoy, keep it running and informed, drain it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
from prometheus_client.core import Metric

from greenroom.config import RoleSpec
from greenroom.errors import SetupError
from greenroom.proxy import nodes, resources, secure, signed
from greenroom.proxy.admin import Admin, AdminError, admin_of
from greenroom.proxy.envoy import Envoy, kill_leftover
from greenroom.proxy.files import EnvoyFiles, envoy_identity
from greenroom.proxy.metrics import STARTS, of_envoy, read
from greenroom.wire import metrics, serving, tasks
from greenroom.wire.calling import RoleClient, role_client
from greenroom.wire.certificates import control_names
from greenroom.wire.credentials import Verifier, own_token, write_private

_log = logging.getLogger(__name__)

START_DEADLINE = 30.0
"""Seconds in which a started Envoy must listen."""
BACKOFF_FIRST, BACKOFF_LAST = 0.1, 5.0
"""Seconds before an Envoy that died is started again; doubles with each death."""
STEADY_AFTER = 30.0
"""Seconds of life after which earlier deaths are forgotten."""
_LOOK_EVERY = 0.02
_APPLY_DEADLINE = 10.0


class Controller:
    """Envoy's configuration and process. One event loop, the main thread's."""

    def __init__(self, spec: RoleSpec, token: str, verifier: Verifier) -> None:
        self._spec = spec
        self._config = spec.config.proxy
        self._token = token
        self._verifier = verifier
        self._own_url = ""
        self._files = EnvoyFiles(spec.home, envoy_identity(spec.config.vm.uid_base))
        self._record = spec.home / "envoy.json"
        self._port = self._config.port
        self._tls_port = self._config.tls_port
        self._domain = spec.domain or self._config.domain
        port = self._config.kube_port
        self._kube_port = port if isinstance(port, int) else None
        self._certificates: list[secure.Certificate] = []
        if self._tls_port is not None:
            self._certificates.append(secure.Certificate(spec.state, self._domain, self._files.write))
        if self._kube_port is not None:
            names = control_names(self._config, self._domain)
            self._certificates.append(
                secure.Certificate(spec.state, names, self._files.write, resources.CONTROL_CERTIFICATE)
            )
        self._version = 0
        self._relays: dict[str, resources.Relay] | None = None
        self._informed = asyncio.Event()
        self._envoy: Envoy | None = None
        # Checked here so that a wrong setting is told before anything is started.
        self._api_clusters = resources.api_clusters(spec.api_urls, self._config)

    async def run(self, leave: asyncio.Event) -> None:
        """From preparation until `leave` is set and the last client was served or its time is up.

        Raises SetupError when Envoy cannot be brought to listen the first time.
        """
        self._files.prepare()
        kill_leftover(self._files, self._record)
        for port in {self._port, self._tls_port or 0, self._kube_port or 0} - {0}:
            check_port(self._config.host, port)
        self._files.write(resources.BOOTSTRAP, _encode(resources.bootstrap(self._config, self._spec.replica)))
        async with (
            role_client(self._token, masters=self._spec.master_urls) as client,
            admin_of(self._files.directory) as admin,
            self._answering(admin, client),
        ):
            self._write_clusters()
            following = tasks.spawn(nodes.follow(client, self._spec.master_urls, self.apply), "follow-nodes")
            telling: asyncio.Task[None] | None = None
            keeping: asyncio.Task[None] | None = None
            certifying: list[asyncio.Task[None]] = []
            try:
                for certificate in self._certificates:
                    await certificate.show()
                    certifying.append(tasks.spawn(certificate.keep(), "keep-certificate"))
                await self._start(admin, leave)
                keeping = tasks.spawn(self._keep_running(admin, leave), "keep-envoy-running")
                telling = tasks.spawn(self._tell_ready(admin), "tell-ready")
                await self._until(leave, following, keeping)
                await tasks.stop(following, keeping, telling)
                await self._drain(admin)
            finally:
                await tasks.stop(following, keeping, telling, *certifying)
                if self._envoy is not None:
                    await self._envoy.stop()
                self._record.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def _answering(self, admin: Admin, client: RoleClient) -> AsyncIterator[None]:
        """For the length of a block, answer `/healthz`, `/metrics` and Envoy's questions about signed URLs on an
        address of the controller's own.

        `<home>/internal.url` tells which, for scrapers: the ready message names the entry.
        """
        finder = signed.Finder(client, lambda: [relay.api_url for relay in (self._relays or {}).values()])
        app = serving.application(finder.routes(), self._verifier, more_metrics=lambda: of_envoy(admin))
        told = self._spec.home / "internal.url"
        sock = serving.listen(self._spec.host, self._spec.port)
        async with serving.serving_beside(app, sock) as self._own_url:
            write_private(told, f"{self._own_url}\n")
            try:
                with metrics.reading(self._read):
                    yield
            finally:
                told.unlink(missing_ok=True)

    def _read(self) -> Iterable[Metric]:
        up = self._envoy is not None and not self._envoy.ended.is_set()
        ends = min((certificate.ends for certificate in self._certificates), default=0.0)
        return read(up=up, nodes=len(self._relays or {}), versions=self._version, certificate_ends=ends)

    async def _until(self, leave: asyncio.Event, *lasting: asyncio.Task[None]) -> None:
        """Wait until it is time to leave. A lasting task that ended is a fault; it is raised, so that the role
        ends and is started anew instead of serving by what it knew.
        """
        leaving = tasks.spawn(leave.wait(), "wait-to-leave")
        try:
            await asyncio.wait({leaving, *lasting}, return_when=asyncio.FIRST_COMPLETED)
            for task in lasting:
                if task.done():
                    task.result()
        finally:
            await tasks.stop(leaving)

    def apply(self, relays: dict[str, resources.Relay]) -> None:
        """Make these the nodes that Envoy knows."""
        known = self._relays or {}
        self._relays = relays
        self._write_clusters()
        self._informed.set()
        changed = sorted(code for code, relay in relays.items() if known.get(code) != relay)
        gone = sorted(known.keys() - relays.keys())
        _log.info("nodes: %d known, new or moved %s, gone %s", len(relays), changed, gone)

    def _write_clusters(self) -> None:
        self._version += 1
        clusters = [*self._api_clusters, resources.controller_cluster(self._own_url, self._config)]
        for code, relay in sorted((self._relays or {}).items()):
            clusters.append(resources.node_cluster(code, relay, self._config))
        self._files.write(resources.CLUSTERS, resources.discovery(str(self._version), clusters))

    def _write_listeners(self) -> None:
        ports = {
            resources.ENTRY: self._port,
            resources.ENTRY_TLS: self._tls_port,
            resources.ENTRY_CONTROL: self._kube_port,
        }
        listeners = [
            resources.entry_listener(
                host=self._config.host,
                port=port,
                domain=self._domain,
                relay_token=self._token,
                config=self._config,
                name=name,
            )
            for name, port in ports.items()
            if port is not None
        ]
        self._files.write(resources.LISTENERS, resources.discovery("1", listeners))

    async def _start(self, admin: Admin, leave: asyncio.Event) -> None:
        """Start Envoy and wait until it is ready and listens, or until it is time to leave.

        Raises SetupError when it ends before that, or takes too long.
        """
        self._write_listeners()
        self._envoy = envoy = Envoy.start(self._files, self._record, self._config.drain)
        STARTS.inc()
        try:
            async with asyncio.timeout(START_DEADLINE):
                while not leave.is_set() and not await self._has_entry(admin):
                    if envoy.ended.is_set():
                        raise SetupError(
                            f"Envoy ended at its start ({envoy.describe_end()}); the log has why"
                        )
                    await asyncio.sleep(_LOOK_EVERY)
        except TimeoutError:
            where = f"{self._config.host}:{self._port}"
            raise SetupError(f"Envoy does not listen on {where}; the log has the cause") from None

    async def _has_entry(self, admin: Admin) -> bool:
        try:
            if not await admin.ready():
                return False
            ports = await admin.ports()
        except AdminError:
            return False
        entry, tls = ports.get(resources.ENTRY, 0), ports.get(resources.ENTRY_TLS, 0)
        control = ports.get(resources.ENTRY_CONTROL, 0)
        if (
            not entry
            or (self._tls_port is not None and not tls)
            or (self._kube_port is not None and not control)
        ):
            return False
        # An Envoy started later must come back to the ports that clients know.
        self._port = entry
        self._tls_port = tls or None
        self._kube_port = control or None
        return True

    async def _tell_ready(self, admin: Admin) -> None:
        """Tell the supervisor once Envoy routes by the first list of nodes."""
        await self._informed.wait()
        await self._applied(admin)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        envoy = self._envoy
        detail = {"envoy_pid": 0 if envoy is None else envoy.pid, "internal_url": self._own_url}
        if self._tls_port is not None:
            detail["tls_url"] = f"https://{host}:{self._tls_port}"
        if self._kube_port is not None:
            detail["kube_url"] = f"https://{host}:{self._kube_port}"
        serving.tell_ready(serving.Ready(url=f"http://{host}:{self._port}", detail=detail))
        _log.info("the entry listens on http://%s:%d", host, self._port)
        if self._tls_port is not None:
            _log.info("and with TLS on port %d", self._tls_port)
        if self._kube_port is not None:
            _log.info("and for Kubernetes' clients on port %d", self._kube_port)

    async def _applied(self, admin: Admin) -> None:
        """Wait until Envoy runs with the clusters written last."""
        ends = asyncio.get_running_loop().time() + _APPLY_DEADLINE
        while True:
            try:
                if await admin.version("cluster_manager.cds") == str(self._version):
                    return
            except AdminError:
                pass  # being started again
            if asyncio.get_running_loop().time() > ends:
                _log.error("Envoy has not taken its clusters; its log has the cause")
                ends += _APPLY_DEADLINE
            await asyncio.sleep(_LOOK_EVERY)

    async def _keep_running(self, admin: Admin, leave: asyncio.Event) -> None:
        """Start Envoy again whenever it ends, later after each death that follows soon."""
        loop = asyncio.get_running_loop()
        pause, born = BACKOFF_FIRST, loop.time()
        while True:
            envoy = self._envoy
            if envoy is not None:
                await envoy.ended.wait()
                if loop.time() - born > STEADY_AFTER:
                    pause = BACKOFF_FIRST
                _log.error("Envoy (pid %d) died: %s", envoy.pid, envoy.describe_end())
            await asyncio.sleep(pause)
            pause, born = min(2 * pause, BACKOFF_LAST), loop.time()
            try:
                await self._start(admin, leave)
                _log.info("Envoy runs again: %r", self._envoy)
            except SetupError as error:
                _log.error("%s", error.message)
                if self._envoy is not None:
                    await self._envoy.stop()  # for one that hangs; the next turn starts another

    async def _drain(self, admin: Admin) -> None:
        """Send clients away and wait until none is connected, for `config.drain` seconds at most."""
        try:
            async with asyncio.timeout(self._config.drain):
                await admin.drain()
                while await admin.active_connections() > 0:  # noqa: ASYNC110  # Envoy announces nothing
                    await asyncio.sleep(_LOOK_EVERY)
        except TimeoutError:
            _log.info("some clients are still connected after %.1f s", self._config.drain)
        except AdminError as error:
            _log.warning("Envoy cannot be drained: %s", error)


def _encode(document: resources.Document) -> bytes:
    return msgspec.json.encode(document)


def check_port(host: str, port: int) -> None:
    """Raise SetupError if the address is taken, or a port that Envoy's user may not take.

    Asked before Envoy tries, which would go on without a listener and only log why.
    """
    serving.listen(host, port).close()
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return
    if port < first and os.geteuid() == 0:
        raise SetupError(
            f"the entry cannot use port {port}: Envoy runs without privileges, for which ports begin at {first} "
            "(sysctl net.ipv4.ip_unprivileged_port_start)"
        )


async def serve(spec: RoleSpec) -> None:
    """Run the role until SIGTERM or SIGINT. Raises SetupError when it cannot start."""
    if not spec.master_urls or not spec.api_urls:
        raise SetupError("a proxy needs the address of a master and of an api")
    controller = Controller(spec, own_token(spec.secrets, "proxy"), Verifier.load(spec.secrets))
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    await controller.run(leave)
