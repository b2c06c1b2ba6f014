"""`Namespace` and `Event` of core/v1, as far as clients need them to look at the other kinds."""

from __future__ import annotations

from greenroom.api.kube.schemas.building import (
    anything,
    atomic,
    instant,
    integer,
    mapping,
    quantity,
    record,
    text,
)
from greenroom.api.kube.schemas.metadata import whole

NAMESPACE = whole(
    "A space for names. One is there as long as something is in it, or somebody may make something in it.",
    {
        "spec": record(
            "What is wanted of the namespace.",
            {"finalizers": atomic("Who has to agree before it goes.", {"type": "string"})},
        ),
        "status": record("What is known of it.", {"phase": text("Active or Terminating.")}),
    },
)

_REFERENCE = record(
    "An object.",
    {
        "apiVersion": text("Its API version."),
        "kind": text("Its kind."),
        "namespace": text("Its namespace."),
        "name": text("Its name."),
        "uid": text("Its UID."),
        "resourceVersion": text("Its version at that time."),
        "fieldPath": text("The part of it that is meant."),
    },
)

EVENT = whole(
    "Something that happened to an object. Made from what the platform knows when it is read, and never written.",
    {
        "involvedObject": _REFERENCE,
        "reason": text("What happened, in one word for programs."),
        "message": text("What happened, for people."),
        "type": text("Normal or Warning."),
        "count": integer("How often it happened."),
        "firstTimestamp": instant("When it happened first.", nullable=True),
        "lastTimestamp": instant("When it happened last.", nullable=True),
        "eventTime": text("When it happened, to the microsecond.", nullable=True),
        "action": text("What was done."),
        "reportingComponent": text("Who tells."),
        "reportingInstance": text("Which of them."),
        "source": record("Who tells.", {"component": text("The part."), "host": text("Its node.")}),
        "related": _REFERENCE,
        "series": anything("How often it happened lately."),
    },
)

QUOTA = whole(
    "Bounds on what a namespace has. Where there are several, all of them hold.",
    {
        "spec": record(
            "What is wanted of the quota.",
            {
                "hard": mapping(
                    "The bounds: count/sandboxes.agents.x-k8s.io, requests.cpu, requests.memory.",
                    quantity("At most that much."),
                )
            },
        ),
        "status": record(
            "What is known of it.",
            {
                "hard": mapping("The bounds that are kept.", quantity("At most that much.")),
                "used": mapping("What there is of each.", quantity("That much.")),
            },
        ),
    },
)
