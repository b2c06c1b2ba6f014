"""What stands before a sandbox: `SandboxTemplate`, `SandboxWarmPool`, `SandboxClaim`."""

from __future__ import annotations

from greenroom.api.kube.schemas.building import (
    Schema,
    anything,
    atomic,
    instant,
    int_or_string,
    integer,
    record,
    text,
    unique,
)
from greenroom.api.kube.schemas.metadata import conditions, whole
from greenroom.api.kube.schemas.pods import POD_METADATA, blueprint, volume_claims

MOST_REPLICAS = 100_000
"""Of one pool."""


def _policy(what: str) -> Schema:
    return text(
        f"Whether a claim may bring {what}: Allowed to add some, Overrides to replace the template's too.",
        enum=("Disallowed", "Allowed", "Overrides"),
        default="Disallowed",
    )


_PORTS = atomic(
    "Ports; all of them when there are none.",
    record(
        "A port or a range of ports.",
        {
            "port": int_or_string("The port's number or name."),
            "endPort": integer("The last port of a range.", minimum=1, maximum=65535),
            "protocol": text("TCP, UDP or SCTP.", enum=("TCP", "UDP", "SCTP"), default="TCP"),
        },
    ),
)


def _peers(description: str) -> Schema:
    return atomic(
        description,
        record(
            "Some addresses or pods.",
            {
                "ipBlock": record(
                    "A range of addresses.",
                    {
                        "cidr": text("The range, as 10.0.0.0/8."),
                        "except": atomic("Ranges within it that are not meant.", {"type": "string"}),
                    },
                    required=("cidr",),
                ),
                "namespaceSelector": anything("Selects namespaces by their labels."),
                "podSelector": anything("Selects pods by their labels."),
            },
        ),
    )


_NETWORK = record(
    "What the sandboxes may reach and be reached from; by default the Internet, and from the proxy alone.",
    {
        "ingress": atomic(
            "Who may connect to the sandboxes; nobody when it is empty.",
            record("A rule.", {"from": _peers("Where connections may come from."), "ports": _PORTS}),
        ),
        "egress": atomic(
            "What the sandboxes may connect to; nothing when it is empty.",
            record("A rule.", {"to": _peers("Where connections may go to."), "ports": _PORTS}),
        ),
    },
)

TEMPLATE = whole(
    "What sandboxes are made from.",
    {
        "spec": record(
            "What the sandboxes have in common.",
            {
                **blueprint(),
                "networkPolicy": _NETWORK,
                "networkPolicyManagement": text(
                    "Managed: networkPolicy is kept for the sandboxes. Unmanaged: it is not looked at.",
                    enum=("Managed", "Unmanaged"),
                    default="Managed",
                ),
                "envVarsInjectionPolicy": _policy("environment variables"),
                "volumeClaimTemplatesPolicy": _policy("volumes"),
            },
            required=("podTemplate",),
        )
    },
    required=("spec",),
)

WARM_POOL = whole(
    "So many sandboxes of a template that are kept ready to be claimed.",
    {
        "spec": record(
            "What is wanted of the pool.",
            {
                "replicas": integer(
                    "How many sandboxes are kept ready.", minimum=0, maximum=MOST_REPLICAS, default=1
                ),
                "autoscaling": record(
                    "Lets the number follow how many are claimed: status.desiredReplicas is between the bounds.",
                    {
                        "minReplicas": integer(
                            "So many are kept ready in any case; by default spec.replicas, but never more than "
                            "maxReplicas.",
                            minimum=0,
                            maximum=MOST_REPLICAS,
                        ),
                        "maxReplicas": integer(
                            "So many are kept ready at most, whatever spec.replicas says.",
                            minimum=0,
                            maximum=MOST_REPLICAS,
                        ),
                    },
                    required=("maxReplicas",),
                ),
                "sandboxTemplateRef": record(
                    "The template of the sandboxes.",
                    {"name": text("Name of a SandboxTemplate in this namespace.", minLength=1)},
                    required=("name",),
                ),
                "updateStrategy": record(
                    "How sandboxes of an older template are replaced.",
                    {
                        "type": text(
                            "OnReplenish replaces one when it is claimed; Recreate replaces all, keeping a floor.",
                            enum=("Recreate", "OnReplenish"),
                            default="OnReplenish",
                        )
                    },
                ),
            },
            required=("sandboxTemplateRef",),
        ),
        "status": record(
            "What is known of the pool.",
            {
                "replicas": integer("How many sandboxes there are in the pool, ready or not.", minimum=0),
                "readyReplicas": integer("How many sandboxes are ready to be claimed.", minimum=0),
                "desiredReplicas": integer(
                    "How many are wanted now: spec.replicas, or what autoscaling makes of them.", minimum=0
                ),
                "selector": text("A label selector that finds the pool's sandboxes."),
                "observedGeneration": integer(
                    "The metadata.generation that was last acted on.", bits=64, minimum=0
                ),
                "conditions": conditions(),
            },
        ),
    },
    required=("spec",),
)

_ENV = record(
    "An environment variable.",
    {
        "name": text("Its name.", minLength=1),
        "value": text("Its value."),
        "containerName": text("The container that gets it; the first by default."),
    },
    required=("name", "value"),
)

CLAIM = whole(
    "The wish for a sandbox out of a warm pool.",
    {
        "spec": record(
            "What is wanted.",
            {
                "warmPoolRef": record(
                    "The pool that the sandbox comes from.",
                    {"name": text("Name of a SandboxWarmPool in this namespace.", minLength=1)},
                    required=("name",),
                ),
                "lifecycle": record(
                    "When the claim ends, and how.",
                    {
                        "shutdownTime": instant("When the claim and its sandbox end."),
                        "ttlSecondsAfterFinished": integer(
                            "Seconds that a claim is kept after its sandbox has finished.", minimum=0
                        ),
                        "shutdownPolicy": text(
                            "What happens to this object when the claim ends. DeleteForeground keeps it until the "
                            "sandbox has gone.",
                            enum=("Delete", "DeleteForeground", "Retain"),
                            default="Retain",
                        ),
                    },
                ),
                "additionalPodMetadata": POD_METADATA,
                "env": atomic("Environment variables that are set when the sandbox is handed over.", _ENV),
                "volumeClaimTemplates": volume_claims(),
                "warmPolicy": text(
                    "Whether the sandbox has to be a warm one: require one, prefer one, or never.",
                    enum=("never", "prefer", "require"),
                    default="prefer",
                ),
            },
            required=("warmPoolRef",),
        ),
        "status": record(
            "What is known of the claim.",
            {
                "conditions": conditions(),
                "sandbox": record(
                    "The sandbox that was handed over.",
                    {
                        "name": text("Its name, in this namespace."),
                        "podIPs": unique(
                            "Its addresses; it has none but through the proxy.", {"type": "string"}
                        ),
                    },
                ),
            },
        ),
    },
    required=("spec",),
)

SCALE = whole(
    "A wish for so many of something (autoscaling/v1).",
    {
        "spec": record("What is wanted.", {"replicas": integer("How many.", minimum=0, default=0)}),
        "status": record(
            "What is there.",
            {
                "replicas": integer("How many there are."),
                "selector": text("A label selector that finds them."),
            },
        ),
    },
)
