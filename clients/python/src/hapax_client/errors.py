"""What a call can end with, by what a caller can do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .claims_request import ClaimRequest
    from .prepared import PreparedWrite

_DETAIL_CHARS_MAX = 1000
_FIELDS_MAX = 32


def visible(text: str) -> str:
    """The text on one line, with everything escaped that does not print as itself."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Problem:
    """What a server answered instead of what it was asked for (RFC 9457)."""

    code: str
    """Its stable name; `docs/errors/<code>.md` explains it."""
    status: int
    """The HTTP status. Decide by the code."""
    detail: str
    """One sentence: what is wrong and what the limit is."""
    fields: tuple[str, ...] = ()
    """Of a reused key: the fields in which the two requests differ, if the server tells."""
    differs: tuple[str, ...] = ()
    """Of a reused key: the parts in which they differ, if the server tells."""
    expected: Optional[int] = None
    """Of a conflict: the seq that was expected, if it is a number."""
    actual: Optional[int] = None
    """Of a conflict: the seq that was found, if it is a number."""

    @staticmethod
    def parse(status: int, body: Any) -> Optional["Problem"]:
        """Reads the body of a problem. `None` if it is none of the server's: it has no code."""
        code = body.get("code") if isinstance(body, dict) else None
        if not isinstance(code, str) or not 1 <= len(code) <= 64:
            return None
        if not all(c in "abcdefghijklmnopqrstuvwxyz0123456789-" for c in code):
            return None
        detail = body.get("detail") or body.get("title") or ""
        return Problem(
            code=code,
            status=status,
            detail=visible(str(detail)[:_DETAIL_CHARS_MAX]),
            fields=_texts(body.get("fields")),
            differs=_texts(body.get("differs")),
            expected=_number(body.get("expected")),
            actual=_number(body.get("actual")),
        )

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(text) for text in value[:_FIELDS_MAX]) if isinstance(value, list) else ()


def _number(value: Any) -> Optional[int]:
    """A number, or a text that ends in one (`seq 7`)."""
    if isinstance(value, str):
        value = value.rsplit(" ", 1)[-1]
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 20 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class HapaxError(Exception):
    """Why a call did not succeed. The client has repeated what may be repeated before it raises one."""

    problem: Optional[Problem] = None
    """The server's problem, if it answered with one."""
    prepared: Optional["PreparedWrite"] = None
    """The write that this is about, with its key. If the error is in doubt, store it and send it again."""
    request: Optional["ClaimRequest"] = None
    """The request of a claim. Sent again (`claim_again`), it gets the run that a lost answer has granted."""
    attempts: int = 0
    """How often the server was asked."""
    _doubt: bool = False

    @property
    def code(self) -> str:
        """A stable name for this kind of error; `docs/errors/<code>.md` explains it."""
        return self.problem.code if self.problem else "unavailable"

    @property
    def in_doubt(self) -> bool:
        """Whether the call may have taken effect: an attempt got no answer, in this call or in an earlier one of
        the same prepared write. Sending the same prepared write again is safe and finds out; a new one could
        write twice."""
        return self._doubt

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later without any change."""
        return False


class Invalid(HapaxError):
    """The input breaks a rule, and nothing was sent."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what} is invalid: {problem}")

    @property
    def code(self) -> str:
        return "invalid"


class _Answered(HapaxError):
    def __init__(self, problem: Problem, doubt: bool = False) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self._doubt = doubt


class Conflict(_Answered):
    """The record or the aggregate has another seq than expected, or a write is not visible yet. Nothing was changed."""

    @property
    def expected(self) -> Optional[int]:
        """The seq that was expected, if it is a number."""
        return self.problem.expected if self.problem else None

    @property
    def actual(self) -> Optional[int]:
        """The seq that was found, if it is a number."""
        return self.problem.actual if self.problem else None


class NotFound(_Answered):
    """There is no such record or module."""


class KeyMismatch(_Answered):
    """The key belongs to another request. If the error is in doubt, that may be this one, sent before by another
    caller or in other bytes: send the first attempt's bytes with the same token. If it is not, prepare it again."""

    def __str__(self) -> str:
        if not self.in_doubt:
            return super().__str__()
        return (
            f"{self.problem}; it may have taken effect: send exactly the bytes of the first attempt, "
            "with the same token (a rotated one is the same)"
        )

    @property
    def in_doubt(self) -> bool:
        problem = self.problem
        if self._doubt or problem is None:
            return True
        return problem.differs == ("principal",) or not (problem.differs or problem.fields)


class KeyExpired(_Answered):
    """The key is older than answers are kept: whether the write was done is not known any more."""

    @property
    def in_doubt(self) -> bool:
        return True


class OutcomeUnknown(_Answered):
    """A write with this key began and never ended. Keep it, and send it again once an operator has decided."""

    @property
    def in_doubt(self) -> bool:
        return True


class Mismatch(_Answered):
    """The id of an event was used before for another content. Nothing was changed."""


class Fenced(_Answered):
    """The token no longer holds the lease, and this attempt changed nothing. If the error is in doubt, an earlier
    attempt may have settled the run before."""


class Denied(_Answered):
    """The credentials are missing, wrong or not enough."""


class Refused(_Answered):
    """The server refuses the call for another reason; the code says which."""

    @property
    def in_doubt(self) -> bool:
        return self._doubt or self.code == "answer-too-large"  # it did the work, and could not keep its answer


class Unavailable(HapaxError):
    """No answer of the server came within the deadline. Send the same prepared write again later."""

    def __init__(self, what: str, attempts: int, doubt: bool, problem: Optional[Problem] = None, too_large: bool = False) -> None:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        effect = "; it may have taken effect" if doubt else ""
        super().__init__(f"unavailable after {times}: {what}{effect}")
        self.problem = problem
        self.attempts = attempts
        self.too_large = too_large
        """Whether the answer was larger than the client reads: it is as large the next time."""
        self.repeats = False
        """Whether the same call again could do more than the lost one: look at what is there first."""
        self._doubt = doubt

    @property
    def is_retryable(self) -> bool:
        return not (self.too_large or self.repeats)


class LeaseLost(HapaxError):
    """The lease of a run could not be kept: another worker may run the event. Stop the effect."""

    @property
    def code(self) -> str:
        return "lease-lost"


_BY_CODE: dict[str, type[_Answered]] = {
    "conflict": Conflict,
    "not-found": NotFound,
    "key-mismatch": KeyMismatch,
    "key-expired": KeyExpired,
    "outcome-unknown": OutcomeUnknown,
    "mismatch": Mismatch,
    "fenced": Fenced,
    "unauthenticated": Denied,
    "forbidden": Denied,
    "host-forbidden": Denied,
    "origin-forbidden": Denied,
}
# The server looked the key or the id up before it answered so.
_SETTLED = (Conflict, Mismatch)


def error_of(problem: Problem, doubt: bool, conflict_in_doubt: bool) -> HapaxError:
    """The meaning of a problem that is not a reason to try again."""
    kind = _BY_CODE.get(problem.code, Refused)
    return kind(problem, doubt and (conflict_in_doubt or kind not in _SETTLED))
