"""What of `network` is about incoming requests: taken over, or refused by the field's name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.e2b.inbound import inbound_of
from greenroom.api.e2b.schemas import NetworkOptions
from greenroom.errors import BadRequest
from greenroom.wire.messages import Inbound


def test_nothing_asked_is_everything_public() -> None:
    for options in (None, NetworkOptions(), NetworkOptions(allow_public_traffic=True, mask_request_host="")):
        assert inbound_of(options, secure=False) == Inbound()


def test_private_ports_need_a_secure_sandbox() -> None:
    private = NetworkOptions(allow_public_traffic=False)
    assert inbound_of(private, secure=True) == Inbound(public=False)
    with pytest.raises(BadRequest, match="secure"):
        inbound_of(private, secure=False)


@pytest.mark.parametrize(
    "mask",
    [
        "localhost:${PORT}", "localhost", "A.example.com:80", "${PORT}.example.com", "p${PORT}:${PORT}", "10.0.0.1",
        "[::1]:${PORT}", "example.com.",
    ],
)  # fmt: skip
def test_a_mask_is_a_host_in_which_the_port_may_stand(mask: str) -> None:
    assert inbound_of(NetworkOptions(mask_request_host=mask), secure=True).mask_host == mask


@pytest.mark.parametrize(
    "mask",
    [
        "a b", "a\r\nX: y", "a\n", "http://a", "a/b", "a:b", "a:99999", "a:", ":80", "${PORT}0:${PORT}0", "$PORT",
        "${port}", "a_b", "-a", "a..b", "a@b", "[::1", "é.test", "a" * 300, "${PORT}${PORT}${PORT}" * 20,
    ],
)  # fmt: skip
def test_any_other_mask_is_refused(mask: str) -> None:
    with pytest.raises(BadRequest, match=r"network\.maskRequestHost"):
        inbound_of(NetworkOptions(mask_request_host=mask), secure=True)


@given(st.text(max_size=60))
def test_what_is_taken_can_be_sent_to_a_node_and_written_into_a_head(mask: str) -> None:
    try:
        inbound = inbound_of(NetworkOptions(mask_request_host=mask), secure=True)
    except BadRequest:
        return
    assert msgspec.json.decode(msgspec.json.encode(inbound), type=Inbound) == inbound
    assert not set(inbound.mask_host or "") & set("\r\n\0 \t,;/")


@pytest.mark.parametrize("mask", ["a\r\nx: y", "a b", "a\n", "", "é"])
def test_a_node_takes_no_mask_that_could_end_a_line(mask: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"mask_host": mask}), type=Inbound)


def test_ports_are_sorted_and_each_named_once() -> None:
    assert inbound_of(NetworkOptions(https_ports=[9, 8, 9]), secure=True).https_ports == (8, 9)


@pytest.mark.parametrize("ports", [[0], [65536], [-1], [49983], list(range(1, 66))])
def test_ports_that_cannot_be_are_refused(ports: list[int]) -> None:
    with pytest.raises(BadRequest, match=r"network\.httpsPorts"):
        inbound_of(NetworkOptions(https_ports=ports), secure=True)
