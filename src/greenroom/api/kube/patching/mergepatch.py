"""JSON merge patch (RFC 7386): objects merge, null removes, everything else replaces."""

from __future__ import annotations

from typing import Any

from greenroom.api.kube.objects import copied


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """The patched copy of `target`."""
    if not isinstance(patch, dict):
        return copied(patch)
    result = copied(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply_merge_patch(result.get(name), value)
    return result
