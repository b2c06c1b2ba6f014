"""The published E2B SDK, unmodified, against a real api and master; the node behind them is a fake."""

from __future__ import annotations

import datetime
import time

import pytest
from e2b import AsyncSandbox, Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    SandboxNotFoundException,
    ServiceBusyException,
)

from greenroom.errors import PoolDry
from tests.support.fake_node import FakeNode
from tests.support.role_process import RoleProcess

pytestmark = pytest.mark.compat


@pytest.fixture
def opts(api: RoleProcess, node: FakeNode, secret: str) -> dict[str, object]:
    """Where the SDK finds us. The data plane is not under test here: its URL leads nowhere."""
    return {"api_key": secret, "api_url": api.url, "sandbox_url": "http://127.0.0.1:9"}


def listed(paginator: object) -> list[str]:
    """The ids of all pages."""
    found: list[str] = []
    while paginator.has_next:
        found += [info.sandbox_id for info in paginator.next_items()]
    return found


def test_create_answers_what_the_sdk_needs(opts, node):
    sandbox = Sandbox.create(**opts, timeout=60, metadata={"app": "prod"}, envs={"A": "1"})
    assert sandbox.sandbox_id in node.sandboxes
    assert sandbox.get_host(3000) == f"3000-{sandbox.sandbox_id}.sbx.example.test:8700"
    claim = node.claims[-1]
    assert (claim.template, claim.ttl, claim.env, claim.secure) == ("base", 60.0, {"A": "1"}, True)
    assert sandbox._envd_access_token == node.sandboxes[sandbox.sandbox_id].token


def test_create_lives_300_seconds_by_default(opts, node):
    Sandbox.create(**opts)
    assert node.claims[-1].ttl == 300.0


def test_get_info(opts, node):
    sandbox = Sandbox.create(**opts, timeout=60, metadata={"k": "v"})
    info = sandbox.get_info()
    kept = node.sandboxes[sandbox.sandbox_id]
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.name == "base"
    assert info.metadata == {"k": "v"}
    assert info.state == SandboxState.RUNNING
    assert (info.cpu_count, info.memory_mb) == (1, 512)
    assert abs(info.started_at.timestamp() - kept.started_at) < 1e-5
    assert abs(info.end_at.timestamp() - kept.ends_at) < 1e-5


def test_kill_and_kill_again(opts):
    sandbox = Sandbox.create(**opts)
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert sandbox.sandbox_id not in listed(Sandbox.list(**opts))


def test_kill_of_an_unknown_id(opts):
    assert Sandbox.kill("i" + "z" * 19, **opts) is False
    assert Sandbox.kill("nonexistingsandbox", **opts) is False


def test_set_timeout_moves_the_end_both_ways(opts):
    sandbox = Sandbox.create(**opts, timeout=60)
    for seconds in (5, 600):
        sandbox.set_timeout(seconds)
        left = sandbox.get_info().end_at.timestamp() - time.time()
        assert seconds - 3 < left <= seconds


def test_set_timeout_of_zero_ends_it(opts):
    sandbox = Sandbox.create(**opts, timeout=60)
    sandbox.set_timeout(0)
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()


def test_connect_never_shortens_and_may_extend(opts):
    sandbox = Sandbox.create(**opts, timeout=300)
    before = sandbox.get_info().end_at
    again = Sandbox.connect(sandbox.sandbox_id, **opts, timeout=10)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again._envd_access_token == sandbox._envd_access_token
    assert sandbox.get_info().end_at == before
    sandbox.connect(timeout=900)
    assert sandbox.get_info().end_at > before + datetime.timedelta(seconds=500)


def test_connect_to_an_unknown_sandbox(opts):
    with pytest.raises(NotFoundException):
        Sandbox.connect("i" + "y" * 19, **opts)


def test_list_by_metadata_that_needs_encoding(opts):
    metadata = {"user id": "a/b&c=d %25 ü", "=": "&"}
    wanted = Sandbox.create(**opts, metadata=metadata)
    Sandbox.create(**opts, metadata={"user id": "other"})
    assert listed(Sandbox.list(**opts, query=SandboxQuery(metadata=metadata))) == [wanted.sandbox_id]


