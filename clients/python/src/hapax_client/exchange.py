"""One call: attempts until there is an answer that counts, or no time left.

`exchange` decides and does no I/O: it yields what to do next, so that both clients share it.
"""

from __future__ import annotations

import email.utils
import enum
import logging
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Optional, TypeVar, Union

from . import text
from .api import CODES, Route
from .claims_request import ClaimRequest
from .errors import HapaxError, Invalid, Problem, Unavailable, error_of, visible
from .prepared import PreparedWrite
from .settings import ClientSettings

log = logging.getLogger("hapax_client")
T = TypeVar("T")

# How often to repeat what a repeat probably does not mend: a failing handler, a proxy's refusal.
_A_FEW_TIMES = 5
# No attempt begins with less time than this: it could only leave a doubt.
_ATTEMPT_MIN = 0.05
# No socket takes a longer timeout.
_ATTEMPT_MAX = 1e6

_AGAIN_IN_DOUBT = {"key-running", "unavailable", "handler-timeout", "request-timeout"}
_AGAIN = {"contended", "week-missing", "rate-limited", "body-unreadable", "overloaded", "not-ready"}
_A_FEW = {"handler-failed", "internal"}


class Odd(Exception):
    """An answer of the right form that is not the answer to this call."""


class Next(enum.Enum):
    """What comes after an attempt."""

    AGAIN = "ask again until the deadline"
    A_FEW_TIMES = "ask again, but not until the deadline"
    STOP = "the answer is final"


@dataclass(frozen=True)
class Reply:
    """A success."""

    body: str
    replayed: bool
    first_sent: float
    """Before the first attempt, by this process's clock."""
    last_sent: float
    """Before the attempt that was answered."""


@dataclass
class Call(Generic[T]):
    """What is asked. Every attempt sends the same bytes."""

    what: str
    """In words, for errors: `creating a record of orders`."""
    route: Route
    read: Callable[[Reply], T]
    """Makes the value of a success; raises `Odd` if it does not answer this."""
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Optional[bytes] = None
    key: Optional[str] = None
    wait: float = 0.0
    """How long the server may wait before it answers, on top of an attempt's time."""
    deadline: Optional[float] = None
    """In place of the settings' deadline."""
    write: Optional[PreparedWrite] = None
    claim: Optional[ClaimRequest] = None
    conflict_in_doubt: bool = False
    """Whether a conflict may be the work of an earlier attempt."""
    once: bool = False
    """Whether a second attempt would do more than the first: an attempt that may have taken effect is not repeated."""

    @property
    def method(self) -> str:
        return self.route.split(" ", 1)[0]


@dataclass(frozen=True)
class Send:
    """Send the call; it may take so long."""

    timeout: float


