"""`Idempotency-Key` for FastAPI (any ASGI app), exactly once: the key, the handler's writes and the answer commit
together, before the answer is sent.

    pip install fastapi uvicorn 'psycopg[binary,pool]>=3.2'
    hapax keys init --keys "$DATABASE_URL"
    uvicorn fastapi_idempotency:app

The handler writes through `request.state.db`, which is in a transaction that the middleware began and ends: a
handler that commits or rolls back fails. `async with db.transaction():` makes a savepoint, as anywhere.
"""
import asyncio
import hashlib
import json
import os
import re
import signal
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from psycopg_pool import AsyncConnectionPool

BYTES_MAX = 1 << 20  # of a body, and of an answer
# The server ends a transaction whose service has stopped, so that its key is free again.
LIMIT_MS = int(os.environ.get("REQUEST_LIMIT_MS", "30000"))
QUOTED = re.compile(r'"((?:[^"\\]|\\["\\])*)"')  # a string of structured fields (RFC 8941)
KEPT_HEADERS = {b"content-type", b"content-encoding", b"content-language", b"location", b"etag", b"last-modified", b"link"}
# Not you, not now, or sent in a wrong way: the retry runs again, as after a 5xx.
NOT_KEPT = {401, 403, 406, 407, 408, 409, 411, 412, 413, 414, 415, 417, 421, 425, 426, 428, 429, 431}
CREDENTIALS = (b"authorization", b"cookie", b"x-api-key")

# What to answer when the request does not run: status, code, and a sentence.
REFUSALS = {
    "running": (409, "key-running", "a request with this key is still running; send it again later to get its answer"),
    "mismatch": (422, "key-mismatch", "the key was used before for another request; make a new key for this one"),
    "expired": (410, "key-expired", "the key is older than answers are kept; find out whether its request was done"),
    "ahead": (400, "key-invalid", "the key says it was made more than 28 days from now; the client's clock is wrong"),
    "outcome-unknown": (409, "outcome-unknown", "a request with this key never ended; an operator decides"),
}


def key_of(headers):
    """The key of a request: the quoted form of the Internet draft, or the bare text. None if there is none."""
    values = [value for name, value in headers if name == b"idempotency-key"]
    if not values:
        return None
    text = values[0].decode("latin-1").strip()
    if quoted := QUOTED.fullmatch(text):
        text = re.sub(r"\\(.)", r"\1", quoted[1])
    elif "," in text or '"' in text:
        text = ""  # two keys, or half a quoted one
    if len(values) > 1 or not 1 <= len(text) <= 255 or not all("!" <= c <= "~" for c in text):
        raise ValueError("Idempotency-Key needs 1 to 255 visible ASCII characters, once")
    return text


def hashed(parts):
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def by_credentials(scope):
    """Whoever sends the same credentials: all values of all of these headers, byte for byte."""
    sent = [(name.lower(), value) for name, value in scope["headers"]]
    return hashed([part for of in CREDENTIALS for name, value in sent if name == of for part in (name, value)])


def fingerprint(scope, body, principal):
    """What makes two requests the same: who asks, method, path and query as sent, body."""
    path = scope.get("raw_path") or scope["path"].encode()
    return hashed([principal, scope["method"].encode(), path, scope["query_string"], body])