def test_list_pages_newest_first(opts):
    made = [Sandbox.create(**opts).sandbox_id for _ in range(3)]
    paginator = Sandbox.list(**opts, limit=1)
    pages = []
    while paginator.has_next:
        pages.append([info.sandbox_id for info in paginator.next_items()])
    assert pages == [[entry] for entry in reversed(made)]
    assert listed(Sandbox.list(**opts, order="asc")) == made


def test_list_by_state_template_and_start(opts):
    sandbox = Sandbox.create(**opts)
    info = sandbox.get_info()
    later = info.started_at + datetime.timedelta(seconds=1)

    def ids(**query: object) -> list[str]:
        return listed(Sandbox.list(**opts, query=SandboxQuery(**query)))

    assert ids(state=[SandboxState.RUNNING]) == [sandbox.sandbox_id]
    assert ids(state=[SandboxState.PAUSED]) == []
    assert ids(template=info.template_id) == [sandbox.sandbox_id]
    assert ids(template="no-such-template") == []
    assert ids(started_after=info.started_at) == [sandbox.sandbox_id]
    assert ids(started_after=later) == []


def test_the_same_idempotency_key_gives_the_same_sandbox(opts):
    first = Sandbox.create(**opts, idempotency_key="order-66")
    assert Sandbox.create(**opts, idempotency_key="order-66").sandbox_id == first.sandbox_id
    with pytest.raises(SandboxException, match="409"):
        Sandbox.create(**opts, idempotency_key="order-66", timeout=77)


def test_a_lost_answer_is_resolved_by_the_key(opts, node):
    node.drop_claim_answers = 1
    sandbox = Sandbox.create(**opts, idempotency_key="lost")
    assert listed(Sandbox.list(**opts)) == [sandbox.sandbox_id]


def test_an_unknown_outcome_without_a_key_is_not_repeated(opts, node):
    node.drop_claim_answers = 1
    node.hide_claims = True
    before = len(node.claims)
    with pytest.raises(SandboxException, match="not known whether"):
        Sandbox.create(**opts)
    assert len(node.claims) == before + 1


def test_what_cannot_be_kept_is_refused(opts):
    for options in ({"network": {"rules": {"h": []}}},):
        with pytest.raises(SandboxException, match="not supported"):
            Sandbox.create(**opts, **options)
    assert Sandbox.create(**opts, allow_internet_access=False, network={"deny_out": ["0.0.0.0/0"]})


def test_the_network_as_the_sdk_tells_and_changes_it(opts):
    sandbox = Sandbox.create(
        **opts, network={"allow_out": ["1.1.1.1"], "deny_out": lambda context: [context.all_traffic]}
    )
    info = sandbox.get_info()
    assert info.network == {"allow_out": ["1.1.1.1"], "deny_out": ["0.0.0.0/0"]}
    sandbox.update_network({"allow_internet_access": False})
    assert sandbox.get_info().allow_internet_access is False
    sandbox.update_network({})
    info = sandbox.get_info()
    assert info.allow_internet_access is True
    assert not info.network
    with pytest.raises(SandboxException, match="no sandbox may reach"):
        sandbox.update_network({"allow_out": ["10.0.0.1"]})


def test_a_dry_pool_is_busy(opts, node):
    node.claim_error = PoolDry("no sandbox came free in time", retry_after=1.0)
    with pytest.raises(ServiceBusyException):
        Sandbox.create(**opts, retries=0)


def test_unknown_template(opts):
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("no-such-template", **opts)
    assert Sandbox.create("base:default", **opts)


def test_wrong_and_missing_keys(opts):
    with pytest.raises(AuthenticationException):
        Sandbox.create(**{**opts, "api_key": "e2b_" + "0" * 40})
    with pytest.raises((AuthenticationException, InvalidArgumentException)):
        Sandbox.create(**{**opts, "api_key": "wrong"})


async def test_the_async_sdk(opts):
    sandbox = await AsyncSandbox.create(**opts, timeout=60)
    assert (await sandbox.get_info()).sandbox_id == sandbox.sandbox_id
    await sandbox.set_timeout(120)
    again = await AsyncSandbox.connect(sandbox.sandbox_id, **opts)
    assert again.sandbox_id == sandbox.sandbox_id
    assert await sandbox.kill() is True
    assert await sandbox.kill() is False
