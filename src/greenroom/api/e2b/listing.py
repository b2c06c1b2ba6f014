"""Listing: which sandboxes, in which order, which page. Pure: query strings and records in, a page out.

Pages are cut by *where* the last one ended (start time and id of its last entry), not by how many entries
came before. So a page neither repeats nor skips a sandbox that existed all along, whatever ended or began
between two requests, and any replica of the api can serve the next page.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from operator import attrgetter
from typing import Literal
from urllib.parse import parse_qsl, unquote

import msgspec

from greenroom.api.e2b.schemas import micros
from greenroom.errors import BadRequest
from greenroom.wire.ids import is_sandbox_id, is_snapshot_id
from greenroom.wire.messages import Listed

Position = tuple[int, str]
"""Start time in microseconds and id: the order of lists, without ties."""
State = Literal["running", "paused"]

_STATES: dict[str, State] = {"running": "running", "paused": "paused"}
_SPACE_FOR_PLUS = re.compile(r"(T[0-9:.]+) ([0-9]{2}:?[0-9]{2})")
_MAX_FILTERS = 64
_TWO_GRAINS = 2e-6
"""Seconds; start times that lie further apart have different microseconds, however they are rounded."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A list request, checked."""

    metadata: dict[str, str] = {}
    states: frozenset[State] = frozenset({"running", "paused"})
    newest_first: bool = True
    started_after: int | None = None
    """Microseconds since the epoch; a sandbox that started exactly then belongs to the list."""
    template: str | None = None
    limit: int = 100
    after: Position | None = None
    """Where the page before ended."""


class Page(msgspec.Struct, frozen=True):
    """One page, how many running sandboxes match in all, and the cursor of the next page if there is one."""

    sandboxes: list[Listed]
    running: int
    next_token: str | None


def parse_query(params: Mapping[str, str], states: Iterable[str], page_limit: int) -> Query:
    """Read a list request's query. `states` are all values of `state`. Raises BadRequest naming the field."""
    order = params.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise BadRequest("order: asc or desc is needed")
    started_after = params.get("startedAfter")
    token = params.get("nextToken")
    return Query(
        metadata=parse_metadata(params.get("metadata", "")),
        states=_parse_states(states),
        newest_first=order == "desc",
        started_after=None if not started_after else parse_instant(started_after),
        template=params.get("template") or None,
        limit=parse_limit(params.get("limit"), page_limit),
        after=None if not token else decode_cursor(token),
    )


def parse_metadata(text: str) -> dict[str, str]:
    """The pairs of a metadata filter.

    E2B's clients percent-encode each key and value, encode the pairs as a form, and send that as one query
    value; the outermost encoding is gone when this is called.
    """
    if not text:
        return {}
    try:
        pairs = parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=_MAX_FILTERS,
        )
        return {unquote(key, errors="strict"): unquote(value, errors="strict") for key, value in pairs}
    except ValueError as error:
        raise BadRequest("metadata: an encoded form such as `user=abc&app=prod` is needed") from error


def parse_instant(text: str) -> int:
    """Microseconds since the epoch of an ISO 8601 time with its zone. Raises BadRequest."""
    # A plus sign that a client did not encode arrives as a space.
    text = _SPACE_FOR_PLUS.sub(r"\1+\2", text)
    try:
        instant = datetime.fromisoformat(text)
        if instant.tzinfo is not None:
            return micros_of(instant)
    except (ValueError, OverflowError):
        pass
    raise BadRequest("startedAfter: an ISO 8601 time with its zone is needed")


def micros_of(instant: datetime) -> int:
    """Microseconds since the epoch, by whole numbers: a float would lose the last digit."""
    epoch = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    delta = instant - epoch
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def _parse_states(values: Iterable[str]) -> frozenset[State]:
    names = {name.strip() for value in values for name in value.split(",")} - {""}
    if unknown := names - _STATES.keys():
        raise BadRequest(f"state: running and paused are known, not {min(unknown)[:40]!r}")
    return frozenset(_STATES[name] for name in names or _STATES)


def parse_limit(text: str | None, page_limit: int) -> int:
    """How many entries a page may have. Raises BadRequest."""
    if text is None or text == "":
        return page_limit
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= page_limit:
        raise BadRequest(f"limit: 1 to {page_limit} is allowed")
    return int(text)


def position_of(sandbox: Listed) -> Position:
    """Where a sandbox stands in the order of lists."""
    return (micros(sandbox.started_at), sandbox.sandbox_id)


def page_of(positions: list[Position], after: Position | None, limit: int) -> tuple[slice, Position | None]:
    """Which of `positions` (in falling order) make the page behind `after`, and where it ends if more follow."""
    first = next((n for n, at in enumerate(positions) if after is None or at < after), len(positions))
    end = min(first + limit, len(positions))
    return slice(first, end), positions[end - 1] if end < len(positions) else None


def encode_cursor(position: Position) -> str:
    """An opaque text for a position, safe in headers and URLs."""
    started, sandbox_id = position
    return base64.urlsafe_b64encode(f"1:{started}:{sandbox_id}".encode()).decode().rstrip("=")


def decode_cursor(token: str) -> Position:
    """The position of a cursor. Raises BadRequest on anything that `encode_cursor` did not make."""
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
        version, started, sandbox_id = text.split(":")
        position = (int(started), sandbox_id)
    except (ValueError, binascii.Error) as error:
        raise BadRequest("nextToken: this is not a token of this list") from error
    known = is_sandbox_id(sandbox_id) or is_snapshot_id(sandbox_id)
    if version != "1" or not known or encode_cursor(position) != token:
        raise BadRequest("nextToken: this is not a token of this list")
    return position


def select(
    sandboxes: Iterable[Listed], query: Query, owner: str, template_name: str | None = None
) -> list[Listed]:
    """The owner's sandboxes that match the filters, in order; paging is `cut`'s.

    `template_name` is the name of the template that `query.template` refers to; with a template filter but
    no such template nothing matches.
    """
    wanted = query.metadata.items()
    found = [
        sandbox
        for sandbox in sandboxes
        if sandbox.owner == owner
        and sandbox.state in query.states
        and wanted <= sandbox.metadata.items()
        and (query.template is None or sandbox.template == template_name)
        and (query.started_after is None or micros(sandbox.started_at) >= query.started_after)
    ]
    sort(found)
    if query.newest_first:
        found.reverse()
    return found


def sort(found: list[Listed]) -> None:
    """Put sandboxes into the order of `position_of`, the oldest first.

    Start times as they are sort much faster than positions, and give the same order but for those that start within
    the same microsecond or the next.
    """
    found.sort(key=attrgetter("started_at"))
    begin = 0
    for end in range(1, len(found) + 1):
        if end == len(found) or found[end].started_at - found[end - 1].started_at > _TWO_GRAINS:
            if end - begin > 1:
                found[begin:end] = sorted(found[begin:end], key=position_of)
            begin = end


def cut(selected: list[Listed], query: Query) -> Page:
    """The page of `selected` (which is in the query's order) that follows `query.after`."""
    rest = selected
    if query.after is not None:
        after = query.after
        if query.newest_first:
            rest = [sandbox for sandbox in selected if position_of(sandbox) < after]
        else:
            rest = [sandbox for sandbox in selected if position_of(sandbox) > after]
    page = rest[: query.limit]
    more = len(rest) > query.limit
    return Page(
        page,
        sum(sandbox.state == "running" for sandbox in selected),
        encode_cursor(position_of(page[-1])) if more else None,
    )
