"""Forms, in whatever pieces they arrive."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest.errors import AgentError
from greenroom.guest.multipart import Event, MultipartParser, PartBegin, PartData, PartEnd, boundary_of


def parse(body: bytes, cuts: list[int], boundary: bytes = b"XYZ") -> list[tuple[str | None, bytes]]:
    """Names and contents of all parts."""
    marks = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    parser = MultipartParser(boundary)
    events: list[Event] = []
    for a, b in itertools.pairwise(marks):
        events += parser.feed(body[a:b])
    parser.finish()
    parts: list[tuple[str | None, bytes]] = []
    open_part: tuple[str | None, bytes] | None = None
    for event in events:
        if isinstance(event, PartBegin):
            assert open_part is None
            open_part = (event.filename, b"")
        elif isinstance(event, PartData):
            assert open_part is not None
            assert event.data
            open_part = (open_part[0], open_part[1] + event.data)
        else:
            assert isinstance(event, PartEnd)
            assert open_part is not None
            parts.append(open_part)
            open_part = None
    assert open_part is None
    return parts


def form(
    parts: list[tuple[bytes, bytes]], boundary: bytes = b"XYZ", preamble: bytes = b"", end: bytes = b"\r\n"
) -> bytes:
    body = preamble
    for filename, content in parts:
        body += b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n' % (
            boundary,
            filename,
        )
        body += b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
    return body + b"--" + boundary + b"--" + end


# Contents that look like the beginning of a boundary are the interesting ones.
contents = (
    st.lists(
        st.sampled_from([b"\r", b"\n", b"\r\n", b"--", b"\r\n--", b"\r\n--XY", b"XYZ", b"\0", b"text", b"-"]),
        max_size=12,
    )
    .map(b"".join)
    .filter(lambda content: b"\r\n--XYZ" not in b"\r\n" + content)
)


@given(
    parts=st.lists(
        st.tuples(st.sampled_from([b"/a/b", b"c.txt", "ü".encode()]), contents | st.binary(max_size=50)),
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 2000), max_size=30),
    preamble=st.sampled_from([b"", b"\r\n", b"preamble\r\n"]),
    end=st.sampled_from([b"", b"\r\n", b"\r\nepilogue"]),
)
def test_parts_survive_any_split(
    parts: list[tuple[bytes, bytes]], cuts: list[int], preamble: bytes, end: bytes
) -> None:
    parts = [(name, content) for name, content in parts if b"\r\n--XYZ" not in content]
    expected = [(name.decode(), content) for name, content in parts]
    assert parse(form(parts, preamble=preamble, end=end), cuts) == expected


def test_one_byte_at_a_time() -> None:
    body = form([(b"a", b""), (b"b", b"\r\n--XY"), (b"c", b"\r\n\r\n")])
    assert parse(body, list(range(len(body)))) == [("a", b""), ("b", b"\r\n--XY"), ("c", b"\r\n\r\n")]


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    parser = MultipartParser(b"XYZ")
    try:
        parser.feed(data)
        parser.finish()
    except AgentError as error:
        assert error.code == "invalid_argument"  # noqa: PT017 - both outcomes are fine


@pytest.mark.parametrize(("disposition", "filename"), [
    ('form-data; name="file"; filename="a\\"b\\\\c"', 'a"b\\c'),
    ('form-data; name="file"; filename="a%22b%0D%0Ac%20d"', 'a"b\r\nc%20d'),
    ('form-data; name="file"; filename="C:\\dir\\x"', "C:\\dir\\x"),
    ("form-data; name=file; filename=/plain/path", "/plain/path"),
    ("form-data; name=\"file\"; filename=\"x\"; filename*=UTF-8''%C3%BC%20a", "ü a"),
    ('form-data; name="file"; filename="/home/user/über/日本.txt"', "/home/user/über/日本.txt"),
    ('form-data; name="file"', None),
    ('Form-Data; NAME="file"; FileName="x;y"', "x;y"),
])  # fmt: skip
def test_file_names_are_kept_whole(disposition: str, filename: str | None) -> None:
    body = f"--XYZ\r\nContent-Disposition: {disposition}\r\n\r\nx\r\n--XYZ--".encode()
    assert parse(body, []) == [(filename, b"x")]


@pytest.mark.parametrize("body", [
    b"--XYZ\r\n\r\nno disposition\r\n--XYZ--",
    b"--XYZ\r\nContent-Disposition: attachment; name=x\r\n\r\n\r\n--XYZ--",
    b"--XYZjunk\r\nA: b\r\n\r\n--XYZ--",
    b"--XYZ\r\n" + b"A" * 20000,
    b"x" * 100000,
    b"--XYZ" + b" " * 300,
])  # fmt: skip
def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(AgentError):
        parse(body, [])


@pytest.mark.parametrize(
    "body", [b"", b"--XYZ", b"--XYZ\r\nContent-Disposition: form-data; name=a\r\n\r\nrest"]
)
def test_a_form_that_stops_early_is_refused(body: bytes) -> None:
    with pytest.raises(AgentError, match="closing boundary"):
        parse(body, [])


def test_memory_is_bounded_by_the_boundary() -> None:
    parser = MultipartParser(b"XYZ")
    parser.feed(b'--XYZ\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n')
    taken = sum(
        len(event.data)
        for _ in range(100)
        for event in parser.feed(b"\r\n--XY" * 1000)
        if isinstance(event, PartData)
    )
    assert 600_000 - taken < 10


@pytest.mark.parametrize(("header", "boundary"), [
    ("multipart/form-data; boundary=abc", b"abc"),
    ('Multipart/Form-Data; charset=x; boundary="a b"', b"a b"),
])  # fmt: skip
def test_the_boundary_comes_from_the_header(header: str, boundary: bytes) -> None:
    assert boundary_of(header) == boundary


@pytest.mark.parametrize(
    "header",
    ["", "multipart/form-data", "multipart/mixed; boundary=x", f"multipart/form-data; boundary={'x' * 300}"],
)
def test_a_header_without_boundary_is_refused(header: str) -> None:
    with pytest.raises(AgentError):
        boundary_of(header)