class Answer:
    """An answer, collected before it is sent. It is an ASGI `send`."""

    def __init__(self, status=500, headers=(), body=b""):
        self.status, self.headers, self.body = status, list(headers), body

    async def __call__(self, message):
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if len(self.body) > BYTES_MAX:
                raise ValueError(f"the answer to a request with a key may have {BYTES_MAX} bytes")

    async def send(self, send):
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def is_passing(error):
    """Whether the request may succeed when it is sent again: the connection broke, the server is going down or full,
    or another transaction was in the way."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate[:2] in ("08", "40", "53", "57") or error.sqlstate in ("25P03", "25P04", "55P03")


class Lent(dict):
    """The state of a request, which notes whether the handler took the transaction."""

    taken = False

    def __getitem__(self, name):
        self.taken = self.taken or name == "db"
        return super().__getitem__(name)


def problem(status, code, detail):
    body = json.dumps({"title": code, "status": status, "code": code, "detail": detail}).encode()
    headers = [(b"content-type", b"application/problem+json")]
    if code in ("key-running", "unavailable"):
        headers.append((b"retry-after", b"1"))
    return Answer(status, headers, body)


class Idempotency:
    """ASGI middleware. Put it inside whatever authenticates.

    `principal` says who asks, as bytes that do not change between retries: nobody gets the answer of another. By default
    that is whoever sends the same Authorization, Cookie and X-Api-Key headers. A service that knows its users by anything
    else (a client certificate, a header of a gateway), or whose cookies change between retries, must say it."""

    def __init__(self, app, pool, committed=lambda: None, principal=by_credentials):
        self.app, self.pool, self.committed, self.principal, self.running = app, pool, committed, principal, set()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS", "TRACE"):
            return await self.app(scope, receive, send)
        # In a task of its own: a client that hangs up cancels nothing.
        task = asyncio.ensure_future(self.answer(scope, receive))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        answer = await asyncio.shield(task)
        await answer.send(send)

    async def answer(self, scope, receive):
        try:
            key = key_of(scope["headers"])
        except ValueError as error:
            return problem(400, "key-invalid", str(error))
        if key is None:
            return problem(400, "key-missing", "this request needs an Idempotency-Key header")
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return problem(400, "body-unreadable", "the body could not be read to its end; nothing was done")
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > BYTES_MAX:
                return problem(413, "body-too-large", f"the body may have {BYTES_MAX} bytes; nothing was done")
        try:
            async with self.pool.connection() as db:
                answer, committed = await self.in_transaction(db, key, scope, body)
        except psycopg.Error as error:
            if not is_passing(error):
                # The server said no, to the answer or to the COMMIT: nothing is kept, and a retry hears the same.
                return problem(500, "handler-failed", "the answer of the request could not be kept; nothing was done")
            # Whether the COMMIT came through is not known here. The retry, with the same key, finds out.
            return problem(503, "unavailable", "the database is away; send the request again with the same key")
        if committed:
            self.committed()
        return answer

    async def in_transaction(self, db, key, scope, body):
        """The answer, and whether it was committed with the handler's work."""
        async with db.transaction() as whole:
            await db.execute(
                f"set local idle_in_transaction_session_timeout = {LIMIT_MS}; set local statement_timeout = {LIMIT_MS}"
            )
            begun = await db.execute(
                "select outcome, token, status, headers, body from hapax.key_begin(%s, %s)",
                (key, fingerprint(scope, body, self.principal(scope))),
            )
            outcome, token, status, headers, kept = await begun.fetchone()
            if outcome == "done":
                headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
                answer = Answer(status, headers + [(b"idempotency-replayed", b"true")], kept)
                raise psycopg.Rollback(whole)
            if outcome != "first":
                answer = problem(*REFUSALS[outcome])
                raise psycopg.Rollback(whole)
            state = Lent({**scope.get("state", {}), "db": db})
            answer = await self.handle(db, {**scope, "state": state}, body)
            # A refusal by the router, or of a body that is not valid: the handler never ran.
            refused = answer.status >= 400 and not state.taken
            if answer.status >= 500 or answer.status in NOT_KEPT or refused:
                raise psycopg.Rollback(whole)
            headers = [[n.decode("latin-1"), v.decode("latin-1")] for n, v in answer.headers if n.lower() in KEPT_HEADERS]
            # It raises if this transaction is not the one that began the key.
            await db.execute(
                "select hapax.key_finish(%s, %s, %s, %s, %s)", (key, token, answer.status, answer.body, json.dumps(headers))
            )
            return answer, True
        return answer, False

    async def handle(self, db, scope, body):
        """Runs the handler. A refusal is kept, its writes are not."""
        answer, sent = Answer(), False

        async def replay_body():
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # a handler that listens for a disconnect
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            async with db.transaction() as work:  # a savepoint
                await self.app(scope, replay_body, answer)
                if answer.status >= 400:
                    raise psycopg.Rollback(work)
        except Exception as error:
            if isinstance(error, psycopg.Error) and is_passing(error):
                raise
            return problem(500, "handler-failed", "the handler of the request failed; nothing was done")
        return answer


# A service that uses it.

pool = AsyncConnectionPool(os.environ.get("DATABASE_URL", ""), min_size=1, max_size=8, open=False)


@asynccontextmanager
async def lifespan(_app):
    await pool.open(wait=True)
    yield
    await pool.close()


def die_once_committed():
    """For the test of the worst moment: after the commit, before the answer."""
    if os.environ.get("DIE_ONCE_COMMITTED"):
        os.kill(os.getpid(), signal.SIGKILL)


app = FastAPI(lifespan=lifespan)
app.add_middleware(Idempotency, pool=pool, committed=die_once_committed)


@app.post("/orders/{number}/notes", status_code=204)
async def note(number: int, request: Request):
    await request.state.db.execute("insert into fastapi_orders (item) values (%s)", (f"note on {number}",))


@app.post("/orders", status_code=201)
async def create_order(request: Request):
    order = await request.json()
    inserted = await request.state.db.execute(
        "insert into fastapi_orders (item) values (%s) returning id", (order["item"],)
    )
    (number,) = await inserted.fetchone()
    if order["item"] == "unknown":
        return JSONResponse({"detail": "no such item"}, status_code=404)
    if order["item"] == "broken":
        raise RuntimeError("the handler failed after its write")
    if order["item"] == "a wrong type":
        return JSONResponse({"detail": "not in this form"}, status_code=415)
    if order["item"] == "stalled":
        await asyncio.sleep(2)
    if order["item"] in ("undone", "undone in SQL"):  # a handler that ends the transaction, and goes on
        await (request.state.db.rollback() if order["item"] == "undone" else request.state.db.execute("rollback"))
        await request.state.db.execute("insert into fastapi_orders (item) values (%s)", (order["item"],))
    return JSONResponse({"id": number, "item": order["item"]}, status_code=201, headers={"location": f"/orders/{number}"})
