"""Sandbox: objects that are made from the nodes' records, and what writing one does.

Create makes a VM, or takes a warm one, before it answers. A change of `operatingMode` pauses or resumes; labels,
annotations, finalizers and the rest of the metadata are kept in the record. The pod template is what the VM was made
from, so it does not change. Deleting the object ends the VM.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any, Final

from greenroom.api.kube import objectmeta
from greenroom.api.kube.kinds import SANDBOX, Action
from greenroom.api.kube.live import compiling, documents
from greenroom.api.kube.live.compiling import Made
from greenroom.api.kube.live.documents import Document
from greenroom.api.kube.live.instants import instant_text, same_instant, seconds_of
from greenroom.api.kube.live.operating import Ending, Operating, new_key
from greenroom.api.kube.live.shelved import Shelved
from greenroom.api.kube.live.shelves import LiveRow
from greenroom.api.kube.objects import Object, copied, key_of, same
from greenroom.api.kube.status import Cause, already_exists, conflict, invalid
from greenroom.api.kube.validation import not_allowed, wrong
from greenroom.errors import UnknownSnapshot, UnknownTemplate
from greenroom.wire.ids import is_snapshot_id
from greenroom.wire.messages import (
    FOREVER,
    ClaimRequest,
    Listed,
    SnapshotInfo,
    SnapshotRequest,
    Template,
)

_SNAPSHOT = re.compile(r"[a-z0-9_-]{1,128}(:[a-z0-9_.-]{1,128})?")
_FIXED: Final = ("podTemplate", "service", "volumeClaimTemplates")


class SandboxStorage(Shelved):
    """See the module."""

    kind = SANDBOX

    def __init__(self, operating: Operating) -> None:
        super().__init__(operating, operating.live.sandboxes)

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """See `Storage`."""
        spec = new.get("spec") or {}
        before = (old or {}).get("spec") or {}
        found: list[Cause] = []
        if old is None:
            found += compiling.name_violations(new)
            found += compiling.pod_violations(spec)
        else:
            detail = "field is immutable: the sandbox was made from it; delete the object and create another"
            found += [
                not_allowed(f"spec.{name}", detail)
                for name in _FIXED
                if not same(spec.get(name), before.get(name))
            ]
        found += compiling.ending_violations(
            spec.get("shutdownTime"), before.get("shutdownTime"), "spec.shutdownTime", self._now()
        )
        return found

    def warnings(self, new: Object, old: Object | None) -> Sequence[str]:
        """What of a new object, or of a change, has no effect."""
        told = [f"metadata.labels: {key} is set by the platform" for key in documents.lies(new, old)]
        return [*told, *compiling.pod_warnings(new.get("spec") or {}, (old or {}).get("spec"))]

    async def create(self, obj: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        namespace, name = key_of(obj)
        made = await self._made(obj)
        if dry_run:
            await self._operating.current()
            if self._shelf.get((namespace, name)) is not None:
                raise already_exists(SANDBOX.subject(name))
            return obj
        spec = obj["spec"]
        document = Document(sandbox=documents.sandbox_part(obj))
        declared = documents.declared_of(
            document,
            revision=1,
            retain=spec.get("shutdownPolicy") != "Delete",
            shutdown_at=seconds_of(spec.get("shutdownTime")),
        )
        request = ClaimRequest(
            key=new_key(),
            template=made.template,
            size=made.size,
            snapshot=made.snapshot,
            ttl=FOREVER,
            env=made.env,
            owner=namespace,
            wait=self._operating.wait,
            name=name,
            declared=declared,
        )
        with self._operating.about(SANDBOX, name):
            sandbox = await self._operating.make(request, suspended=spec.get("operatingMode") == "Suspended")
        return self._operating.row_of(self._shelf, sandbox).object()

    async def _made(self, obj: Object) -> Made:
        namespace, name = key_of(obj)
        image = compiling.image(obj["spec"])
        subject = SANDBOX.subject_of_kind(name)
        try:
            source = await self._source(namespace, image)
        except UnknownTemplate:
            templates = await self._operating.platform.templates()
            raise invalid(subject, [compiling.unknown_image(image, templates, or_snapshot=True)]) from None
        made = compiling.made_of(obj["spec"], source)
        if isinstance(made, Cause):
            raise invalid(subject, [made])
        return made

    async def _source(self, namespace: str, image: str) -> Template | SnapshotInfo:
        """What an image names: a template, or a snapshot of the namespace. Raises UnknownTemplate."""
        platform = self._operating.platform
        if not is_snapshot_id(image):
            with contextlib.suppress(UnknownTemplate):
                return await platform.template(image)
        try:
            return await platform.snapshot(namespace, image)
        except UnknownSnapshot:
            # A template's id can have the form of a snapshot's.
            return await platform.template(image)

    async def replace(self, obj: Object, old: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        name = key_of(old)[1]
        row = self._operating.present(self._shelf, SANDBOX, old)
        new, before = obj.get("spec") or {}, old.get("spec") or {}
        moved = new.get("operatingMode") != before.get("operatingMode")
        facts = row.facts.listed
        moved_end = not same(new.get("shutdownTime"), before.get("shutdownTime"))
        if (moved or moved_end) and facts.state == "ended":
            raise conflict(
                SANDBOX.subject(name), "the sandbox has ended; all that can be done is to delete it"
            )
        if dry_run:
            return obj
        with self._operating.about(SANDBOX, name):
            wish = _ending(facts, new, before)
            document = Document(documents.sandbox_part(obj), documents.document_of(facts).claim)
            now = await self._operating.declare(row, document, wish)
            if not same(new.get("shutdownTime"), before.get("shutdownTime")):
                # Before it may be the time-out that the other dialect gave. Last: what fails here ends too early.
                await self._operating.forever(now)
            if moved and new.get("operatingMode") == "Suspended":
                await self._operating.pause(now)
            elif moved:
                await self._operating.resume(now)
        return self._operating.row_of(self._shelf, now).object()

    def _kept(self, row: LiveRow, document: Document) -> Document | None:
        if document.claim is None or not documents.held(document.claim):
            return None
        return Document(documents.sandbox_part(row.object()), document.claim)

    async def act(self, action: Action, old: Object, body: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        name = key_of(old)[1]
        row = self._operating.present(self._shelf, SANDBOX, old)
        if row.facts.listed.state == "ended":
            raise conflict(
                SANDBOX.subject(name), "the sandbox has ended; all that can be done is to delete it"
            )
        with self._operating.about(SANDBOX, name):
            match action.name:
                case "pause":
                    if not dry_run:
                        await self._operating.pause(row.facts.listed)
                    return self._again(row)
                case "resume":
                    return await self._resume(row, body, dry_run=dry_run)
                case "fork":
                    return await self._fork(row, body, dry_run=dry_run)
                case _:
                    return await self._snapshot(row, body, dry_run=dry_run)

    def _again(self, row: LiveRow) -> Object:
        return (self._shelf.get(row.key) or row).object()

    async def _resume(self, row: LiveRow, body: Object, *, dry_run: bool) -> Object:
        told = body.get("shutdownTime")
        self._future(row, told)
        if dry_run:
            return row.object()
        listed = row.facts.listed
        if told is not None and not same_instant(told, Ending.of(listed.declared).shutdown_at):
            obj = row.object()
            part = documents.sandbox_part(obj)
            part["spec"]["shutdownTime"] = told
            part["metadata"]["generation"] += 1
            document = Document(part, documents.document_of(listed).claim)
            wish = Ending.of(listed.declared)._replace(shutdown_at=seconds_of(told))
            listed = await self._operating.declare(row, document, wish)
            await self._operating.forever(listed)
        await self._operating.resume(listed)
        return self._again(row)

    def _future(self, row: LiveRow, told: Any) -> None:
        if found := list(compiling.ending_violations(told, None, "shutdownTime", self._now())):
            raise invalid(SANDBOX.subject_of_kind(row.key[1]), found)

    async def _fork(self, row: LiveRow, body: Object, *, dry_run: bool) -> Object:
        name = row.key[1]
        prefix = body.get("generateName") or f"{name}-"
        told = body.get("shutdownTime")
        self._future(row, told)
        subject = SANDBOX.subject_of_kind(name)
        given = body.get("labels") or {}
        causes = list(objectmeta.label_violations(given, "labels"))
        causes += [
            not_allowed("labels", f"{key} is set by the platform; leave it out")
            for key in documents.SET_LABELS
            if key in given
        ]
        if problem := objectmeta.name_problem(prefix.rstrip("-.") or prefix):
            causes.append(wrong("generateName", prefix, problem))
        if causes:
            raise invalid(subject, causes)
        if row.facts.listed.state != "running":
            raise conflict(SANDBOX.subject(name), "the sandbox is paused; only a running one can be copied")
        names = [objectmeta.generated_name(prefix) for _ in range(body.get("count") or 1)]
        result: Object = {"apiVersion": SANDBOX.api_version, "kind": "SandboxForkResult", "metadata": {}}
        if dry_run:
            return {**result, "sandboxes": [{"name": each} for each in names]}
        listed = row.facts.listed
        part = self._copied_part(row, given)
        at = seconds_of(told) if told is not None else documents.ends(listed)
        if told is not None:
            part["spec"]["shutdownTime"] = told
        declared = documents.declared_of(
            Document(sandbox=part),
            revision=1,
            retain=part["spec"].get("shutdownPolicy") != "Delete",
            shutdown_at=at,
        )
        made = await self._operating.fork(listed, names, [declared] * len(names))
        copies = [
            {
                "name": documents.name_of(each),
                "sandboxID": each.sandbox_id,
                "uid": documents.uid_of(SANDBOX, each.sandbox_id),
            }
            for each in made
        ]
        return {**result, "sandboxes": copies}

    @staticmethod
    def _copied_part(row: LiveRow, labels: Object) -> documents.Part:
        """What a copy declares: what the sandbox is, but nobody's claim on it."""
        part = copied(documents.sandbox_part(row.object()))
        both = {**part["metadata"].get("labels", {}), **labels}
        part["metadata"] = {"generation": 1, **({"labels": both} if both else {})}
        return dict(part)

    async def _snapshot(self, row: LiveRow, body: Object, *, dry_run: bool) -> Object:
        name = body.get("name") or ""
        subject = SANDBOX.subject_of_kind(row.key[1])
        if name:
            if not _SNAPSHOT.fullmatch(name):
                detail = "a-z, 0-9, - and _ are allowed, and a tag after a colon"
                raise invalid(subject, [wrong("name", name, detail)])
            known = [each.name for each in await self._operating.platform.templates()]
            if name in known:
                detail = "a template has this name, so the snapshot could not be found; take another"
                raise invalid(subject, [wrong("name", name, detail)])
        result: Object = {"apiVersion": SANDBOX.api_version, "kind": "SandboxSnapshotResult", "name": name}
        if dry_run:
            return result
        taken = await self._operating.platform.take_snapshot(row.sandbox_id, SnapshotRequest(name=name))
        await self._operating.seen(row.sandbox_id)
        return {
            **result,
            "snapshotID": taken.snapshot_id,
            "name": taken.name,
            "createdAt": instant_text(taken.created_at),
        }


def _ending(listed: Listed, new: Object, before: Object) -> Ending:
    wish = Ending.of(listed.declared)._replace(retain=new.get("shutdownPolicy") != "Delete")
    told = new.get("shutdownTime")
    return wish if same(told, before.get("shutdownTime")) else wish._replace(shutdown_at=seconds_of(told))
