"""A pytest plugin for the SDK's own suite: one JSON line for each test with what became of it.

Loaded with `-p recorder` by `compat/run.py`; COMPAT_RECORD names the file. A test has failed when any of its phases
has, and a skip counts as not passed. Some tests open `https://<get_host()>`: names below COMPAT_DOMAIN lead to this
machine, as a resolver for the domain would have it.
"""

import json
import os
import socket
from collections.abc import Generator
from typing import Any

import pytest

_resolve = socket.getaddrinfo
_domain = os.environ.get("COMPAT_DOMAIN", "").partition(":")[0]


def _resolve_here(host: Any, *arguments: Any, **options: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    here = isinstance(name, str) and bool(_domain) and name.endswith("." + _domain)
    return _resolve("127.0.0.1" if here else host, *arguments, **options)


socket.getaddrinfo = _resolve_here

_outcomes: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called for set-up, call and tear-down; with pytest-xdist in the controlling process."""
    row = _outcomes.setdefault(
        report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "why": ""}
    )
    row["seconds"] += report.duration
    if report.outcome != "passed" and row["outcome"] == "passed":
        row["outcome"] = report.outcome
        row["why"] = _last_line(report)


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip().splitlines()[0][:300]
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:300]
    return str(report.longrepr).strip().splitlines()[-1][:300]


@pytest.hookimpl(hookwrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Only the controlling process writes."""
    yield
    if not hasattr(session.config, "workerinput"):
        with open(os.environ["COMPAT_RECORD"], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _outcomes.values())
