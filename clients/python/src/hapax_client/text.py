"""JSON as text: content keeps every digit, whatever a number can hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import Invalid

NAME_CHARS_MAX = 255
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[^\s,\]}]+")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class RawJson:
    """Content that is JSON already. It is sent as it is, to the digit."""

    text: str


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def loads(text: str) -> Any:
    """The value of a JSON text."""
    return json.loads(text, parse_constant=_refuse_constant)


def dumps(what: str, value: Any) -> str:
    """The JSON text of a value."""
    if isinstance(value, RawJson):
        text = value.text
        try:
            loads(text)
        except RecursionError:
            pass  # deeper than Python reads; the server decides
        except ValueError as error:
            raise Invalid(what, f"it is not JSON: {error}") from None
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise Invalid(what, f"it is not JSON: {error} (RawJson takes any JSON text)") from None
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(what, "it has half of a surrogate pair, which is not a character") from None
    return text


def check_name(what: str, text: str) -> str:
    """An id or a name: 1 to 255 characters, not blank, no NUL."""
    if not isinstance(text, str):
        raise Invalid(what, f"it is {type(text).__name__}; it needs to be text")
    if len(text) > NAME_CHARS_MAX:
        raise Invalid(what, f"it has {len(text)} characters; the limit is {NAME_CHARS_MAX}")
    if not text.strip():
        raise Invalid(what, f"it is blank; it needs 1 to {NAME_CHARS_MAX} characters")
    if "\0" in text:
        raise Invalid(what, f"it has a NUL character at {text.index(chr(0))}; NUL is not allowed")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(what, "it has half of a surrogate pair, which is not a character") from None
    return text


def _skip(text: str, at: int) -> int:
    """The end of the value that begins at `at`. Brackets are counted, so that depth costs no stack."""
    if text[at] == '"':
        return _match(_STRING, text, at)
    if text[at] not in "{[":
        return _match(_SCALAR, text, at)
    depth = 0
    while True:
        found = _BRACKET.search(text, at)
        if found is None:
            raise ValueError("a bracket is not closed")
        at = found.end()
        if found.group() == '"':
            at = _match(_STRING, text, found.start())
        elif found.group() in "{[":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return at


def _match(pattern: "re.Pattern[str]", text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"there is no JSON value at {at}")
    return found.end()


def _parts(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """Where the values between two brackets are; of an object, names and values in turn."""
    at = _match(_SPACE, text, 0)
    if text[at : at + 1] != opening:
        raise ValueError(f"it does not begin with {opening}")
    at = _match(_SPACE, text, at + 1)
    while text[at : at + 1] != closing:
        if at >= len(text):
            raise ValueError("it ends too early")
        end = _skip(text, at)
        yield at, end
        at = _match(_SPACE, text, end)
        if text[at : at + 1] in (",", ":"):
            at = _match(_SPACE, text, at + 1)


def members(text: str) -> dict[str, str]:
    """The members of a JSON object, each as text."""
    parts = [text[start:end] for start, end in _parts(text, "{", "}")]
    if len(parts) % 2:
        raise ValueError("a member has no value")
    return {str(loads(name)): value for name, value in zip(parts[::2], parts[1::2])}


def elements(text: str) -> list[str]:
    """The elements of a JSON array, each as text."""
    return [text[start:end] for start, end in _parts(text, "[", "]")]
