"""What Envoy itself answers, as JSON in E2B's forms: `{"code", "message"}`, with `sandboxId` where there is one.

The first mapper whose filter holds writes the answer. Envoy's response flags tell what happened
(https://www.envoyproxy.io/docs/envoy/latest/configuration/observability/access_log/usage#response-flags):
NC no such cluster, UF cannot connect, UH no healthy host, UO circuit breaker open, URX retries used up, UC the
upstream closed before it answered, UPE the upstream did not speak HTTP.
"""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]

_UNREACHABLE = ["UF", "UH", "UO", "URX"]
_LOST = ["UC", "UPE", "UR"]


def local_replies() -> Document:
    """The `local_reply_config` of the entry's connection manager."""
    return {
        "mappers": [
            _mapper(
                _has("x-greenroom-refusal"),
                {"code": "%RESPONSE_CODE%", "message": "%REQ(x-greenroom-refusal)%"},
            ),
            # A sandbox of a node that is not there is not there either; the relay answers the same.
            _mapper(_both(_TO_SANDBOX, _flags("NC")), _of_sandbox("The sandbox was not found"), status=502),
            _mapper(
                _both(_TO_SANDBOX, _flags(*_LOST)),
                _of_sandbox("The connection to the sandbox was lost before it answered"),
                status=502,
            ),
            _mapper(
                _both(_TO_SANDBOX, _flags(*_UNREACHABLE)),
                _of_sandbox("The sandbox's node cannot be reached; try again"),
                status=503,
                retry=True,
            ),
            # Not 503: E2B's clients repeat a 503, and the api may have done what it was asked.
            _mapper(
                _flags(*_LOST),
                _plain("The api's answer was lost; the request may or may not have been carried out"),
                status=502,
            ),
            _mapper(
                _flags(*_UNREACHABLE), _plain("The api cannot be reached; try again"), status=503, retry=True
            ),
        ],
        "body_format": {"json_format": {"code": "%RESPONSE_CODE%", "message": "%LOCAL_REPLY_BODY%"}},
    }


def _plain(message: str) -> Document:
    return {"code": "%RESPONSE_CODE%", "message": message}


def _of_sandbox(message: str) -> Document:
    return {"sandboxId": "%REQ(x-greenroom-sandbox)%", "message": message, "code": "%RESPONSE_CODE%"}


def _has(header: str) -> Document:
    return {"header_filter": {"header": {"name": header, "present_match": True}}}


_TO_SANDBOX = _has("x-greenroom-cluster")


def _flags(*flags: str) -> Document:
    return {"response_flag_filter": {"flags": list(flags)}}


def _both(*filters: Document) -> Document:
    return {"and_filter": {"filters": list(filters)}}


def _mapper(
    condition: Document, body: Document, status: int | None = None, *, retry: bool = False
) -> Document:
    mapper: Document = {"filter": condition, "body_format_override": {"json_format": body}}
    if status is not None:
        mapper["status_code"] = status
    if retry:
        mapper["headers_to_add"] = [{"header": {"key": "retry-after", "value": "1"}}]
    return mapper
