"""The journal: events to append, and events that were read."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Optional, Union

from . import text
from .errors import Invalid
from .exchange import Call, Reply, odd
from .records import check_limit
from .text import RawJson, check_name

Expected = Union[int, Literal["new", "any"]]


@dataclass(frozen=True)
class NewEvent:
    """An event to append."""

    id: str
    """The same event sent again is stored once."""
    payload: Any = None
    """Its content: JSON, `RawJson` (sent to the byte), bytes, or `None` for nothing."""
    kind: Optional[str] = None
    """What kind of fact it is."""
    time: Optional[str] = None
    """When it happened (RFC 3339)."""
    headers: Sequence[tuple[str, Union[str, bytes]]] = ()
    aggregate: Optional[str] = None
    """If it is said here too, it must be that of the append."""
    tenant: Optional[str] = None
    """If it is said here too, it must be that of the client."""
    seq: Optional[int] = None
    """The server gives it: an event that has one is refused."""

    def _json(self, aggregate: str, tenant: Optional[str]) -> str:
        id = check_name("the event's id", self.id)
        # What the request has no field for must not be lost in silence.
        if self.aggregate is not None and self.aggregate != aggregate:
            raise Invalid("the event", f"{id!r} names another aggregate than the append")
        if self.tenant is not None and self.tenant != tenant:
            raise Invalid("the event", f"{id!r} names another tenant than the client")
        if self.seq is not None:
            raise Invalid("the event", f"{id!r} has a seq, which the server gives; say what is there with `expected`")
        fields = {"id": text.dumps("the id", id)}
        if self.kind is not None:
            fields["kind"] = text.dumps("the kind", check_name("the event's kind", self.kind))
        if self.time is not None:
            fields["time"] = text.dumps("the time", self.time)
        if isinstance(self.payload, (bytes, bytearray)):
            fields["payload_base64"] = f'"{base64.b64encode(self.payload).decode()}"'
        elif isinstance(self.payload, RawJson):
            fields.update(_raw(self.payload))
        elif self.payload is not None:
            fields["payload"] = text.dumps("the payload", self.payload)
        if self.headers:
            fields["headers"] = "[" + ",".join(_header(name, value) for name, value in self.headers) + "]"
        return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def _raw(payload: RawJson) -> dict[str, str]:
    """The server stores the bytes of a JSON value, without the white space around it. What has some, and a null,
    which many a parser on the way takes for no payload, is sent as bytes."""
    json = text.dumps("the payload", payload)
    if json.strip() == json and json != "null":
        return {"payload": json}
    return {"payload_base64": f'"{base64.b64encode(json.encode()).decode()}"'}


def _header(name: str, value: Union[str, bytes]) -> str:
    if isinstance(value, str):
        return f'{{"name":{text.dumps("a header", name)},"value":{text.dumps("a header", value)}}}'
    return f'{{"name":{text.dumps("a header", name)},"value_base64":"{base64.b64encode(value).decode()}"}}'


@dataclass(frozen=True)
class JournalEvent:
    """An event as the journal has it."""

    id: str
    seq: int
    """Its number within the aggregate."""
    position: str
    """Its place in the journal's order."""
    aggregate: Optional[str]
    kind: Optional[str]
    time: Optional[str]
    """When it happened."""
    at: str
    """When it was stored."""
    payload_json: Optional[str]
    """Its content as JSON text; numbers have all their digits. `None` if it is not JSON."""
    payload_bytes: bytes
    """Its content, to the byte."""
    headers: list[tuple[str, bytes]] = field(default_factory=list)

    @cached_property
    def payload(self) -> Any:
        """Its content as a value; `None` if it is not JSON."""
        return None if self.payload_json is None else text.loads(self.payload_json)


@dataclass(frozen=True)
class Placed:
    """Where an event is stored."""

    id: str
    seq: int
    position: str
    placing: Literal["new", "repeat", "kept"]
    """`new`: stored now; `repeat`: it was there already; `kept`: another event is there under its id."""


@dataclass(frozen=True)
class Appended:
    """What was appended."""

    last_seq: int
    events: list[Placed]
    warning: Optional[str] = None
    """Set if an id was used before for another content, and the server keeps the original."""


