"""The client for programs with threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Optional, TypeVar, Union

import httpx

from . import analytics, base, claims, journal, letters, records
from .analytics import Fields, Tally, Write
from .api import ChangedAnswer, EntriesAnswer, InfoAnswer, KeyAnswer
from .claims import Claim, Grant, NotClaimed
from .claims_request import ClaimRequest
from .errors import Unavailable
from .exchange import Answer, Call, NoAnswer, Pause, Send, exchange
from .journal import AggregateEvents, Appended, Events, Expected, NewEvent
from .prepared import PreparedWrite
from .records import Page, Record, RecordId, Writes, Written
from .settings import ClientSettings

T = TypeVar("T")


class Client(base.Base):
    """A client of one server. Every write has a key, made before its first attempt and sent with every one, so
    a retry never writes twice.

        with Client("http://127.0.0.1:7070") as client:
            client.data("orders").create({"amount": 7})
    """

    def __init__(
        self,
        url: str,
        *,
        token: Optional[str] = None,
        tenant: Optional[str] = None,
        settings: Optional[ClientSettings] = None,
        http: Optional[httpx.Client] = None,
    ) -> None:
        """Sends nothing yet. `token` is an API token; use https then, except to the same machine. `tenant` is for a
        server without tokens. `http` is a client of yours, for certificates or proxies of your own."""
        super().__init__(url, token, tenant, settings)
        self._own = http is None
        self._http = http or httpx.Client()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        if self._own:
            self._http.close()

    def data(self, module: str) -> "Data":
        """The records of a module. Nothing is asked yet."""
        return Data(self, module)

    @property
    def journal(self) -> "Journal":
        """The journal."""
        return Journal(self)

    @property
    def dead(self) -> "DeadLetters":
        """Dead letters, for operators."""
        return DeadLetters(self)

    def analytics(self, module: str) -> "Analytics":
        """Questions to the read model of a module."""
        return Analytics(self, module)

    def info(self) -> InfoAnswer:
        """What the server is, and its limits."""
        return self._call(base.info())

    def key(self, key: str) -> KeyAnswer:
        """What became of a write with this key."""
        return self._call(base.key(key))

    def send(self, write: PreparedWrite) -> Written:
        """Sends a prepared write until there is an answer, within the deadline. It takes effect once, however often
        it is sent. Refuses a write that was prepared for another server or tenant, which has not seen the key and
        would run the write again."""
        return self._call(records.write(write, self.server, self.tenant))

    def send_anywhere(self, write: PreparedWrite) -> Written:
        """Like `send`, to a server with another URL than the write was prepared for. Gives up: the check that it is
        the same server. Use it for one that has moved with its data, or that is reached another way."""
        return self._call(records.write(write, None, self.tenant))

    def claim(
        self,
        scope: str,
        id: str,
        *,
        lease: Optional[float] = None,
        at_most_once: bool = False,
        time: Optional[str] = None,
        payload: Any = None,
    ) -> Union[Claim, NotClaimed]:
        """Asks for the right to run an event. Run it only if the `outcome` is `claimed`.

        `lease` is how long it may take unless it is extended, in seconds; the server's default otherwise.
        `at_most_once`: what fails or crashes after the claim is lost, and listed. `payload` is the event's content:
        it is kept with the dead letter if the event becomes one, and an id that is used again for another content is
        noticed.

        A claim without an answer raises an error that has the request: `claim_again(error.request)` gets the run that
        the lost answer has granted."""
        request = ClaimRequest(scope, id, lease=lease, at_most_once=at_most_once, time=time, payload=payload)
        return self.claim_again(request)

    def claim_again(self, request: ClaimRequest) -> Union[Claim, NotClaimed]:
        """Asks with a request that got no answer. It grants one run: a request that got one is refused."""
        request._take()
        try:
            granted = self._call(claims.claim(request))
        except BaseException:
            request._give_back()
            raise
        if isinstance(granted, Grant):
            return Claim(self, request, granted, self.settings)
        return granted

    def _call(self, call: Call[T]) -> T:
        steps = exchange(call, self.settings)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = steps.send(None)
                else:
                    step = steps.send(self._attempt(call, step))
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            steps.close()

    def _attempt(self, call: Call[Any], step: Send) -> Union[Answer, NoAnswer]:
        ends = time.monotonic() + step.timeout
        try:
            with self._http.stream(**self._request(call, step.timeout)) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > self.settings.answer_bytes_max:
                        return self._too_large()
                    if time.monotonic() > ends:  # httpx limits each read, not all of them together
                        return NoAnswer("the answer took too long", True)
                return Answer(response.status_code, response.headers, bytes(body))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            return self._no_answer(error)


class Data(Writes):
    """The records of one module. See `Client.data`."""

    def __init__(self, client: Client, module: str) -> None:
        super().__init__(client.server, client.tenant, module)
        self._client = client

    def analytics(self) -> "Analytics":
        """Questions to the read model of the module."""
        return Analytics(self._client, self.module)

    def create(self, payload: Any) -> Written:
        """Creates a record. Retries by itself. If it fails without an answer, the error has the write with its key
        (`error.prepared`): send that again."""
        return self._client.send(self.prepare_create(payload))

    def create_as(self, id: RecordId, payload: Any) -> Written:
        """Creates a record with an id of your own."""
        return self._client.send(self.prepare_create_as(id, payload))

    def update(self, id: RecordId, expected_seq: int, payload: Any) -> Written:
        """Replaces the content of a record that has this seq; `Conflict` if it has another."""
        return self._client.send(self.prepare_update(id, expected_seq, payload))

    def delete(self, id: RecordId, expected_seq: int) -> Written:
        """Deletes a record that has this seq; `Conflict` if it has another."""
        return self._client.send(self.prepare_delete(id, expected_seq))

    def get(self, id: RecordId) -> Record:
        """Reads a record."""
        return self._client._call(records.get(self.module, id))

    def list(self, after: Optional[RecordId] = None, limit: int = 100) -> Page:
        """Reads up to `limit` records (1 to 1000) in the order of their ids, from behind `after` on."""
        return self._client._call(records.page(self.module, after, limit))

    def records(self, page: int = 100) -> Iterator[Record]:
        """All records in the order of their ids, read page by page. It is not a snapshot: what is written meanwhile
        may or may not be seen."""
        after: Optional[RecordId] = None
        while True:
            try:
                found = self.list(after, page)
            except Unavailable as error:
                if not error.too_large or page == 1:
                    raise
                page //= 2  # the client reads no answer of that size; half of the records may fit
                continue
            for record in found.records:
                yield record
            if found.next is None:
                return
            after = found.next


class Journal:
    """The journal of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def append(self, aggregate: str, events: Sequence[NewEvent], expected: Expected = "any") -> Appended:
        """Appends events to an aggregate: all of them, or none. An event that is there already, because an answer was
        lost or because it was sent before, keeps its seq. `expected` is the aggregate's last seq, `new` or `any`."""
        return self._client._call(journal.append(self._client.tenant, aggregate, events, expected))

    def events(self, after: Optional[str] = None, limit: int = 100, wait: float = 0.0) -> Events:
        """Reads events in the journal's order, from behind a position on. If there are none, waits for them for
        `wait` seconds (30 at most)."""
        return self._client._call(journal.read(after, limit, wait))

    def aggregate(self, aggregate: str, from_seq: int = 1, limit: int = 100) -> AggregateEvents:
        """Reads the events of an aggregate."""
        return self._client._call(journal.read_aggregate(aggregate, from_seq, limit))


