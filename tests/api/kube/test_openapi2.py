"""The older description has what clients look for, in JSON and in Protocol Buffers alike."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from greenroom.api.kube.kinds import CORE, KINDS, Kind
from greenroom.api.kube.openapi import GVK, component
from greenroom.api.kube.openapi2 import ANSWERED, PROTOBUF, document, documents, encoded
from greenroom.api.kube.status import StatusError

ALL = (*KINDS, *CORE)


def parts(data: bytes, number: int) -> Iterator[bytes]:
    """The length-delimited fields of a message that have a number; there are none of other types here but flags."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag, length = varint(), varint()
        if tag & 7 == 0:
            continue
        if tag >> 3 == number:
            yield data[at : at + length]
        at += length


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_every_kind_is_known_by_its_name_in_both_forms(kind: Kind) -> None:
    made = document(ALL)
    name = component(kind.group, kind.version, kind.name)
    known = {"group": kind.group, "version": kind.version, "kind": kind.name}
    assert made["definitions"][name][GVK] == [known]
    (definitions,) = parts(encoded(made), 9)
    named = {next(parts(each, 1)).decode(): next(parts(each, 2)) for each in parts(definitions, 1)}
    extensions = {next(parts(each, 1)).decode(): next(parts(each, 2)) for each in parts(named[name], 31)}
    assert json.loads(next(parts(extensions[GVK], 2))) == [known]
    (fields,) = parts(named[name], 25)
    assert {next(parts(each, 1)).decode() for each in parts(fields, 1)} == kind.root_fields


def test_patches_can_be_tried_out() -> None:
    patches = [item["patch"] for item in document(ALL)["paths"].values()]
    assert {patch[GVK]["kind"] for patch in patches} == {kind.name for kind in ALL if "patch" in kind.verbs}
    assert all("dryRun" in {each["name"] for each in patch["parameters"]} for patch in patches)
    (paths,) = parts(encoded(document(ALL)), 8)
    assert len(list(parts(paths, 2))) == len(patches)


def test_fields_are_not_told_where_others_may_be() -> None:
    """A client that checks by this would refuse those that are not told."""
    spec = document(ALL)["definitions"]["io.x-k8s.agents.v1beta1.Sandbox"]["properties"]["spec"]
    assert "properties" not in spec["properties"]["podTemplate"]["properties"]["spec"]
    assert "shutdownTime" in spec["properties"]


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        (PROTOBUF, ANSWERED),
        (f"{PROTOBUF},application/json", ANSWERED),
        (f"application/json,{PROTOBUF}", "application/json"),
    ],
)
def test_the_form_is_the_one_that_is_wanted_most(accept: str, media_type: str) -> None:
    found, told = documents(ALL).wanted(accept)
    assert told == media_type
    assert found.body.startswith(b"{") == (media_type == "application/json")


def test_another_form_is_refused() -> None:
    with pytest.raises(StatusError, match="only the following media types"):
        documents(ALL).wanted("text/html")
