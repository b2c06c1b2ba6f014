"""Pod templates, as far as a sandbox is made from one: the parts of core/v1 that mean something here.

Manifests that were written for pods have more fields than these. They are kept as they come
(`open_ended`), so that reading gives back what was written.
"""

from __future__ import annotations

from greenroom.api.kube.schemas.building import (
    Schema,
    anything,
    atomic,
    boolean,
    integer,
    keyed,
    mapping,
    quantity,
    record,
    text,
)
from greenroom.api.kube.schemas.metadata import ANNOTATIONS, LABELS

_ENV = record(
    "An environment variable.",
    {
        "name": text("Its name.", minLength=1),
        "value": text("Its value; empty by default."),
        "valueFrom": anything("Where the value comes from, for systems that can look it up."),
    },
    required=("name",),
)

_PORT = record(
    "A port that the container listens on.",
    {
        "containerPort": integer("The port's number.", minimum=1, maximum=65535),
        "name": text("A name for the port."),
        "protocol": text("TCP, UDP or SCTP.", enum=("TCP", "UDP", "SCTP"), default="TCP"),
        "hostIP": text("Address of the host to bind to; not used here."),
        "hostPort": integer("Port of the host; not used here.", minimum=0, maximum=65535),
    },
    required=("containerPort",),
)

_RESOURCES = record(
    "What the container needs. The sandbox's size is the smallest that has it.",
    {
        "requests": mapping("What it needs at least, by resource (cpu, memory).", quantity("An amount.")),
        "limits": mapping("What it may use at most, by resource (cpu, memory).", quantity("An amount.")),
    },
    open_ended=True,
)

CONTAINER = record(
    "A container of the pod; the first one's image and resources choose the sandbox's template and size.",
    {
        "name": text("Its name, unique within the pod.", minLength=1),
        "image": text("The image; it names the template that the sandbox is made from."),
        "imagePullPolicy": text(
            "When to fetch the image; not used here.", enum=("Always", "IfNotPresent", "Never")
        ),
        "command": atomic("The program to run instead of the image's own.", {"type": "string"}),
        "args": atomic("Arguments to the program.", {"type": "string"}),
        "workingDir": text("The directory that the program starts in."),
        "env": keyed("Environment variables.", _ENV, "name"),
        "ports": keyed("Ports that the container listens on.", _PORT, "containerPort", "protocol"),
        "resources": _RESOURCES,
    },
    required=("name",),
    open_ended=True,
)

POD_SPEC = record(
    "What runs in the sandbox.",
    {
        "containers": keyed("The containers; there has to be one.", CONTAINER, "name", minItems=1),
        "initContainers": keyed("Containers that run before the others; not used here.", CONTAINER, "name"),
        "nodeSelector": mapping("Labels that the node has to have."),
        "runtimeClassName": text("The runtime to use."),
        "restartPolicy": text("What happens when a container ends.", enum=("Always", "OnFailure", "Never")),
        "automountServiceAccountToken": boolean("Whether a service account's token is put into the pod."),
        "terminationGracePeriodSeconds": integer("Seconds that the pod may take to end.", bits=64),
    },
    required=("containers",),
    open_ended=True,
)

POD_METADATA = record("Metadata of the pod.", {"labels": LABELS, "annotations": ANNOTATIONS})

_CLAIM_SPEC = record(
    "The volume that is wanted.",
    {
        "accessModes": atomic("How the volume may be mounted.", {"type": "string"}),
        "resources": record(
            "How large the volume has to be.",
            {
                "requests": mapping("At least, by resource (storage).", quantity("An amount.")),
                "limits": mapping("At most, by resource (storage).", quantity("An amount.")),
            },
        ),
        "storageClassName": text("The class of storage."),
        "volumeMode": text("Filesystem or Block."),
    },
    open_ended=True,
)

_CLAIM = record(
    "A volume claim.",
    {
        "metadata": record(
            "Metadata of the claim.",
            {"name": text("Its name."), "labels": LABELS, "annotations": ANNOTATIONS},
        ),
        "spec": _CLAIM_SPEC,
    },
    required=("spec",),
)


def volume_claims(**more: object) -> Schema:
    """`volumeClaimTemplates`, as sandboxes, templates and claims have them."""
    return atomic("Volumes that are made with the sandbox.", _CLAIM, **more)


def blueprint(**volumes: object) -> dict[str, Schema]:
    """The fields that a sandbox and a template share; `volumes` goes into the volumes' schema."""
    return {
        "podTemplate": record(
            "The pod that the sandbox stands for.",
            {"metadata": POD_METADATA, "spec": POD_SPEC},
            required=("spec",),
        ),
        "volumeClaimTemplates": volume_claims(**volumes),
        "service": boolean("Whether the sandbox gets a name of its own in DNS."),
    }
