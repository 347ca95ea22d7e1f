"""Claims: the right to run an event, the lease that is kept meanwhile, and how the run ended."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Generic, Literal, Optional, TypeVar, Union

from . import text
from .api import Route
from .claims_request import ClaimRequest, lease_ms
from .errors import HapaxError, LeaseLost, visible
from .exchange import Call, Reply, log, odd
from .settings import ClientSettings

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .client import Client

C = TypeVar("C")
# Of a longer reason the rest is left out, so that it does not keep a run from being settled.
_REASON_BYTES_MAX = 4096
# What a settling has besides payload and reason, at most: a scope, an id, a time.
_ENVELOPE_BYTES = 4096
# The lease is extended when a third of it is used up, and counts as lost when a sixth is left: what is
# cancelled then has that time to end.
_BEAT_AFTER = 1 / 3
_LOST_BEFORE = 1 / 6
# Between an extension that failed and the next one, in seconds.
_BEAT_PAUSE = 0.05
# How long the end of a block may try to report a failure, though its lease is over.
_SETTLE_MIN = 1.0

NotClaimedOutcome = Literal["duplicate", "busy", "retry_later", "wait", "stale", "parked", "dead", "mismatch", "too_old"]
_NOT_CLAIMED = ("duplicate", "busy", "retry_later", "wait", "stale", "parked", "dead", "mismatch", "too_old")


@dataclass(frozen=True)
class NotClaimed:
    """The event is not this caller's to run."""

    outcome: NotClaimedOutcome
    """Why: `duplicate` (it took effect before), `busy` (somebody else runs it), `retry_later` (it failed and is not
    due yet), `wait` and `parked` (another event comes first), `stale` (a later one is done), `dead` (only an
    operator runs it again), `mismatch` (its id was used for another content), `too_old`."""
    until: Optional[str] = None
    """When the lease in the way ends, by the ledger's clock."""
    at: Optional[str] = None
    """When a retry is due, or since when it has been so, by the ledger's clock."""


@dataclass
class Grant:
    """What a claim was granted."""

    token: int
    attempt: int
    suspect: bool
    until: Optional[str]
    lease: Optional[float]
    sent: float


def claim(request: ClaimRequest) -> Call[Union[Grant, NotClaimed]]:
    """Asks for the right to run an event."""

    def read(reply: Reply) -> Union[Grant, NotClaimed]:
        answer = text.loads(reply.body)
        _is_about(request.id, answer["id"])
        outcome = answer["outcome"]
        if outcome in _NOT_CLAIMED:
            return NotClaimed(outcome, answer.get("until"), answer.get("at"))
        if outcome != "claimed":
            odd(f"the answer has an outcome that this client does not know: {outcome!r}")
        lease, token = answer.get("lease_ms"), answer["token"]
        if isinstance(token, bool) or not isinstance(token, int):
            odd("the answer's token is not a number")
        return Grant(
            token=token,
            attempt=answer.get("attempt", 1),
            suspect=answer.get("suspect", False),
            until=answer.get("until"),
            lease=None if lease is None else lease / 1000,
            # A lease starts over with every attempt at its claim; an at-most-once claim does not.
            sent=reply.first_sent if request.at_most_once else reply.last_sent,
        )

    return Call(
        what=f"claiming {request.id!r} for {request.scope!r}",
        route="POST /v1/claims",
        body=request._body(),
        read=read,
        claim=request,
    )


def _is_about(asked: str, answered: Any) -> None:
    if asked != answered:
        odd(f"the answer is about {visible(str(answered))}")


def reason_of(reason: str) -> str:
    """A reason that the server takes: not blank, and bounded."""
    kept = reason.encode(errors="replace")[:_REASON_BYTES_MAX].decode(errors="ignore")
    return kept if kept.strip() else "no reason given"


