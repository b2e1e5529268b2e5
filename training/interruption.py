"""A clean end when a program is interrupted, within SECONDS wherever it is.

In the training loop signals are noted and looked at between two steps; elsewhere they end the work at once. Python
comes to a signal between two of its own instructions alone: a thread watches for those that come while compiled code
runs.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SECONDS = 4.0  # until a program ends that does not come to a signal
SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE = "stopped at once; files written so far are complete"


class Stopped(KeyboardInterrupt):
    """The work ends because of a signal: `number`."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


class Interrupted:
    """Context in which Ctrl-C and SIGTERM are noted in `signal` instead of stopping the program; twice stops it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}
        self._raises = False

    def __enter__(self) -> "Interrupted":
        if threading.current_thread() is threading.main_thread():  # others cannot receive signals
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it a signal raises Stopped, also one that was noted before."""
        self._raises = True
        try:
            if self.signal is not None:
                raise Stopped(self.signal)
            yield
        finally:
            self._raises = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        for known, handler in self._previous.items():
            signal.signal(known, handler)
        if self._raises:
            raise Stopped(number)


@contextmanager
def stoppable() -> Iterator[None]:
    """Context in which SIGTERM raises Stopped, as Ctrl-C raises KeyboardInterrupt.

    Where nobody takes notice within SECONDS, because compiled code runs, the process ends with exit code 128 + signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _Watch():
        before = signal.signal(signal.SIGTERM, _stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def noticed() -> None:
    """The program acts on the signal that it received, which may take its time: to save a checkpoint, say."""
    if _Watch.current is not None:
        _Watch.current.acting.set()


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise Stopped(number)


class _Watch:
    """A thread that hears of signals from Python's own handler in C, which tells it by a socket."""

    current: "_Watch | None" = None

    def __init__(self) -> None:
        self.acting = threading.Event()
        self._reader, self._writer = socket.socketpair()

    def __enter__(self) -> None:
        self._writer.setblocking(False)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._outer, _Watch.current = _Watch.current, self
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        _Watch.current = self._outer
        self.acting.set()
        self._writer.close()  # which ends the thread
        self._thread.join()
        self._reader.close()

    def _wait(self) -> None:
        while received := self._reader.recv(1):
            if received[0] in SIGNALS and not self.acting.wait(SECONDS):
                print(AT_ONCE, file=sys.stderr, flush=True)
                os._exit(128 + received[0])
