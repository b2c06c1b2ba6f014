"""Pause, resume, snapshots and forks by the published SDK, on a real node with the simulated engine."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from e2b import Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import NotFoundException, SandboxException, SandboxNotFoundException

from greenroom.config import VmConfig
from tests.support.cluster import QUICK, Cluster, cluster
from tests.support.role_process import RoleProcess

CONFIG = msgspec.structs.replace(QUICK, vm=VmConfig(engine="simulated"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, RoleProcess]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        master = made.master()
        made.stack.enter_context(RoleProcess(made.spec("node", config=CONFIG, master_urls=[master.url])))
        yield made, made.api()


@pytest.fixture
def opts(stage: tuple[Cluster, RoleProcess], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    made, api = stage
    _, secret = made.key()
    return {"api_url": api.url, "api_key": secret, "sandbox_url": api.url}


def call(opts: dict[str, str], method: str, path: str, body: object = None) -> httpx.Response:
    headers = {"X-API-Key": opts["api_key"]}
    return httpx.request(method, opts["api_url"] + path, headers=headers, json=body)


def listed(opts: dict[str, str], *states: SandboxState) -> set[str]:
    query = SandboxQuery(state=list(states)) if states else None
    return {item.sandbox_id for item in Sandbox.list(**opts, query=query).next_items()}


def test_pause_connect_and_pause_again(opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts, metadata={"m": "1"})
    assert box.pause() is True
    assert box.pause() is False
    assert listed(opts, SandboxState.PAUSED) == {box.sandbox_id}
    assert listed(opts, SandboxState.RUNNING) == set()
    info = box.get_info()
    assert (info.state, info.metadata) == (SandboxState.PAUSED, {"m": "1"})
    again = Sandbox.connect(box.sandbox_id, **opts, timeout=900)
    assert again._envd_access_token == box._envd_access_token
    info = box.get_info()
    assert info.state == SandboxState.RUNNING
    assert info.end_at > info.started_at + datetime.timedelta(seconds=800)
    assert box.pause() is True
    assert box.kill() is True
    assert box.kill() is False


def test_the_statuses_of_a_resume(opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts)
    for path in ("/v2/sandboxes/{}/connect", "/sandboxes/{}/connect"):
        path = path.format(box.sandbox_id)
        assert call(opts, "POST", path, {"timeout": 60}).status_code == 200
        assert call(opts, "POST", f"/sandboxes/{box.sandbox_id}/pause").status_code == 204
        assert call(opts, "GET", f"/sandboxes/{box.sandbox_id}").json()["pauseMode"] == "full"
        answer = call(opts, "POST", path, {"timeout": 60})
        assert answer.status_code == 201
        assert answer.json()["sandboxID"] == box.sandbox_id
    assert call(opts, "POST", f"/sandboxes/{box.sandbox_id}/pause", {"memory": False}).status_code == 204
    assert call(opts, "GET", f"/sandboxes/{box.sandbox_id}").json()["pauseMode"] == "filesystem"
    assert call(opts, "POST", f"/sandboxes/{box.sandbox_id}/timeout", {"timeout": 60}).status_code == 404
    assert call(opts, "POST", f"/sandboxes/{box.sandbox_id}/resume").status_code == 201


@pytest.mark.parametrize(
    "path", ["/v2/sandboxes/{}/connect", "/sandboxes/{}/connect", "/sandboxes/{}/resume"]
)
def test_a_sandbox_whose_memory_was_kept_may_be_booted(path: str, opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts)
    path = path.format(box.sandbox_id)
    assert box.pause() is True
    answer = call(opts, "POST", path, {"timeout": 60, "memory": False})
    assert (answer.status_code, answer.json()["sandboxID"]) == (201, box.sandbox_id)
    assert answer.json()["envdAccessToken"] == box._envd_access_token
    messages = [
        entry["message"] for entry in call(opts, "GET", f"/v2/sandboxes/{box.sandbox_id}/logs").json()["logs"]
    ]
    assert "it was resumed by booting its disk" in messages
    # One that runs has nothing to resume.
    expected = 201 if path.endswith("resume") else 200
    assert call(opts, "POST", path, {"timeout": 60, "memory": False}).status_code == expected


def test_auto_pause_and_what_is_told_of_it(opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts, lifecycle={"on_timeout": "pause", "auto_resume": True}, timeout=60)
    told = call(opts, "GET", f"/sandboxes/{box.sandbox_id}").json()["lifecycle"]
    assert told == {"autoResume": True, "onTimeout": "pause"}
    box.set_timeout(0)
    ends = time.monotonic() + 20
    while box.get_info().state != SandboxState.PAUSED:
        assert time.monotonic() < ends
    assert box.kill() is True


def test_somebody_elses_and_unknown_ones(opts: dict[str, str], stage: tuple[Cluster, RoleProcess]) -> None:
    box = Sandbox.create(**opts)
    taken = box.create_snapshot()
    other = {**opts, "api_key": stage[0].key()[1]}
    for sandbox_id in (box.sandbox_id, "i" + "y" * 19):
        for what in ("pause", "resume", "fork", "snapshots"):
            answer = call(other, "POST", f"/sandboxes/{sandbox_id}/{what}")
            assert (answer.status_code, answer.json()["code"]) == (404, 404)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.pause("i" + "y" * 19, **opts)
    assert Sandbox.list_snapshots(**other).next_items() == []
    assert Sandbox.delete_snapshot(taken.snapshot_id, **other) is False
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(taken.snapshot_id, **other)
    assert Sandbox.delete_snapshot(taken.snapshot_id, **opts) is True


def test_snapshots(opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts)
    plain, named = box.create_snapshot(), box.create_snapshot(name="mine")
    assert named.names == ["mine"]
    assert [s.snapshot_id for s in Sandbox.list_snapshots(**opts).next_items()] == [
        named.snapshot_id, plain.snapshot_id,
    ]  # fmt: skip
    assert [s.snapshot_id for s in Sandbox.list_snapshots(**opts, name="mine").next_items()] == [
        named.snapshot_id
    ]
    assert Sandbox.list_snapshots(**opts, name="other").next_items() == []
    pages = Sandbox.list_snapshots(**opts, limit=1, sandbox_id=box.sandbox_id)
    seen = []
    while pages.has_next:
        seen += [s.snapshot_id for s in pages.next_items()]
    assert seen == [named.snapshot_id, plain.snapshot_id]
    for ref in (plain.snapshot_id, "mine", "mine:default"):
        child = Sandbox.create(ref, **opts)
        assert child.sandbox_id != box.sandbox_id
        assert child.get_info().template_id in (plain.snapshot_id, named.snapshot_id)
    assert Sandbox.delete_snapshot(plain.snapshot_id, **opts) is True
    assert Sandbox.delete_snapshot(plain.snapshot_id, **opts) is False
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(plain.snapshot_id, **opts)
    for name in ("base", "base:default", "Upper", "a b", "x" * 300, "a:b:c"):
        assert call(opts, "POST", f"/sandboxes/{box.sandbox_id}/snapshots", {"name": name}).status_code == 400


def test_the_platforms_templates_stay(opts: dict[str, str]) -> None:
    answer = call(opts, "DELETE", "/templates/base")
    assert (answer.status_code, answer.json()["code"]) == (403, 403)
    assert call(opts, "DELETE", "/templates/no-such-template").status_code == 404


def test_forks(opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts, metadata={"m": "1"})
    forks = box.fork(count=3, timeout=60)
    assert all(isinstance(fork, Sandbox) for fork in forks)
    ids = {fork.sandbox_id for fork in forks if isinstance(fork, Sandbox)}
    assert len(ids) == 3
    assert listed(opts) == {*ids, box.sandbox_id}
    for count in (0, 21, -1):
        assert call(opts, "POST", f"/sandboxes/{box.sandbox_id}/fork", {"count": count}).status_code == 400
    box.kill()
    with pytest.raises((SandboxNotFoundException, NotFoundException)):
        box.fork()


def test_a_paused_sandbox_is_not_forked_or_saved(opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts)
    box.pause()
    for what in ("fork", "snapshots"):
        answer = call(opts, "POST", f"/sandboxes/{box.sandbox_id}/{what}")
        assert answer.status_code == 400
        assert "resume it first" in answer.json()["message"]


@pytest.mark.parametrize("body", [{"memory": "yes"}, {"timeout": "x"}, [], {"timeout": -1}, {"count": 1.5}])
def test_bad_bodies(opts: dict[str, str], body: object) -> None:
    box = Sandbox.create(**opts)
    for what in ("pause", "resume", "fork", "connect", "snapshots"):
        answer = call(opts, "POST", f"/sandboxes/{box.sandbox_id}/{what}", body)
        assert answer.status_code < 500
        with contextlib.suppress(ValueError):
            if answer.status_code >= 400:
                assert set(answer.json()) == {"code", "message"}


def test_the_log_tells_what_became_of_a_sandbox(
    opts: dict[str, str], stage: tuple[Cluster, RoleProcess]
) -> None:
    box = Sandbox.create(**opts)
    box.pause()
    box.connect(timeout=60)
    one = call(opts, "GET", f"/sandboxes/{box.sandbox_id}/logs").json()
    assert [line["line"] for line in one["logs"]] == ["it runs", "it was paused", "it was resumed"]
    assert [entry["message"] for entry in one["logEntries"]] == [line["line"] for line in one["logs"]]
    path = f"/v2/sandboxes/{box.sandbox_id}/logs"
    newest = call(opts, "GET", f"{path}?limit=1").json()["logs"]
    assert [entry["message"] for entry in newest] == ["it was resumed"]
    assert set(newest[0]) == {"timestamp", "message", "level", "fields"}
    forward = call(opts, "GET", f"{path}?direction=forward&search=paused").json()["logs"]
    assert [entry["message"] for entry in forward] == ["it was paused"]
    assert call(opts, "GET", f"{path}?level=error").json()["logs"] == []
    for query in (
        "direction=up",
        "level=loud",
        "limit=-1",
        "limit=5000",
        "cursor=x",
        "cursor=99999999999999",
    ):
        assert call(opts, "GET", f"{path}?{query}").status_code == 400
    other = {**opts, "api_key": stage[0].key()[1]}
    assert call(other, "GET", path).status_code == 404


def test_metrics_of_a_guest_that_was_never_asked(opts: dict[str, str]) -> None:
    box = Sandbox.create(**opts)
    assert box.get_metrics() == []
    assert call(opts, "GET", f"/sandboxes/metrics?sandbox_ids={box.sandbox_id},unknown").json() == {
        "sandboxes": {}
    }
    assert call(opts, "GET", f"/sandboxes/{box.sandbox_id}/metrics?start=5&end=4").status_code == 400
    assert call(opts, "GET", "/sandboxes/metrics").status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"autoPauseMemory": False},
        {"autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}},
    ],
)
def test_wishes_that_contradict_each_other(opts: dict[str, str], fields: dict[str, object]) -> None:
    answer = call(opts, "POST", "/v2/sandboxes", {"templateID": "base", **fields})
    assert answer.status_code == 400
    assert "autoPauseMemory" in answer.json()["message"]


def test_a_rollback_to_an_own_snapshot(opts: dict[str, str]) -> None:
    box, other = Sandbox.create(**opts), Sandbox.create(**opts)
    taken = box.create_snapshot(name="point")
    path = f"/sandboxes/{box.sandbox_id}/rollback"
    for ref in (taken.snapshot_id, "point"):
        answer = call(opts, "POST", path, {"snapshotID": ref})
        assert (answer.status_code, answer.json()["sandboxID"]) == (200, box.sandbox_id)
        assert answer.json()["envdAccessToken"] == box._envd_access_token
    refused = call(opts, "POST", f"/sandboxes/{other.sandbox_id}/rollback", {"snapshotID": taken.snapshot_id})
    assert refused.status_code == 400
    assert call(opts, "POST", path, {"snapshotID": "s" + "y" * 19}).status_code == 404
    assert call(opts, "POST", path, {}).status_code == 400
