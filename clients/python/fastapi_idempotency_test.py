"""Runs the service of fastapi_idempotency.py and retries against it. Needs DATABASE_URL, with the keys' tables,
and the binary in HAPAX_TEST_SERVER.

    python3 fastapi_idempotency_test.py
"""
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg

PATIENCE = 60  # seconds until a test that hangs has failed
listener = socket.create_server(("127.0.0.1", 0), backlog=128)  # stays open while servers come and go
URL = f"http://127.0.0.1:{listener.getsockname()[1]}/orders"


def serve(**environment):
    command = [sys.executable, "-m", "uvicorn", "fastapi_idempotency:app", "--fd", str(listener.fileno())]
    return subprocess.Popen(
        command + ["--log-level", "critical"],
        cwd=Path(__file__).parent,
        env={**os.environ, **environment},
        pass_fds=[listener.fileno()],
    )


def post(key, item, path="", method="POST", **credentials):
    """Status, headers and body of one try."""
    body = json.dumps({"item": item}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    headers.update({name.replace("_", "-"): value for name, value in credentials.items()})
    request = urllib.request.Request(URL + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as got:
            text = got.read()
            return got.status, got.headers, json.loads(text) if text else None
    except urllib.error.HTTPError as refused:
        text = refused.read()
        return refused.code, refused.headers, json.loads(text) if text else None


def post_until(key, item):
    """Tries again while the answer says so, or there is none."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            got = post(key, item)
            if (got[2] or {}).get("code") not in ("key-running", "unavailable"):
                return got
        except (ConnectionError, TimeoutError, urllib.error.URLError):
            pass
        assert time.monotonic() < deadline, f"no answer for {key}"
        time.sleep(0.05)


def main():
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as db:
        db.execute("drop table if exists fastapi_orders")
        db.execute("create table fastapi_orders (id bigserial primary key, item text not null)")
        rows = lambda item: db.execute("select count(*) from fastapi_orders where item = %s", (item,)).fetchone()[0]
        key = lambda: f"fastapi-{uuid.uuid4()}"
        server = serve()
        try:
            once = key()
            with ThreadPoolExecutor(20) as clients:
                got = list(clients.map(lambda _: post_until(once, "book"), range(20)))
            assert {status for status, _, _ in got} == {201}, got
            assert len({json.dumps(body) for _, _, body in got}) == 1, "one answer"
            assert rows("book") == 1, "one row"

            status, headers, body = post(f'"{once}"', "book")
            assert (status, body, headers["Idempotency-Replayed"]) == (201, got[0][2], "true"), "a replay, quoted"
            assert headers["Location"] == f"/orders/{body['id']}"
            status, _, body = post(once, "pen")
            assert (status, body["code"], rows("pen")) == (422, "key-mismatch", 0)

            refused = key()
            assert [post(refused, "unknown")[0] for _ in range(2)] == [404, 404] and rows("unknown") == 0
            assert post(refused, "unknown")[1]["Idempotency-Replayed"] == "true", "a refusal is kept, its row is not"
            broken = key()
            assert [post(broken, "broken")[0] for _ in range(2)] == [500, 500] and rows("broken") == 0
            for bad in ("a b", '"a","b"', "a,b", '"a', '"a\\\\b"c"', '""'):
                assert (post(bad, "x")[2]["code"], rows("x")) == ("key-invalid", 0), bad
            escaped = key()
            assert post(f'"{escaped}\\"\\\\"', "quill")[0] == 201, 'a quoted key with " and \\ in it'
            db.execute("select set_config('hapax.maintenance', 'on', false)")  # row security may bind this role
            (found,) = db.execute("select count(*) from hapax.keys where key = %s", (f'{escaped}"\\',)).fetchone()
            assert found == 1

            # Two users with one key: the other one does not get the answer, however it is known.
            for header in ("Authorization", "Cookie", "X_Api_Key"):
                shared = key()
                assert post(shared, "ring", **{header: "ann"})[0] == 201, header
                status, headers, body = post(shared, "ring", **{header: "bob"})
                assert (status, body["code"], headers["Idempotency-Replayed"]) == (422, "key-mismatch", None), header
                assert post(shared, "ring")[2]["code"] == "key-mismatch", f"nobody, after {header}"
                assert post(shared, "ring", **{header: "ann"})[1]["Idempotency-Replayed"] == "true", header
            # What says that it was sent in a wrong way is not kept: the next one may be better.
            wrong = key()
            for _ in range(2):
                got = post(wrong, "a wrong type")
                assert (got[0], got[1]["Idempotency-Replayed"], rows("a wrong type")) == (415, None, 0), got

            # Whoever never ran did nothing: its refusal is not kept.
            for path, method, status in (("/none", "POST", 404), ("", "PUT", 405), ("/x/notes", "POST", 422)):
                refused = key()
                for _ in range(2):
                    got = post(refused, "x", path, method)
                    assert (got[0], got[1]["Idempotency-Replayed"]) == (status, None), (path, got[0])
            empty = key()
            assert [post(empty, "x", "/17/notes")[::2] for _ in range(2)] == [(204, None)] * 2 and rows("note on 17") == 1
            assert post(empty, "x", "/17/notes")[1]["Idempotency-Replayed"] == "true"

            # A handler that ends the transaction and goes on writes nothing, however often it is sent.
            for item in ("undone", "undone in SQL"):
                ended = key()
                for _ in range(2):
                    status, _, body = post(ended, item)
                    assert (status, body["code"], rows(item)) == (500, "handler-failed", 0), (item, status, body)

            # The probe finds nothing, and every key that it used is one row: nine keys of writes that succeed.
            bodies = ["--body", '{"item": "probe"}', "--other-body", '{"item": "another probe"}']
            probe = subprocess.run([os.environ["HAPAX_TEST_SERVER"], "probe", URL, *bodies, "--json"], capture_output=True, timeout=4 * PATIENCE)
            assert probe.returncode == 0, (probe.stdout, probe.stderr)
            seen = {check["check"]: check["verdict"] for check in json.loads(probe.stdout)["checks"]}
            assert {seen[name] for name in ("retry", "parallel", "other body", "bare key", "no key", "hang-up in the body")} == {"ok"}, seen
            assert (rows("probe"), rows("another probe")) == (9, 0), seen

            # The server of the database ends a transaction whose service has stopped.
            server.kill()
            server.wait()
            server = serve(REQUEST_LIMIT_MS="300")
            status, _, body = post(key(), "stalled")
            assert (status, body["code"], rows("stalled")) == (503, "unavailable", 0), (status, body)

            # kill -9 between the commit and the answer; the client retries.
            server.kill()
            server.wait()
            server = serve(DIE_ONCE_COMMITTED="1")
            lost = key()
            try:
                raise AssertionError(f"it should have died: {post(lost, 'lamp')}")
            except (ConnectionError, urllib.error.URLError):
                pass
            assert server.wait(PATIENCE) == -9 and rows("lamp") == 1, "committed, and not answered"
            server = serve()
            status, headers, body = post_until(lost, "lamp")
            assert (status, headers["Idempotency-Replayed"], rows("lamp")) == (201, "true", 1), body
        finally:
            server.kill()
            server.wait()
        db.execute("drop table fastapi_orders")
    print("fastapi: 20 posts at once, 1 row; replayed; another body refused; killed after the commit, 1 row")


main()
