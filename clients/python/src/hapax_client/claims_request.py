"""A request for the right to run an event."""

from __future__ import annotations

import threading
import uuid
from typing import Any, Optional

from .errors import Invalid
from .text import check_name, dumps

_LEASE_MS_MAX = 86_400_000


def lease_ms(lease: float) -> int:
    """A lease in milliseconds: up to a day."""
    ms = round(lease * 1000) if isinstance(lease, (int, float)) and lease == lease and abs(lease) < 1e9 else 0
    if not 1 <= ms <= _LEASE_MS_MAX:
        raise Invalid("the lease", f"it is {lease} s; it must be 0.001 to {_LEASE_MS_MAX // 1000} s (a day)")
    return ms


class ClaimRequest:
    """A request to claim, with a name of its own: repeated because an answer was lost, it gets the same token.

    It grants one run. `claim` makes one; an error without an answer has it (`error.request`), to ask again with
    `claim_again`.
    """

    def __init__(
        self,
        scope: str,
        id: str,
        *,
        lease: Optional[float] = None,
        at_most_once: bool = False,
        time: Optional[str] = None,
        payload: Any = None,
    ) -> None:
        self.scope = check_name("the scope", scope)
        self.id = check_name("the event's id", id)
        self.time = time
        self.at_most_once = at_most_once
        self.payload_json = None if payload is None else dumps("the payload", payload)
        self._lease_ms = None if lease is None else lease_ms(lease)
        self._request_id = str(uuid.uuid4())
        self._lock = threading.Lock()
        self._used = False

    def _take(self) -> None:
        """Two claims with one request would be one permission for two runs."""
        with self._lock:
            if self._used:
                raise Invalid("the claim's request", "it was used already; a request grants one run, so make a new one")
            self._used = True

    def _give_back(self) -> None:
        with self._lock:
            self._used = False

    def _body(self) -> bytes:
        parts = [f'"scope":{dumps("the scope", self.scope)}', f'"id":{dumps("the id", self.id)}']
        if self.time is not None:
            parts.append(f'"time":{dumps("the time", self.time)}')
        parts.append(f'"mode":"{"at_most_once" if self.at_most_once else "lease"}"')
        if self._lease_ms is not None:
            parts.append(f'"lease_ms":{self._lease_ms}')
        parts.append(f'"request_id":"{self._request_id}"')
        if self.payload_json is not None:
            parts.append(f'"payload":{self.payload_json}')
        return ("{" + ",".join(parts) + "}").encode()

    def __repr__(self) -> str:
        return f"ClaimRequest({self.scope!r}, {self.id!r})"
