"""`up`, `down` and `demo`: the platform as a whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from greenroom.cli.options import (
    CacheDirOption,
    JsonOption,
    StateDirOption,
    cache_dir_of,
    examples,
    state_dir_of,
)

if TYPE_CHECKING:
    from greenroom.cli.plans import UpOptions

NodesOption = Annotated[int, typer.Option("--nodes", metavar="N", help="Node processes.")]
WarmOption = Annotated[
    int | None,
    typer.Option(
        "--warm",
        metavar="N",
        show_default=False,
        help="Sandboxes kept warm of the base template (default: as before, at first 4).",
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="P",
        show_default=False,
        help="Port of the entry (default: 8700; 0 takes a free one)",
    ),
]
EngineOption = Annotated[
    Literal["qemu", "simulated"] | None,
    typer.Option("--engine", show_default=False, help="VM engine; `simulated` runs no VM (default: qemu)"),
]
AcceleratorOption = Annotated[
    Literal["auto", "kvm", "tcg"] | None,
    typer.Option("--accelerator", show_default=False, help="How QEMU runs guest code (default: auto)"),
]
RoleModuleOption = Annotated[str, typer.Option("--role-module", hidden=True)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "greenroom up                          # in the foreground; Ctrl-C stops it",
            "greenroom up --detach                 # returns when all is ready",
            "greenroom up --detach --warm 8 --port 9000",
            "greenroom up --detach --tls-port 8443 # https for get_host(); see `greenroom certs`",
            "greenroom up --engine simulated       # no VMs: try the control plane anywhere",
        )
    )(up)
    app.command(epilog=examples("greenroom down", "greenroom down --timeout 20 --json"))(down)
    app.command(
        epilog=examples("greenroom demo", "greenroom demo --engine simulated", "greenroom demo --port 0")
    )(demo)


def up(
    context: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when all is ready and leave it running.")
    ] = False,
    api: Annotated[int, typer.Option("--api", metavar="N", help="API processes.")] = 1,
    master: Annotated[int, typer.Option("--master", metavar="N", help="Master processes (1 for now).")] = 1,
    proxy: Annotated[int, typer.Option("--proxy", metavar="N", help="Proxy processes (1 for now).")] = 1,
    nodes: NodesOption = 1,
    store: Annotated[str, typer.Option("--store", metavar="sqlite|etcd", help="Store.")] = "sqlite",
    port: PortOption = None,
    domain: Annotated[
        str | None,
        typer.Option(
            "--domain",
            metavar="D",
            show_default=False,
            help="<port>-<sandbox>.<D> reaches a port of a sandbox "
            "(default: localhost:<entry port>; with TLS sandbox.localhost)",
        ),
    ] = None,
    tls_port: Annotated[
        int | None,
        typer.Option(
            "--tls-port",
            metavar="P",
            show_default=False,
            help="A second port, with TLS for https://<port>-<sandbox>.<domain> (default: none; 0 takes a free one)",
        ),
    ] = None,
    kube_port: Annotated[
        str | None,
        typer.Option(
            "--kube-port",
            metavar="P",
            show_default=False,
            help="A port with TLS for kubectl and other clients of Kubernetes "
            "(default: 8701, and a free one with --port 0; 0 takes a free one, none leaves it out)",
        ),
    ] = None,
    warm: WarmOption = None,
    engine: EngineOption = None,
    accelerator: AcceleratorOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
    role_module: RoleModuleOption = "greenroom.{role}",
) -> int:
    """Start the platform: master, nodes, api, proxy, each a process that is restarted when it dies.

    The first start builds a guest image and boots it once; that takes minutes and is shown.

    In the foreground Ctrl-C, SIGTERM and a closed terminal stop the platform in order; Ctrl-C or SIGTERM once
    more stops it at once. With --detach they stop what had started, until all is ready; after that only
    `greenroom down` does. What a killed platform left running goes on with the next `up`.
    """
    from greenroom.cli.hints import kubectl_hint, pasteable
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.launch import StartFailed, bring_up
    from greenroom.cli.output import say
    from greenroom.cli.plans import UpOptions
    from greenroom.cli.records import StateDir
    from greenroom.cli.reports import reporter_for
    from greenroom.cli.supervisor import supervise

    options = UpOptions(
        state_dir=str(state_dir_of(context, state_dir)),
        cache_dir=str(cache_dir_of(context, cache_dir)),
        api=api,
        master=master,
        proxy=proxy,
        nodes=nodes,
        store=store,
        port=port,
        domain=domain,
        tls_port=tls_port,
        kube_port=_port_or_none(kube_port),
        warm=warm,
        engine=engine,
        accelerator=accelerator,
        role_module=role_module,
    )
    _check(options)
    reporter = reporter_for(sys.stderr)
    use = pasteable('eval "$(greenroom env)"', Path(options.state_dir))
    try:
        if detach:
            with Interrupts() as interrupts:
                record = bring_up(options, reporter, interrupts)
            if (hint := kubectl_hint(StateDir(Path(options.state_dir)), record.kube_port)) is not None:
                say(hint)
            say(f"To use it: {use}")
        elif failure := supervise(
            options, reporter, [f"To use it, in another terminal: {use}", "Ctrl-C stops it"]
        ):
            raise StartFailed(failure)
    finally:
        reporter.close()
    return 0


def down(
    context: typer.Context,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0, help="Seconds to wait before killing.")
    ] = 180.0,
    json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> int:
    """Stop the platform and remove what it left; does nothing when nothing runs."""
    from greenroom.cli.hints import pasteable
    from greenroom.cli.launch import take_down
    from greenroom.cli.leftovers import describe
    from greenroom.cli.output import EXIT_ERROR, fail, print_json
    from greenroom.cli.records import StateDir
    from greenroom.cli.reports import reporter_for

    state = StateDir(state_dir_of(context, state_dir))
    reporter = reporter_for(sys.stderr)
    try:
        result = take_down(state, timeout, reporter)
    finally:
        reporter.close()
    if json:
        print_json(result)
    else:
        for name in result.ended:
            print(f"ended {name}, which had outlived its supervisor")
        for swept in result.swept:
            print(describe(swept))
        if result.was_running:
            print("stopped")
        else:
            print("cleaned up after a supervisor that was killed" if result.crashed else "nothing is running")
    if result.stuck:
        fail(f"could not end {', '.join(result.stuck)}\nLook for processes in state D, then run this again")
    elif not result.clean:
        fail(
            pasteable(
                "not everything could be removed; see above\nRun `greenroom down` again, as root", state.root
            )
        )
    return 0 if result.clean else EXIT_ERROR


def demo(
    context: typer.Context,
    nodes: NodesOption = 1,
    port: PortOption = None,
    warm: WarmOption = None,
    engine: EngineOption = None,
    accelerator: AcceleratorOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
    role_module: RoleModuleOption = "greenroom.{role}",
) -> int:
    """Show the whole in one go: start if needed, create a sandbox, run a command in it, clean up.

    Prints each step with the time it took. A platform that was running before is left running; one that this
    started is stopped again, also after Ctrl-C, SIGTERM or the end of the terminal.
    """
    from greenroom.cli.demonstration import demonstrate
    from greenroom.cli.plans import UpOptions

    options = UpOptions(
        state_dir=str(state_dir_of(context, state_dir)),
        cache_dir=str(cache_dir_of(context, cache_dir)),
        nodes=nodes,
        port=port,
        warm=warm,
        engine=engine,
        accelerator=accelerator,
        role_module=role_module,
    )
    _check(options)
    return demonstrate(options)


def _port_or_none(text: str | None) -> int | Literal["none"] | None:
    if text is None:
        return None
    if text == "none":
        return "none"
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise typer.BadParameter(f"--kube-port {text[:20]}: choose a port, 0 (any free port) or none")
    return int(text)


def _check(options: UpOptions) -> None:
    """Refuse options that cannot be followed as wrong usage, before anything is touched."""
    from greenroom.errors import BadRequest

    try:
        options.check()
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