class _Run(Generic[C]):
    """A run that was granted: what both kinds of claims share."""

    outcome: Literal["claimed"] = "claimed"

    def __init__(self, client: C, request: ClaimRequest, grant: Grant, settings: ClientSettings) -> None:
        self._client = client
        self._settings = settings
        self.scope = request.scope
        self.id = request.id
        self.token = grant.token
        """The fencing token: pass it to what dedups or fences."""
        self.attempt = grant.attempt
        """Which run this is, counted from 1."""
        self.suspect = grant.suspect
        """Whether the last run's process died."""
        self.until = grant.until
        """When the lease ends, by the ledger's clock."""
        self.deadline = None if grant.lease is None else grant.sent + grant.lease
        """When it ends at the earliest, by `time.monotonic()`: counted from before the claim was sent. `None`:
        the claim has no lease."""
        self.payload_json = request.payload_json
        """The event's content, kept with the dead letter if it becomes one."""
        self._at_most_once = request.at_most_once
        self._time = request.time
        self._lease = grant.lease
        self._lost: Optional[LeaseLost] = None
        self._settled = False

    def with_payload(self, payload: Any) -> None:
        """The event's content, to be kept with the dead letter if it becomes one."""
        self.payload_json = text.dumps("the payload", payload)

    @property
    def lost(self) -> bool:
        """Whether the lease is lost: another worker may run the event."""
        return self._lost is not None or (self.deadline is not None and time.monotonic() >= self.deadline)

    def check(self) -> None:
        """Raises `LeaseLost` if the lease is lost. Call it between the steps of a long effect."""
        if self.lost:
            raise self._lost or self._lose("its time is over")

    def _lose(self, why: str) -> LeaseLost:
        self._lost = LeaseLost(f"the lease of {self.id!r} for {self.scope!r} is lost: {why}")
        return self._lost

    def _lost_at(self) -> float:
        """From when on the lease counts as lost while it is kept."""
        return (self.deadline or 0.0) - (self._lease or 0.0) * _LOST_BEFORE

    def _beats(self) -> Optional[float]:
        """The pause between two extensions; `None`: there is no lease to keep."""
        return None if self._lease is None or self._at_most_once else self._lease * _BEAT_AFTER

    def _extended(self, kept: tuple[Optional[str], float], lease: float) -> None:
        (self.until, sent), self._lease = kept, lease
        self.deadline = sent + lease

    def _extend(self, lease: float, deadline: Optional[float] = None) -> Call[tuple[Optional[str], float]]:
        call = self._settle("extend", "POST /v1/claims/extend", {"lease_ms": str(lease_ms(lease))})
        call.deadline = deadline
        return call

    def _next_beat(self) -> float:
        return (self.deadline or 0.0) - (self._lease or 0.0) * (1 - _BEAT_AFTER)

    def _fail_at_the_end(self, error: BaseException) -> Call[Any]:
        """Reports a failure within the rest of the lease: after that it ends by itself."""
        call = self._fail(f"{type(error).__name__}: {error}", "retry")
        if self.deadline is not None:
            rest = max(_SETTLE_MIN, self.deadline - time.monotonic())
            call.deadline = min(rest, self._settings.deadline)
        return call

    def _done(self) -> Call[Any]:
        self._settled = True
        return self._settle("done", "POST /v1/claims/done", {})

    def _release(self) -> Call[Any]:
        self._settled = True
        return self._settle("release", "POST /v1/claims/release", {})

    def _fail(self, reason: str, then: str) -> Call[Any]:
        self._settled = True
        reason = reason_of(reason)
        fields = {"reason": text.dumps("the reason", reason), "then": f'"{then}"'}
        # What is too large for one request together with the reason must not keep it from failing. And the
        # server refuses content that it would not keep: an at-most-once event never runs again.
        room = self._settings.body_bytes_max - 6 * len(reason.encode()) - _ENVELOPE_BYTES
        if self.payload_json is not None and not self._at_most_once and len(self.payload_json.encode()) <= room:
            fields["payload"] = self.payload_json
        return self._settle("fail", "POST /v1/claims/fail", fields)

    def _settle(self, what: str, route: Route, fields: dict[str, str]) -> Call[tuple[Optional[str], float]]:
        run = {"scope": text.dumps("the scope", self.scope), "id": text.dumps("the id", self.id)}
        if self._time is not None:
            run["time"] = text.dumps("the time", self._time)
        body = ",".join(f'"{name}":{value}' for name, value in {**run, "token": str(self.token), **fields}.items())

        def read(reply: Reply) -> tuple[Optional[str], float]:
            answer = text.loads(reply.body)
            _is_about(self.id, answer["id"])
            return answer.get("at"), reply.last_sent

        return Call(f"{what} of {self.id!r} for {self.scope!r}", route, read, body=f"{{{body}}}".encode())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scope!r}, {self.id!r}, token={self.token}, attempt={self.attempt})"


class Claim(_Run["Client"]):
    """An event that is this caller's to run. In a `with` block its lease is kept by a thread; the end of the block
    settles it: done, or failed if an exception leaves the block.

        claim = client.claim("mailer", "order-17-paid")
        if claim.outcome == "claimed":
            with claim:
                send_mail()
    """

    _stop: Optional[threading.Event] = None

    def __init__(self, client: "Client", request: ClaimRequest, grant: Grant, settings: ClientSettings) -> None:
        super().__init__(client, request, grant, settings)
        self._extending = threading.Lock()  # one after the other: the last one counts, on the server as here

    def done(self) -> None:
        """It took effect. May be repeated; a token that another run has fenced is `Fenced`."""
        self._client._call(self._done())

    def fail(self, reason: str) -> None:
        """It failed: it runs again after a pause, until its attempts are used up. Then it is a dead letter. An
        at-most-once event is lost. Of the reason 4096 bytes are kept."""
        self._client._call(self._fail(reason, "retry"))

    def dead(self, reason: str) -> None:
        """It failed for good: only an operator runs it again."""
        self._client._call(self._fail(reason, "dead"))

    def release(self) -> None:
        """Gives the claim back, without having run the event."""
        self._client._call(self._release())

    def extend(self, lease: float) -> None:
        """Extends the lease from now on; `deadline` says until when."""
        with self._extending:
            self._extended(self._client._call(self._extend(lease)), lease)

    def __enter__(self) -> "Claim":
        if self._beats() is not None and self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._keep, args=(self._stop,), name=f"lease of {self.id}", daemon=True).start()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if self._stop is not None:
            self._stop.set()
        if self._settled:
            return
        if error is None:
            self.done()  # a lease that is lost by the clock too: the token decides
        elif not isinstance(error, LeaseLost):
            try:
                self._client._call(self._fail_at_the_end(error))
            except HapaxError as unsettled:  # the caller gets its own exception; the lease ends by itself
                log.warning("%r failed, and that could not be reported: %s", self, unsettled)

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(max(0.0, self._next_beat() - time.monotonic())):
            if time.monotonic() < self._next_beat():
                continue  # it was extended meanwhile
            left = self._lost_at() - time.monotonic()
            if left <= 0:
                self._lose("its time is over")
                return
            if not self._extending.acquire(blocking=False):
                stop.wait(_BEAT_PAUSE)  # the effect extends it
                continue
            try:
                lease = self._lease or 0.0
                self._extended(self._client._call(self._extend(lease, left)), lease)
            except HapaxError as error:
                if stop.is_set() or self._settled:
                    return
                if error.is_retryable and time.monotonic() < self._lost_at():
                    stop.wait(_BEAT_PAUSE)
                    continue
                self._lose(str(error))
                return
            except Exception as error:  # the client was closed
                self._lose(repr(error))
                return
            finally:
                self._extending.release()


