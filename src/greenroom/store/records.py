"""The records only the store knows, and the interface that every store keeps.

Templates and pools are messages between roles as well, so they live in `wire.messages`. The interface is
small and record-shaped (whole records in, whole records out, no queries) so that an etcd store can keep it
too. No sandbox is ever stored: a node owns the truth about its sandboxes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from greenroom.wire.messages import PoolSpec, Template


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node's membership: who it is and where it is. Written when one of these changes, never by heartbeats.

    `first_seen` and `last_seen` are Unix seconds; `last_seen` is that of the last write, so it only says that
    the node was alive then.
    """

    name: str
    code: str
    api_url: str
    relay_host: str
    relay_port: int
    engine: str
    accelerator: str = ""
    first_seen: float
    last_seen: float


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may do: these verbs on these resources in these namespaces. `*` stands for all of them.

    A resource is a plural (`sandboxes`), with its group if one likes (`sandboxes.agents.x-k8s.io`); a subresource
    follows a slash (`sandboxes/pause`) and is not part of its resource, `sandboxes/*` are all of them.
    """

    namespaces: list[str]
    resources: list[str]
    verbs: list[str]


EVERYTHING = Rule(namespaces=["*"], resources=["*"], verbs=["*"])
"""What the operator's own key may."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret. `hint` is the secret's last four digits; times are Unix seconds."""

    key_id: str
    name: str
    owner: str
    created_at: float
    hint: str
    revoked_at: float | None = None
    rules: list[Rule] = []
    """Without any it may do everything in its owner's namespace, and nothing elsewhere."""

    @property
    def admin(self) -> bool:
        """Whether it may do everything everywhere."""
        return EVERYTHING in self.rules


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object of the Kubernetes dialect, kept as it was declared: a template, a pool, a quota. Never a sandbox."""

    resource: str
    """Plural of its kind, with its group where it has one: `sandboxwarmpools.extensions.agents.x-k8s.io`."""
    namespace: str
    name: str
    version: int = 0
    """Of all changes of any object in this store, which one made it so: rises, and is never used again."""
    document: msgspec.Raw
    """JSON: metadata (without resourceVersion) and spec; no status."""


class Store(Protocol):
    """What a store keeps. Every method raises TemporaryError when the store cannot be reached in time."""

    async def version(self) -> int:
        """A number that differs from the one before when another process has written meanwhile."""

    async def templates(self) -> list[Template]:
        """All templates, oldest first."""

    async def add_template(self, template: Template) -> Template:
        """Keep `template` unless its name is taken; returns the record that has the name afterwards."""

    async def pools(self) -> list[PoolSpec]:
        """All declared pools, by template and size name."""

    async def put_pool(self, pool: PoolSpec) -> None:
        """Declare `pool` in place of one with the same template and size name; a target of 0 removes it.

        `pool.template` is a template's name. Raises UnknownTemplate when there is none with it.
        """

    async def nodes(self) -> list[NodeRecord]:
        """All nodes, by name."""

    async def put_node(self, node: NodeRecord) -> None:
        """Write a node by name, keeping its `first_seen`. Raises KeyConflict when another has its code."""

    async def remove_node(self, name: str) -> bool:
        """Forget a node; False when there was none of this name."""

    async def api_keys(self) -> list[ApiKey]:
        """All API keys, revoked ones too, oldest first."""

    async def add_api_key(self, key: ApiKey, digest: str) -> None:
        """Keep a key under the hex SHA-256 of its secret. Raises KeyConflict when id or digest is taken."""

    async def find_api_key(self, digest: str) -> ApiKey | None:
        """The key with this digest, revoked or not."""

    async def revoke_api_key(self, key_id: str, at: float) -> bool:
        """Mark a key as revoked at `at` (Unix seconds); False when there is none or it already was."""

    async def set_api_key_rules(self, key_id: str, rules: list[Rule]) -> bool:
        """Let a key have these rules from now on; False when there is none of this id."""

    async def objects(self, resource: str) -> tuple[int, list[StoredObject]]:
        """All objects of a resource by namespace and name, and the version of the last change of any object."""

    async def put_object(self, stored: StoredObject, expect: int) -> StoredObject:
        """Keep an object if `expect` is the version that the store has of it (0: none); returns it with its new one.

        `stored.version` is not looked at. Raises StaleObject where it is another, or is not there any more.
        """

    async def remove_object(self, resource: str, namespace: str, name: str, expect: int) -> int:
        """Forget an object that has this version; returns the version of its end. Raises StaleObject."""

    async def close(self) -> None:
        """Give back what the store holds open. The store cannot be used afterwards."""
