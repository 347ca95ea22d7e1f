"""Questions to the read model: records as it has them, and numbers about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Optional, Union

from .errors import Invalid
from .exchange import Call, Reply
from .prepared import check_id, check_module
from .records import Page, Record, RecordId, Written, check_limit, read_page

Write = Union[Written, Record, str]
Fields = Union[str, Sequence[str]]


@dataclass(frozen=True)
class Measure:
    """One number of a group."""

    measure: str
    """`sum`, `min` or `max`."""
    field: str
    """The field, as a JSON pointer."""
    value: Optional[Decimal]
    """The number, exactly; `None` if no record has one."""
    left_out: int
    """How many records have something else in the field than a number that fits."""


@dataclass(frozen=True)
class Group:
    """Records that share a value."""

    key: Any
    """That value; `None` if the field is missing, or if nothing groups."""
    count: int
    measures: list[Measure]


@dataclass(frozen=True)
class Tally:
    """Numbers about records."""

    groups: list[Group]
    """By their values; one if nothing groups."""
    more: bool
    """Whether there are more groups than these."""
    meta: dict[str, Any]
    """How current they are: `lastSyncAt`, `stale`, and what an `approximate` answer may count wrongly."""


def _common(
    since: Optional[str], approximate: bool, after_write: Optional[Write], wait: float
) -> dict[str, Any]:
    if isinstance(after_write, Written):
        after_write = after_write.record
    token = after_write.read_token if isinstance(after_write, Record) else after_write
    wait_ms = round(wait * 1000)
    if not 0 <= wait_ms <= 30_000:
        raise Invalid("the wait", f"it is {wait} s; it must be 0 to 30 s")
    return {
        "since": since,
        "approximate": "true" if approximate else None,
        "after_write": token,
        "wait_ms": None if token is None else wait_ms,
    }


def records(
    module: str,
    since: Optional[str],
    after: Optional[RecordId],
    limit: int,
    approximate: bool,
    after_write: Optional[Write],
    wait: float,
) -> Call[Page]:
    """Records as the read model has them."""
    start = None if after is None else check_id(after, "the cursor")
    return Call(
        f"asking for records of {check_module(module)}",
        "GET /v1/analytics/modules/{slug}/records",
        lambda reply: read_page(reply.body, module, start),
        path={"slug": module},
        query={"after": start, "limit": check_limit(limit), **_common(since, approximate, after_write, wait)},
        wait=wait,
    )


def tally(
    module: str,
    sum: Fields,
    min: Fields,
    max: Fields,
    group_by: Optional[str],
    since: Optional[str],
    approximate: bool,
    after_write: Optional[Write],
    wait: float,
) -> Call[Tally]:
    """Counts records, and computes numbers of their fields."""
    query = {"sum": _fields(sum), "min": _fields(min), "max": _fields(max), "group_by": group_by}
    return Call(
        f"counting records of {check_module(module)}",
        "GET /v1/analytics/modules/{slug}/tally",
        _read_tally,
        path={"slug": module},
        query={**query, **_common(since, approximate, after_write, wait)},
        wait=wait,
    )


def _fields(fields: Fields) -> Optional[str]:
    pointers = [fields] if isinstance(fields, str) else list(fields)
    for pointer in pointers:
        if "," in pointer:
            raise Invalid("the field", f"{pointer!r} has a comma, which separates fields in the request")
    return ",".join(pointers) or None


def _read_tally(reply: Reply) -> Tally:
    answer = json.loads(reply.body, parse_float=Decimal, parse_int=Decimal)
    groups = []
    for group in answer["groups"]:
        measures = [Measure(m["measure"], m["field"], m["value"], int(m["left_out"])) for m in group["measures"]]
        groups.append(Group(_plain(group["key"]), int(group["count"]), measures))
    return Tally(groups, answer["more"] is True, answer["meta"])


def _plain(key: Any) -> Any:
    """A group's key as Python reads JSON."""
    if not isinstance(key, Decimal):
        return key
    return int(key) if key == key.to_integral_value() and "E" not in str(key) and "." not in str(key) else float(key)