@dataclass(frozen=True)
class Events:
    """Events in the journal's order."""

    events: list[JournalEvent]
    next: str
    """Where to read on: the `after` of the next call."""
    more: bool
    """Whether more may follow at once."""


@dataclass(frozen=True)
class AggregateEvents:
    """The events of an aggregate."""

    aggregate: str
    last_seq: int
    """The seq of its last event; 0: it has none."""
    events: list[JournalEvent]
    more: bool
    """Whether more follow: read on from the seq after the last one."""


def _event(raw: str) -> JournalEvent:
    fields = text.members(raw)
    payload = fields.pop("payload", None)
    rest: Mapping[str, Any] = {name: text.loads(value) for name, value in fields.items()}
    stored = (payload or "").encode() if "payload_base64" not in rest else base64.b64decode(rest["payload_base64"])
    headers = [
        (header["name"], header["value"].encode() if "value" in header else base64.b64decode(header["value_base64"]))
        for header in rest.get("headers", [])
    ]
    return JournalEvent(
        id=rest["id"],
        seq=rest["seq"],
        position=rest["position"],
        aggregate=rest.get("aggregate"),
        kind=rest.get("kind"),
        time=rest.get("time"),
        at=rest["at"],
        payload_json=payload,
        payload_bytes=stored,
        headers=headers,
    )


def append(tenant: Optional[str], aggregate: str, events: Sequence[NewEvent], expected: Expected) -> Call[Appended]:
    """Appends events to an aggregate: all of them, or none."""
    check_name("the aggregate", aggregate)
    if not events:
        raise Invalid("the events", "there are none; append at least one")
    if expected not in ("new", "any") and (isinstance(expected, bool) or not isinstance(expected, int) or expected < 0):
        raise Invalid("expected", f"it is {expected!r}; it must be a whole number from 0 on, 'new' or 'any'")
    bodies = ",".join(event._json(aggregate, tenant) for event in events)
    body = f'{{"aggregate":{text.dumps("the aggregate", aggregate)},"expected":{text.dumps("expected", expected)},"events":[{bodies}]}}'

    def read(reply: Reply) -> Appended:
        answer = text.loads(reply.body)
        placed = [Placed(p["id"], p["seq"], p["position"], p["placing"]) for p in answer["events"]]
        if [p.id for p in placed] != [event.id for event in events]:
            odd("the answer is about other events")
        return Appended(answer["last_seq"], placed, answer.get("warning"))

    return Call(f"appending to {aggregate!r}", "POST /v1/journal/append", read, body=body.encode())


def read(after: Optional[str], limit: int, wait: float) -> Call[Events]:
    """Reads events in the journal's order."""
    wait_ms = round(wait * 1000)
    if not 0 <= wait_ms <= 30_000:
        raise Invalid("the wait", f"it is {wait} s; it must be 0 to 30 s")

    def read(reply: Reply) -> Events:
        raw = text.members(reply.body)
        events = [_event(event) for event in text.elements(raw["events"])]
        return Events(events, str(text.loads(raw["next"])), text.loads(raw["more"]) is True)

    query = {"after": after, "limit": check_limit(limit), "wait_ms": wait_ms or None}
    return Call("reading the journal", "GET /v1/journal/events", read, query=query, wait=wait)


def read_aggregate(aggregate: str, from_seq: int, limit: int) -> Call[AggregateEvents]:
    """Reads the events of an aggregate."""
    check_name("the aggregate", aggregate)

    def read(reply: Reply) -> AggregateEvents:
        raw = text.members(reply.body)
        if text.loads(raw["aggregate"]) != aggregate:
            odd("the answer is about another aggregate")
        events = [_event(event) for event in text.elements(raw["events"])]
        return AggregateEvents(aggregate, text.loads(raw["last_seq"]), events, text.loads(raw["more"]) is True)

    return Call(
        f"reading {aggregate!r}",
        "GET /v1/journal/aggregates/{aggregate}",
        read,
        path={"aggregate": aggregate},
        query={"from": from_seq, "limit": check_limit(limit)},
    )
