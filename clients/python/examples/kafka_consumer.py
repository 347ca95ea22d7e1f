#!/usr/bin/env python3
"""A Kafka consumer in Python (confluent-kafka) that claims each event over HTTP before its effect.

    python3 kafka_consumer.py --kafka localhost:9092 --topic orders --server http://127.0.0.1:7070 --sink effects.db

What it promises is the leased mode: at any time one process runs an event, an event that is done never runs again, and
one whose process died runs again. A process that dies between its effect and `done` leaves an effect that the next run
would repeat, so the effect dedups on the event's id, as the insert below does. With both, each event takes effect once,
whatever Kafka delivers again and whoever is killed. An effect that cannot dedup happens at least once.

An event that is dead is passed: its offset is committed, so Kafka does not deliver it again. If you redrive it
(`client.dead.redrive`), publish it to the topic again too, with the same event_id: only then does it run
(`needs_delivery` in the answer says so).
"""

import argparse
import json
import signal
import sqlite3
import sys
import time

from confluent_kafka import Consumer, KafkaError, KafkaException

from hapax_client import Client


def effect(sink, event_id, token, event):
    """Your effect. The id makes a second run harmless; a sink that knows versions can fence by the token."""
    with sink:
        sink.execute(
            "insert into effects (id, token, kind) values (?, ?, ?) on conflict (id) do nothing",
            (event_id, token, event.get("kind")),
        )


def handle(client, options, sink, message):
    """Returns when the event has taken effect, or when the ledger has recorded that it will not."""
    try:
        event = json.loads(message.value())
        event_id = event["event_id"]
        if not isinstance(event_id, str) or not event_id.strip():
            raise ValueError("event_id is not text")
    except (ValueError, KeyError, TypeError) as error:
        bury(client, options, message, f"it is not an event: {error!r}")
        return
    while True:
        claim = client.claim(options.scope, event_id, lease=options.lease, payload=event)
        if claim.outcome == "claimed":
            try:
                with claim:  # keeps the lease; done at the end, failed if an exception leaves the block
                    effect(sink, event_id, claim.token, event)
                return
            except (ValueError, sqlite3.Error) as error:
                print(f"{event_id} failed and will be tried again: {error}", file=sys.stderr)
        elif claim.outcome not in ("busy", "retry_later", "wait"):
            return  # a duplicate; or recorded for a person to look at: dead, parked, mismatch, too old
        # Somebody else runs it, or it is not due yet. The offset waits, so that it is not lost. A pause beyond
        # max.poll.interval.ms gives the partition to another member, who asks the ledger too.
        time.sleep(0.2)


def bury(client, options, message, reason):
    """What is not an event never becomes one: it is a dead letter, named after its place, and does not stop the others."""
    place = f"{message.topic()}-{message.partition()}-{message.offset()}"
    print(f"{place}: {reason}", file=sys.stderr)
    while True:
        content = (message.value() or b"").decode(errors="replace")
        claim = client.claim(options.scope, place, lease=options.lease, payload=content)
        if claim.outcome == "claimed":
            claim.dead(reason)
        elif claim.outcome in ("busy", "retry_later", "wait"):
            time.sleep(0.2)
            continue
        return


def commit(consumer, message):
    try:
        consumer.commit(message=message, asynchronous=False)
    except KafkaException as error:
        # The partition is another member's by now: it gets the message again, and the ledger says "duplicate".
        if error.args[0].code() not in (KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS):
            raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--sink", required=True, help="a SQLite file")
    parser.add_argument("--scope", default="kafka-python")
    parser.add_argument("--lease", type=float, default=30.0, help="seconds")
    options = parser.parse_args()

    sink = sqlite3.connect(options.sink)
    sink.execute("create table if not exists effects (id text primary key, token integer not null, kind text)")
    consumer = Consumer(
        {
            "bootstrap.servers": options.kafka,
            "group.id": options.scope,
            "enable.auto.commit": False,  # an offset is committed after its event is done
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6000,  # after that, the partitions of a killed process go to another
        }
    )
    stopping = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stopping.append(True))
    consumer.subscribe([options.topic])
    try:
        with Client(options.server) as client:
            while not stopping:
                message = consumer.poll(0.2)
                if message is None:
                    continue
                if message.error():
                    raise KafkaException(message.error())
                handle(client, options, sink, message)
                commit(consumer, message)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
