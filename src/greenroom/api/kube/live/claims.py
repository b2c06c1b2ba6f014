"""SandboxClaim: the wish for a sandbox out of a warm pool, and the sandbox that it became.

A claim is answered when it is fulfilled; there are none that wait. It has no record of its own: it is a part of its
sandbox's, has the sandbox's name, and goes with it. Deleted with `propagationPolicy=Orphan`, it leaves the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from greenroom.api.kube import objectmeta
from greenroom.api.kube.kinds import CLAIM, Kind
from greenroom.api.kube.kinds import Action as KindAction
from greenroom.api.kube.live import compiling, documents
from greenroom.api.kube.live.compiling import Made
from greenroom.api.kube.live.documents import Document, Part
from greenroom.api.kube.live.instants import seconds_of
from greenroom.api.kube.live.operating import Ending, Operating, new_key
from greenroom.api.kube.live.policies import template_network
from greenroom.api.kube.live.shelved import Shelved
from greenroom.api.kube.live.shelves import LiveRow
from greenroom.api.kube.objects import Object, copied, key_of, metadata_of, same
from greenroom.api.kube.status import (
    Cause,
    StatusError,
    already_exists,
    conflict,
    invalid,
    method_not_allowed,
)
from greenroom.api.kube.validation import not_allowed
from greenroom.errors import NotFound, UnknownTemplate
from greenroom.wire.messages import FOREVER, ClaimRequest, Listed, Network, Size

_FIXED: Final = ("warmPoolRef", "additionalPodMetadata", "env", "volumeClaimTemplates", "warmPolicy")
PoolKey = tuple[str, Size]


class Found(NamedTuple):
    """What a SandboxWarmPool stands for."""

    template: Object
    """The SandboxTemplate."""
    keys: Sequence[PoolKey]
    """Template and size of its members, those that a claim should get first."""
    keeps: bool = True
    """It has members, or is to have some as soon as they can be made: not one that is declared with none."""


class Pools(Protocol):
    """The warm pools that are declared."""

    async def pool(self, namespace: str, name: str) -> Found:
        """The pool of this name, with its template. Raises a 404 that names the one that is missing."""


class SandboxClaimStorage(Shelved):
    """See the module."""

    kind: Kind = CLAIM

    def __init__(self, operating: Operating, pools: Pools) -> None:
        super().__init__(operating, operating.live.claims)
        self._pools = pools

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """See `Storage`."""
        spec = new.get("spec") or {}
        before = (old or {}).get("spec") or {}
        found: list[Cause] = []
        if old is None:
            found += compiling.name_violations(new)
            found += compiling.env_violations(spec.get("env") or (), "spec.env")
            found += _pod_metadata(spec.get("additionalPodMetadata") or {})
            if spec.get("volumeClaimTemplates"):
                detail = "sandboxes have the disk of their size alone; leave the volumes out"
                found.append(not_allowed("spec.volumeClaimTemplates", detail))
        else:
            detail = (
                "field is immutable: the sandbox was handed over for it; delete the claim and create another"
            )
            found += [
                not_allowed(f"spec.{name}", detail)
                for name in _FIXED
                if not same(spec.get(name), before.get(name))
            ]
        path = "spec.lifecycle.shutdownTime"
        told = (spec.get("lifecycle") or {}).get("shutdownTime")
        was = (before.get("lifecycle") or {}).get("shutdownTime")
        found += compiling.ending_violations(told, was, path, self._now())
        return found

    async def create(self, obj: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        namespace, name = key_of(obj)
        request = await self._request(obj)
        if dry_run:
            await self._operating.current()
            if self._operating.live.sandboxes.get((namespace, name)) is not None:
                raise already_exists(CLAIM.subject(name))
            return obj
        with self._operating.about(CLAIM, name):
            sandbox = await self._operating.make(request)
        return self._operating.row_of(self._shelf, sandbox).object()

    async def _request(self, obj: Object) -> ClaimRequest:
        namespace, name = key_of(obj)
        spec = obj["spec"]
        pool_name = spec["warmPoolRef"]["name"]
        try:
            pool = await self._pools.pool(namespace, pool_name)
        except (NotFound, StatusError) as error:
            if isinstance(error, StatusError) and error.reason != "NotFound":
                raise
            cause = Cause("FieldValueNotFound", f"Not found: {error.message}", "spec.warmPoolRef.name")
            raise self._invalid(name, [cause]) from error
        warm: Literal["never", "prefer", "require"] = spec.get("warmPolicy") or "prefer"
        if warm == "require" and not pool.keeps:
            raise _keeps_none(pool_name)
        template = pool.template.get("spec") or {}
        network = template_network(template)
        if not isinstance(network, Network):
            raise self._invalid(name, _of_template(pool, network))
        made = await self._made(name, pool)
        env = compiling.combined(
            made.env,
            compiling.environment(spec.get("env") or ()),
            template.get("envVarsInjectionPolicy") or "Disallowed",
            "spec.env",
        )
        if isinstance(env, Cause):
            raise self._invalid(name, [env])
        image, size = self._key(pool, made)
        ending = ending_of(spec)
        part = _sandbox_part(spec, template, env)
        if (image, size) != (made.template, made.size):
            # A member from before the template was changed: shown is what it has, not what the template says now.
            part["spec"]["podTemplate"]["spec"]["containers"][0] |= documents.has(image, size)
        document = Document(part, documents.claim_part(obj))
        return ClaimRequest(
            key=new_key(),
            template=image,
            size=size,
            ttl=FOREVER,
            env=env,
            owner=namespace,
            wait=self._operating.wait,
            network=network,
            name=name,
            declared=documents.declared_of(
                document,
                revision=1,
                retain=ending.retain,
                retain_for=ending.retain_for,
                shutdown_at=ending.shutdown_at,
            ),
            warm=warm,
            pool=pool_name,
        )

    async def _made(self, name: str, pool: Found) -> Made:
        spec = pool.template.get("spec") or {}
        found = list(compiling.pod_violations(spec))
        image = compiling.image(spec)
        if not found:
            try:
                template = await self._operating.platform.template(image)
            except UnknownTemplate:
                found.append(compiling.unknown_image(image, await self._operating.platform.templates()))
            else:
                made = compiling.made_of(spec, template)
                if isinstance(made, Made):
                    return made
                found.append(made)
        raise self._invalid(name, _of_template(pool, found))

    def _key(self, pool: Found, made: Made) -> PoolKey:
        """The members that a claim gets: the first kind of them of which one is warm."""
        keys = list(pool.keys) or [(made.template, made.size)]
        nodes = [node for node in self._operating.live.view.nodes().values() if node.since is None]
        for template, size in keys:
            counts = (node.pools.get((template, size.name)) for node in nodes)
            if any(count is not None and count.warm > 0 for count in counts):
                return template, size
        return keys[0]

    def _invalid(self, name: str, causes: Sequence[Cause]) -> StatusError:
        return invalid(CLAIM.subject_of_kind(name), causes)

    async def replace(self, obj: Object, old: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        row = self._operating.present(self._shelf, CLAIM, old)
        listed = row.facts.listed
        told, was = ((each["spec"].get("lifecycle") or {}).get("shutdownTime") for each in (obj, old))
        if listed.state == "ended" and not same(told, was):
            why = "its sandbox has ended; all that can be done is to delete it"
            raise conflict(CLAIM.subject(key_of(old)[1]), why)
        if dry_run:
            return obj
        with self._operating.about(CLAIM, key_of(old)[1]):
            wish = _ending(listed, obj["spec"], old["spec"])
            document = Document(documents.document_of(listed).sandbox, documents.claim_part(obj))
            now = await self._operating.declare(row, document, wish)
            if wish.shutdown_at != Ending.of(listed.declared).shutdown_at:
                await self._operating.forever(now)
        return self._operating.row_of(self._shelf, now).object()

    def _kept(self, row: LiveRow, document: Document) -> Document | None:
        if not documents.held(document.sandbox):
            return None
        return Document(document.sandbox, documents.claim_part(row.object()))

    async def orphan(self, old: Object, *, dry_run: bool) -> None:
        """See `Orphaning`: the sandbox stays, and belongs to nobody."""
        row = self._operating.present(self._shelf, CLAIM, old)
        if dry_run:
            return
        listed = row.facts.listed
        with self._operating.about(CLAIM, key_of(old)[1]):
            alone = Document(documents.document_of(listed).sandbox)
            await self._operating.declare(row, alone, Ending.of(listed.declared))

    async def act(self, action: KindAction, old: Object, body: Object, *, dry_run: bool) -> Object:
        """See `Storage`: a claim has none."""
        raise method_not_allowed(CLAIM.subject(), "POST")


def _ending(listed: Listed, new: Object, before: Object) -> Ending:
    now = Ending.of(listed.declared)
    lifecycle, was = new.get("lifecycle") or {}, before.get("lifecycle") or {}
    if same(lifecycle, was):
        return now
    wish = ending_of(new)
    if same(lifecycle.get("shutdownTime"), was.get("shutdownTime")):
        return wish._replace(shutdown_at=now.shutdown_at)
    return wish


def ending_of(spec: Mapping[str, Any]) -> Ending:
    """What a claim's lifecycle means for its sandbox's record."""
    lifecycle = spec.get("lifecycle") or {}
    retain = (lifecycle.get("shutdownPolicy") or "Retain") == "Retain"
    kept = lifecycle.get("ttlSecondsAfterFinished")
    return Ending(
        retain,
        float(kept) if retain and kept is not None else None,
        seconds_of(lifecycle.get("shutdownTime")),
    )


def _keeps_none(pool: str) -> StatusError:
    """A claim insists on a member of a pool that is declared with none: no time brings one, so none is named."""
    text = (
        f"SandboxWarmPool {pool!r} is declared with 0 sandboxes, and this claim insists on one of them; scale the pool "
        f"(kubectl scale sandboxwarmpool {pool} --replicas=1), or ask with warmPolicy prefer"
    )
    return StatusError(503, "PoolExhausted", text)


def _of_template(pool: Found, causes: Sequence[Cause]) -> list[Cause]:
    name = metadata_of(pool.template).get("name", "")
    return [
        Cause(cause.reason, f"SandboxTemplate {name}: {cause.line()}", "spec.warmPoolRef.name")
        for cause in causes
    ]


def _pod_metadata(metadata: Mapping[str, Any]) -> list[Cause]:
    path = "spec.additionalPodMetadata"
    labels = metadata.get("labels") or {}
    found = list(objectmeta.label_violations(labels, f"{path}.labels"))
    found += objectmeta.annotation_violations(metadata.get("annotations") or {}, f"{path}.annotations")
    return found + [
        not_allowed(f"{path}.labels", f"{key} is set by the platform; leave it out")
        for key in documents.SET_LABELS
        if key in labels
    ]


def _sandbox_part(spec: Object, template: Object, env: Mapping[str, str]) -> Part:
    """What is declared of a claim's sandbox: its template's pod, with what the claim brings."""
    pod = copied(template.get("podTemplate") or {})
    first = pod.get("spec", {}).get("containers", [{}])[0]
    if env:
        first["env"] = [{"name": name, "value": value} for name, value in env.items()]
    metadata: Object = {"generation": 1}
    for field in ("labels", "annotations"):
        both = {
            **((pod.get("metadata") or {}).get(field) or {}),
            **((spec.get("additionalPodMetadata") or {}).get(field) or {}),
        }
        if kept := {key: value for key, value in both.items() if key not in documents.SET_LABELS}:
            metadata[field] = kept
            pod.setdefault("metadata", {})[field] = kept
    lifecycle = spec.get("lifecycle") or {}
    policy = "Retain" if (lifecycle.get("shutdownPolicy") or "Retain") == "Retain" else "Delete"
    wanted: Object = {"podTemplate": pod, "shutdownPolicy": policy}
    if lifecycle.get("shutdownTime"):
        wanted["shutdownTime"] = lifecycle["shutdownTime"]
    return {"metadata": metadata, "spec": wanted}
