"""The settings of a client."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .errors import Invalid


@dataclass(frozen=True)
class ClientSettings:
    """Times are in seconds. Every setting is a number above 0."""

    deadline: float = 60.0
    """How long a call may take, with all its attempts and pauses."""
    attempt_timeout: float = 20.0
    """How long one attempt may take. The server goes on with a write whose attempt took too long; the next
    attempt gets its answer."""
    connect_timeout: float = 5.0
    """How long connecting may take."""
    backoff_base: float = 0.1
    """The longest pause after a first attempt; doubles with each."""
    backoff_max: float = 10.0
    """The longest pause."""
    retry_after_max: float = 3600.0
    """The longest `Retry-After` to honour; pauses grow on top of it. One beyond the deadline ends the call."""
    body_bytes_max: int = 1 << 20
    """The largest request."""
    answer_bytes_max: int = 32 << 20
    """The largest answer."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise Invalid(f"the setting {setting.name}", f"it is {value!r}; it needs to be a number above 0")
