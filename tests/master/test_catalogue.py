"""What a master makes sure of at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config import PoolsConfig
from greenroom.master.catalogue import Catalogue
from greenroom.store.sqlite import SqliteStore


@pytest.mark.parametrize(
    ("settings", "targets"),
    [
        (PoolsConfig(default_target=9), [5]),
        (PoolsConfig(base_target=7), [7]),
        (PoolsConfig(base_target=5, default_target=9), [5]),
        (PoolsConfig(base_target=0), []),
    ],
    ids=["as before", "another number", "the same number", "none"],
)
async def test_a_later_start_keeps_the_pool_unless_it_was_asked_for_another(
    tmp_path: Path, settings: PoolsConfig, targets: list[int]
) -> None:
    store = await SqliteStore.open(tmp_path / "store.db")
    try:
        catalogue = Catalogue(store)
        await catalogue.seed(PoolsConfig(default_target=5, default_warm="running"))
        assert [(pool.target, pool.warm) for pool in catalogue.pools] == [(5, "running")]
        await catalogue.seed(settings)
        assert [pool.target for pool in catalogue.pools] == targets
        assert all(pool.warm == "running" for pool in catalogue.pools)
    finally:
        await store.close()


async def test_a_first_start_can_be_without_a_pool(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.db")
    try:
        catalogue = Catalogue(store)
        await catalogue.seed(PoolsConfig(base_target=0))
        assert catalogue.pools == []
        assert [template.name for template in catalogue.templates] == ["base"]
    finally:
        await store.close()
