"""What the node daemon has told this agent: tokens, environment, defaults. Plain state, no logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Settings:
    """The sandbox's identity as far as requests need it.

    ``access_token`` opens the data plane (None: open to all), ``control_token`` the control routes,
    ``environment`` goes into every command. Tokens are never logged and never shown.
    """

    access_token: str | None = field(default=None, repr=False)
    control_token: str | None = field(default=None, repr=False)
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    default_user: str = "user"
    default_workdir: str = ""

    def dump(self) -> dict[str, Any]:
        """Everything, tokens included, for the private file that outlives a crash of the agent."""
        return asdict(self)

    def take(self, other: Settings) -> None:
        """Become equal to another one; whoever holds this object sees the change."""
        for item in fields(self):
            setattr(self, item.name, getattr(other, item.name))

    def restore(self, dumped: Mapping[str, Any]) -> None:
        """Take back what :meth:`dump` gave; unknown names are ignored."""
        for item in fields(self):
            if item.name in dumped:
                setattr(self, item.name, dumped[item.name])
