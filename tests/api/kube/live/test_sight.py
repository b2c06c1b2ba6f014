"""What the fleet gives to this dialect: what a read waits for, and a change whose answer is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.api import seen as module
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.documents import Document
from greenroom.api.kube.live.operating import Platform
from greenroom.api.nodes import Fleet, NodeTable
from greenroom.api.seen import Seen
from greenroom.config import Config
from greenroom.errors import OutcomeUnknown
from greenroom.wire import credentials
from greenroom.wire.calling import RoleClient
from greenroom.wire.changes import Position
from greenroom.wire.messages import DeclaredChange, Listed, NodeList, Sandbox
from tests.fleet.test_following import Node
from tests.fleet.test_view import sandbox
from tests.support.waiting import until


async def test_a_read_names_what_it_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    monkeypatch.setattr(module, "BRIEFLY", 0.05)
    credentials.ensure(tmp_path)
    node, dead = Node("aaaa", tmp_path), Node("bbbb", tmp_path)
    node.log.put(sandbox(1))
    async with RoleClient(credentials.own_token(tmp_path, "api")) as client:
        seen = Seen(client)
        assert await seen.current() == []
        async with node.run():
            seen.learn(NodeList(1, [node.info(), dead.info(live=False)]))
            await until(lambda: "aaaa" not in seen.view.partial())
            assert await seen.current() == ["node-bbbb"]
            client.heard(Position(node.log.position.stream, 2))
            assert await seen.current() == ["node-aaaa", "node-bbbb"]
            assert not await seen.caught_up(["aaaa"])
            node.log.drop(sandbox(1).sandbox_id)
            assert await seen.caught_up(["aaaa"])
            assert await seen.current() == ["node-bbbb"]
            assert len(seen.view) == 0
        await until(lambda: "aaaa" in seen.view.partial())
        assert await seen.current() == ["node-aaaa", "node-bbbb"]
        await seen.close()


class Lossy:
    """A client whose PUT loses its answer, after or before it had an effect."""

    def __init__(self, now: Listed) -> None:
        self.now = Sandbox(**{field: getattr(now, field) for field in Listed.__struct_fields__})
        self.heard: Any = None

    async def call(self, method: str, url: str, kind: Any, *_body: Any, deadline: float) -> Any:
        if url.endswith("/v1/nodes"):
            return NodeList(1, [])
        if method == "PUT":
            raise OutcomeUnknown("no answer")
        return self.now


@pytest.mark.parametrize("happened", [True, False], ids=["happened", "did not"])
async def test_a_change_whose_answer_is_lost_is_looked_up(tmp_path: Path, happened: bool) -> None:
    credentials.ensure(tmp_path)
    declared = documents.declared_of(Document({"metadata": {"generation": 2}}), revision=3, retain=True)
    old = documents.declared_of(Document(), revision=2, retain=True)
    client = Lossy(sandbox(1, declared=declared if happened else old))
    fleet = Fleet(client, ["http://m"], Config())  # type: ignore[arg-type]
    node = Node("aaaa", tmp_path)
    fleet._table = NodeTable.of(NodeList(1, [node.info()]))
    change = DeclaredChange(2, msgspec.structs.replace(declared, revision=0))
    if happened:
        assert (await fleet.declare(client.now.sandbox_id, change)).declared == declared
    else:
        with pytest.raises(OutcomeUnknown):
            await fleet.declare(client.now.sandbox_id, change)
    platform: Platform = fleet
    assert platform.seen is fleet.seen
