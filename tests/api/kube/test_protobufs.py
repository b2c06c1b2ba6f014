"""The reviews that kubectl writes in Protocol Buffers are read as what they are; anything else is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.protobufs import KINDS, MAGIC, decoded
from greenroom.api.kube.status import StatusError


def field(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2, len(data)]) + data


def envelope(kind: str, raw: bytes) -> bytes:
    return MAGIC + field(1, field(1, "authorization.k8s.io/v1") + field(2, kind)) + field(2, raw)


def test_an_access_review() -> None:
    attributes = field(1, "team") + field(2, "list") + field(3, "agents.x-k8s.io") + field(5, "sandboxes")
    body = envelope("SelfSubjectAccessReview", field(1, b"") + field(2, field(1, attributes)))
    assert decoded(body, "SelfSubjectAccessReview") == {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "namespace": "team",
                "verb": "list",
                "group": "agents.x-k8s.io",
                "resource": "sandboxes",
            }
        },
    }


def test_a_quota_with_what_a_client_sets() -> None:
    labels = field(11, field(1, "team") + field(2, "a")) + field(11, field(1, "bare") + field(2, ""))
    metadata = field(1, "q") + field(3, "") + field(5, "") + labels + field(14, "x/y") + field(8, b"")
    hard = field(1, field(1, "requests.cpu") + field(2, field(1, "4")))
    hard += field(1, field(1, "requests.memory") + field(2, field(1, "8Gi")))
    raw = field(1, metadata) + field(2, hard + field(2, "BestEffort")) + field(3, b"")
    assert decoded(envelope("ResourceQuota", raw), "ResourceQuota") == {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q", "labels": {"team": "a", "bare": ""}, "finalizers": ["x/y"]},
        "spec": {"hard": {"requests.cpu": "4", "requests.memory": "8Gi"}, "scopes": ["BestEffort"]},
    }


def test_numbers_and_unknown_fields_are_passed_over() -> None:
    # A varint, 8 and 4 bytes, then a text.
    raw = bytes([9 << 3, 0xFF, 0x01]) + bytes([10 << 3 | 1]) + bytes(8) + bytes([11 << 3 | 5]) + bytes(4)
    body = envelope("SelfSubjectRulesReview", raw + field(2, field(1, "ns")))
    assert decoded(body, "SelfSubjectRulesReview")["spec"] == {"namespace": "ns"}


def test_another_kind_is_refused() -> None:
    with pytest.raises(StatusError, match="expected kind"):
        decoded(envelope("Pod", b""), "SelfSubjectReview")
    with pytest.raises(StatusError):
        decoded(b"{}", "SelfSubjectReview")


@given(st.binary(max_size=200), st.sampled_from(sorted(KINDS)))
def test_whatever_comes_is_read_or_refused(data: bytes, kind: str) -> None:
    for body in (MAGIC + data, envelope(kind, data[:100])):
        with contextlib.suppress(StatusError):
            assert isinstance(decoded(body, kind), dict)
