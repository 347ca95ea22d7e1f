"""Exactly once from Python (psycopg 3): the claim commits or rolls back with the effect.

    pip install 'psycopg[binary]>=3.2'
    hapax --ledger "$DATABASE_URL" ledger init
    python3 claim_in_transaction.py
"""
import os
import uuid

import psycopg

SCOPE = "python-demo"


def handle(connection, event_id, amount, fail=False):
    """One delivery. The outcome says what to do with it: acknowledge 'claimed' and 'duplicate', redeliver the rest."""
    with connection.transaction():
        outcome = connection.execute("select outcome from hapax.claim_in(%s, %s)", (SCOPE, event_id)).fetchone()[0]
        if outcome == "claimed":
            connection.execute("update python_demo_account set balance = balance + %s", (amount,))
            if fail:
                raise RuntimeError("the handler failed after its write")
    return outcome


def main():
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute("drop table if exists python_demo_account")
        connection.execute("create table python_demo_account (balance int not null)")
        connection.execute("insert into python_demo_account values (0)")
        balance = lambda: connection.execute("select balance from python_demo_account").fetchone()[0]
        paid = f"payment-{uuid.uuid4()}"

        try:
            handle(connection, paid, 7, fail=True)
        except RuntimeError:
            pass
        assert balance() == 0, "effect and claim were rolled back together"

        assert handle(connection, paid, 7) == "claimed", "the rollback gave the event back"
        assert handle(connection, paid, 7) == "duplicate", "a redelivery"
        assert balance() == 7, "it took effect once"
        connection.execute("drop table python_demo_account")
    print("python: 1 failure rolled back, 1 claim, 1 duplicate, 1 effect")


main()
