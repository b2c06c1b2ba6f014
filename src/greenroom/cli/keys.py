"""`keys`: API keys, made and revoked straight in the store, whether the platform runs or not."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from greenroom.cli.options import JsonOption, StateDirOption, examples, group_options, state_dir_of

if TYPE_CHECKING:
    from greenroom.store.records import ApiKey
    from greenroom.store.sqlite import SqliteStore

T = TypeVar("T")

_keys = typer.Typer(
    callback=group_options,
    help="Create, list and revoke API keys.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples("greenroom keys create ci", "greenroom keys list", "greenroom keys revoke 3f2a91c07b5d"),
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(_keys, name="keys")


@_keys.command(
    epilog=examples(
        "greenroom keys create ci",
        "greenroom keys create ci > ci.key       # only the secret",
        "greenroom keys create alice --owner alice    # everything in the namespace alice, nothing elsewhere",
        'greenroom keys create viewer --allow "get,list,watch sandboxes in team-a,team-b"',
        "greenroom keys create default --default  # what `greenroom env` prints from then on",
    )
)
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A name for people, to know the key by.")],
    owner: Annotated[
        str | None,
        typer.Option(
            "--owner",
            metavar="OWNER",
            show_default=False,
            help="Whose sandboxes it sees: keys of one owner share theirs, others' do not exist for it; "
            "in Kubernetes' terms a namespace",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar='"VERBS RESOURCES [in NAMESPACES]"',
            show_default=False,
            help="Only what these rules name, each a list with commas or *; may be repeated "
            "(default: everything in the owner's namespace)",
        ),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may do everything in all namespaces.")] = False,
    default: Annotated[
        bool, typer.Option("--default", help="`env`, `run` and `exec` use it from now on.")
    ] = False,
    json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Make an API key and print its secret, which cannot be shown again."""
    from greenroom.api.kube.rulewords import check_words
    from greenroom.cli.default_key import OWNER, keep_secret
    from greenroom.cli.output import print_json, warn
    from greenroom.cli.records import StateDir
    from greenroom.errors import BadRequest
    from greenroom.store.keys import create_api_key, rule_of, text_of
    from greenroom.store.records import EVERYTHING

    root = state_dir_of(context, state_dir)
    if admin and allow:
        raise BadRequest("--admin allows everything: leave out --allow, or --admin")
    rules = [rule_of(text, owner or OWNER) for text in allow or []]
    for rule in rules:
        check_words(rule)
    # The default key is the operator's own, unless it was made for somebody else or for something less.
    if admin or (default and owner is None and not allow):
        rules = [EVERYTHING]
    key, secret = _with_store(
        root, lambda store: create_api_key(store, name, owner or OWNER, rules), make=True
    )
    if default:
        keep_secret(StateDir(root), secret)
    if json:
        shown = {"owner": key.owner, "rules": [text_of(rule) for rule in key.rules]}
        print_json({"id": key.key_id, "name": key.name, "secret": secret, **shown})
        return
    warn(f"this is key {key.key_id}; its secret is not kept and cannot be shown again")
    print(secret)


