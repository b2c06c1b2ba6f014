"""Label and field selectors: what a list, a watch or a deletecollection is narrowed to.

The grammar and the texts are apimachinery's (`labels.Parse`, `fields.ParseSelector`); see "Labels and Selectors" and
"Field Selectors" in Kubernetes' documentation. Pure: a text becomes a selector once, and it is then asked per object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from greenroom.api.kube.kinds import field
from greenroom.api.kube.objectmeta import qualified_problem, value_problem
from greenroom.api.kube.objects import Object, metadata_of
from greenroom.api.kube.rows import Item, Row
from greenroom.api.kube.status import StatusError, bad_request

LENGTH_LIMIT = 8 << 10
"""Characters of a selector."""
_TOKEN = re.compile(r"\s*(==|!=|=|!|,|\(|\)|<|>|[^\s=!,()<>]+)|\s+$")
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
_OPERATORS: Final = {"=": "=", "==": "=", "!=": "!=", "in": "in", "notin": "notin", ">": ">", "<": "<"}
_SPECIAL: Final = frozenset(("=", "==", "!=", "!", ",", "(", ")", "<", ">"))


class Requirement(msgspec.Struct, frozen=True):
    """One part of a label selector; `operator` is one of `=`, `!=`, in, notin, exists, `!`, `<`, `>`."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels meets it. What has no such label is not equal to anything."""
        value = labels.get(self.key)
        match self.operator:
            case "exists":
                return value is not None
            case "!":
                return value is None
            case "=" | "in":
                return value in self.values
            case "!=" | "notin":
                return value not in self.values
        if value is None or not _NUMBER.fullmatch(value):
            return False
        return int(value) > int(self.values[0]) if self.operator == ">" else int(value) < int(self.values[0])

    def __str__(self) -> str:
        if self.operator in ("in", "notin"):
            return f"{self.key} {self.operator} ({','.join(sorted(self.values))})"
        if self.operator == "exists":
            return self.key
        return f"!{self.key}" if self.operator == "!" else f"{self.key}{self.operator}{self.values[0]}"


class LabelSelector(msgspec.Struct, frozen=True):
    """All requirements have to be met; without any, everything matches."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is selected."""
        return all(each.matches(labels) for each in self.requirements)

    def __str__(self) -> str:
        return ",".join(str(each) for each in self.requirements)


def parse_labels(text: str) -> LabelSelector:
    """The selector that a `labelSelector` parameter names. Raises 400."""
    _bounded(text)
    parser = _Labels(_tokens(text))
    return LabelSelector(tuple(sorted(parser.requirements(), key=lambda each: each.key)))


class _Labels:
    """Recursive descent over the tokens of a label selector."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        word = self._peek()
        self._at += 1
        return word

    def requirements(self) -> Iterator[Requirement]:
        if not self._tokens:
            return
        while True:
            yield self._requirement()
            word = self._next()
            if word == "":
                return
            if word != ",":
                raise _unparsable(f"found '{word}', expected: ',' or 'end of string'")
            if self._peek() in ("", ","):
                raise _unparsable(f"found '{self._peek()}', expected: identifier after ','")

    def _requirement(self) -> Requirement:
        absent = self._peek() == "!"
        if absent:
            self._next()
        key = self._next()
        if key == "" or key in _SPECIAL:
            raise _unparsable(f"found '{key}', expected: identifier")
        if problem := qualified_problem(key):
            raise _unparsable(f'key: Invalid value: "{key[:80]}": {problem}')
        if absent:
            return Requirement(key, "!")
        if self._peek() in ("", ","):
            return Requirement(key, "exists")
        return self._comparison(key)

    def _comparison(self, key: str) -> Requirement:
        word = self._next()
        operator = _OPERATORS.get(word)
        if operator is None:
            raise _unparsable(f"found '{word}', expected: in, notin, =, ==, !=, >, <")
        values = self._set() if operator in ("in", "notin") else (self._value(),)
        for value in values:
            if operator in ("<", ">") and not _NUMBER.fullmatch(value):
                raise _unparsable(
                    f"values[0][{key}]: Invalid value: \"{value[:80]}\": for 'Gt', 'Lt' operators, "
                    "the value must be an integer"
                )
            if problem := value_problem(value):
                raise _unparsable(f'values[0][{key}]: Invalid value: "{value[:80]}": {problem}')
        return Requirement(key, operator, values)

    def _value(self) -> str:
        # `key=` and `key=,other` select the empty value.
        if self._peek() in ("", ","):
            return ""
        word = self._next()
        if word in _SPECIAL:
            raise _unparsable(f"found '{word}', expected: identifier")
        return word

    def _set(self) -> tuple[str, ...]:
        if (word := self._next()) != "(":
            raise _unparsable(f"found '{word}' expected: '('")
        values: list[str] = []
        wanted = True
        while (word := self._next()) != ")":
            if word == ",":
                if wanted:
                    values.append("")
                wanted = True
            elif word == "" or word in _SPECIAL or not wanted:
                raise _unparsable(f"found '{word}', expected: ',', ')' or identifier")
            else:
                values.append(word)
                wanted = False
        if wanted:
            values.append("")
        return tuple(dict.fromkeys(values))


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(text):
        word = _TOKEN.match(text, at)
        if word is None:
            raise _unparsable(f"found '{text[at : at + 20]}', expected: identifier")
        if word[1] is not None:
            found.append(word[1])
        at = word.end()
    return found


def _unparsable(why: str) -> StatusError:
    return bad_request(f"unable to parse requirement: {why}")


def _bounded(text: str) -> None:
    if len(text) > LENGTH_LIMIT:
        raise bad_request(f"a selector may not have more than {LENGTH_LIMIT} characters")


class FieldRequirement(msgspec.Struct, frozen=True):
    """One part of a field selector."""

    field: str
    equal: bool
    value: str

    def matches(self, obj: Object) -> bool:
        """Whether an object meets it; what the object does not have counts as empty."""
        return (value_of(obj, self.field) == self.value) == self.equal


class FieldSelector(msgspec.Struct, frozen=True):
    """All requirements have to be met; without any, everything matches."""

    requirements: tuple[FieldRequirement, ...] = ()

    def matches(self, obj: Object) -> bool:
        """Whether the object is selected."""
        return all(each.matches(obj) for each in self.requirements)

    def exactly(self, name: str) -> str | None:
        """The one value that a field has to have, if there is one."""
        return next((each.value for each in self.requirements if each.field == name and each.equal), None)


def parse_fields(text: str, selectable: Sequence[str]) -> FieldSelector:
    """The selector that a `fieldSelector` parameter names; `selectable` are the kind's own fields. Raises 400."""
    _bounded(text)
    known = ("metadata.name", "metadata.namespace", *selectable)
    found: list[FieldRequirement] = []
    for part in _split(text):
        if part == "":
            continue
        cut = re.match(r"((?:[^\\=!]|\\.|!(?!=))*)(==|!=|=)(.*)", part, re.DOTALL)
        if cut is None:
            raise bad_request(f"invalid selector: '{text[:80]}'; can't understand '{part[:80]}'")
        name, value = cut[1], _unescaped(cut[3])
        if name not in known:
            raise bad_request(f"field label not supported: {name[:80]}")
        found.append(FieldRequirement(name, cut[2] != "!=", value))
    return FieldSelector(tuple(found))


