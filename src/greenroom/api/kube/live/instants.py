"""Instants of records (Unix seconds) and of objects (RFC 3339), and which of them mean the same. Pure."""

from __future__ import annotations

import time
from functools import lru_cache

from greenroom.api.kube.objects import instant_of


@lru_cache(maxsize=8192)
def _text(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def instant_text(seconds: float) -> str:
    """An instant as objects have it, in whole seconds."""
    return _text(int(seconds))


def seconds_of(text: object) -> float | None:
    """The Unix seconds of a text, or None where it is no instant."""
    instant = instant_of(text)
    return None if instant is None else instant.timestamp()


def same_instant(text: object, seconds: float | None) -> bool:
    """Whether a text, or none, means this instant, to a millisecond."""
    if seconds is None or text is None:
        return seconds is None and text is None
    told = seconds_of(text)
    return told is not None and abs(told - seconds) < 0.001
