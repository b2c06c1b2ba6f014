"""`Sandbox`, and the bodies of what can be done with one (pause, resume, fork, snapshot)."""

from __future__ import annotations

from greenroom.api.kube.schemas.building import (
    IMMUTABLE,
    atomic,
    instant,
    integer,
    mapping,
    record,
    text,
    unique,
)
from greenroom.api.kube.schemas.metadata import LIST_META, OBJECT_META, conditions, whole
from greenroom.api.kube.schemas.pods import blueprint
from greenroom.wire.messages import MOST_FORKS

SANDBOX = whole(
    "A microVM that somebody owns. It is made at once from a warm one where there is one.",
    {
        "spec": record(
            "What is wanted of the sandbox.",
            {
                **blueprint(**{IMMUTABLE: True}),
                "shutdownTime": instant("When the sandbox ends. Without it, it lives until it is deleted."),
                "shutdownPolicy": text(
                    "What happens to this object when the sandbox ends: Retain keeps it, with the condition Ready "
                    "false and the reason SandboxExpired; Delete removes it.",
                    enum=("Delete", "Retain"),
                    default="Retain",
                ),
                "operatingMode": text(
                    "Running, or Suspended: the sandbox is paused, memory and all, and uses no CPU until it is "
                    "Running again.",
                    enum=("Running", "Suspended"),
                    default="Running",
                ),
            },
            required=("podTemplate",),
        ),
        "status": record(
            "What is known of the sandbox.",
            {
                "serviceFQDN": text("The full name that the sandbox is reached by."),
                "service": text("The sandbox's own name in DNS, where it has one."),
                "conditions": conditions(),
                "selector": text("A label selector that finds the sandbox."),
                "podIPs": unique(
                    "Addresses of the sandbox; it has none but through the proxy.", {"type": "string"}
                ),
                "nodeName": text("The node that has the sandbox."),
                "phase": text("Where the sandbox is in its life: Running, Paused, Expired."),
                "sandboxID": text("The sandbox's id, which the E2B dialect and the proxy know it by."),
            },
        ),
    },
    required=("spec",),
)

_META = {"apiVersion": text("Group and version of this body."), "kind": text("The kind of this body.")}

PAUSE_OPTIONS = record("Pause a sandbox: its memory is written to disk and its CPU given back.", {**_META})
RESUME_OPTIONS = record(
    "Resume a paused sandbox.",
    {**_META, "shutdownTime": instant("When the sandbox shall end now; as before by default.")},
)
FORK_OPTIONS = record(
    "Make copies of a sandbox as it is in this moment, memory and all.",
    {
        **_META,
        "metadata": OBJECT_META,
        "count": integer("How many copies.", minimum=1, maximum=MOST_FORKS, default=1),
        "generateName": text("Prefix of the copies' names; the sandbox's own name and a hyphen by default."),
        "labels": mapping("Labels that the copies get beside those of the sandbox."),
        "shutdownTime": instant("When the copies end; when the sandbox ends by default."),
    },
)
FORK_RESULT = record(
    "The copies that were made.",
    {
        **_META,
        "metadata": LIST_META,
        "sandboxes": atomic(
            "The copies.",
            record(
                "A copy.", {"name": text("Its name."), "sandboxID": text("Its id."), "uid": text("Its UID.")}
            ),
        ),
    },
)
SNAPSHOT_OPTIONS = record(
    "Keep the state of a sandbox, memory and all; the sandbox goes on.",
    {**_META, "name": text("A name for the snapshot; the server makes one by default.", maxLength=253)},
)
SNAPSHOT_RESULT = record(
    "The snapshot that was made.",
    {
        **_META,
        "snapshotID": text("Its id, which new sandboxes can be made from."),
        "name": text("Its name."),
        "createdAt": instant("When it was made."),
        "sizeBytes": integer("How much it takes on disk, in bytes.", bits=64),
    },
)
