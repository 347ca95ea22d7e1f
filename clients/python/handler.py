#!/usr/bin/env python3
"""A handler for `hapax consume --exec`, version 1 of its protocol (docs/handlers.md). Standard library only.

    hapax consume --topic orders --scope mailer --exec 'python3 clients/python/handler.py'

Write your effect in `handle`. Each request runs on a thread of its own, so a slow one does not hold up the others, and
replies leave in whatever order they are ready; how many run at once, it tells hapax when it starts. With `concurrency=1`
they come one by one, as to a handler that tells nothing. Standard output belongs to the protocol: print to standard error.
"""

import json
import sys
import threading


class Retry(Exception):
    """It may succeed next time; `after_ms` is the shortest pause."""

    def __init__(self, error, after_ms=None):
        super().__init__(error)
        self.after_ms = after_ms


class Fatal(Exception):
    """No run will succeed: straight to the dead letters."""


def handle(request, cancelled):
    """Your effect. `request["key"]` is the same for every attempt: let the sink dedup on it, and pass `request["token"]` on.

    `cancelled` is set when nobody waits for the reply any more: stop if you can.
    """
    event = request["event"]
    if event["tombstone"]:  # there is no payload: whatever stands under the record's key is to be deleted
        print(f"{event['record_key']} is gone (event {request['id']})", file=sys.stderr)
        return
    payload = event["payload"]
    order = payload.get("order", payload.get("aggregate", "?")) if isinstance(payload, dict) else "?"
    print(f"mail for order {order} (event {request['id']}, attempt {request['attempt']})", file=sys.stderr)


class Handler:
    def __init__(self, handle, concurrency=64):
        self.handle = handle
        self.concurrency = concurrency
        self.lock = threading.Lock()
        self.running = {}

    def reply(self, request, **outcome):
        line = json.dumps({"id": request["id"], "token": request["token"], **outcome})
        with self.lock:
            # The reply to a cancel, too, tells that it was heard.
            self.running.pop((request["id"], request["token"]), None)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def run_one(self, request, cancelled):
        try:
            self.handle(request, cancelled)
            self.reply(request, done=True)
        except Retry as error:
            self.reply(request, retry=True, error=str(error), after_ms=error.after_ms)
        except Fatal as error:
            self.reply(request, fatal=True, error=str(error))
        except Exception as error:  # what was not foreseen may succeed next time
            self.reply(request, retry=True, error=f"{type(error).__name__}: {error}")

    def run(self):
        print(json.dumps({"v": 1, "concurrency": self.concurrency}), flush=True)
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("v") != 1:
                print(f"this handler speaks version 1, not {message.get('v')}", file=sys.stderr)
                sys.exit(1)
            if "cancel" in message:
                which = (message["cancel"]["id"], message["cancel"]["token"])
                with self.lock:
                    cancelled = self.running.get(which)
                if cancelled is not None:
                    cancelled.set()
                continue
            cancelled = threading.Event()
            with self.lock:
                self.running[(message["id"], message["token"])] = cancelled
            threading.Thread(target=self.run_one, args=(message, cancelled), daemon=True).start()


if __name__ == "__main__":
    Handler(handle).run()
