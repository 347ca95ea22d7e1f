"""A client of `hapax serve`: a retry never writes twice.

    from hapax_client import Client

    with Client("http://127.0.0.1:7070") as client:
        written = client.data("orders").create({"amount": 7})
        print(written.record.id, written.replayed)

Each write has a key, made before the first attempt and sent with every one. The client repeats what may be repeated;
it decides by the `code` of the server's problem, never by the status. A write that ends without an answer comes back
with its key: `error.prepared`. `AsyncClient` is the same for asyncio.
"""

from .aio import AsyncAnalytics, AsyncClient, AsyncData, AsyncDeadLetters, AsyncJournal
from .analytics import Group, Measure, Tally
from .base import VERSION as __version__
from .claims import AsyncClaim, Claim, NotClaimed
from .claims_request import ClaimRequest
from .client import Analytics, Client, Data, DeadLetters, Journal
from .errors import (
    Conflict,
    Denied,
    Fenced,
    HapaxError,
    Invalid,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    Mismatch,
    NotFound,
    OutcomeUnknown,
    Problem,
    Refused,
    Unavailable,
)
from .journal import AggregateEvents, Appended, Events, JournalEvent, NewEvent, Placed
from .prepared import PreparedWrite
from .records import Page, Record, Written
from .settings import ClientSettings
from .text import RawJson
from .uuid7 import uuid7

__all__ = [
    "AggregateEvents",
    "Analytics",
    "Appended",
    "AsyncAnalytics",
    "AsyncClaim",
    "AsyncClient",
    "AsyncData",
    "AsyncDeadLetters",
    "AsyncJournal",
    "Claim",
    "ClaimRequest",
    "Client",
    "ClientSettings",
    "Conflict",
    "Data",
    "DeadLetters",
    "Denied",
    "Events",
    "Fenced",
    "Group",
    "HapaxError",
    "Invalid",
    "Journal",
    "JournalEvent",
    "KeyExpired",
    "KeyMismatch",
    "LeaseLost",
    "Measure",
    "Mismatch",
    "NewEvent",
    "NotClaimed",
    "NotFound",
    "OutcomeUnknown",
    "Page",
    "Placed",
    "PreparedWrite",
    "Problem",
    "RawJson",
    "Record",
    "Refused",
    "Tally",
    "Unavailable",
    "Written",
    "__version__",
    "uuid7",
]