@dataclass(frozen=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """What came back, whoever sent it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class NoAnswer:
    """Nothing, or half an answer."""

    said: str
    in_doubt: bool
    error: Optional[BaseException] = None
    too_large: bool = False


def verdict(problem: Problem, has_retry_after: bool) -> tuple[Next, bool]:
    """What to do about a problem, and whether it leaves a doubt. Known codes decide; of an unknown one the
    server says by `Retry-After` whether it passes."""
    if problem.code in _AGAIN_IN_DOUBT:
        return Next.AGAIN, True
    if problem.code in _AGAIN:
        return Next.AGAIN, False
    if problem.code in _A_FEW:
        return Next.A_FEW_TIMES, True
    if problem.code in CODES or not has_retry_after:
        return Next.STOP, False
    return Next.AGAIN, True


def retry_after(value: Optional[str], date: Optional[str]) -> Optional[float]:
    """The pause that a server asks for. A date counts from the answer's own `Date`."""
    value = (value or "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:12])
    at = _instant(value)
    if at is None:
        return None
    start = _instant(date or "")
    return max(0.0, at - (time.time() if start is None else start))


def _instant(value: str) -> Optional[float]:
    try:
        return email.utils.parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def pause(settings: ClientSettings, attempts: int, after: Optional[float]) -> float:
    """Full jitter up to an exponential bound, on top of what the server asks for: whoever asks everybody to come
    back in a second does not get them all at once, nor every second."""
    longest = min(settings.backoff_base * 2.0 ** min(attempts - 1, 60), settings.backoff_max)
    return (after or 0.0) + longest * random.randint(1, 1000) / 1000


class _Course:
    """What the attempts so far have shown."""

    def __init__(self, in_doubt: bool) -> None:
        self.attempts = 0
        self.a_few = 0
        self.in_doubt = in_doubt
        self.said = ""
        self.problem: Optional[Problem] = None
        self.error: Optional[BaseException] = None
        self.too_large = False

    def note(self, said: str, problem: Optional[Problem] = None) -> None:
        self.said, self.problem, self.error, self.too_large = said, problem, None, False

    def goes_on(self, then: Next, in_doubt: bool) -> bool:
        if then is Next.STOP:
            return False
        self.in_doubt |= in_doubt
        if then is Next.A_FEW_TIMES:
            self.a_few += 1
            return self.a_few < _A_FEW_TIMES
        return True

    def end(self, call: "Call[Any]", then: Next) -> HapaxError:
        doubt = self.in_doubt and call.method != "GET"
        error: HapaxError
        if self.problem is not None and then is not Next.AGAIN:
            error = error_of(self.problem, doubt, call.conflict_in_doubt)
        else:
            error = Unavailable(f"{call.what}: {self.said}", self.attempts, doubt, self.problem, self.too_large)
            error.repeats = call.once and doubt
        error.attempts = self.attempts
        error.prepared = call.write
        error.request = call.claim
        error.__cause__ = self.error
        return error


def exchange(call: Call[T], settings: ClientSettings) -> Generator[Union[Send, Pause], Any, T]:
    """Sends a call until its answer can be read, the server refuses it, or the deadline is over."""
    if call.body is not None and len(call.body) > settings.body_bytes_max:
        raise Invalid("the request", f"it has {len(call.body)} bytes; the limit is {settings.body_bytes_max}")
    write = call.write
    course = _Course(write.maybe_sent if write else False)
    first = time.monotonic()
    deadline = first + call.wait + (settings.deadline if call.deadline is None else call.deadline)
    touched = True  # also if the caller gives up: its attempt may have got through
    try:
        while True:
            sent = time.monotonic()
            got = yield Send(max(0.001, min(deadline - sent, settings.attempt_timeout + call.wait, _ATTEMPT_MAX)))
            course.attempts += 1
            then, in_doubt, after = Next.AGAIN, True, None
            if isinstance(got, NoAnswer):
                course.note(got.said)
                course.error, course.too_large, in_doubt = got.error, got.too_large, got.in_doubt
                if got.too_large:
                    # What is read changes nothing, and is as large the next time.
                    then = Next.STOP if call.method == "GET" else Next.A_FEW_TIMES
            else:
                judged = _judge(got, settings)
                after = judged.after
                if judged.reply is not None:
                    try:
                        return call.read(Reply(judged.reply, judged.replayed, first, sent))
                    except Odd as odd:
                        course.note(str(odd))
                    except (ValueError, KeyError, TypeError, RecursionError) as error:
                        course.note(f"the answer is not what the server answers to this ({visible(str(error))})")
                elif judged.problem is not None:
                    course.note(str(judged.problem), judged.problem)
                    then, in_doubt = verdict(judged.problem, after is not None)
                else:
                    course.note(judged.said)
                    then = judged.then
            if not course.goes_on(then, in_doubt) or (call.once and course.in_doubt):
                error_now = course.end(call, then)
                touched = error_now.in_doubt
                raise error_now
            seconds = pause(settings, course.attempts, after)
            if time.monotonic() + seconds + _ATTEMPT_MIN >= deadline:
                error_now = course.end(call, then)
                touched = error_now.in_doubt
                raise error_now
            log.debug("%s, attempt %d: %s; trying again in %.3f s", call.what, course.attempts, course.said, seconds)
            yield Pause(seconds)
    finally:
        if write is not None and touched:
            write._sent()


@dataclass(frozen=True)
class _Judged:
    after: Optional[float] = None
    reply: Optional[str] = None
    replayed: bool = False
    problem: Optional[Problem] = None
    said: str = ""
    then: Next = Next.AGAIN


def _judge(answer: Answer, settings: ClientSettings) -> _Judged:
    """What an answer is: a success, a problem of the server, or somebody else's page."""
    headers = answer.headers
    after = retry_after(headers.get("retry-after"), headers.get("date"))
    after = None if after is None else min(after, settings.retry_after_max)
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    success = 200 <= answer.status < 300
    if success and kind == "application/json":
        try:
            return _Judged(after, answer.body.decode(), headers.get("idempotency-replayed") == "true")
        except UnicodeDecodeError:
            return _Judged(after, said="the answer is not UTF-8")
    if not success and kind == "application/problem+json":
        try:
            problem = Problem.parse(answer.status, text.loads(answer.body.decode()))
        except (ValueError, RecursionError):
            problem = None
        if problem is not None:
            return _Judged(after, problem=problem)
    # A proxy has only its status to say: 5xx, 408, 425 and 429 pass; another refusal, and a redirect, which is
    # not followed, probably does not.
    passes = success or answer.status >= 500 or answer.status in (408, 425, 429) or after is not None
    page = visible(" ".join(answer.body[:400].decode(errors="replace").split())[:120])
    said = f"{answer.status} is not the server's own answer (content-type {kind!r}: {page})"
    return _Judged(after, said=said, then=Next.AGAIN if passes else Next.A_FEW_TIMES)


def odd(said: str) -> NoReturn:
    """It does not answer this call, so the call is repeated."""
    raise Odd(said)
