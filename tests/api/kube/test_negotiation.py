"""Clients get the form that they ask for first, or a 406."""

from __future__ import annotations

import pytest

from greenroom.api.kube.negotiation import (
    APPLY_PATCH,
    JSON,
    PATCHES,
    accepts,
    body_type,
    form_of,
    include_of,
    media_ranges,
)
from greenroom.api.kube.status import StatusError

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
KUBECTL = f"{TABLE},application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "object"),
        ("*/*", "object"),
        ("application/json", "object"),
        ("application/yaml, application/json", "object"),
        (KUBECTL, "table"),
        ("application/json, " + TABLE, "object"),
        ("application/json;q=0.5, " + TABLE, "table"),
        ("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", "partial"),
        ("application/vnd.kubernetes.protobuf,application/json", "object"),
        ("application/json;as=Table;v=v9;g=meta.k8s.io,*/*;q=0.1", "object"),
    ],
)
def test_forms(accept: str, form: str) -> None:
    assert form_of(accept) == form


def test_what_cannot_be_had_is_not_acceptable() -> None:
    for accept in ("application/yaml", "application/json;q=0", "application/json;as=Tree;v=v1;g=x"):
        with pytest.raises(StatusError) as refused:
            form_of(accept)
        assert refused.value.code == 406, accept
    assert form_of(KUBECTL, alone=True) == "object"
    with pytest.raises(StatusError):
        form_of(TABLE, alone=True)
    with pytest.raises(StatusError) as refused:
        media_ranges("x" * 5000)
    assert refused.value.code == 400


def test_media_types_in_and_out() -> None:
    assert accepts("text/html, application/*")
    assert not accepts("text/html")
    assert body_type("") == JSON
    assert body_type("application/JSON; charset=utf-8") == JSON
    assert body_type(APPLY_PATCH, PATCHES) == APPLY_PATCH
    with pytest.raises(StatusError) as refused:
        body_type("application/yaml")
    assert refused.value.code == 415


def test_what_rows_include() -> None:
    assert [include_of(each) for each in (None, "None", "Object")] == ["Metadata", "None", "Object"]
    with pytest.raises(StatusError):
        include_of("Everything")
