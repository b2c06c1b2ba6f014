"""The supervisor's life story: take the lock, end leftovers, start the roles, keep them alive, stop them.

What to do next is decided by `supervision`, which does no I/O; here it is done. There is one supervisor for a
state directory. It runs inside `greenroom up`, or, for `--detach`, as `python -m greenroom.cli.supervisor` in
a session of its own; then it tells the command that started it what happens until all is ready.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from greenroom import __version__
from greenroom.cli import kept as kept_on_disk
from greenroom.cli.children import Child, ProgressLine
from greenroom.cli.hints import kubectl_hint, pasteable
from greenroom.cli.interrupts import stop_signals
from greenroom.cli.leftovers import describe, end_roles, sweep_nodes
from greenroom.cli.plans import Plan, UpOptions, check_user, make_plan
from greenroom.cli.processes import CLEAN_EXIT, ProcessId
from greenroom.cli.records import Lock, RoleRecord, StateDir, SupervisorRecord
from greenroom.cli.reports import PipeReporter, Report, Reporter
from greenroom.cli.supervision import (
    AllReady,
    Announce,
    BecameReady,
    Begin,
    Elapsed,
    Event,
    Exited,
    Finished,
    Instruction,
    Kill,
    MadeProgress,
    Phase,
    Spawn,
    StopAsked,
    Supervision,
    Terminate,
)
from greenroom.cli.words import plain_log_line
from greenroom.config import RoleSpec
from greenroom.errors import GreenroomError, SetupError
from greenroom.wire import credentials
from greenroom.wire.calling import role_client
from greenroom.wire.messages import SandboxList

_log = logging.getLogger("greenroom.supervisor")  # the module may run as __main__

T = TypeVar("T")

REPORT_FD = "GREENROOM_REPORT_FD"
"""Environment variable naming the pipe to the command that waits for a detached supervisor."""
RECORD_INTERVAL = 0.25
"""Seconds between two writes of the records while only progress changes."""


class Supervisor:
    """Runs one platform. `run` returns why the start failed, or an empty text after an ordinary stop."""

    def __init__(self, plan: Plan, options: UpOptions, reporter: Reporter, hints: Sequence[str] = ()) -> None:
        self._plan = plan
        self._options = options
        self._reporter = reporter
        self._hints = hints
        self._state = StateDir(plan.specs[0].state)
        self._machine = Supervision(plan.role_plans(), options.restart_pause)
        self._specs: dict[str, RoleSpec] = {spec.name: spec for spec in plan.specs}
        self._children: dict[str, Child] = {}
        self._urls: dict[str, str] = {}
        self._started_at: dict[str, float] = {}
        self._last_exit: dict[str, tuple[str, float]] = {}
        self._progress: dict[str, str] = {}
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._mark = uuid.uuid4().hex
        self._began = time.time()
        self._failure = ""
        self._hung_up = False
        self._takes_over = False
        self._saved_at = 0.0
        self._unsaved = False

    async def run(self) -> str:
        """The whole life. Raises GreenroomError when it cannot even begin."""
        loop = asyncio.get_running_loop()
        asked = stop_signals()
        for number in asked:
            loop.add_signal_handler(number, self._stop_asked, number)
        try:
            await self._clear_leftovers()
            credentials.ensure(self._state.secrets)
            await self._certify()
            from greenroom.cli.default_key import ensure_default_key

            if (made := await ensure_default_key(self._state)) is not None:
                self._show("notice", text=made)
            await self._introduce()
            await self._main_loop()
            await self._sweep_killed_nodes()
        finally:
            for number in asked:
                loop.remove_signal_handler(number)
        if self._failure:
            _log.error("the start failed: %s", self._failure)
        else:
            self._show("stopped", text="stopped")
        return self._failure

    # Before the start

    async def _clear_leftovers(self) -> None:
        """End what a supervisor that was killed left running, and sweep nodes that will not come back."""
        before = self._state.supervisor()
        self._takes_over = before is not None and before.state != "stopped"
        if self._takes_over:
            self._show("notice", text="the last supervisor was killed; taking over what it left")
        ended, stuck = await _off_loop(lambda: end_roles(self._state))
        if ended:
            self._show("notice", text=f"ended what an earlier run left behind: {', '.join(ended)}")
        if stuck:
            self._show("notice", text=f"could not end {', '.join(stuck)}, left by an earlier run")
        # Nodes that start again see to their own remains, and may still want some of them.
        orphans = [path for path in self._state.node_specs() if path not in self._spec_paths()]
        module = self._options.role_module
        for swept in await _off_loop(lambda: sweep_nodes(orphans, module)):
            self._show("notice", text=describe(swept))

    async def _certify(self) -> None:
        """Make the authority that kubeconfigs name, if there is none: `greenroom env` may be asked at any time."""
        if self._plan.kube_port is None:
            return
        # Slow to import, and needed by nobody else.
        from greenroom.wire import certificate_files
        from greenroom.wire.certificates import control_names

        names = control_names(self._plan.specs[0].config.proxy, self._plan.domain)
        await _off_loop(lambda: certificate_files.ensure(self._state.root, names, time.time()))

    async def _introduce(self) -> None:
        """Write the kubeconfig, so that one that was exported before leads to the ports of this start."""
        from greenroom.cli import kubeconfig
        from greenroom.cli.default_key import known, read_secret
        from greenroom.cli.target import Target

        secret = read_secret(self._state)
        key = None if secret is None else await known(self._state, secret)
        if self._plan.kube_port is None or secret is None or key is None:
            return
        target = Target(
            url=self._plan.entry_url, domain=self._plan.domain, key=secret, kube_port=self._plan.kube_port
        )
        state, owner = self._state, key.owner
        try:
            await _off_loop(lambda: kubeconfig.write(state.kubeconfig, state.root, target, owner))
        except SetupError as error:
            self._show("notice", text=error.message)

    def _spec_paths(self) -> set[Path]:
        return {self._state.spec_path(name) for name in self._specs}

    # The loop

    async def _main_loop(self) -> None:
        self._events.put_nowait(Begin())
        while True:
            event = await self._next_event()
            instructions = self._machine.handle(event, time.monotonic())
            if self._takes_over and any(isinstance(instruction, AllReady) for instruction in instructions):
                self._show("notice", text=await self._taken_over())
            finished = self._carry_out(instructions)
            self._save(force=not isinstance(event, MadeProgress))
            if finished:
                return

    async def _next_event(self) -> Event:
        """The next event, or `Elapsed` when the machine's time, or the records', has come first."""
        wakes = [self._machine.wake_at, self._saved_at + RECORD_INTERVAL if self._unsaved else None]
        timeout = min((max(0.0, at - time.monotonic()) for at in wakes if at is not None), default=None)
        try:
            async with asyncio.timeout(timeout):
                return await self._events.get()
        except TimeoutError:
            return Elapsed()

    def _carry_out(self, instructions: list[Instruction]) -> bool:
        """Do what the machine says; True when it was the last."""
        for instruction in instructions:
            match instruction:
                case Spawn(name):
                    self._spawn(name)
                case Terminate(name):
                    self._show("step", name, "stopping")
                    self._children[name].terminate()
                case Kill(name):
                    self._children[name].kill()
                case Announce(name, text):
                    self._show("notice", name, text)
                case AllReady():
                    for kept in kept_on_disk.out_of_reach(self._state.root, self._specs):
                        text = kept_on_disk.describe(self._state.root, kept)
                        self._show("notice", text=pasteable(text, self._state.root))
                    self._save(force=True)  # whoever is told finds it in the records
                    self._show("up", text=f"Greenroom is up at {self._plan.entry_url}")
                    if (hint := kubectl_hint(self._state, self._plan.kube_port)) is not None:
                        self._show("notice", text=hint)
                    for hint in self._hints:
                        self._show("notice", text=hint)
                case Finished(failure):
                    self._failure = self._explained(failure)
                    return True
        return False

    def _stop_asked(self, number: signal.Signals) -> None:
        _log.info("asked to stop by %s", number.name)
        # Asked twice it stops at once, but a terminal that closes sends SIGHUP more often without impatience.
        if number is not signal.SIGHUP or not self._hung_up:
            self._events.put_nowait(StopAsked())
        self._hung_up = self._hung_up or number is signal.SIGHUP

    # Roles

    def _spawn(self, name: str) -> None:
        spec = self._placed(self._specs[name])
        child = Child(
            spec,
            on_progress=lambda progress: self._made_progress(name, progress),
            on_ready=lambda url, detail: self._became_ready(name, url, detail),
            on_exit=lambda how: self._exited(name, how),
        )
        self._children[name] = child
        self._progress.pop(name, None)
        self._started_at[name] = time.time()
        self._show("step", name, "starting")
        try:
            child.start(self._state, self._options.role_module.format(role=spec.role), self._mark)
        except OSError as error:
            self._exited(name, f"could not be started ({error.strerror})")
            return
        _log.info("%s started as pid %d", name, child.pid)

    def _placed(self, spec: RoleSpec) -> RoleSpec:
        """The spec with what is known by now: where the others are, and the port the role had before."""
        masters = [url for name, url in self._urls.items() if self._specs[name].role == "master"]
        apis = [url for name, url in self._urls.items() if self._specs[name].role == "api"]
        port = spec.port
        if spec.role != "proxy" and (url := self._urls.get(spec.name)):
            port = urllib.parse.urlsplit(url).port or 0
        return msgspec.structs.replace(spec, master_urls=masters, api_urls=apis, port=port)

    def _made_progress(self, name: str, progress: ProgressLine) -> None:
        self._progress[name] = progress.step
        _log.info("%s: %s", name, progress.step)
        self._reporter.show(Report(kind="progress", name=name, text=progress.step, done=progress.done))
        self._events.put_nowait(MadeProgress(name))

    def _became_ready(self, name: str, url: str, detail: dict[str, Any]) -> None:
        self._urls[name] = url
        self._progress.pop(name, None)
        self._show("ready", name, describe_ready(detail))
        self._events.put_nowait(BecameReady(name))

    def _exited(self, name: str, how: str) -> None:
        self._last_exit[name] = (how, time.time())
        role = self._machine.roles[name]
        if role.phase is Phase.STOPPING:
            self._show("ready", name, "stopped" if how == CLEAN_EXIT else how)
        self._events.put_nowait(Exited(name, how))

    def _explained(self, failure: str) -> str:
        """Why the start failed, with the last thing that the role in question wrote and where the rest is."""
        name = failure.split(" ", 1)[0]
        if name not in self._specs:
            return failure
        last = plain_log_line(self._state.log_tail(name, lines=1).strip())
        said = f": {last}" if last else ""
        return f"{failure}{said}\nIts log is {self._state.log_path(name)}"

    async def _taken_over(self) -> str:
        """How many sandboxes of the run before this one go on."""
        nodes = [url for name, url in self._urls.items() if self._specs[name].role == "node"]
        try:
            async with role_client(credentials.own_token(self._state.secrets, "operator")) as client:
                lists = await asyncio.gather(
                    *(client.call("GET", f"{url}/v1/sandboxes", SandboxList, deadline=2.0) for url in nodes)
                )
        except GreenroomError as error:
            return f"cannot tell how many sandboxes of the last run go on: {error.message}"
        return f"sandboxes of the last run that go on: {sum(len(listed.sandboxes) for listed in lists)}"

    # After the end

    async def _sweep_killed_nodes(self) -> None:
        """A node that ended by itself has cleared up behind itself; one that was killed has not."""
        specs = [
            self._state.spec_path(name)
            for name, (how, _at) in self._last_exit.items()
            if self._specs[name].role == "node" and how != CLEAN_EXIT
        ]
        present = [path for path in specs if path.exists()]
        module = self._options.role_module
        for swept in await _off_loop(lambda: sweep_nodes(present, module)):
            self._show("notice", text=describe(swept))

    # Telling

    def _show(
        self,
        kind: Literal["step", "ready", "notice", "up", "stopped"],
        name: str = "",
        text: str = "",
    ) -> None:
        _log.info("%s", f"{name}: {text}" if name else text)
        self._reporter.show(Report(kind=kind, name=name, text=text))

    def _save(self, *, force: bool) -> None:
        now = time.monotonic()
        self._unsaved = not force and now - self._saved_at < RECORD_INTERVAL
        if self._unsaved:
            return
        self._saved_at = now
        supervisor = SupervisorRecord(
            process=ProcessId.own(),
            state=cast("Literal['starting', 'running', 'stopping', 'stopped']", self._machine.state),
            started_at=self._began,
            version=__version__,
            mark=self._mark,
            cache_dir=self._options.cache_dir,
            role_module=self._options.role_module,
            entry_url=self._plan.entry_url,
            domain=self._plan.domain,
            tls_port=self._plan.tls_port,
            kube_port=self._plan.kube_port,
            failure=self._failure,
        )
        self._state.save(supervisor, [self._role_record(name) for name in self._specs])

    def _role_record(self, name: str) -> RoleRecord:
        role = self._machine.roles[name]
        child = self._children.get(name)
        how, at = self._last_exit.get(name, ("", None))
        return RoleRecord(
            name=name,
            role=role.plan.kind,
            replica=self._specs[name].replica,
            state=str(role.phase),
            process=child.identity if child is not None and role.live else None,
            url=self._urls.get(name, ""),
            started_at=self._started_at.get(name) if role.live else None,
            restarts=role.restarts,
            last_exit=how,
            last_exit_at=at,
            progress=self._progress.get(name, "") if role.phase is Phase.STARTING else "",
        )


def describe_ready(detail: dict[str, Any]) -> str:
    """What a role said of itself when it became ready, as far as people care: a node's engine."""
    engine, accelerator, why = (str(detail.get(key) or "") for key in ("engine", "accelerator", "why"))
    if not engine:
        return "ready"
    on = f"{engine}/{accelerator}" if accelerator not in ("", "none") else engine
    return f"ready on {on} ({why})" if why else f"ready on {on}"


