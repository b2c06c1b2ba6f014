"""What a write means, between HTTP and the storage: create, update, patch, apply, delete, of objects and subresources.

Every write becomes a complete new object that is pruned, filled in, checked, and kept if the current one is still the
one that it was made from. A write that did not say which version it means is tried again when somebody else was
faster. Sources: "Kubernetes API Concepts", "Finalizers", "Server-Side Apply" in Kubernetes' documentation.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from greenroom.api.kube import objectmeta
from greenroom.api.kube.kinds import Action, field
from greenroom.api.kube.negotiation import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from greenroom.api.kube.objects import Key, Object, copied, metadata_of, rfc3339, same
from greenroom.api.kube.options import Deleting, Writing
from greenroom.api.kube.patching.applying import Author, applied, updated
from greenroom.api.kube.patching.jsonpatch import apply_json_patch
from greenroom.api.kube.patching.mergepatch import apply_merge_patch
from greenroom.api.kube.patching.strategic import apply_strategic_patch
from greenroom.api.kube.schemas.building import Schema
from greenroom.api.kube.schemas.metadata import OBJECT_META
from greenroom.api.kube.schemas.pools import SCALE
from greenroom.api.kube.status import (
    CONFLICT_409,
    Cause,
    StatusError,
    bad_request,
    conflict,
    invalid,
    name_not_free,
    not_found,
    too_large,
    unsupported_media_type,
)
from greenroom.api.kube.storage import Cautioning, Orphaning, Storage
from greenroom.api.kube.validation import (
    changes_refused,
    defaulted,
    pruned,
    strictness,
    violations,
    without_nulls,
    wrong,
)
from greenroom.api.kube.versions import revision_of

T = TypeVar("T")
ATTEMPTS = 5
"""Times that a write without a version is tried when others are faster."""
OBJECT_LIMIT = 3 << 19
"""Bytes of an object (1.5 MiB, as in Kubernetes): patches could make it larger than any body may be."""
NAMES = 8
"""Names that a create with generateName tries."""
Body = tuple[Any, list[str]]
"""Decoded JSON, and the keys that it repeats."""


class Outcome:
    """An object after a write, whether it is new, and what the client should be warned of."""

    __slots__ = ("created", "obj", "warnings")

    def __init__(self, obj: Object, warnings: Sequence[str] = (), *, created: bool = False) -> None:
        self.obj = obj
        self.warnings = warnings
        self.created = created


class Writer:
    """Writes objects of one storage. `now` is a clock, for tests."""

    def __init__(self, storage: Storage, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._storage = storage
        self._kind = storage.kind
        self._now = now

    async def create(self, namespace: str, body: Body, options: Writing) -> Outcome:
        """Create an object from a whole one. Raises 400, 409, 422, and what the storage raises."""
        new, warnings = self._taken(body, options)
        self._placed(new, namespace, "")
        return await self._created(new, warnings, options, None)

    async def update(self, key: Key, body: Body, options: Writing, part: str = "") -> Outcome:
        """Put a whole object in the place of the current one; `part` is "" or status."""
        new, warnings = self._taken(body, options)
        self._placed(new, *key)
        if not metadata_of(new).get("resourceVersion"):
            raise self._invalid(
                key, [wrong("metadata.resourceVersion", "", "must be specified for an update")]
            )
        old = await self._existing(key)
        return await self._changed(old, new, warnings, options, part)

    async def patch(
        self,
        key: Key,
        media_type: str,
        patch: Body,
        options: Writing,
        part: str = "",
        may_create: Callable[[], Awaitable[None]] | None = None,
    ) -> Outcome:
        """Change an object in part; an apply also creates it, once `may_create` has not objected.

        Raises 400, 404, 409, 415, 422."""
        if media_type == APPLY_PATCH:
            return await self._apply(key, patch, options, part, may_create)

        async def attempt() -> Outcome:
            old = await self._existing(key)
            changed: Any = patched(old, media_type, patch[0], self._kind.schema)
            if not isinstance(changed, dict):
                raise bad_request("the patch does not leave an object")
            new, warnings = self._taken((changed, patch[1]), options)
            self._placed(new, *key)
            return await self._changed(old, new, warnings, options, part)

        return await self._again(attempt, names_version(media_type, patch[0]))

    async def _apply(
        self,
        key: Key,
        body: Body,
        options: Writing,
        part: str,
        may_create: Callable[[], Awaitable[None]] | None,
    ) -> Outcome:
        config, warnings = self._taken(body, options)
        self._placed(config, *key)
        told_version = metadata_of(config).get("resourceVersion", "")
        told_uid = metadata_of(config).get("uid", "")
        author = self._author(options, part)

        async def attempt() -> Outcome:
            old = await self._storage.get(key)
            if old is None and (part or told_uid or told_version):
                raise not_found(self._kind.subject(key[1]))
            if old is None and may_create is not None:
                await may_create()
            self._meant(old, told_version, told_uid)
            given = copied(config)
            if self._kind.has_status:
                given = {
                    name: value for name, value in given.items() if (name == "status") == (part == "status")
                }
            given |= {name: config[name] for name in ("apiVersion", "kind") if name in config}
            given["metadata"] = copied(metadata_of(config)) if part == "" else {}
            for name in objectmeta.SERVER_SET:
                given["metadata"].pop(name, None)
            new = applied(old, given, self._kind, author, force=options.force)
            if old is None:
                return await self._created(new, warnings, options, author)
            return await self._changed(old, new, warnings, options, part, tracked=True)

        return await self._again(attempt, bool(told_version))

    async def _again(self, attempt: Callable[[], Awaitable[T]], once: bool) -> T:
        for _ in range(0 if once else ATTEMPTS - 1):
            try:
                return await attempt()
            except StatusError as error:
                # Owners that object will object again; a version that has moved on will be read anew.
                lost = error.code == CONFLICT_409 and error.reason in ("Conflict", "AlreadyExists")
                if not lost or error.causes:
                    raise
        return await attempt()

    async def _created(
        self, new: Object, warnings: Sequence[str], options: Writing, applier: Author | None
    ) -> Outcome:
        if self._kind.has_status:
            new.pop("status", None)
        defaulted(new, self._kind.schema)
        metadata = new["metadata"]
        prefix = metadata.get("generateName") or ""
        generate = bool(prefix) and not metadata.get("name")
        objectmeta.prepare_create(new, uid=str(uuid.uuid4()), now=self._now())
        for attempt in range(NAMES):
            if generate:
                metadata["name"] = objectmeta.generated_name(prefix)
            if attempt == 0:
                self._check(new, None)
                if isinstance(self._storage, Cautioning):
                    warnings = [*warnings, *self._storage.warnings(new, None)]
                if applier is None:
                    updated(None, new, self._kind, self._author(options, ""))
                check_size(new)
            try:
                kept = await self._storage.create(copied(new) if generate else new, dry_run=options.dry_run)
            except StatusError as error:
                if not generate or error.reason != "AlreadyExists":
                    raise
            else:
                return Outcome(kept, warnings, created=True)
        raise name_not_free(self._kind.subject(metadata["name"]))

    async def _changed(
        self,
        old: Object,
        new: Object,
        warnings: Sequence[str],
        options: Writing,
        part: str,
        *,
        tracked: bool = False,
    ) -> Outcome:
        """Keep `new` in the place of `old`, as far as a write of this part may change it."""
        self._meant(old, metadata_of(new).get("resourceVersion", ""), metadata_of(new).get("uid", ""))
        new = self._narrowed(old, new, part)
        objectmeta.prepare_update(new, old)
        defaulted(new, self._kind.schema)
        self._check(new, old)
        if not tracked:
            updated(old, new, self._kind, self._author(options, part))
        check_size(new)
        own = self._kind.root_fields - {"metadata", "status", "apiVersion", "kind"}
        if any(not same(new.get(name), old.get(name)) for name in own):
            new["metadata"]["generation"] = int(metadata_of(old).get("generation") or 0) + 1
        if same(new, old):
            return Outcome(old, warnings)
        if part == "" and isinstance(self._storage, Cautioning):
            warnings = [*warnings, *self._storage.warnings(new, old)]
        if metadata_of(new).get("deletionTimestamp") and not metadata_of(new).get("finalizers"):
            await self._storage.remove(old, dry_run=options.dry_run)
            return Outcome(new, warnings)
        return Outcome(await self._storage.replace(new, old, dry_run=options.dry_run), warnings)

    def _narrowed(self, old: Object, new: Object, part: str) -> Object:
        if part == "status":
            left: Object = copied(old)
            left.pop("status", None)
            if "status" in new:
                left["status"] = new["status"]
            if "managedFields" in metadata_of(new):
                left["metadata"]["managedFields"] = metadata_of(new)["managedFields"]
            return left
        if self._kind.has_status:
            new = {name: value for name, value in new.items() if name != "status"}
            if "status" in old:
                new["status"] = copied(old["status"])
        return new

    async def delete(self, key: Key, options: Deleting) -> tuple[Object, bool]:
        """Let an object go; answers it, and whether it has gone or waits for its finalizers."""

        async def attempt() -> tuple[Object, bool]:
            old = await self._existing(key)
            return await self.delete_known(old, options)

        return await self._again(attempt, bool(options.version))

    async def delete_known(self, old: Object, options: Deleting) -> tuple[Object, bool]:
        """The same for an object that was just read."""
        self._meant(old, options.version, options.uid)
        metadata = metadata_of(old)
        if not metadata.get("finalizers"):
            if options.orphan and isinstance(self._storage, Orphaning):
                await self._storage.orphan(old, dry_run=options.dry_run)
            else:
                await self._storage.remove(old, dry_run=options.dry_run)
            return old, True
        if metadata.get("deletionTimestamp"):
            return old, False
        going = copied(old)
        going["metadata"]["deletionTimestamp"] = rfc3339(self._now())
        going["metadata"]["deletionGracePeriodSeconds"] = 0
        going["metadata"]["generation"] = int(metadata.get("generation") or 0) + 1
        return await self._storage.replace(going, old, dry_run=options.dry_run), False

    async def read_scale(self, key: Key) -> Object:
        """The Scale of an object."""
        return self._scale_of(await self._existing(key))

    async def write_scale(self, key: Key, media_type: str, body: Body, options: Writing) -> Outcome:
        """Set the replicas of an object by a whole Scale (media type "") or by a patch of one."""

        async def attempt() -> Outcome:
            old = await self._existing(key)
            scale = body[0] if media_type == "" else patched(self._scale_of(old), media_type, body[0], SCALE)
            kept, unknown = pruned(scale, SCALE)
            warnings = strictness(options.level, unknown, body[1])
            if found := violations(defaulted(kept, SCALE), SCALE):
                raise invalid(self._kind.subject_of_kind(key[1]), found)
            given = metadata_of(kept)
            if given.get("name", key[1]) != key[1] or given.get("namespace", key[0]) != key[0]:
                raise bad_request("the name of the scale does not match the name on the URL")
            self._meant(old, given.get("resourceVersion", ""), given.get("uid", ""))
            new = copied(old)
            assert self._kind.scale is not None  # noqa: S101
            *above, last = self._kind.scale.spec
            node = new
            for name in above:
                node = node.setdefault(name, {})
            node[last] = (kept.get("spec") or {}).get("replicas", 0)
            outcome = await self._changed(old, new, warnings, options, "scale")
            return Outcome(self._scale_of(outcome.obj), outcome.warnings)

        told = bool(metadata_of(body[0] if isinstance(body[0], dict) else {}).get("resourceVersion"))
        return await self._again(attempt, told)

    def _scale_of(self, obj: Object) -> Object:
        metadata, where = metadata_of(obj), self._kind.scale
        assert where is not None  # noqa: S101
        names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        status: Object = {"replicas": field(obj, where.status) or 0}
        if selector := field(obj, where.selector):
            status["selector"] = selector
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {name: metadata[name] for name in names if name in metadata},
            "spec": {"replicas": field(obj, where.spec) or 0},
            "status": status,
        }

    async def act(self, key: Key, action: Action, body: Body, options: Writing) -> Outcome:
        """Do what a subresource stands for."""
        told, repeated = body
        self._typed(told, self._kind.api_version, action.takes)
        kept, unknown = pruned(told, action.schema)
        warnings = strictness(options.level, unknown, repeated)
        without_nulls(kept, action.schema)
        if found := violations(defaulted(kept, action.schema), action.schema):
            raise invalid(self._kind.subject_of_kind(key[1]), found)
        old = await self._existing(key)
        return Outcome(
            await self._storage.act(action, old, kept, dry_run=options.dry_run), warnings, created=True
        )

    async def _existing(self, key: Key) -> Object:
        if (found := await self._storage.get(key)) is None:
            raise not_found(self._kind.subject(key[1]))
        return found

    def _taken(self, body: Body, options: Writing) -> tuple[Object, list[str]]:
        """A body as an object of this kind: typed, pruned, without nulls."""
        told, repeated = body
        if not isinstance(told, dict):
            raise bad_request("a JSON object is needed")
        self._typed(told, self._kind.api_version, self._kind.name)
        # The path says both. Typed clients leave them out, and kube-apiserver fills them in for its own kinds.
        told = {**told, "apiVersion": self._kind.api_version, "kind": self._kind.name}
        kept, unknown = pruned(told, self._kind.schema)
        warnings = strictness(options.level, unknown, repeated)
        without_nulls(kept, self._kind.schema)
        metadata = kept.setdefault("metadata", {})
        # Before anything is decided by it: that its fields are of their types.
        if found := violations(metadata, OBJECT_META, "metadata"):
            raise self._invalid(("", str(metadata_of(kept).get("name", ""))[:100]), found)
        return kept, warnings

    def _typed(self, body: Object, api_version: str, name: str) -> None:
        for what, wanted in (("apiVersion", api_version), ("kind", name)):
            told = body.get(what)
            if told not in (None, "", wanted):
                known = "API version" if what == "apiVersion" else "kind"
                raise bad_request(
                    f"the {known} in the data ({str(told)[:100]}) does not match the expected {known} ({wanted})"
                )

    def _placed(self, new: Object, namespace: str, name: str) -> None:
        """Put an object where the URL says. Raises 400 when it says otherwise itself."""
        metadata = new["metadata"]
        told = metadata.get("namespace") or namespace
        if self._kind.namespaced and told != namespace:
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        if self._kind.namespaced:
            metadata["namespace"] = namespace
        if name and (given := metadata.setdefault("name", name)) != name:
            raise bad_request(
                f"the name of the object ({str(given)[:100]}) does not match the name on the URL ({name})"
            )

    def _meant(self, old: Object | None, version: str, uid: str) -> None:
        """Raise 409 when the current object is not the one that a request means."""
        if old is None:
            return
        metadata = metadata_of(old)
        subject = self._kind.subject(metadata.get("name", ""))
        if uid and uid != metadata.get("uid"):
            why = f"Precondition failed: UID in precondition: {uid[:100]}, UID in object meta: {metadata.get('uid')}"
            raise conflict(subject, why)
        # Other digits move with what nobody writes: states, and the process that shows them.
        if version and revision_of(version) != revision_of(metadata.get("resourceVersion") or ""):
            raise conflict(subject)

    def _check(self, new: Object, old: Object | None) -> None:
        key = (metadata_of(new).get("namespace") or "", str(metadata_of(new).get("name") or ""))
        found = violations(new, self._kind.schema)
        if not found:
            found += objectmeta.violations(new["metadata"], namespaced=self._kind.namespaced)
            if old is not None:
                found += objectmeta.update_violations(new, old) + changes_refused(new, old, self._kind.schema)
        if not found:
            found += self._storage.check(new, old)
        if found:
            raise self._invalid(key, found)

    def _invalid(self, key: Key, causes: Sequence[Cause]) -> StatusError:
        return invalid(self._kind.subject_of_kind(key[1]), causes)

    def _author(self, options: Writing, part: str) -> Author:
        return Author(manager=options.manager, now=self._now(), subresource=part)


def patched(old: Object, media_type: str, patch: Any, schema: Schema) -> Any:
    """`old` after a patch that is no apply. Raises 400, 415, 422."""
    if media_type == JSON_PATCH:
        return apply_json_patch(old, patch)
    if not isinstance(patch, dict):
        raise bad_request("a patch of this kind is a JSON object")
    if media_type == MERGE_PATCH:
        return apply_merge_patch(old, patch)
    if media_type == STRATEGIC_PATCH:
        return apply_strategic_patch(old, patch, schema)
    raise unsupported_media_type((JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH))


def check_size(obj: Object) -> None:
    """Raises 413 for an object that is larger than one may be."""
    if len(msgspec.json.encode(obj)) > OBJECT_LIMIT:
        raise too_large(OBJECT_LIMIT, "Object")


def names_version(media_type: str, patch: Any) -> bool:
    """Whether a patch says which version it is for, so that a conflict is its answer."""
    if media_type == JSON_PATCH:
        told = (
            [each.get("path") for each in patch if isinstance(each, dict)] if isinstance(patch, list) else []
        )
        return "/metadata/resourceVersion" in told
    return isinstance(patch, dict) and bool(metadata_of(patch).get("resourceVersion"))
