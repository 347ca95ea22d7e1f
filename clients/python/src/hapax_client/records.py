"""Records of modules: what is read and written, and the calls for it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional, Union

from . import text
from .errors import Invalid, visible
from .exchange import Call, Reply, odd
from .prepared import PreparedWrite, check_id, check_module, check_seq, prepare
from .text import RawJson

RecordId = Union[uuid.UUID, str]
_ROUTES: dict[str, Any] = {
    "create": "POST /v1/modules/{slug}/records",
    "update": "PUT /v1/modules/{slug}/records/{id}",
    "delete": "DELETE /v1/modules/{slug}/records/{id}",
}


@dataclass(frozen=True)
class Record:
    """A record as the server has it."""

    id: uuid.UUID
    module: str
    seq: int
    """Its version: every write raises it."""
    payload_json: str
    """Its content as JSON text; numbers have all their digits. Write it again with `RawJson`."""
    created_at: str
    updated_at: str

    @cached_property
    def payload(self) -> Any:
        """Its content. A number with a point is a float: `payload_json` has all its digits."""
        return text.loads(self.payload_json)

    @property
    def read_token(self) -> str:
        """Names this version, for `after_write` of a question to the read model."""
        return f"{self.module}/{self.id}@{self.seq}"


@dataclass(frozen=True)
class Written:
    """The answer to a write."""

    record: Record
    """The record as the write left it. Others may have written since."""
    replayed: bool
    """Whether the write was done before: an earlier attempt got through."""


@dataclass(frozen=True)
class Page:
    """Some records, ordered by id."""

    records: list[Record]
    next: Optional[uuid.UUID]
    """Where the next page begins; `None`: this is the last one."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Of the read model: how current the answer is (`lastSyncAt`, `stale`)."""


def read_record(body: str, module: str, id: Optional[uuid.UUID] = None) -> Record:
    """The record, if it is the one that was asked for. Anything else is somebody else's answer."""
    raw = text.members(body)
    payload = raw.get("payload", "null")
    try:
        text.loads(payload)
    except RecursionError:
        pass  # deeper than Python reads: the text is there
    seq = text.loads(raw["seq"])
    record = Record(
        id=uuid.UUID(text.loads(raw["id"])),
        module=text.loads(raw["module"]),
        seq=seq if isinstance(seq, int) else odd("the answer's seq is not a number"),
        payload_json=payload,
        created_at=text.loads(raw.get("created_at", '""')),
        updated_at=text.loads(raw.get("updated_at", '""')),
    )
    if record.module != module or (id is not None and record.id != id):
        odd(f"the answer is about record {record.id} of {visible(record.module)}")
    return record


def read_page(body: str, module: str, after: Optional[uuid.UUID]) -> Page:
    """A page that leads on: a cursor that does not move would go round for ever."""
    raw = text.members(body)
    cursor = text.loads(raw["next"])
    following = None if cursor is None else uuid.UUID(cursor)
    if following is not None and after is not None and following <= after:
        odd("the server's cursor does not move")
    records = [read_record(record, module) for record in text.elements(raw["records"])]
    return Page(records, following, text.loads(raw.get("meta", "{}")))


def _content(payload: Any) -> str:
    json = text.dumps("the payload", payload)
    if not json.lstrip().startswith("{"):
        kind = "JSON text" if isinstance(payload, RawJson) else type(payload).__name__
        raise Invalid("the payload", f"it is {kind}; the content of a record is a JSON object")
    return json


class Writes:
    """Prepares writes of one module. Nothing is sent."""

    def __init__(self, server: str, tenant: Optional[str], module: str) -> None:
        self._server, self._tenant, self.module = server, tenant, module

    def _prepare(self, operation: str, **fields: Any) -> PreparedWrite:
        return prepare(operation, self._server, self._tenant, self.module, **fields)

    def prepare_create(self, payload: Any) -> PreparedWrite:
        """A record to create, with its key."""
        return self._prepare("create", body=f'{{"payload":{_content(payload)}}}')

    def prepare_create_as(self, id: RecordId, payload: Any) -> PreparedWrite:
        """The same with an id of your own."""
        return self._prepare("create", body=f'{{"payload":{_content(payload)},"id":"{check_id(id)}"}}')

    def prepare_update(self, id: RecordId, expected_seq: int, payload: Any) -> PreparedWrite:
        """New content for the record that has this seq."""
        body = f'{{"payload":{_content(payload)},"expected_seq":{check_seq(expected_seq)}}}'
        return self._prepare("update", id=check_id(id), body=body)

    def prepare_delete(self, id: RecordId, expected_seq: int) -> PreparedWrite:
        """A record to delete, if it has this seq."""
        return self._prepare("delete", id=check_id(id), expected_seq=check_seq(expected_seq))


def write(prepared: PreparedWrite, server: Optional[str], tenant: Optional[str]) -> Call[Written]:
    """Sends a prepared write, if it was prepared for this server and tenant (`server` is `None`: for any)."""
    if server is not None and prepared.server is not None and prepared.server != server:
        raise Invalid(
            "the prepared write",
            f"it was prepared for {prepared.server}, and this is a client of {server}; "
            "if both are one server, use send_anywhere",
        )
    if prepared.tenant != tenant:
        named = ["no tenant" if name is None else f"tenant {name!r}" for name in (prepared.tenant, tenant)]
        raise Invalid("the prepared write", f"it was prepared for {named[0]}, and this client names {named[1]}")
    wanted = prepared._record_id()
    path = {"slug": prepared.module}
    if prepared.id is not None:
        path["id"] = str(prepared.id)
    return Call(
        what=f"{prepared.operation} in {prepared.module}",
        route=_ROUTES[prepared.operation],
        path=path,
        query={} if prepared.expected_seq is None else {"expected_seq": prepared.expected_seq},
        key=prepared.key,
        body=None if prepared.body is None else prepared.body.encode(),
        read=lambda reply: Written(read_record(reply.body, prepared.module, wanted), reply.replayed),
        write=prepared,
    )


def get(module: str, id: RecordId) -> Call[Record]:
    """Reads a record."""
    wanted = check_id(id)
    return Call(
        what=f"reading record {wanted} of {check_module(module)}",
        route="GET /v1/modules/{slug}/records/{id}",
        path={"slug": module, "id": str(wanted)},
        read=lambda reply: read_record(reply.body, module, wanted),
    )


def check_limit(limit: int) -> int:
    """How many lines a page may have."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1000:
        raise Invalid("the limit", f"{limit!r} is not in 1 to 1000")
    return limit


def page(module: str, after: Optional[RecordId], limit: int) -> Call[Page]:
    """Reads some records in the order of their ids."""
    start = None if after is None else check_id(after, "the cursor")

    def read(reply: Reply) -> Page:
        return read_page(reply.body, module, start)

    return Call(
        what=f"listing records of {check_module(module)}",
        route="GET /v1/modules/{slug}/records",
        path={"slug": module},
        query={"after": start, "limit": check_limit(limit)},
        read=read,
    )
