#!/usr/bin/env python3
"""Runs a Kafka consumer of the examples: 300 deliveries of 100 events, kill -9 in the middle, and counts the effects.

    kafka_check.py KAFKA SINK COMMAND…    the consumer's command, without its options

SINK is `sqlite` or `files`: what the example writes. Of each event there must be one effect, with the token of a run.
Among them are messages that are not events: each becomes a dead letter. One event was dead before; it is redriven and
published again.
"""

import json
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid

from confluent_kafka import Consumer, Producer, TopicPartition
from support import PATIENCE, Server, run, wait_until

from hapax_client import Client

EVENTS, COPIES, PARTITIONS = 100, 3, 3
ODD = [b"not JSON", b"7", b'{"kind": "order.paid"}']
LEASE = "2"  # so that what a killed process held is free again soon


def main(kafka, kind, command):
    began = time.monotonic()
    name = f"recipe-{uuid.uuid4()}"
    server = Server()
    dir = pathlib.Path(server.dir.name)
    sink = dir / "effects"
    ids = [f"{name}-{number}" for number in range(EVENTS)]
    lines = [json.dumps({"event_id": id, "kind": "order.paid"}) for id in ids] * COPIES
    random.Random(7).shuffle(lines)
    (dir / "events.jsonl").write_text("\n".join(lines) + "\n")
    bus = ["--bus", f"kafka://{kafka}", "--data", server.data]
    run(*bus, "produce", "--topic", name, "--create", str(PARTITIONS), str(dir / "events.jsonl"))
    publish(kafka, name, ODD)
    with Client(server.url) as client:
        client.claim(name, ids[0], payload=json.loads(lines[0]) | {"event_id": ids[0]}).dead("killed before")
    options = ["--kafka", kafka, "--topic", name, "--server", server.url, "--sink", str(sink), "--scope", name, "--lease", LEASE]
    start = lambda: subprocess.Popen([*command, *options])
    effects = lambda: read(kind, sink)
    worker = start()
    try:
        wait_until(lambda: len(effects()) >= EVENTS // 3 or ended(worker), "a third of the effects is there")
        worker.send_signal(signal.SIGKILL)
        worker.wait(PATIENCE)
        at_the_kill = len(effects())
        assert at_the_kill < EVENTS, "it was killed in the middle"
        worker = start()
        wait_until(lambda: committed(kafka, name, EVENTS * COPIES + len(ODD)) or ended(worker), "every offset is committed")
        assert ids[0] not in [id for id, _ in effects()], "it is dead"
        with Client(server.url) as client:
            dead = client.dead.list(scope=name, payload=True)["entries"]
            assert len(dead) == 1 + len(ODD) and sum("not an event" in entry["reason"] for entry in dead) == len(ODD), dead
            redriven = client.dead.redrive(name, ids=[ids[0]], reason="mended")["entries"]
            assert redriven[0]["needs_delivery"], redriven
        publish(kafka, name, [json.dumps({"event_id": ids[0], "kind": "order.paid"}).encode()])
        wait_until(lambda: committed(kafka, name, EVENTS * COPIES + len(ODD) + 1) or ended(worker), "it ran")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0, "it stops when it is told to"
        found = effects()
        with Client(server.url) as client:
            unsettled = [id for id in ids if client.claim(name, id).outcome != "duplicate"]
        seen = [id for id, _ in found]
        lost, doubled = set(ids) - set(seen), len(seen) - len(set(seen))
        assert not lost and not doubled and not unsettled and len(seen) == EVENTS, (lost, doubled, unsettled)
        assert all(isinstance(token, int) and token > 0 for _, token in found), found
        print(
            f"{command[-1]}: {len(lines)} deliveries of {EVENTS} events, kill -9 after {at_the_kill} effects: effects {len(found)}, lost 0, doubled 0 "
            f"({time.monotonic() - began:.1f} s)"
        )
    finally:
        worker.kill()
        worker.wait()
        server.stop()


def publish(kafka, topic, messages):
    producer = Producer({"bootstrap.servers": kafka})
    for message in messages:
        producer.produce(topic, message)
    assert producer.flush(PATIENCE) == 0, "they are published"


def ended(worker):
    assert worker.poll() is None, f"the consumer ended by itself with {worker.returncode}"
    return False


def read(kind, sink):
    """The id and the token of each effect."""
    if kind == "sqlite":
        return rows(sink)
    found = [json.loads(file.read_text()) for file in sink.glob("[!.]*")] if sink.exists() else []
    return [(effect["id"], effect["token"]) for effect in found]


def rows(sink):
    if not sink.exists():
        return []
    found = sqlite3.connect(f"file:{sink}?mode=ro", uri=True, timeout=PATIENCE)
    try:
        return found.execute("select id, token from effects").fetchall()
    except sqlite3.OperationalError:
        return []  # it has no table yet
    finally:
        found.close()


def committed(kafka, name, expected, consumers={}):
    if kafka not in consumers:
        consumers[kafka] = Consumer({"bootstrap.servers": kafka, "group.id": name, "enable.auto.commit": False})
    consumer = consumers[kafka]
    partitions = consumer.committed([TopicPartition(name, number) for number in range(PARTITIONS)], timeout=PATIENCE)
    ends = [consumer.get_watermark_offsets(TopicPartition(name, p.partition), timeout=PATIENCE)[1] for p in partitions]
    assert sum(ends) == expected, ends
    return [max(p.offset, 0) for p in partitions] == ends


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
