"""Dead letters: what failed for good, to be looked at, run again or given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Optional, cast

from . import text
from .api import ChangedAnswer, EntriesAnswer
from .errors import Invalid
from .exchange import Call, Reply
from .records import check_limit
from .text import check_name


def entries(
    *,
    scope: Optional[str] = None,
    id: Optional[str] = None,
    aggregate: Optional[str] = None,
    payload: bool = False,
    limit: int = 100,
    after: Optional[str] = None,
) -> Call[EntriesAnswer]:
    """Lists dead letters."""

    def read(reply: Reply) -> EntriesAnswer:
        answer = text.loads(reply.body)
        if not isinstance(answer["entries"], list) or "next" not in answer:
            raise ValueError("it has no entries")
        return cast(EntriesAnswer, answer)

    query: dict[str, Any] = {"scope": scope, "id": id, "aggregate": aggregate, "after": after}
    query.update(limit=check_limit(limit), payload="true" if payload else None)
    return Call("listing dead letters", "GET /v1/dead", read, query=query)


def change(
    how: Literal["redrive", "drop"],
    scope: str,
    reason: str,
    ids: Optional[Sequence[str]],
    all: bool,
    dry_run: bool,
    limit: Optional[int],
    after: Optional[str],
) -> Call[ChangedAnswer]:
    """Runs dead letters again, or gives them up."""
    if all == bool(ids) or isinstance(ids, str):
        raise Invalid("the dead letters", "name their ids in a list, or say all=True, and not both")
    body: dict[str, Any] = {"scope": check_name("the scope", scope), "reason": reason, "all": all, "dry_run": dry_run}
    if ids:
        body["ids"] = [check_name("the event's id", id) for id in ids]
    if limit is not None:
        body["limit"] = check_limit(limit)
    if after is not None:
        body["after"] = after

    def read(reply: Reply) -> ChangedAnswer:
        answer = text.loads(reply.body)
        if not isinstance(answer["entries"], list):
            raise ValueError("it has no entries")
        return cast(ChangedAnswer, answer)

    return Call(
        f"{how} of dead letters of {scope!r}",
        "POST /v1/dead/redrive" if how == "redrive" else "POST /v1/dead/drop",
        read,
        body=text.dumps("the request", body).encode(),
        # An event that is not dead any more may have been changed by the attempt whose answer was lost.
        conflict_in_doubt=True,
        # A second attempt would take the next ones.
        once=all and not dry_run,
    )