def value_of(obj: Object, name: str) -> str:
    """The text that field selectors compare: of `a.b` in an object."""
    found = field(obj, tuple(name.split(".")))
    if isinstance(found, bool):
        return "true" if found else "false"
    return "" if found is None else str(found)


def _split(text: str) -> list[str]:
    parts, part, escaped = [], "", False
    for letter in text:
        if letter == "," and not escaped:
            parts.append(part)
            part = ""
        else:
            part += letter
        escaped = letter == "\\" and not escaped
    return [*parts, part]


def _unescaped(value: str) -> str:
    found, escaped = "", False
    for letter in value:
        if escaped and letter not in "\\,=":
            raise bad_request(f'invalid field selector: invalid escape sequence: "\\{letter}"')
        if letter == "\\" and not escaped:
            escaped = True
            continue
        if letter in ",=" and not escaped:
            raise bad_request(f"invalid field selector: unescaped character: '{letter}'")
        found += letter
        escaped = False
    if escaped:
        raise bad_request('invalid field selector: invalid escape sequence: "\\"')
    return found


Predicate = Callable[[Object], bool]


def _admitted(requirement: FieldRequirement, row: Row) -> bool:
    known = {"metadata.namespace": row.key[0], "metadata.name": row.key[1]}.get(requirement.field)
    value = row.field(requirement.field) if known is None else known
    if value is None:
        return requirement.matches(row.object())
    return (value == requirement.value) == requirement.equal


class Selection(msgspec.Struct, frozen=True):
    """What a request is narrowed to: a namespace ("" for all), labels and fields, and names where that is not None."""

    namespace: str = ""
    labels: LabelSelector = LabelSelector()
    fields: FieldSelector = FieldSelector()
    names: frozenset[str] | None = None

    def matches(self, obj: Object) -> bool:
        """Whether the object is selected."""
        metadata = metadata_of(obj)
        if self.namespace and metadata.get("namespace") != self.namespace:
            return False
        if self.names is not None and metadata.get("name") not in self.names:
            return False
        return self.labels.matches(metadata.get("labels") or {}) and self.fields.matches(obj)

    def admits(self, item: Item) -> bool:
        """The same for what a storage lists: of a row no more is made than is asked for."""
        if not isinstance(item, Row):
            return self.matches(item)
        if self.namespace and item.key[0] != self.namespace:
            return False
        if self.names is not None and item.key[1] not in self.names:
            return False
        if self.labels.requirements and not self.labels.matches(item.labels()):
            return False
        return all(_admitted(each, item) for each in self.fields.requirements)

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return not self.namespace and self.namespaced_only

    @property
    def namespaced_only(self) -> bool:
        """Whether nothing is left out but other namespaces."""
        return not (self.labels.requirements or self.fields.requirements or self.names is not None)
