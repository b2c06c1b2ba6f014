"""The kinds that the API serves: their names, verbs, subresources, columns and schemas. Everything else goes by this.

Groups and fields are those of kubernetes-sigs/agent-sandbox (v1beta1), so that its manifests and clients work;
`NodeInventory` and the bodies of actions are Greenroom's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from greenroom.api.kube.schemas import core, inventories, pools, sandboxes
from greenroom.api.kube.schemas.building import Schema
from greenroom.api.kube.status import Subject

AGENTS: Final = "agents.x-k8s.io"
EXTENSIONS: Final = "extensions.agents.x-k8s.io"
OWN: Final = "sandbox.greenroom.dev"
READS: Final = ("get", "list", "watch")
WRITES: Final = ("create", "update", "patch", "delete", "deletecollection")


class Column(msgspec.Struct, frozen=True):
    """A column of `kubectl get`. `path` is a JSONPath; a priority above 0 shows it with `-o wide` alone."""

    name: str
    type: str
    path: str
    description: str
    priority: int = 0
    cell: Callable[[Any], Any] | None = None
    """What makes the cell of the value at the path, where that is not a cell itself."""


class Action(msgspec.Struct, frozen=True):
    """A subresource that does something: POST with a body of one kind, answered with another or the object."""

    name: str
    takes: str
    schema: Schema
    gives: str = ""
    """Kind of the answer; the object itself when empty."""
    gives_schema: Schema | None = None


class Scale(msgspec.Struct, frozen=True):
    """Where the scale subresource finds its numbers: paths of field names."""

    spec: tuple[str, ...] = ("spec", "replicas")
    status: tuple[str, ...] = ("status", "replicas")
    selector: tuple[str, ...] = ("status", "selector")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of object."""

    group: str
    version: str
    name: str
    plural: str
    singular: str
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    namespaced: bool = True
    verbs: tuple[str, ...] = (*READS, *WRITES)
    schema: Schema
    columns: tuple[Column, ...] = ()
    has_status: bool = False
    scale: Scale | None = None
    actions: tuple[Action, ...] = ()
    selectable: tuple[str, ...] = ()
    """Fields that field selectors may name, beside metadata.name and metadata.namespace."""
    answers_deleted: bool = False
    """Whether a delete is answered with the object that has gone, as kube-apiserver does for some of its own kinds."""

    @property
    def list_name(self) -> str:
        """The kind of its lists."""
        return f"{self.name}List"

    @property
    def api_version(self) -> str:
        """What objects have in `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        """Where its group and version are served."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def root_fields(self) -> frozenset[str]:
        """Top-level fields of its objects."""
        return frozenset(self.schema["properties"])

    def subject(self, name: str = "") -> Subject:
        """What errors about an object of this kind name."""
        return Subject(self.group, self.plural, name)

    def subject_of_kind(self, name: str = "") -> Subject:
        """The same for errors that name the kind: those about what is in an object."""
        return Subject(self.group, self.name, name)

    def action(self, name: str) -> Action | None:
        """The action of this name."""
        return next((each for each in self.actions if each.name == name), None)


_AGE = Column("Age", "date", ".metadata.creationTimestamp", "How long ago the object was made.")
_READY = ".status.conditions[?(@.type=='Ready')]"

SANDBOX = Kind(
    group=AGENTS,
    version="v1beta1",
    name="Sandbox",
    plural="sandboxes",
    singular="sandbox",
    short_names=("sbx",),
    categories=("all", "agents"),
    schema=sandboxes.SANDBOX,
    columns=(
        Column("Ready", "string", f"{_READY}.status", "Whether the sandbox can be used."),
        Column("Reason", "string", f"{_READY}.reason", "Why it can or cannot."),
        Column("Node", "string", ".status.nodeName", "The node that has it.", 1),
        Column("ID", "string", ".status.sandboxID", "The sandbox's id.", 1),
        _AGE,
    ),
    has_status=True,
    actions=(
        Action("pause", "SandboxPauseOptions", sandboxes.PAUSE_OPTIONS),
        Action("resume", "SandboxResumeOptions", sandboxes.RESUME_OPTIONS),
        Action(
            "fork", "SandboxForkOptions", sandboxes.FORK_OPTIONS, "SandboxForkResult", sandboxes.FORK_RESULT
        ),
        Action(
            "snapshot",
            "SandboxSnapshotOptions",
            sandboxes.SNAPSHOT_OPTIONS,
            "SandboxSnapshotResult",
            sandboxes.SNAPSHOT_RESULT,
        ),
    ),
    selectable=("spec.operatingMode", "status.nodeName", "status.phase"),
)

TEMPLATE = Kind(
    group=EXTENSIONS,
    version="v1beta1",
    name="SandboxTemplate",
    plural="sandboxtemplates",
    singular="sandboxtemplate",
    short_names=("sbt",),
    categories=("agents",),
    schema=pools.TEMPLATE,
    columns=(
        Column(
            "Image", "string", ".spec.podTemplate.spec.containers[0].image", "The image of its sandboxes."
        ),
        _AGE,
    ),
)