class AsyncClaim(_Run["AsyncClient"]):
    """An event that is this caller's to run. In an `async with` block its lease is kept by a task; if it is lost, the
    block is cancelled and raises `LeaseLost`. The end of the block settles it: done, or failed if an exception
    leaves the block."""

    _keeper: "Optional[asyncio.Task[None]]" = None
    _runner: "Optional[asyncio.Task[Any]]" = None

    def __init__(self, client: "AsyncClient", request: ClaimRequest, grant: Grant, settings: ClientSettings) -> None:
        super().__init__(client, request, grant, settings)
        self._extending = asyncio.Lock()  # one after the other: the last one counts, on the server as here

    async def done(self) -> None:
        """It took effect. May be repeated; a token that another run has fenced is `Fenced`."""
        await self._client._call(self._done())

    async def fail(self, reason: str) -> None:
        """It failed: it runs again after a pause, until its attempts are used up. Then it is a dead letter. An
        at-most-once event is lost. Of the reason 4096 bytes are kept."""
        await self._client._call(self._fail(reason, "retry"))

    async def dead(self, reason: str) -> None:
        """It failed for good: only an operator runs it again."""
        await self._client._call(self._fail(reason, "dead"))

    async def release(self) -> None:
        """Gives the claim back, without having run the event."""
        await self._client._call(self._release())

    async def extend(self, lease: float) -> None:
        """Extends the lease from now on; `deadline` says until when."""
        async with self._extending:
            self._extended(await self._client._call(self._extend(lease)), lease)

    async def __aenter__(self) -> "AsyncClaim":
        if self._beats() is not None and self._keeper is None:
            self._runner = asyncio.current_task()
            self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        cancelled_here = self._lost is not None and self._keeper is not None
        if self._keeper is not None:
            self._keeper.cancel()
        if cancelled_here and self._forget_cancellation(error) and isinstance(error, asyncio.CancelledError):
            raise self._lost or LeaseLost() from None
        if self._settled:
            return
        if error is None:
            if cancelled_here:
                await self._absorb_cancellation()
            await self.done()  # a lease that is lost by the clock too: the token decides
        elif not isinstance(error, LeaseLost):
            try:
                await self._client._call(self._fail_at_the_end(error))
            except HapaxError as unsettled:  # the caller gets its own exception; the lease ends by itself
                log.warning("%r failed, and that could not be reported: %s", self, unsettled)

    def _forget_cancellation(self, error: Optional[BaseException]) -> bool:
        """Whether nobody but the keeper has cancelled the block."""
        uncancel: Optional[Callable[[], int]] = getattr(self._runner, "uncancel", None)  # since Python 3.11
        return uncancel is None or uncancel() == 0

    async def _absorb_cancellation(self) -> None:
        """The keeper's cancellation that the block did not meet any more."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if getattr(self._runner, "cancelling", lambda: 0)() > 0:
                raise

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._next_beat() - time.monotonic()))
            if time.monotonic() < self._next_beat():
                continue  # it was extended meanwhile
            left = self._lost_at() - time.monotonic()
            why = "its time is over"
            if left > 0 and self._extending.locked():
                await asyncio.sleep(_BEAT_PAUSE)  # the effect extends it
                continue
            if left > 0:
                try:
                    async with self._extending:
                        lease = self._lease or 0.0
                        self._extended(await self._client._call(self._extend(lease, left)), lease)
                    continue
                except HapaxError as error:
                    if self._settled:
                        return
                    if error.is_retryable and time.monotonic() < self._lost_at():
                        await asyncio.sleep(_BEAT_PAUSE)
                        continue
                    why = str(error)
                except Exception as error:  # the client was closed
                    why = repr(error)
            self._lose(why)
            if self._runner is not None:
                self._runner.cancel()
            return
