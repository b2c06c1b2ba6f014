"""The supply figures: the best of each round counts, ratios stay within a round, missing sides have none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from greenroom.bench import supply
from greenroom.bench.supply import Figures, HeldRow, RateRow, Supply
from greenroom.config import Config, RoleSpec


def row(number: int, kind: Supply, lanes: int, rate: float) -> RateRow:
    return RateRow(round=number, supply=kind, lanes=lanes, count=9, per_second=rate)


ROWS = [
    row(1, "loop", 1, 10.0),
    row(1, "loop", 2, 20.0),
    row(1, "stock", 1, 120.0),
    row(1, "stock", 3, 60.0),
    row(2, "loop", 2, 40.0),
    row(2, "stock", 2, 160.0),
    row(3, "loop", 4, 10.0),
    row(3, "stock", 2, 50.0),
]


def test_the_best_of_each_round_is_compared_with_the_loops_best_of_that_round() -> None:
    loop, stock = supply.summarise(ROWS)
    assert (loop.best, loop.ratio) == ([20.0, 40.0, 10.0], [1.0, 1.0, 1.0])
    assert (stock.best, stock.ratio) == ([120.0, 160.0, 50.0], [6.0, 4.0, 5.0])
    assert stock.median_ratio == 5.0


def test_without_a_loop_there_is_no_ratio() -> None:
    (nothing,) = supply.summarise([row(1, "nothing", 1, 30.0)])
    assert (nothing.best, nothing.ratio, nothing.median_ratio) == ([30.0], [], None)


def test_tables_fit_their_columns() -> None:
    held = HeldRow(
        mode="cow",
        state="paused",
        memory_mib=256,
        alive=40,
        pss_mib=16.5,
        private_mib=16.0,
        available_mib=15.0,
    )
    figures = Figures(
        rates=ROWS, summaries=supply.summarise(ROWS), held=[held], cold_boot_ms=None, notes=["a note"]
    )
    for table in supply.tables(figures):
        assert all(len(cells) == len(table.columns) for cells in table.rows)


def test_a_benchmark_makes_no_stock_of_its_own_accord() -> None:
    spec = RoleSpec(role="node", replica=0, state_dir="/nowhere", cache_dir="/nowhere", config=Config())
    found = supply.without_stock(spec).config.vm
    assert (found.stock_slots, found.stock_waiting) == (0, 0)


def test_the_loop_is_where_the_benchmark_looks_for_it() -> None:
    script = supply.loop_script()
    assert script is not None
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--threads" in done.stdout


@pytest.mark.parametrize("memory", [256, 512])
def test_guests_of_other_sizes_differ_in_memory_alone(memory: int) -> None:
    size = supply.spec_size(memory)
    assert (size.memory_mib, size.disk_mib, size.cpus) == (memory, 4096, 1)