class DeadLetters:
    """Dead letters, for operators."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(
        self,
        *,
        scope: Optional[str] = None,
        id: Optional[str] = None,
        aggregate: Optional[str] = None,
        payload: bool = False,
        limit: int = 100,
        after: Optional[str] = None,
    ) -> EntriesAnswer:
        """A page of them, each with its reason; with headers and payload if you ask for it. `after` is `next` of the
        page before."""
        call = letters.entries(scope=scope, id=id, aggregate=aggregate, payload=payload, limit=limit, after=after)
        return self._client._call(call)

    def redrive(
        self,
        scope: str,
        *,
        reason: str,
        ids: Optional[Sequence[str]] = None,
        all: bool = False,
        dry_run: bool = False,
        limit: Optional[int] = None,
        after: Optional[str] = None,
    ) -> ChangedAnswer:
        """Runs them again, with attempts reset. A `Conflict` that is in doubt may be the work of an earlier attempt:
        look at them. With `all`, a lost answer is not asked for again, which would take the next ones: `Unavailable`,
        in doubt. One with `needs_delivery` in the answer runs when it is delivered again: publish it. With `all`, what
        cannot be changed has a `problem`; `after`, the `next` of an answer, goes on behind it."""
        return self._client._call(letters.change("redrive", scope, reason, ids, all, dry_run, limit, after))

    def drop(
        self,
        scope: str,
        *,
        reason: str,
        ids: Optional[Sequence[str]] = None,
        all: bool = False,
        dry_run: bool = False,
        limit: Optional[int] = None,
        after: Optional[str] = None,
    ) -> ChangedAnswer:
        """Gives them up: their aggregates go on past them. With `all`, a lost answer is `Unavailable`, in doubt, as
        with `redrive`."""
        return self._client._call(letters.change("drop", scope, reason, ids, all, dry_run, limit, after))


class Analytics:
    """Questions to the read model of one module. `after_write` waits until a write of yours is visible.
    With `approximate` replaced and deleted versions may count, which is faster on some read models; `meta` says so."""

    def __init__(self, client: Client, module: str) -> None:
        self._client, self._module = client, module

    def records(
        self,
        *,
        since: Optional[str] = None,
        after: Optional[RecordId] = None,
        limit: int = 100,
        approximate: bool = False,
        after_write: Optional[Write] = None,
        wait: float = 5.0,
    ) -> Page:
        """A page of records, each once; `meta` says how current they are. `since` is a time span such as `7d`."""
        call = analytics.records(self._module, since, after, limit, approximate, after_write, wait)
        return self._client._call(call)

    def tally(
        self,
        *,
        sum: Fields = (),
        min: Fields = (),
        max: Fields = (),
        group_by: Optional[str] = None,
        since: Optional[str] = None,
        approximate: bool = False,
        after_write: Optional[Write] = None,
        wait: float = 5.0,
    ) -> Tally:
        """Counts records, and computes exact sums, least and greatest numbers of fields (JSON pointers)."""
        call = analytics.tally(self._module, sum, min, max, group_by, since, approximate, after_write, wait)
        return self._client._call(call)
