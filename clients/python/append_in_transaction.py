"""The transactional outbox from Python (psycopg 3): row and event are committed together, and `hapax relay` brings the event to the bus.

    pip install 'psycopg[binary]>=3.2'
    hapax --journal "$DATABASE_URL" journal stat     # makes the journal's tables
    python3 append_in_transaction.py
"""
import json
import os
import uuid

import psycopg

CONFLICT, MISMATCH = "JC001", "JM001"  # told apart by SQLSTATE, never by text


def append(connection, order, expected, event):
    """One event of an order, in the transaction that is open: (seq, position). `expected` is the order's last seq, 0 if it is new."""
    rows = connection.execute(
        "select o_seq, o_position from hapax.append_in(%s, %s, %s)", (order, expected, json.dumps([event]))
    ).fetchall()
    return rows[0]


def place(connection, order, amount, event_id, expected=0, fail=False):
    with connection.transaction():
        connection.execute("insert into python_demo_order values (%s, %s) on conflict do nothing", (order, amount))
        event = {"id": event_id, "kind": "order.placed", "payload": {"order": order, "amount": amount}}
        placed = append(connection, order, expected, event)
        if fail:
            raise RuntimeError("the service failed after its append")
    return placed


def main():
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute("drop table if exists python_demo_order")
        connection.execute("create table python_demo_order (id text primary key, amount int not null)")
        count = lambda sql: connection.execute(sql).fetchone()[0]
        order, event_id = f"order-{uuid.uuid4()}", str(uuid.uuid4())
        events = "select count(*) from hapax.journal_events where aggregate = '%s'" % order

        try:
            place(connection, order, 7, event_id, fail=True)
        except RuntimeError:
            pass
        assert (count("select count(*) from python_demo_order"), count(events)) == (0, 0), "both were rolled back"

        first = place(connection, order, 7, event_id)
        assert first[0] == 1, "numbers begin at 1, and the failure has burned none"
        assert place(connection, order, 7, event_id) == first, "the same event again: its original place, nothing stored"
        assert (count("select count(*) from python_demo_order"), count(events)) == (1, 1)

        for expected, amount, event, code in [(0, 7, str(uuid.uuid4()), CONFLICT), (1, 8, event_id, MISMATCH)]:
            try:
                place(connection, order, amount, event, expected)
                raise AssertionError("it was not refused")
            except psycopg.Error as error:
                assert error.sqlstate == code, error
        assert count(events) == 1
        connection.execute("drop table python_demo_order")
    print("python: 1 failure rolled back, 1 row and 1 event in one transaction, 1 repeat, 1 conflict, 1 mismatch")


main()
