"""`NodeInventory`: what a node has, as the fleet's view knows it. Made when it is read, and never written."""

from __future__ import annotations

from greenroom.api.kube.schemas.building import atomic, boolean, instant, integer, mapping, record, text
from greenroom.api.kube.schemas.metadata import whole

_POOL = record(
    "The node's part of a warm pool.",
    {
        "template": text("The template of its sandboxes."),
        "net": text("The network that they are in."),
        "size": text("Their size."),
        "warm": integer("How many are ready to be claimed.", minimum=0),
        "target": integer("How many shall be ready.", minimum=0),
    },
)

_TEMPLATE = record(
    "A template that the node has.",
    {
        "template": text("Its name."),
        "net": text("The network of its sandboxes."),
        "size": text("The size of its sandboxes."),
        "contentDigest": text("A digest of what it is made of."),
        "tenant": text("Whose it is; empty when it is everybody's."),
        "createdAt": instant("When it was made."),
        "cpuCount": integer("CPUs of its sandboxes.", minimum=0),
        "memoryBytes": integer("Memory of its sandboxes, in bytes.", bits=64, minimum=0),
        "labels": mapping("Its labels."),
    },
)

_ENTRY = record(
    "A sandbox that somebody owns.",
    {
        "name": text("Namespace and name, as ns/name."),
        "id": text("The sandbox's id."),
        "phase": text("Running or Paused."),
        "template": text("The template that it was made from."),
        "claimRef": text("The claim that it was handed to, as ns/name."),
        "addr": text("Where it is reached, as host:port."),
        "deadline": instant("When it ends."),
        "claimedAt": instant("When it was handed over."),
        "cpuCount": integer("Its CPUs.", minimum=0),
        "memoryBytes": integer("Its memory, in bytes.", bits=64, minimum=0),
    },
)

INVENTORY = whole(
    "What a node has: its part of the warm pools, its templates, its sandboxes.",
    {
        "node": text("The node's name, which is this object's name."),
        "address": text("Where the node is reached, as host:port."),
        "publishedAt": instant("When the node last told what it has."),
        "reachable": boolean(
            "Whether the node can be read at present. When not, this is what was last known."
        ),
        "pools": atomic("The node's parts of warm pools.", _POOL),
        "templates": atomic("Templates that the node has.", _TEMPLATE),
        "entries": atomic("Sandboxes that somebody owns.", _ENTRY),
    },
)
