"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP): three ways to ask a command to stop, answered alike.

Inside `with Interrupts() as interrupts` the first of them raises `Interrupted`, or cancels what
`interrupts.run` runs, so that clean-up happens in `finally` as for any other error. Further ones are ignored: a
terminal that closes sends SIGHUP more than once, and nothing may break into the clean-up. Signals that we were
told to ignore (`nohup`) stay ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

T = TypeVar("T")


class Interrupted(BaseException):
    """A signal asked us to stop. No Exception, so that nothing takes it for an error; `main.run` ends with it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status that a shell gives to a command ended by this signal."""
        return 128 + self.number


def stop_signals() -> list[signal.Signals]:
    """The signals that ask us to stop, without those that are ignored."""
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in every if signal.getsignal(number) is not signal.SIG_IGN]


class Interrupts:
    """Takes the signals while the context is open; only for the main thread."""

    def __init__(self) -> None:
        self.received = 0
        """The signal that asked us to stop, 0 while there was none."""
        self._held = False
        self._raised = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received = number
            if not self._held:
                self._raise_received()

    def _raise_received(self) -> None:
        if self.received:
            self._raised = True
            raise Interrupted(self.received)

    def hold(self) -> None:
        """From here on a signal is noted and raises nothing."""
        self._held = True

    def release(self) -> None:
        """End `hold`. Raises Interrupted when a signal has come meanwhile."""
        self._held = False
        if not self._raised:
            self._raise_received()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing break in between two steps that belong together."""
        self.hold()
        yield
        self.release()

    def run(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        on_stop: Callable[[], None] = lambda: None,
        loop_factory: Callable[[], AbstractEventLoop] | None = None,
    ) -> T:
        """Run `work` on an event loop of its own; the first signal calls `on_stop` and cancels it.

        Raises Interrupted once its clean-up is over.
        """
        import asyncio

        self._raise_received()
        results: list[T] = []

        async def whole() -> None:
            me = asyncio.current_task()
            loop = asyncio.get_running_loop()

            def interrupt(number: int) -> None:
                if not self.received and me is not None:
                    self.received = number
                    on_stop()
                    me.cancel()

            for number in self._before:
                loop.add_signal_handler(number, interrupt, number)
            try:
                results.append(await work())
            except asyncio.CancelledError:
                if not self.received:
                    raise
            finally:
                # The loop gives the signals back to their defaults; none may come before we have them again.
                signal.pthread_sigmask(signal.SIG_BLOCK, self._before)

        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(whole())
        finally:
            for number in self._before:
                signal.signal(number, self._take)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        self._raise_received()
        return results[0]
