"""What the node daemon has told this agent: tokens, environment, defaults. Plain state, no logic."""

from __future__ import annotations

from dataclasses import dataclass, field


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
