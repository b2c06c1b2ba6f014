"""Walks in the documentation: commands with what they print, and the files that they need.

A command stands behind `$ ` in a block of the language `console`, its further lines behind `> `; then comes what it
printed. A block of YAML is the file that the text before it names last. `<!-- needs microVMs -->` before a block says
that the simulated engine cannot do it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DEADLINE = 300
"""Seconds for a whole walk."""
_BLOCK = re.compile(r"(?:<!-- (?P<note>[\w ]+) -->\n)?```console\n(?P<body>.*?)```", re.S)
_FILE = re.compile(r"`([\w-]+\.yaml)`:\n\n```yaml\n(.*?)```", re.S)
_MARK = "\x1e"


class Step(NamedTuple):
    """One command."""

    command: str
    printed: list[str]
    note: str = ""


class Done(NamedTuple):
    """What became of one."""

    status: int
    printed: list[str]


def steps(text: str) -> list[Step]:
    """The commands of a walk, in order."""
    found: list[Step] = []
    for block in _BLOCK.finditer(text):
        for line in block["body"].splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], [], block["note"] or ""))
            elif line == ">" or line.startswith("> "):
                found[-1] = found[-1]._replace(command=f"{found[-1].command}\n{line[2:]}")
            else:
                found[-1].printed.append(line)
    return found


def files(text: str) -> dict[str, str]:
    """The files of a walk, by name."""
    return dict(_FILE.findall(text))


def run(taken: Sequence[Step], place: Path, environment: Mapping[str, str]) -> list[Done]:
    """Run steps in one shell, in a directory; what each printed, to either stream."""
    script = "".join(f"{step.command}\nprintf '{_MARK}%s\\n' \"$?\"\n" for step in taken)
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"], cwd=place, env=dict(environment), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    parts = re.split(f"{_MARK}(\\d+)\n", done.stdout)
    assert len(parts) == 2 * len(taken) + 1, done.stdout
    return [
        Done(int(status), printed.splitlines())
        for printed, status in zip(parts[::2], parts[1::2], strict=False)
    ]


_ALIKE = (
    (r"\x1b\[[0-9;]*m", ""),
    (r"\bi[a-z0-9]{19}\b", "ID"),
    (r"-[a-z0-9]{5}\b(?=[ \"]|$)", "-NAME"),
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UID"),
    (r"\b[0-9a-f]{12}\b", "KEY"),
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
    (r"\b\d{20,30}\b", "VERSION"),
    (r"\.[a-z0-9]{6}[0-9a-f]{13,15}\.", ".EVENT."),
    (r"(?<=:)\d{4,5}\b", "PORT"),
    (r"(?<=true) +0 +\d+\b", " 0 WARM"),
    (r"(?<= )(\d+[dhms])+\b", "AGE"),
    (r"Linux \S+", "Linux RELEASE"),
    (r"a warm one was handed over|it was started for this", "IT BEGAN"),
    (r" --state-dir \S+", ""),
    (r"KUBECONFIG=\S+", "KUBECONFIG=FILE"),
    (r"\(supervisor \d+\)", "(supervisor N)"),
    (r" +", " "),
)
"""What differs from run to run, and how it is called where two are compared."""


def shape(lines: Sequence[str]) -> list[str]:
    """Lines without what differs from run to run. What roles tell of their start and end is left out."""
    found = []
    for line in lines:
        for pattern, name in _ALIKE:
            line = re.sub(pattern, name, line)
        if not re.match(r"(\w+-\d: |waiting for |nearly done|made the API key )", line):
            found.append(line.strip())
    return found