@_keys.command("list", epilog=examples("greenroom keys list", "greenroom keys list --json"))
def list_keys(context: typer.Context, json: JsonOption = False, state_dir: StateDirOption = None) -> None:
    """List the API keys, revoked ones too, oldest first."""
    from greenroom.cli.default_key import read_secret
    from greenroom.cli.output import print_json, print_table
    from greenroom.cli.records import StateDir
    from greenroom.store.keys import list_api_keys, recognise, text_of

    root = state_dir_of(context, state_dir)

    async def read(store: SqliteStore) -> tuple[list[ApiKey], str]:
        default = await recognise(store, read_secret(StateDir(root)) or "")
        return await list_api_keys(store), "" if default is None else default.key_id

    found, default_id = _with_store(root, read)
    if json:
        print_json(
            [
                {
                    "id": key.key_id,
                    "name": key.name,
                    "owner": key.owner,
                    "hint": key.hint,
                    "created_at": key.created_at,
                    "revoked_at": key.revoked_at,
                    "rules": [text_of(rule) for rule in key.rules],
                    "default": key.key_id == default_id,
                }
                for key in found
            ]
        )
        return
    rows = [
        [
            key.key_id,
            key.owner,
            f"{key.name} (default)" if key.key_id == default_id else key.name,
            _allowed(key),
            f"e2b_…{key.hint}",
            _date(key.created_at),
            "" if key.revoked_at is None else _date(key.revoked_at),
        ]
        for key in found
    ]
    print_table(
        "API keys",
        ["id", "owner", "name", "may", "secret", "created", "revoked"],
        rows,
        texts=["name", "may"],
        spare=["created", "owner", "secret"],
    )


@_keys.command(
    epilog=examples("greenroom keys revoke 3f2a91c07b5d", "greenroom keys revoke 3f2a91c07b5d --yes")
)
def revoke(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `keys list` shows it.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Also the key that `env`, `run` and `exec` use.")
    ] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Revoke an API key; whoever uses it is refused from then on.

    The key that `greenroom env` prints is revoked only with --yes.
    """
    from greenroom.cli.default_key import MAKE_ANOTHER, forget_secret, read_secret
    from greenroom.cli.hints import pasteable
    from greenroom.cli.output import warn
    from greenroom.cli.records import StateDir
    from greenroom.errors import BadRequest, NotFound
    from greenroom.store.keys import list_api_keys, recognise, revoke_api_key

    root = state_dir_of(context, state_dir)
    state = StateDir(root)

    async def work(store: SqliteStore) -> tuple[bool, bool, list[ApiKey]]:
        default = await recognise(store, read_secret(state) or "")
        is_default = default is not None and default.key_id == key_id
        if is_default and not yes:
            raise BadRequest(
                f"{key_id} is the key that `greenroom env` prints and that `run` and `exec` use, and every program "
                "that was started with it\n"
                f"{MAKE_ANOTHER}, then this one can be revoked like any other\n"
                f"`greenroom keys revoke {key_id} --yes` revokes it now, and leaves them without one"
            )
        return await revoke_api_key(store, key_id), is_default, await list_api_keys(store)

    revoked, was_default, keys = _with_store(root, work)
    if revoked:
        print(f"revoked {key_id}")
        if was_default:
            forget_secret(state)
            warn(pasteable(f"`env`, `run` and `exec` have no key now; {MAKE_ANOTHER}", root))
    elif any(key.key_id == key_id for key in keys):
        print(f"{key_id} is revoked already")
    elif named := [key for key in keys if key.name == key_id]:
        ids = ", ".join(key.key_id + (" (revoked)" if key.revoked_at is not None else "") for key in named)
        raise NotFound(f"the id of a key is wanted, not its name\nThe id of keys named {key_id}: {ids}")
    else:
        raise NotFound(f"there is no key {key_id}; `greenroom keys list` shows the ids")


def _with_store(root: Path, work: Callable[[SqliteStore], Awaitable[T]], *, make: bool = False) -> T:
    """Open the state directory's store for `work`; it and its directory are made only if `make`."""
    import asyncio

    from greenroom.cli.records import StateDir
    from greenroom.errors import SetupError
    from greenroom.store.sqlite import SqliteStore

    state = StateDir(root)
    if make:
        state.prepare()
    elif not state.store.exists():
        raise SetupError(f"there is no platform in {root} yet; `greenroom up --detach` makes one")

    async def run() -> T:
        store = await SqliteStore.open(state.store)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _allowed(key: ApiKey) -> str:
    from greenroom.store.keys import text_of

    if key.admin:
        return "everything"
    return "; ".join(text_of(rule) for rule in key.rules) or f"all in {key.owner}"


def _date(instant: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(instant))