WARM_POOL = Kind(
    group=EXTENSIONS,
    version="v1beta1",
    name="SandboxWarmPool",
    plural="sandboxwarmpools",
    singular="sandboxwarmpool",
    short_names=("swp",),
    categories=("agents",),
    schema=pools.WARM_POOL,
    columns=(
        Column("Ready", "integer", ".status.readyReplicas", "How many sandboxes are ready to be claimed."),
        Column("Desired", "integer", ".status.desiredReplicas", "How many are wanted now."),
        Column("Template", "string", ".spec.sandboxTemplateRef.name", "The template of its sandboxes.", 1),
        _AGE,
    ),
    has_status=True,
    scale=Scale(),
)

CLAIM = Kind(
    group=EXTENSIONS,
    version="v1beta1",
    name="SandboxClaim",
    plural="sandboxclaims",
    singular="sandboxclaim",
    short_names=("sbc",),
    categories=("all", "agents"),
    schema=pools.CLAIM,
    columns=(
        Column("Ready", "string", f"{_READY}.status", "Whether its sandbox can be used."),
        Column("Sandbox", "string", ".status.sandbox.name", "The sandbox that was handed over."),
        Column("Reason", "string", f"{_READY}.reason", "Why it can or cannot."),
        _AGE,
    ),
    has_status=True,
    selectable=("spec.warmPoolRef.name",),
)


def _count(found: Any) -> int:
    return len(found or ())


def _warm(pools: Any) -> int:
    """Sandboxes that wait on a node, over all its pools."""
    return sum(pool.get("warm") or 0 for pool in pools or ())


INVENTORY = Kind(
    group=OWN,
    version="v1beta1",
    name="NodeInventory",
    plural="nodeinventories",
    singular="nodeinventory",
    short_names=("ninv",),
    categories=("agents",),
    namespaced=False,
    verbs=READS,
    schema=inventories.INVENTORY,
    columns=(
        Column("Reachable", "boolean", ".reachable", "Whether the node can be read at present."),
        Column("Sandboxes", "integer", ".entries", "How many sandboxes somebody owns.", cell=_count),
        Column("Warm", "integer", ".pools", "How many wait to be claimed.", cell=_warm),
        Column("Address", "string", ".address", "Where the node is reached.", 1),
        _AGE,
    ),
)

KINDS: Final[tuple[Kind, ...]] = (SANDBOX, TEMPLATE, WARM_POOL, CLAIM, INVENTORY)

NAMESPACE = Kind(
    group="",
    version="v1",
    name="Namespace",
    plural="namespaces",
    singular="namespace",
    short_names=("ns",),
    namespaced=False,
    verbs=READS,
    schema=core.NAMESPACE,
    columns=(Column("Status", "string", ".status.phase", "Whether it is active."), _AGE),
)


def _kind_and_name(reference: Any) -> str:
    """`sandbox/box`, as Kubernetes' own events show it."""
    return f"{str(field(reference, ('kind',))).lower()}/{field(reference, ('name',))}"


EVENT = Kind(
    group="",
    version="v1",
    name="Event",
    plural="events",
    singular="event",
    short_names=("ev",),
    verbs=READS,
    schema=core.EVENT,
    columns=(
        Column("Last Seen", "date", ".lastTimestamp", "When it happened last."),
        Column("Type", "string", ".type", "Normal or Warning."),
        Column("Reason", "string", ".reason", "What happened."),
        Column("Object", "string", ".involvedObject", "What it happened to.", cell=_kind_and_name),
        Column("Message", "string", ".message", "What happened, for people."),
    ),
    selectable=(
        "involvedObject.apiVersion",
        "involvedObject.fieldPath",
        "involvedObject.kind",
        "involvedObject.name",
        "involvedObject.namespace",
        "involvedObject.resourceVersion",
        "involvedObject.uid",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
)


def _used_of_hard(status: Any) -> str:
    """`count/sandboxes.agents.x-k8s.io: 3/10, requests.cpu: 3/8`, as Kubernetes' own quotas show it."""
    used = field(status, ("used",)) or {}
    hard = field(status, ("hard",)) or {}
    return ", ".join(f"{name}: {used.get(name, '0')}/{hard[name]}" for name in sorted(hard))


QUOTA = Kind(
    group="",
    version="v1",
    name="ResourceQuota",
    plural="resourcequotas",
    singular="resourcequota",
    short_names=("quota",),
    schema=core.QUOTA,
    columns=(
        Column("Request", "string", ".status", "What there is of what may be there.", cell=_used_of_hard),
        _AGE,
    ),
    has_status=True,
    answers_deleted=True,
)

CORE: Final[tuple[Kind, ...]] = (NAMESPACE, EVENT, QUOTA)
"""Kinds of core/v1 that clients ask for beside those that they want."""


def groups(kinds: tuple[Kind, ...] = KINDS) -> dict[str, dict[str, list[Kind]]]:
    """Kinds by group and version, in the order of the registry; the core group's name is empty."""
    found: dict[str, dict[str, list[Kind]]] = {}
    for kind in kinds:
        found.setdefault(kind.group, {}).setdefault(kind.version, []).append(kind)
    return found


def field(obj: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of field names, or None."""
    for name in path:
        if not isinstance(obj, dict):
            return None
        obj = obj.get(name)
    return obj