async def _off_loop(work: Callable[[], T]) -> T:
    """Run `work` on a thread that ends with it.

    No thread may stay: the kernel sends a role's parent-death signal once for each thread of a dying
    supervisor that its children pass through, and a role may take a second SIGTERM for impatience.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def supervise(options: UpOptions, reporter: Reporter, hints: Sequence[str] = ()) -> str:
    """Run a platform in this process until it is stopped; returns why the start failed, or nothing.

    `hints` are shown once all is ready. Raises GreenroomError (also `Busy`, when one runs already) before
    anything was started.
    """
    options.check()
    check_user(options)
    state = StateDir(Path(options.state_dir))
    state.prepare()
    with Lock(state):
        plan = make_plan(options)
        os.close(state.open_log("supervisor"))  # sets a large one aside
        logging.basicConfig(
            filename=state.log_path("supervisor"),
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        return asyncio.run(Supervisor(plan, options, reporter, hints).run())


def main() -> int:
    """Entry of a detached supervisor: its options are the only argument, as JSON."""
    reporter = PipeReporter(int(os.environ.pop(REPORT_FD, "-1")))
    try:
        failure = supervise(msgspec.json.decode(sys.argv[1], type=UpOptions), reporter)
    except GreenroomError as error:
        failure = error.message
    if failure:
        reporter.show(Report(kind="failed", text=failure))
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
