"""Put this folder on PYTHONPATH, and every Python process started with it has a wall clock that a test can set.

`STEPPED` in GREENROOM_TEST_CLOCK's file, in seconds, is added to the real time. Only the wall clock: what nobody can
set (monotonic clocks, the time since boot) stays. A real `settimeofday` would set the clock of the whole machine.
"""

import os
import time

_path = os.environ.get("GREENROOM_TEST_CLOCK")
if _path:
    _time, _time_ns = time.time, time.time_ns

    def _step() -> float:
        with open(_path, encoding="ascii") as file:
            return float(file.read() or 0)

    time.time = lambda: _time() + _step()
    time.time_ns = lambda: _time_ns() + int(_step() * 1e9)
