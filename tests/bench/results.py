"""Conditions and rows as a run would make them, for tests of what is made of them."""

from __future__ import annotations

from greenroom.bench.report import Conditions, gather_conditions
from greenroom.runtime.engine import EngineInfo
from greenroom.wire.messages import Size

SIZE = Size("small", 1, 512, 4096)


class Quiet:
    """A meter that counts."""

    def __init__(self) -> None:
        self.total = 0
        self.advanced = 0
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin(self, total: int) -> None:
        self.total = total

    def advance(self) -> None:
        self.advanced += 1


def conditions() -> Conditions:
    engine = EngineInfo(engine="simulated", accelerator="none", version="1", reason="asked for by name")
    return gather_conditions(engine, "base", SIZE)
