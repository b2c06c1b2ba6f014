"""Statuses have the reasons, codes and texts that clients know, whatever error they come from."""

from __future__ import annotations

import json

import pytest

from greenroom import errors
from greenroom.api.kube import status
from greenroom.api.kube.status import Cause, StatusError, Subject

SANDBOX = Subject("agents.x-k8s.io", "sandboxes", "box")


def every_error() -> list[type[errors.GreenroomError]]:
    """All of Greenroom's own error types."""
    found: list[type[errors.GreenroomError]] = []
    waiting = [errors.PermanentError, errors.TemporaryError]
    while waiting:
        each = waiting.pop()
        if each.__module__ == errors.__name__:
            found.append(each)
            waiting += each.__subclasses__()
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.parametrize(
    ("failure", "code", "reason", "text"),
    [
        (status.not_found(SANDBOX), 404, "NotFound", 'sandboxes.agents.x-k8s.io "box" not found'),
        (
            status.already_exists(SANDBOX),
            409,
            "AlreadyExists",
            'sandboxes.agents.x-k8s.io "box" already exists',
        ),
        (status.conflict(SANDBOX), 409, "Conflict", "the object has been modified"),
        (status.bad_request("no"), 400, "BadRequest", "no"),
        (status.unauthorized(), 401, "Unauthorized", "Unauthorized"),
        (status.forbidden(SANDBOX, "not yours"), 403, "Forbidden", '"box" is forbidden: not yours'),
        (status.method_not_allowed(SANDBOX, "patch"), 405, "MethodNotAllowed", "patch is not supported"),
        (
            status.method_not_allowed(Subject("", "namespaces"), "POST"),
            405,
            "MethodNotAllowed",
            "a namespace is there as soon as something is in it",
        ),
        (status.not_acceptable(["a/b"]), 406, "NotAcceptable", "only the following media types"),
        (status.unsupported_media_type(["a/b"]), 415, "UnsupportedMediaType", "unknown format"),
        (status.expired("old"), 410, "Expired", "old"),
        (status.gone("gone"), 410, "Gone", "gone"),
        (status.too_large(7), 413, "RequestEntityTooLarge", "limit is 7 bytes"),
        (status.too_many_requests("slow", 3), 429, "TooManyRequests", "slow"),
        (status.unavailable("later"), 503, "ServiceUnavailable", "later"),
        (status.timeout("late"), 504, "Timeout", "Timeout: late"),
        (status.internal("x"), 500, "InternalError", "Internal error occurred: x"),
    ],
    ids=lambda value: value.reason if isinstance(value, StatusError) else "",
)
def test_each_failure_has_its_code_reason_and_text(
    failure: StatusError, code: int, reason: str, text: str
) -> None:
    body = failure.body()
    assert (body["code"], body["reason"], body["status"]) == (code, reason, "Failure")
    assert (body["kind"], body["apiVersion"]) == ("Status", "v1")
    assert text in body["message"]


def test_one_cause_reads_as_a_sentence_and_several_as_a_list() -> None:
    one = Cause("FieldValueRequired", "Required value", "spec.x")
    two = Cause("FieldValueInvalid", "Invalid value: 1: no", "spec.y")
    kind = Subject("agents.x-k8s.io", "Sandbox", "box")
    single, double = status.invalid(kind, [one]), status.invalid(kind, [one, two])
    assert single.message == 'Sandbox.agents.x-k8s.io "box" is invalid: spec.x: Required value'
    assert double.message.endswith("is invalid: [spec.x: Required value, spec.y: Invalid value: 1: no]")
    assert double.body()["details"] == {
        "name": "box",
        "group": "agents.x-k8s.io",
        "kind": "Sandbox",
        "causes": [
            {"reason": "FieldValueRequired", "message": "Required value", "field": "spec.x"},
            {"reason": "FieldValueInvalid", "message": "Invalid value: 1: no", "field": "spec.y"},
        ],
    }


def test_a_status_tells_a_bounded_number_of_causes() -> None:
    causes = [Cause("FieldValueRequired", "Required value", f"spec.x{n}") for n in range(10_000)]
    failure = status.invalid(Subject("", "Sandbox", "box"), causes)
    assert len(failure.causes) == status.CAUSES
    assert len(failure.message) < 100 * status.CAUSES


def test_apply_conflicts_are_told_by_manager() -> None:
    ours = Cause("FieldManagerConflict", 'conflict with "b"', ".spec.x")
    other = Cause("FieldManagerConflict", 'conflict with "a"', ".spec.y")
    assert status.apply_conflict([ours]).message == 'Apply failed with 1 conflict: conflict with "b": .spec.x'
    assert status.apply_conflict([ours, other]).message == (
        'Apply failed with 2 conflicts: conflict with "a":\n- .spec.y\nconflict with "b":\n- .spec.x'
    )


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_of_ours_has_a_status_that_keeps_its_meaning_for_retry(
    kind: type[errors.GreenroomError],
) -> None:
    failure = status.status_of(kind("what to do"))
    assert failure.message == "what to do"
    assert (failure.retry is not None) == issubclass(kind, errors.TemporaryError)
    assert failure.code == (504 if kind is errors.OutcomeUnknown else kind.status)
    assert failure.reason != "InternalError" or failure.code == 500


def test_a_dry_pool_says_so_and_when_to_come_again() -> None:
    response = status.render(errors.PoolDry("no warm sandbox", 2.2))
    body = json.loads(response.body)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert (body["reason"], body["details"]["retryAfterSeconds"]) == ("PoolExhausted", 3)


def test_what_else_belongs_into_headers() -> None:
    assert (
        status.render(status.method_not_allowed(SANDBOX, "patch", "GET, PUT")).headers["allow"] == "GET, PUT"
    )
    assert "www-authenticate" in status.render(errors.Unauthorized("who?")).headers
    token = json.loads(status.render(status.expired("old", "abc")).body)["metadata"]
    assert token == {"continue": "abc"}


def test_success_says_what_is_gone() -> None:
    body = status.success(SANDBOX, "u-1")
    assert body["status"] == "Success"
    assert body["details"] == {"name": "box", "group": "agents.x-k8s.io", "kind": "sandboxes", "uid": "u-1"}
