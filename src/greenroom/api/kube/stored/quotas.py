"""What a ResourceQuota may bound, and its status from what the nodes tell. Pure. The master enforces quotas."""

from __future__ import annotations

from typing import Final

from greenroom.api.kube.objects import Object
from greenroom.api.kube.status import Cause
from greenroom.api.kube.validation import unsupported, wrong
from greenroom.errors import BadRequest
from greenroom.fleet.usage import Amount
from greenroom.wire.podsizes import quantity

COUNT: Final = "count/sandboxes.agents.x-k8s.io"
CPU: Final = "requests.cpu"
MEMORY: Final = "requests.memory"
KEYS: Final = (COUNT, CPU, MEMORY)


def problems(obj: Object) -> list[Cause]:
    """What is wrong with a quota."""
    hard = (obj.get("spec") or {}).get("hard") or {}
    found: list[Cause] = []
    for name, amount in hard.items():
        path = f"spec.hard[{name[:80]}]"
        if name not in KEYS:
            found.append(unsupported(path, name[:80], KEYS))
            continue
        try:
            number = quantity(amount)
        except BadRequest as error:
            found.append(wrong(path, amount, error.message))
            continue
        if number < 0:
            found.append(wrong(path, amount, "must be greater than or equal to 0"))
        elif name == COUNT and number.denominator != 1:
            found.append(wrong(path, amount, "must be a whole number"))
    return found


def status_of(document: Object, used: Amount) -> Object:
    """The status of a quota whose namespace has `used`."""
    hard = dict((document.get("spec") or {}).get("hard") or {})
    amounts = {COUNT: str(used.sandboxes), CPU: str(used.cpus), MEMORY: _memory(used.memory_mib)}
    return {"hard": hard, "used": {name: amounts[name] for name in hard if name in amounts}}


def _memory(mib: int) -> str:
    if mib and mib % 1024 == 0:
        return f"{mib // 1024}Gi"
    return f"{mib}Mi" if mib else "0"
