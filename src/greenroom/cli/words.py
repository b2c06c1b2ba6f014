"""What pydantic (behind typer) and msgspec say about a wrong value, in the words of this program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from greenroom.config import Config, load
from greenroom.errors import SetupError

_OPTION_WORDS = (
    (r"Value error, ", ""),
    (r"Input should be a valid integer\b.*", "a whole number is needed"),
    (r"Input should be a valid number\b.*", "a number is needed"),
    (r"Input should be a finite number\b.*", "a number is needed"),
    (r"Input should be greater than or equal to (\S+)", r"it must be \1 or more"),
    (r"Input should be greater than (\S+)", r"it must be more than \1"),
    (r"Input should be less than or equal to (\S+)", r"it must be \1 or less"),
    (r"Input should be less than (\S+)", r"it must be less than \1"),
)
_TYPES = {
    "int": "a whole number", "float": "a number", "str": "a text in quotes", "bool": "true or false",
    "array": "a list", "object": "a table", "null": "nothing",
}  # fmt: skip


def plain_option(text: str) -> str:
    """A message about a value on the command line."""
    for pattern, words in _OPTION_WORDS:
        text = re.sub(pattern, words, text)
    return text


def plain_setting(text: str) -> str:
    """A message about a value in `config.toml`."""
    text = re.sub(r" - at `\$((?:\.\w+)*)`$", lambda match: f" (in {_place(match[1])})", text)
    text = re.sub(r"Object contains unknown field `([^`]*)`", r"there is no setting named \1", text)
    text = re.sub(r"Expected `([\w |]+)`, got `(\w+)`", lambda match: _types(match[1], match[2]), text)
    text = re.sub(r"Invalid enum value '(.*)'", r"'\1' is not one of the choices", text)
    return re.sub(r"Expected `(int|float)` ([<>]=?) (\S+)", r"the number must be \2 \3", text)


def _place(path: str) -> str:
    """`[claims] queue_wait` for `.claims.queue_wait`."""
    table, *rest = path.strip(".").split(".")
    return f"[{table}] {'.'.join(rest)}".strip()


def _types(wanted: str, got: str) -> str:
    names = " or ".join(_TYPES.get(name.strip(), name.strip()) for name in wanted.split("|"))
    return f"{names} is needed, not {_TYPES.get(got, got)}"


def plain_log_line(line: str) -> str:
    """What a line of a role's log says: the text of a JSON record with the error behind it, or the line itself."""
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line
    said = str(record.get("message", line))
    *_, cause = str(record.get("exception") or "").strip().splitlines() or [""]
    return f"{said}: {cause}" if cause else said


def load_settings(state_dir: Path) -> Config:
    """`config.load` with its complaints in plain words. Raises SetupError."""
    try:
        return load(state_dir)
    except SetupError as error:
        raise SetupError(plain_setting(error.message)) from error
    except OSError as error:
        raise SetupError(f"cannot read {state_dir / 'config.toml'}: {error.strerror}") from error
