"""The real server, and a way to it that loses answers."""

import collections
import contextlib
import http.client
import http.server
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import time

from hapax_client import Client, ClientSettings

PATIENCE = 120
HAPAX = os.environ.get("HAPAX_TEST_SERVER", "target/debug/hapax")
# Every call has one attempt: the pause after it would outlast the deadline.
ONCE = ClientSettings(deadline=PATIENCE, backoff_base=1e9, backoff_max=1e9)
FAST = ClientSettings(deadline=PATIENCE, attempt_timeout=PATIENCE, backoff_base=0.01)


def wait_until(condition, what):
    """Waits for a state."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"waited in vain until {what}"
        time.sleep(0.005)


def run(*arguments):
    """Runs the binary; returns what it prints."""
    return subprocess.run([HAPAX, *arguments], check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


class Server:
    """`hapax serve` on its embedded defaults, with a module `orders`."""

    def __init__(self, *more):
        self.dir = tempfile.TemporaryDirectory()
        self.more = more
        self.data = str(pathlib.Path(self.dir.name) / "data")
        run("modules", "create", "orders", "--data", self.data)
        self.start()

    def start(self):
        command = [HAPAX, "serve", "--listen", "127.0.0.1:0", "--json", "--data", self.data, *self.more]
        log = open(pathlib.Path(self.dir.name) / "log", "a")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        log.close()
        line = self.process.stdout.readline()
        assert line, "the server did not start: " + (pathlib.Path(self.dir.name) / "log").read_text()
        self.url = json.loads(line)["url"]

    def kill(self):
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)
        self.process.stdout.close()

    def stop(self):
        self.kill()
        self.dir.cleanup()


class Lose:
    """The server does the work, and its answer is lost. Then the way may be closed."""

    def __init__(self, close=False, half=False):
        self.close, self.half = close, half


class Say:
    """Somebody else answers in place of the server."""

    def __init__(self, status, body="", kind="application/json", **headers):
        self.status, self.kind, self.headers = status, kind, headers
        self.body = body if isinstance(body, str) else json.dumps(body)


def problem(status, code, /, *, headers=None, **more):
    body = {"type": "about:blank", "title": code, "status": status, "code": code, "detail": "d", **more}
    return Say(status, body, "application/problem+json", **(headers or {}))


class Way:
    """Forwards to a server that may come back at another port, unless it was told what to do with a request."""

    def __init__(self, server):
        self.to = server.url
        self.plan = collections.deque()
        self.always = {}
        self.asked = []
        self.lost = 0
        way = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                way.carry(self, body)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, *_):
                pass  # clients hang up

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = "http://127.0.0.1:%d" % self.http.server_address[1]

    def carry(self, request, body):
        self.asked.append((time.monotonic(), request.command, request.path, dict(request.headers), body))
        step = self.always.get(request.path.split("?")[0])
        if step is None and self.plan:
            step = self.plan.popleft()
        try:
            if isinstance(step, Say):
                return self.answer(request, step.status, {"content-type": step.kind, **step.headers}, step.body.encode())
            if self.to is None:
                raise ConnectionError("the way is closed")
            to = http.client.HTTPConnection(self.to.split("//")[1], timeout=PATIENCE)
            headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
            to.request(request.command, request.path, body, headers)
            answer = to.getresponse()
            said = answer.read()
            to.close()
            if isinstance(step, Lose):
                self.to = None if step.close else self.to
                if step.half:
                    request.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
                self.lost += 1
                raise ConnectionError("the answer is lost")
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in ("transfer-encoding", "content-length")}
            self.answer(request, answer.status, kept, said)
        except OSError:
            request.close_connection = True
            with contextlib.suppress(OSError):
                request.connection.shutdown(socket.SHUT_RDWR)

    def answer(self, request, status, headers, body):
        request.send_response_only(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def client(self, settings=FAST, **more):
        return Client(self.url, settings=settings, **more)

    def stop(self):
        self.http.shutdown()
        self.http.server_close()


def closed_port():
    """A URL where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
