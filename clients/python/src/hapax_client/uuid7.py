"""UUIDv7 that only increase within a process."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable

_RANDOM_BITS = 74
_RANDOM_MAX = (1 << _RANDOM_BITS) - 1


class Uuid7Maker:
    """Makes UUIDv7: 48 bits are the time in milliseconds, 6 are the same in all, 74 are random.

    Within a millisecond, and while the clock goes back, the 74 bits rise by a random step. If they would
    overflow, the time rises by a millisecond instead.
    """

    def __init__(self, clock_ms: Callable[[], int] | None = None) -> None:
        self._clock_ms = clock_ms or (lambda: time.time_ns() // 1_000_000)
        self._lock = threading.Lock()
        self._ms = -1
        self._random = 0

    def make(self) -> uuid.UUID:
        """The next one: greater than all before."""
        with self._lock:
            now = max(0, min(self._clock_ms(), (1 << 48) - 1))
            step = 1 + int.from_bytes(os.urandom(4), "big")
            if now > self._ms:
                self._ms, self._random = now, self._draw()
            elif self._random + step <= _RANDOM_MAX:
                self._random += step
            else:
                self._ms, self._random = self._ms + 1, self._draw()
            high, low = self._random >> 62, self._random & ((1 << 62) - 1)
            return uuid.UUID(int=self._ms << 80 | 7 << 76 | high << 64 | 2 << 62 | low)

    @staticmethod
    def _draw() -> int:
        return int.from_bytes(os.urandom(10), "big") & _RANDOM_MAX


_maker = Uuid7Maker()


def _begin_again() -> None:
    """A child that goes on where its parent was could make the parent's next id."""
    global _maker
    _maker = Uuid7Maker()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def uuid7() -> uuid.UUID:
    """A new UUIDv7, greater than all that this process has made."""
    return _maker.make()
