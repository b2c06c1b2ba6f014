"""Selectors read what Kubernetes' clients write, refuse the rest, and select what they say."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.selectors import (
    FieldSelector,
    LabelSelector,
    Requirement,
    Selection,
    parse_fields,
    parse_labels,
)
from greenroom.api.kube.status import StatusError

KEYS = ["a", "b", "example.com/c"]
VALUES = ["", "x", "y", "10", "z.z"]


@pytest.mark.parametrize(
    ("text", "requirements"),
    [
        ("", []),
        ("  ", []),
        ("a", [("a", "exists", ())]),
        ("!a", [("a", "!", ())]),
        ("a=x", [("a", "=", ("x",))]),
        ("a == x", [("a", "=", ("x",))]),
        ("a=", [("a", "=", ("",))]),
        ("a!=x,b", [("a", "!=", ("x",)), ("b", "exists", ())]),
        ("b in (x, y),a", [("a", "exists", ()), ("b", "in", ("x", "y"))]),
        ("a notin (x,)", [("a", "notin", ("x", ""))]),
        ("a in ()", [("a", "in", ("",))]),
        ("a>3", [("a", ">", ("3",))]),
        ("in in (in)", [("in", "in", ("in",))]),
    ],
    ids=lambda value: repr(value) if isinstance(value, str) else "",
)
def test_label_selectors(text: str, requirements: list[tuple[str, str, tuple[str, ...]]]) -> None:
    assert parse_labels(text) == LabelSelector(tuple(Requirement(*each) for each in requirements))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (",a", "found ',', expected: identifier"),
        ("a,", "found '', expected: identifier after ','"),
        ("a b", "found 'b', expected: in, notin, =, ==, !=, >, <"),
        ("a in x", "found 'x' expected: '('"),
        ("a in (x", "found '', expected: ',', ')' or identifier"),
        ("a in (x y)", "found 'y'"),
        ("a=x=y", "found '=', expected: ',' or 'end of string'"),
        ("a>x", "the value must be an integer"),
        ("a=" + "x" * 64, "must be no more than 63 characters"),
        ("a b c/d=", "found 'b'"),
        ("/a", "prefix part must be non-empty"),
        ("a&b", "name part must consist of"),
        ("x" * 9000, "may not have more than"),
    ],
    ids=lambda value: value[:20],
)
def test_label_selectors_that_are_none(text: str, said: str) -> None:
    with pytest.raises(StatusError) as refused:
        parse_labels(text)
    assert refused.value.code == 400
    assert said in refused.value.message


@given(st.text(max_size=40))
def test_any_text_is_a_selector_or_a_bad_request(text: str) -> None:
    for parse in (parse_labels, lambda given: parse_fields(given, ("status.phase",))):
        with contextlib.suppress(StatusError):
            parse(text)


REQUIREMENTS = st.one_of(
    st.builds(Requirement, st.sampled_from(KEYS), st.sampled_from(["exists", "!"])),
    st.builds(
        Requirement, st.sampled_from(KEYS), st.sampled_from(["=", "!="]), st.tuples(st.sampled_from(VALUES))
    ),
    st.builds(
        Requirement,
        st.sampled_from(KEYS),
        st.sampled_from(["in", "notin"]),
        st.lists(st.sampled_from(VALUES), min_size=1, max_size=3, unique=True).map(
            lambda each: tuple(sorted(each))
        ),
    ),
)


@given(
    st.lists(REQUIREMENTS, max_size=3).map(
        lambda each: LabelSelector(tuple(sorted(each, key=lambda one: one.key)))
    ),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES)),
)
def test_a_selector_says_itself_and_selects_what_the_sets_say(
    selector: LabelSelector, labels: dict[str, str]
) -> None:
    assert parse_labels(str(selector)) == selector
    for each in selector.requirements:
        has = {labels[each.key]} if each.key in labels else set()
        wanted = set(each.values)
        model = {
            "exists": bool(has),
            "!": not has,
            "=": bool(has & wanted),
            "in": bool(has & wanted),
            "!=": not has & wanted,
            "notin": not has & wanted,
        }[each.operator]
        assert each.matches(labels) == model


def test_comparisons_are_of_numbers() -> None:
    above = parse_labels("a>9")
    assert above.matches({"a": "10"})
    assert not above.matches({"a": "9"})
    assert not above.matches({"a": "x"})
    assert not above.matches({})


def test_field_selectors() -> None:
    obj = {"metadata": {"name": "box", "namespace": "n"}, "status": {"phase": "Running"}}
    for text, fits in {
        "metadata.name=box": True,
        "metadata.name==box,status.phase!=Paused": True,
        "metadata.name!=box": False,
        "status.nodeName=": True,
        "status.nodeName!=": False,
        "": True,
    }.items():
        assert parse_fields(text, ("status.phase", "status.nodeName")).matches(obj) == fits, text
    assert parse_fields("metadata.name=box", ()).exactly("metadata.name") == "box"
    assert FieldSelector().exactly("metadata.name") is None
    assert (
        parse_fields(r"status.phase=a\,b\=c\\", ("status.phase",)).requirements[0].value == r"a,b=c\ ".strip()
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spec.x=1", "field label not supported: spec.x"),
        ("metadata.name", "invalid selector: 'metadata.name'; can't understand 'metadata.name'"),
        ("metadata.name=a=b", "unescaped character"),
        (r"metadata.name=\x", "invalid escape sequence"),
        ("metadata.name=\\", "invalid escape sequence"),
    ],
    ids=["unknown", "no-operator", "unescaped", "escape", "open"],
)
def test_field_selectors_that_are_none(text: str, said: str) -> None:
    with pytest.raises(StatusError) as refused:
        parse_fields(text, ())
    assert (refused.value.code, refused.value.reason) == (400, "BadRequest")
    assert said in refused.value.message


def test_a_selection_is_all_of_it() -> None:
    obj = {"metadata": {"name": "box", "namespace": "n", "labels": {"a": "x"}}}
    assert Selection().everything
    assert Selection("n", parse_labels("a=x"), parse_fields("metadata.name=box", ())).matches(obj)
    assert not Selection("m").matches(obj)
    assert not Selection("n", parse_labels("a=y")).matches(obj)
    assert not Selection("n", fields=parse_fields("metadata.name=other", ())).matches(obj)
