#!/usr/bin/env python3
"""ClickHouse's HTTP interface in front of its engine (chDB, in this process).

usage: clickhouse_http.py PORT DIRECTORY     for tests: one query at a time, two users, answers sent whole
"""
import base64, os, re, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

# chDB leaves its directory for a while as it is imported, by which `scripts/services` knows its processes.
chdir, os.chdir = os.chdir, lambda _: None
import chdb
from chdb.state import connect
os.chdir = chdir

# Tests connect as either; the second shows what a wrong password does.
USERS = {"default": "", "hapax": "s3cret/&?"}
# What a URL says besides settings and `param_NAME`.
OF_PROTOCOL = {"query", "database", "user", "password", "default_format", "query_id", "wait_end_of_query", "buffer_size"}
# The status that the server gives an exception, by its code; 500 if it is not here.
STATUS = {
    **dict.fromkeys([6, 7, 26, 27, 36, 38, 41, 42, 43, 44, 53, 62, 72, 117, 229, 386, 427, 456, 457], 400),
    **dict.fromkeys([192, 193, 516], 403),
    **dict.fromkeys([46, 47, 50, 56, 60, 63, 73, 81, 115], 404),
    48: 501, 159: 408, 194: 401, 209: 503, 439: 503,
}
INSERT_DATA = re.compile(r"\s*INSERT\s.*?\sFORMAT\s+(\w+)\s*$", re.I | re.S)
FORMAT = re.compile(r"\sFORMAT\s+(\w+)\s*;?\s*$", re.I)

# The rows of the insert that is under way.
BODY = os.path.join(sys.argv[2], "insert-body")

engine_lock = threading.Lock()
engine = None


def quoted(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def run(query, body, said):
    """The answer's bytes and format. Settings hold for this query only."""
    settings = {k: v for k, v in said.items() if k not in OF_PROTOCOL and not k.startswith("param_")}
    params = {k[len("param_"):]: v for k, v in said.items() if k.startswith("param_")}
    for name in settings:
        if not name.isidentifier():
            raise ValueError(f"Code: 115. DB::Exception: Setting {name} is unknown. (UNKNOWN_SETTING)")
    with engine_lock:
        engine.query("USE `%s`" % said.get("database", "default").replace("`", "\\`"))
        try:
            if settings:
                engine.query("SET " + ", ".join(f"{k} = {quoted(v)}" for k, v in settings.items()))
            inserted = INSERT_DATA.match(query)
            if inserted:
                # Not by chDB's streaming inserts: they answer well also if the table refuses the rows.
                with open(BODY, "wb") as file:
                    file.write(body)
                head = query[:inserted.start(1)].rstrip()[:-len("FORMAT")]
                engine.query(f"{head} FROM INFILE {quoted(BODY)} FORMAT {inserted[1]}")
                return b"", inserted[1]
            if body:
                query = f"{query}\n{body.decode()}" if query else body.decode()
            named = FORMAT.search(query)
            form = named[1] if named else said.get("default_format", "TabSeparated")
            if named:
                query = query[:named.start()]
            answer = engine.query(query, form, params=params) if params else engine.query(query, form)
            return (answer.bytes() or b"") if hasattr(answer, "bytes") else b"", form
        finally:
            if settings:
                try:
                    engine.query("SET " + ", ".join(f"{k} = DEFAULT" for k in settings))
                except Exception: # one of them is unknown, so none was set
                    pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_):
        pass

    def reply(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def refuse(self, text):
        text = text[max(text.find("Code: "), 0):]
        code = int((re.match(r"Code: (\d+)", text) or [0, "1002"])[1])
        headers = {"X-ClickHouse-Exception-Code": str(code), "Content-Type": "text/plain; charset=UTF-8"}
        self.reply(STATUS.get(code, 500), text.encode() + b"\n", headers)

    def body(self):
        """All of it, or ConnectionError: an insert that was cut off writes nothing."""
        if "chunked" not in (self.headers.get("Transfer-Encoding") or "").lower():
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length)
            if len(data) < length:
                raise ConnectionError
            return data
        data = bytearray()
        while size := int(self.rfile.readline().split(b";")[0] or b"-", 16):
            chunk = self.rfile.read(size)
            if len(chunk) < size:
                raise ConnectionError
            data += chunk
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return bytes(data)

    def user(self, said):
        basic = self.headers.get("Authorization") or ""
        if basic.startswith("Basic "):
            name, _, password = base64.b64decode(basic[len("Basic "):]).decode().partition(":")
            return name, password
        return (self.headers.get("X-ClickHouse-User") or said.get("user", "default"),
                self.headers.get("X-ClickHouse-Key") or said.get("password", ""))

    def answer(self):
        place = urlsplit(self.path)
        said = dict(parse_qsl(place.query, keep_blank_values=True))
        try:
            body = self.body() if self.command == "POST" else b""
        except (ConnectionError, ValueError):
            self.close_connection = True
            return
        if place.path == "/ping" or (self.command == "GET" and "query" not in said):
            return self.reply(200, b"Ok.\n", {})
        name, password = self.user(said)
        if USERS.get(name) != password:
            return self.refuse(f"Code: 516. DB::Exception: {name}: Authentication failed: password is incorrect, "
                               "or there is no user with such name. (AUTHENTICATION_FAILED)")
        try:
            data, form = run(said.get("query", ""), body, said)
        except Exception as error:
            return self.refuse(str(error))
        headers = {"Content-Type": "application/octet-stream", "X-ClickHouse-Format": form, "X-ClickHouse-Summary": "{}"}
        self.reply(200, data, headers)

    do_GET = do_POST = answer


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    engine = connect(sys.argv[2])
    server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
    print("ClickHouse", chdb.engine_version, "answers on port", sys.argv[1], flush=True)
    server.serve_forever()
