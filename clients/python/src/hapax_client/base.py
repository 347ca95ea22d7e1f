"""What both clients know about their server."""

from __future__ import annotations

import urllib.parse
from typing import Any, Optional

import httpx

from . import text
from .api import InfoAnswer, KeyAnswer
from .errors import Invalid, visible
from .exchange import Call, NoAnswer, Reply
from .prepared import check_key
from .settings import ClientSettings
from .text import check_name

VERSION = "0.1.0"


class Base:
    """The server's URL, the credentials, and the requests that calls become."""

    def __init__(self, url: str, token: Optional[str], tenant: Optional[str], settings: Optional[ClientSettings]) -> None:
        self.settings = settings or ClientSettings()
        self.server = _server(url)
        """The server's URL, as prepared writes name it."""
        self.tenant = None if tenant is None else _tenant(tenant)
        self._headers: dict[str, bytes] = {
            "accept": b"application/json, application/problem+json",
            "user-agent": f"hapax-client-python/{VERSION}".encode(),
        }
        if token is not None:
            self._headers["authorization"] = b"Bearer " + _token(token)
        if self.tenant is not None:
            self._headers["hapax-tenant"] = self.tenant.encode()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r}, tenant={self.tenant!r})"

    def _request(self, call: Call[Any], timeout: float) -> dict[str, Any]:
        """The arguments of httpx for one attempt."""
        headers = dict(self._headers)
        if call.key is not None:
            quoted = call.key.replace("\\", "\\\\").replace('"', '\\"')
            headers["idempotency-key"] = f'"{quoted}"'.encode()
        if call.body is not None:
            headers["content-type"] = b"application/json"
        return {
            "method": call.method,
            "url": self._url(call),
            "headers": headers,
            "content": call.body,
            "timeout": httpx.Timeout(timeout, connect=min(timeout, self.settings.connect_timeout)),
            "follow_redirects": False,
        }

    def _url(self, call: Call[Any]) -> str:
        path = call.route.split(" ", 1)[1]
        for name, value in call.path.items():
            if value in (".", ".."):  # a URL would lead elsewhere, escaped or not
                raise Invalid(f"the {name}", f"{value!r} cannot be part of a URL's path")
            path = path.replace(f"{{{name}}}", urllib.parse.quote(value, safe=""))
        query = {name: value for name, value in call.query.items() if value is not None}
        return self.server + path + ("?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote) if query else "")

    def _no_answer(self, error: Exception) -> NoAnswer:
        """What an error of the connection means. A connection that was never made carried nothing."""
        if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
            raise Invalid("the request", visible(str(error))) from None
        in_doubt = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        return NoAnswer(f"there was no answer ({type(error).__name__}: {visible(str(error))})", in_doubt, error)

    def _too_large(self) -> NoAnswer:
        message = f"the answer has more than {self.settings.answer_bytes_max} bytes (answer_bytes_max)"
        return NoAnswer(message, True, too_large=True)


def _server(url: str) -> str:
    example = "write it like http://127.0.0.1:7070"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError, ValueError):
        raise Invalid("the server's URL", f"it is not a URL; {example}") from None
    if parsed.scheme not in ("http", "https"):
        raise Invalid("the server's URL", f"it must be http or https; {example}")
    if not parsed.host:
        raise Invalid("the server's URL", f"it has no host; {example}")
    if parsed.userinfo:
        raise Invalid("the server's URL", "it has a user or a password; pass a token instead")
    if "?" in url or "#" in url:
        raise Invalid("the server's URL", "it has a query or a fragment")
    return str(parsed).rstrip("/")


def _token(token: str) -> bytes:
    token = token.strip()  # a file ends with a line break
    if not token or not all("!" <= char <= "~" for char in token):
        raise Invalid("the token", "it is empty, or has characters that no token has")
    return token.encode()


def _tenant(tenant: str) -> str:
    check_name("the tenant", tenant)
    # A header is trimmed on its way: " acme" would arrive as another tenant.
    if tenant != tenant.strip(" \t") or any(ord(char) < 32 or ord(char) == 127 for char in tenant):
        raise Invalid("the tenant", f"{tenant!r} has a character that no header can carry; use a token of that tenant")
    return tenant


def info() -> Call[InfoAnswer]:
    """What the server is, and its limits."""

    def read(reply: Reply) -> InfoAnswer:
        answer: InfoAnswer = text.loads(reply.body)
        answer["version"], answer["key_retention_s"]
        return answer

    return Call("asking for the server's info", "GET /v1/info", read)


def key(name: str) -> Call[KeyAnswer]:
    """What became of a write with a key."""

    def read(reply: Reply) -> KeyAnswer:
        answer: KeyAnswer = text.loads(reply.body)
        if answer["key"] != name:
            raise ValueError("it is about another key")
        return answer

    return Call("asking for a key", "GET /v1/keys/{key}", read, path={"key": check_key(name)})
