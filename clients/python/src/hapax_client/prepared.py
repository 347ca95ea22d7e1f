"""A write that can be sent any number of times and takes effect once."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Optional

from .errors import Invalid
from .text import loads, members
from .uuid7 import uuid7

_VERSION = 1
_KEY_CHARS_MAX = 255
_SLUG_CHARS_MAX = 48


def check_key(key: str) -> str:
    """1 to 255 visible ASCII characters."""
    if not isinstance(key, str) or not 1 <= len(key) <= _KEY_CHARS_MAX:
        raise Invalid("the Idempotency-Key", f"it needs 1 to {_KEY_CHARS_MAX} characters")
    for at, char in enumerate(key):
        if not "!" <= char <= "~":
            raise Invalid("the Idempotency-Key", f"character {at + 1} is not visible ASCII")
    return key


def check_module(module: str) -> str:
    """A module's name is part of a path."""
    plain = isinstance(module, str) and 1 <= len(module) <= _SLUG_CHARS_MAX and "a" <= module[0] <= "z"
    if not plain or not all(c in "abcdefghijklmnopqrstuvwxyz0123456789_" for c in module):
        shown = ascii(str(module)[:_SLUG_CHARS_MAX])
        raise Invalid(
            "the module",
            f"its name is {shown}; it needs 1 to {_SLUG_CHARS_MAX} characters a-z, 0-9 or _, beginning with a letter",
        )
    return module


def check_id(id: "uuid.UUID | str", what: str = "the record's id") -> uuid.UUID:
    """A record's id."""
    if isinstance(id, uuid.UUID):
        return id
    try:
        if len(id) == 36:
            return uuid.UUID(id)
    except (ValueError, TypeError):
        pass
    raise Invalid(what, f"it is {ascii(str(id)[:64])}; it needs to be a UUID of 32 hexadecimal digits with hyphens")


def check_seq(seq: int) -> int:
    """A record's version."""
    if isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq < 1 << 63:
        raise Invalid("the expected seq", f"it is {seq!r}; it needs to be a whole number from 0 on")
    return seq


@dataclass
class PreparedWrite:
    """A write with its key, made before the first attempt.

    Store it before you send it (`to_json`), and after a crash send what you stored (`from_json`). It holds the
    bytes of the request, because the server compares them. The stored form is that of the other clients too.

    Send it to the server and the tenant it was prepared for: another one has not seen the key and would run the
    write again. It therefore remembers both, and `send` refuses any other.
    """

    operation: str
    """`create`, `update` or `delete`."""
    key: str
    """The key: a UUIDv7, unless you chose another."""
    tenant: Optional[str]
    module: str
    id: Optional[uuid.UUID]
    """The record of an update or a delete."""
    expected_seq: Optional[int]
    """Of a delete; that of an update is in its body."""
    body: Optional[str] = field(repr=False)
    """The request's body, to the byte."""
    server: Optional[str]
    """The URL of the server it was prepared for."""
    maybe_sent: bool = field(default=False, compare=False)
    """Whether it may have reached a server before. It is not stored: what comes back from a store may have been
    sent."""

    def _sent(self) -> None:
        self.maybe_sent = True

    def with_key(self, key: str) -> "PreparedWrite":
        """The same write with a key that you derive from its cause, such as the id of a form: two processes that
        prepare it then have one key. Both must prepare the same content.

        Gives up: the expiry of UUIDv7 keys (a retry after the server's retention is a new write), and knowing
        that nothing was sent: another process may have sent the key, so a write that fails is in doubt.
        """
        fields = {**self.__dict__, "key": check_key(key), "maybe_sent": True}
        return PreparedWrite(**fields)

    def to_json(self) -> str:
        """The stored form."""
        return json.dumps(
            {
                "v": _VERSION,
                "operation": self.operation,
                "key": self.key,
                "tenant": self.tenant,
                "module": self.module,
                "id": None if self.id is None else str(self.id),
                "expected_seq": self.expected_seq,
                "body": self.body,
                "server": self.server,
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(stored: str) -> "PreparedWrite":
        """Reads the stored form. The write counts as sent: the process that stored it may have done so."""
        try:
            wire = loads(stored)
        except (ValueError, TypeError, RecursionError) as error:
            raise _bad(f"it is not JSON: {error}") from None
        if not isinstance(wire, dict):
            raise _bad("it is not a JSON object")
        if wire.get("v") != _VERSION:
            raise _bad(f"its version is {ascii(wire.get('v'))}; this client reads version {_VERSION}")
        operation, id, seq, body = (wire.get(name) for name in ("operation", "id", "expected_seq", "body"))
        if (operation, id is None, seq is None) not in (
            ("create", True, True),
            ("update", False, True),
            ("delete", False, False),
        ):
            raise _bad("it is not a create, an update with an id, or a delete with id and expected_seq")
        if (operation == "delete") != (body is None):
            raise _bad("a create and an update have a body, a delete has none")
        if body is not None:
            _check_body(body)
        return PreparedWrite(
            operation=str(operation),
            key=check_key(wire.get("key", "")),
            tenant=_text("tenant", wire.get("tenant")),
            module=check_module(wire.get("module", "")),
            id=None if id is None else check_id(id),
            expected_seq=None if seq is None else check_seq(seq),
            body=body,
            server=_text("server", wire.get("server")),
            maybe_sent=True,
        )

    def _record_id(self) -> Optional[uuid.UUID]:
        """The id of the record, unless the server chooses it."""
        if self.id is not None or self.body is None:
            return self.id
        named = members(self.body).get("id")
        return None if named is None else uuid.UUID(loads(named))


def prepare(
    operation: str,
    server: str,
    tenant: Optional[str],
    module: str,
    *,
    id: Optional[uuid.UUID] = None,
    expected_seq: Optional[int] = None,
    body: Optional[str] = None,
) -> PreparedWrite:
    """A new write with a new key."""
    return PreparedWrite(operation, str(uuid7()), tenant, check_module(module), id, expected_seq, body, server)


def _bad(problem: str) -> Invalid:
    return Invalid("the prepared write", problem)


def _text(what: str, value: Any) -> Optional[str]:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise _bad(f"its {what} is {ascii(value)}; it needs to be text")


def _check_body(body: Any) -> None:
    # The payload is not looked into: however deep it is, it was sent before.
    try:
        if isinstance(body, str) and "payload" in members(body):
            return
    except ValueError:
        pass
    raise _bad("its body is not a JSON object with a payload")
