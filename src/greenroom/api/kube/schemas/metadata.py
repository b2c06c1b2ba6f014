"""What every object has: `ObjectMeta`, conditions, and the fields around a kind's own (`meta/v1` of apimachinery)."""

from __future__ import annotations

from greenroom.api.kube.schemas.building import (
    PRESERVE,
    Schema,
    atomic,
    boolean,
    instant,
    integer,
    keyed,
    mapping,
    record,
    text,
    unique,
)

LABELS = mapping("Keys and values to organize and select objects by.")
ANNOTATIONS = mapping("Keys and values that tools keep with the object; they cannot be selected by.")

OWNER_REFERENCE = record(
    "An object that this one belongs to, in the same namespace or without one.",
    {
        "apiVersion": text("API version of the owner."),
        "kind": text("Kind of the owner."),
        "name": text("Name of the owner."),
        "uid": text("UID of the owner."),
        "controller": boolean("Whether this owner is the managing controller."),
        "blockOwnerDeletion": boolean(
            "Whether the owner cannot go in the foreground before this object has gone."
        ),
    },
    required=("apiVersion", "kind", "name", "uid"),
    whole=True,
)

MANAGED_FIELDS_ENTRY = record(
    "What one manager set, by one operation.",
    {
        "apiVersion": text("API version that the field paths are of."),
        "fieldsType": text("FieldsV1 is the only format there is."),
        "fieldsV1": {
            "type": "object",
            "description": "The set of fields, as a tree of keys.",
            PRESERVE: True,
        },
        "manager": text("The one who set the fields."),
        "operation": text("Apply or Update."),
        "subresource": text(
            "The subresource through which the fields were set; empty for the object itself."
        ),
        "time": instant("When the manager's set of fields last changed."),
    },
)

OBJECT_META = record(
    "Standard object metadata.",
    {
        "name": text("The name, unique for its kind within a namespace. Cannot be updated."),
        "generateName": text("A prefix; the server appends five characters to it when there is no name."),
        "namespace": text("The space within which the name is unique. Cannot be updated."),
        "uid": text("Unique in time and space; given by the server. Read-only."),
        "resourceVersion": text(
            "The version of this object. An update that names one is refused when it is not the current one."
        ),
        "generation": integer("Counts the desired states; given by the server. Read-only.", bits=64),
        "creationTimestamp": instant(
            "When the object was made; given by the server. Read-only.", nullable=True
        ),
        "deletionTimestamp": instant(
            "When the object was asked to go; it goes when its last finalizer is gone. Read-only.",
            nullable=True,
        ),
        "deletionGracePeriodSeconds": integer("Seconds that the object may take to go. Read-only.", bits=64),
        "labels": LABELS,
        "annotations": ANNOTATIONS,
        "ownerReferences": keyed("Objects that this one belongs to.", OWNER_REFERENCE, "uid"),
        "finalizers": unique(
            "Names of those who have to agree before the object goes. None may be added once it is going.",
            {"type": "string"},
        ),
        "managedFields": atomic("Who set which fields; kept by the server.", MANAGED_FIELDS_ENTRY),
        "selfLink": text("Not used any more; the server leaves it out."),
    },
)

LIST_META = record(
    "Metadata of a list.",
    {
        "resourceVersion": text("The version that the list was made at; a watch may start from it."),
        "continue": text("A token to ask for the rest of the list with; empty when there is none."),
        "remainingItemCount": integer(
            "How many objects the rest of the list has, where it is known.", bits=64
        ),
        "selfLink": text("Not used any more."),
    },
)

CONDITION = record(
    "One aspect of the current state.",
    {
        "type": text("Name of the condition.", maxLength=316),
        "status": text("Whether it holds.", enum=("True", "False", "Unknown")),
        "observedGeneration": integer("The metadata.generation that it was observed at.", bits=64, minimum=0),
        "lastTransitionTime": instant("When the status last changed."),
        "reason": text("Why it last changed, in one word for programs.", minLength=1, maxLength=1024),
        "message": text("Details of the last change, for people.", maxLength=32768),
    },
    required=("type", "status", "lastTransitionTime", "reason", "message"),
)


def conditions() -> Schema:
    """The `conditions` of a status."""
    return keyed("What is known about the current state, one entry for each type.", CONDITION, "type")


def whole(description: str, fields: dict[str, Schema], *, required: tuple[str, ...] = ()) -> Schema:
    """The schema of a kind: its own fields beside apiVersion, kind and metadata."""
    return record(
        description,
        {
            "apiVersion": text("Group and version of this representation of the object."),
            "kind": text("The kind of the object."),
            "metadata": OBJECT_META,
            **fields,
        },
        required=required,
    )
