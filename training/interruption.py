"""A clean end when a run is interrupted: signals are noted, and looked at between two steps."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted:
    """Context in which Ctrl-C and SIGTERM are noted in `signal` instead of stopping the program; twice stops it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupted":
        if threading.current_thread() is threading.main_thread():  # others cannot receive signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        for known, handler in self._previous.items():
            signal.signal(known, handler)
