"""The client and the real server: answers that get lost, a server that is killed, leases that are lost."""

import asyncio
import concurrent.futures
import contextlib
import io
import json
import sqlite3
import threading
import time
import types
import unittest
import uuid
from decimal import Decimal

import httpx
from support import FAST, ONCE, PATIENCE, Lose, Say, Server, Way, closed_port, problem, run, wait_until

from hapax_client import (
    AsyncClient,
    Client,
    ClientSettings,
    Conflict,
    Denied,
    Fenced,
    Invalid,
    KeyMismatch,
    LeaseLost,
    Mismatch,
    NewEvent,
    NotFound,
    PreparedWrite,
    RawJson,
    Refused,
    Unavailable,
    uuid7,
)

HOSTILE = ['"\\\'; drop table x; --', "<script>alert(1)</script>", "\u202ertl\u200f", "字" * 255, "a/b?c#d%2F..", "\x1b[31m\n\t"]


def has_failed(test, claim):
    """The pause before the next attempt is drawn at random from up to a second, so it may be over."""
    test.assertIn(claim.outcome, ("retry_later", "claimed"))
    if claim.outcome == "claimed":
        test.assertEqual(claim.attempt, 2)


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.way = Way(cls.server)

    @classmethod
    def tearDownClass(cls):
        cls.way.stop()
        cls.server.stop()

    def setUp(self):
        self.way.plan.clear()
        self.way.always.clear()
        self.client = self.way.client()
        self.orders = self.client.data("orders")
        self.addCleanup(self.client.close)

    def once(self):
        client = self.way.client(ONCE)
        self.addCleanup(client.close)
        return client

    def named(self, what):
        """An id that no other test has."""
        return f"{what}-{uuid.uuid4()}"

    def count(self, mark):
        """How many records have this mark, by the direct way."""
        with Client(self.server.url, settings=FAST) as direct:
            return sum(record.payload.get("mark") == mark for record in direct.data("orders").records())


class Writes(Case):
    def test_records_are_written_read_and_deleted(self):
        written = self.orders.create({"amount": 7})
        record = written.record
        self.assertEqual((written.replayed, record.seq, record.payload), (False, 1, {"amount": 7}))
        self.assertEqual(self.orders.get(record.id), record)
        updated = self.orders.update(record.id, 1, {"amount": 8}).record
        self.assertEqual((updated.seq, updated.id), (2, record.id))
        with self.assertRaises(Conflict) as raised:
            self.orders.update(str(record.id), 1, {"amount": 9})
        self.assertEqual((raised.exception.expected, raised.exception.actual), (1, 2))
        self.assertFalse(raised.exception.in_doubt)
        own = uuid7()
        self.assertEqual(self.orders.create_as(own, {}).record.id, own)
        self.assertIn(own, [record.id for record in self.orders.records(page=1)])
        page = self.orders.list(limit=1)
        self.assertEqual(len(page.records), 1)
        self.assertGreater(self.orders.list(page.next, 1).records[0].id, page.records[0].id)
        self.assertEqual(self.orders.delete(record.id, 2).record.seq, 3)
        self.assertRaises(NotFound, self.orders.get, record.id)
        self.assertRaises(NotFound, self.client.data("invoices").create, {})
        info = self.client.info()
        self.assertEqual((info["key_retention_s"], info["keys"]), (30 * 86400, "sqlite"))

    def test_t190_a_lost_answer_is_asked_for_again_and_the_write_is_done_once(self):
        for lost in (Lose(), Lose(half=True)):
            mark = self.named("lost")
            self.way.plan.append(lost)
            written = self.orders.create({"mark": mark})
            self.assertTrue(written.replayed)
            self.assertEqual(self.count(mark), 1)
            self.way.plan.append(lost)
            self.assertTrue(self.orders.update(written.record.id, 1, {"mark": mark, "n": 2}).replayed)
            self.way.plan.append(lost)
            deleted = self.orders.delete(written.record.id, 2)
            self.assertEqual((deleted.replayed, deleted.record.seq), (True, 3))

    def test_t280_a_write_in_doubt_comes_back_with_its_key(self):
        mark = self.named("doubt")
        once = self.once()
        self.way.plan.append(Lose())
        with self.assertRaises(Unavailable) as raised:
            once.data("orders").create({"mark": mark})
        error = raised.exception
        self.assertTrue(error.in_doubt and error.is_retryable)
        self.assertIn("may have taken effect", str(error))
        self.assertEqual(self.client.key(error.prepared.key)["state"], "done")
        self.assertTrue(once.send(error.prepared).replayed)
        self.assertEqual(self.count(mark), 1)
        self.way.plan.append(problem(401, "unauthenticated"))
        write = self.orders.prepare_delete(uuid7(), 1)
        with self.assertRaises(Denied) as raised:
            self.client.send(write)
        self.assertIs(raised.exception.prepared, write)
        with self.assertRaises(Invalid) as raised:
            self.client.data("Orders").create({})
        self.assertIsNone(raised.exception.prepared)

    def test_t281_a_doubt_outlives_the_call_and_the_process(self):
        nobody = Client(closed_port(), settings=ONCE)
        write = nobody.data("orders").prepare_create({})
        for _ in range(2):
            with self.assertRaises(Unavailable) as raised:
                nobody.send(write)
            self.assertFalse(raised.exception.in_doubt, "nobody has seen it")
        for maybe in (PreparedWrite.from_json(write.to_json()), write.with_key("form-17")):
            with self.assertRaises(Unavailable) as raised:
                nobody.send(maybe)
            self.assertTrue(raised.exception.in_doubt)
        denied = problem(401, "unauthenticated")
        for first, doubt in ((Say(504, "<html>", "text/html"), True), (problem(409, "contended"), False), (None, False)):
            write = self.orders.prepare_create({})
            self.way.plan.extend([first] if first else [])
            self.way.plan.extend([denied, denied])
            for _ in range(2):
                with self.assertRaises(Denied) as raised:
                    self.client.send(write)
                self.assertEqual(raised.exception.in_doubt, doubt)
            self.assertFalse(self.way.plan)
        nobody.close()

    def test_t281_a_call_that_is_cancelled_leaves_a_doubt(self):
        async def give_up():
            async with AsyncClient(self.way.url, settings=FAST) as client:
                asked = len(self.way.asked)
                self.way.always["/v1/modules/orders/records"] = problem(503, "unavailable")
                write = client.data("orders").prepare_create({})
                task = asyncio.create_task(client.send(write))
                while len(self.way.asked) == asked:
                    await asyncio.sleep(0.005)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                return write

        self.assertTrue(asyncio.run(give_up()).maybe_sent)

    def test_t282_the_same_fields_in_other_bytes_are_the_same_write(self):
        key = self.named("form")
        prepare = lambda json: self.orders.prepare_create(RawJson(json)).with_key(key)
        first = self.client.send(prepare('{"a":1,"b":2}')).record
        again = self.client.send(prepare('{"b": 2, "a": 1}'))
        self.assertEqual((again.replayed, again.record), (True, first))
        with self.assertRaises(KeyMismatch) as raised:
            self.client.send(prepare('{"a":1,"b":3}'))
        self.assertEqual(raised.exception.problem.fields, ("/payload",))
        self.way.plan.append(problem(422, "key-mismatch"))
        with self.assertRaises(KeyMismatch) as raised:
            self.client.send(prepare('{"a":1,"b":2}'))
        self.assertTrue(raised.exception.in_doubt, "the server knows of no part that differs")

    def test_t192_codes_decide_about_a_retry(self):
        mark = self.named("codes")
        passing = ["key-running", "unavailable", "contended", "overloaded", "not-ready", "rate-limited", "internal"]
        self.way.plan.extend(problem(418, code) for code in passing)
        self.way.plan.extend([Say(502, "<html>", "text/html"), Say(200, "<html>", "text/html"), Say(200, "{", "application/json")])
        self.assertFalse(self.orders.create({"mark": mark}).replayed)
        self.assertFalse(self.way.plan)
        for code, kind in (("outcome-unknown", "OutcomeUnknown"), ("key-expired", "KeyExpired"), ("invalid", "Refused")):
            self.way.plan.append(problem(503, code, headers={"Retry_After": "1"}))
            with self.assertRaises(Exception) as raised:
                self.orders.create({"mark": mark})
            self.assertEqual((type(raised.exception).__name__, raised.exception.code), (kind, code))
            self.assertEqual(raised.exception.in_doubt, code != "invalid")
        self.way.plan.extend([problem(500, "handler-failed")] * 9)
        with self.assertRaises(Refused) as raised:
            self.orders.create({"mark": mark})
        self.assertEqual((raised.exception.attempts, raised.exception.in_doubt), (5, True))
        self.assertEqual(self.count(mark), 1)

    def test_t193_a_refusal_after_a_lost_answer_does_not_end_the_doubt(self):
        self.way.plan.extend([Lose(), problem(403, "forbidden")])
        with self.assertRaises(Denied) as raised:
            self.orders.create({})
        self.assertTrue(raised.exception.in_doubt)

    def test_a_key_that_runs_is_asked_for_until_it_is_done(self):
        mark = self.named("running")
        write = self.orders.prepare_create({"mark": mark})
        self.way.plan.extend([Lose(), problem(409, "key-running", headers={"Retry_After": "1"})])
        began = time.monotonic()
        written = self.client.send(write)
        self.assertTrue(written.replayed)
        self.assertGreater(time.monotonic() - began, 1.0, "Retry-After is a lower bound")
        self.assertEqual(self.count(mark), 1)

    def test_twenty_threads_with_one_write_make_one_record(self):
        mark = self.named("threads")
        stored = self.orders.prepare_create({"mark": mark}).to_json()
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            sent = [pool.submit(lambda: self.client.send(PreparedWrite.from_json(stored))) for _ in range(20)]
            records = {str(one.result(PATIENCE).record.id) for one in sent}
        self.assertEqual((len(records), self.count(mark)), (1, 1))

    def test_the_deadline_ends_a_call(self):
        self.way.always["/v1/info"] = problem(503, "unavailable", headers={"Retry_After": "3000"})
        with self.assertRaises(Unavailable) as raised:
            self.client.info()
        self.assertEqual(raised.exception.attempts, 1, "the server asks for more time than there is")
        self.way.always["/v1/info"] = problem(503, "unavailable")
        hasty = self.way.client(ClientSettings(deadline=0.5, backoff_base=0.02, backoff_max=0.02))
        began = time.monotonic()
        with self.assertRaises(Unavailable) as raised:
            hasty.info()
        self.assertFalse(raised.exception.in_doubt, "what is read changes nothing")
        self.assertLess(time.monotonic() - began, PATIENCE)
        hasty.close()

    def test_t289_an_answer_about_something_else_is_no_answer(self):
        record = lambda module, id: Say(200, {"id": str(id), "module": module, "seq": 1, "payload": {"of": "another"}})
        mark = self.named("mixed")
        self.way.plan.append(record("invoices", uuid7()))
        created = self.orders.create({"mark": mark}).record
        self.assertEqual((created.module, self.count(mark)), ("orders", 1))
        self.way.plan.extend([record("orders", uuid7()), record("invoices", created.id)])
        self.assertEqual(self.orders.get(created.id).payload, {"mark": mark})
        page = {"records": [], "next": str(created.id)}
        self.way.plan.extend([Say(200, page), Say(200, {"records": [{"id": str(uuid7()), "module": "x", "seq": 1}], "next": None})])
        self.orders.list(after=created.id)
        self.way.plan.extend([Say(200, {"outcome": "duplicate", "id": "another"}), Say(200, {"outcome": "duplicate", "id": mark})])
        self.assertEqual(self.client.claim("mailer", mark).outcome, "duplicate")
        placed = lambda id: Say(200, {"last_seq": 1, "events": [{"id": id, "seq": 1, "position": "1", "placing": "new"}]})
        self.way.plan.extend([placed("another"), placed("e")])
        self.client.journal.append("order-1", [NewEvent("e")])
        self.assertFalse(self.way.plan, "each wrong answer was passed over")

    def test_t290_a_write_is_not_sent_to_another_server_by_mistake(self):
        mark = self.named("elsewhere")
        stored = PreparedWrite.from_json(self.orders.prepare_create({"mark": mark}).to_json())
        with Client(self.server.url, settings=FAST) as elsewhere:
            with self.assertRaisesRegex(Invalid, "send_anywhere"):
                elsewhere.send(stored)
            self.assertEqual(self.count(mark), 0)
            self.assertFalse(elsewhere.send_anywhere(stored).replayed)
        with self.way.client(tenant=str(uuid.uuid4())) as other:
            with self.assertRaisesRegex(Invalid, "no tenant"):
                other.send(stored)
        with Client(self.way.url + "/", settings=FAST) as same:
            self.assertTrue(same.send(stored).replayed)
        self.assertEqual(self.count(mark), 1)

    def test_t252_what_is_read_can_be_written_again_to_the_digit(self):
        digits = '{"amount":12345678901234567890.12,"n":1.50,"big":123456789012345678901234567890}'
        record = self.orders.create(RawJson(digits)).record
        self.assertIn("12345678901234567890.12", record.payload_json)
        self.assertEqual(record.payload["big"], 123456789012345678901234567890)
        again = self.orders.update(record.id, 1, RawJson(record.payload_json)).record
        self.assertEqual(again.payload_json, record.payload_json)

    def test_t255_records_that_are_too_large_for_one_page_are_read_in_smaller_ones(self):
        small = self.way.client(ClientSettings(deadline=PATIENCE, answer_bytes_max=60_000))
        made = {self.orders.create({"large": "x" * 20_000}).record.id for _ in range(5)}
        self.assertLessEqual(made, {record.id for record in small.data("orders").records(page=1000)})
        with self.assertRaises(Unavailable) as raised:
            small.data("orders").list(limit=1000)
        self.assertFalse(raised.exception.is_retryable)
        small.close()

    def test_hostile_content_comes_back_as_it_was_and_bad_content_is_refused_in_a_sentence(self):
        for text in HOSTILE:
            payload = {"text": text, text: [text, {"deep": text}]}
            record = self.orders.create(payload).record
            self.assertEqual(self.orders.get(record.id).payload, payload)
        for payload, says in (
            (RawJson('{"a":1,"a":2}'), "a"),
            ({"nul": "a\0b"}, "U\\+0000|NUL"),
            (RawJson('{"half":"\\ud800"}'), "surrogate|escape"),
            (RawJson('{"n":1e999}'), "number|exponent|double"),
        ):
            with self.assertRaisesRegex(Refused, says) as raised:
                self.orders.create(payload)
            self.assertFalse(raised.exception.in_doubt)
        with self.assertRaisesRegex(Invalid, "the limit is 1048576"):
            self.orders.create({"x": "x" * (1 << 20)})
        for key in ("", "a b", "é", "x" * 256, "a\nb"):
            with self.assertRaisesRegex(Invalid, "Idempotency-Key"):
                self.orders.prepare_create({}).with_key(key)
        odd = self.named('"quo\\ted,key"')
        self.assertFalse(self.client.send(self.orders.prepare_create({}).with_key(odd)).replayed)
        self.assertEqual(self.client.key(odd)["state"], "done")

    def test_t194_a_server_killed_between_commit_and_answer_is_met_again(self):
        server = Server()
        way = Way(server)
        self.addCleanup(server.stop)
        self.addCleanup(way.stop)
        with way.client() as client:
            write = client.data("orders").prepare_create({"amount": 1.5})
            stored = write.to_json()
            way.plan.append(Lose(close=True))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                sending = pool.submit(client.send, write)
                wait_until(lambda: way.lost == 1, "the server has done it")
                server.kill()
                server.start()
                way.to = server.url
                written = sending.result(PATIENCE)
            self.assertTrue(written.replayed)
            # The next process of the client sends what was stored.
            self.assertEqual(client.send(PreparedWrite.from_json(stored)).record, written.record)
            self.assertEqual([record.id for record in client.data("orders").records()], [written.record.id])


class Claims(Case):
    def claimed(self, id, **more):
        claim = self.client.claim("mailer", id, **more)
        self.assertEqual(claim.outcome, "claimed")
        return claim

    def entry(self, which, id):
        with httpx.Client() as direct:
            found = direct.get(f"{self.server.url}/v1/{which}", params={"id": id, "payload": "true"}).json()
        return found["entries"][0]

    def test_a_run_is_claimed_kept_and_done(self):
        id = self.named("order")
        with self.claimed(id, lease=12.0) as claim:
            before, until = claim.deadline, claim.until
            self.assertEqual((claim.attempt, claim.suspect), (1, False))
            other = self.client.claim("mailer", id)
            self.assertEqual(other.outcome, "busy")
            self.assertIsNotNone(other.until)
            wait_until(lambda: claim.until != until, "the heartbeat has extended the lease")
            self.assertGreater(claim.deadline, before)
            claim.check()
        self.assertEqual(self.client.claim("mailer", id).outcome, "duplicate")

    def test_a_run_that_raises_has_failed(self):
        id = self.named("raises")
        with self.assertRaisesRegex(RuntimeError, "no stock"), self.claimed(id):
            raise RuntimeError("no stock")
        has_failed(self, self.client.claim("mailer", id))
        id = self.named("dead")
        with self.claimed(id, payload={"n": 1.50}) as claim:
            claim.dead("no such order")
        self.assertEqual(self.client.claim("mailer", id).outcome, "dead")
        self.assertEqual(self.entry("dead", id)["reason"], "no such order")
        id = self.named("released")
        with self.claimed(id) as claim:
            claim.release()
        again = self.claimed(id)
        with self.assertRaises(Fenced) as raised:
            claim.done()
        self.assertFalse(raised.exception.in_doubt)
        again.done()

    def test_a_lease_that_cannot_be_kept_is_lost(self):
        id = self.named("lost")
        self.way.always["/v1/claims/extend"] = problem(503, "unavailable")
        with self.assertRaises(LeaseLost):
            with self.claimed(id, lease=2.0) as claim:
                wait_until(lambda: claim.lost, "the lease is lost")
                claim.check()
        self.way.always.clear()
        wait_until(lambda: self.claims(id), "another run has it")
        with self.assertRaises(Fenced):
            claim.done()

    def claims(self, id):
        return self.client.claim("mailer", id, lease=600.0).outcome == "claimed"

    def test_the_heartbeat_keeps_what_the_effect_has_extended(self):
        with self.claimed(self.named("extended"), lease=9.0) as claim:
            claim.extend(600.0)
            asked = len(self.way.asked)
            time.sleep(3.5)  # the first beat of the lease before would have been due
            self.assertGreater(claim.deadline - time.monotonic(), 500)
            self.assertEqual(len(self.way.asked), asked, "nothing was due")

    def test_a_block_that_fails_ends_within_its_lease(self):
        self.way.always["/v1/claims/fail"] = problem(503, "unavailable")
        before = time.monotonic()
        with self.assertRaisesRegex(RuntimeError, "no stock"):
            with self.claimed(self.named("away"), lease=1.5):
                raise RuntimeError("no stock")
        self.assertLess(time.monotonic() - before, PATIENCE / 4, "the deadline of a call is that long")

    def test_a_lease_that_is_fenced_is_lost_at_once(self):
        id = self.named("fenced")
        claim = self.claimed(id, lease=9.0)
        self.way.always["/v1/claims/extend"] = problem(409, "fenced")
        with self.assertRaisesRegex(LeaseLost, "fenced"):
            with claim:
                wait_until(lambda: claim.lost, "the lease is lost")
                claim.check()

    def test_a_process_that_wakes_late_knows_it(self):
        claim = self.claimed(self.named("late"), lease=0.05)
        time.sleep(0.06)  # as if it had been stopped: no heartbeat ran
        self.assertTrue(claim.lost)
        self.assertRaises(LeaseLost, claim.check)

    def test_t283_an_at_most_once_run_can_fail_whatever_it_was_claimed_with(self):
        id = self.named("at-most-once")
        claim = self.claimed(id, at_most_once=True, payload={"n": 1})
        self.assertIsNone(claim.deadline)
        claim.fail("no such order")
        self.assertEqual(self.entry("lost", id)["reason"], "no such order")

    def test_t285_a_claim_without_an_answer_is_asked_for_again(self):
        id, once = self.named("asked-twice"), self.once()
        self.way.plan.append(Lose())
        with self.assertRaises(Unavailable) as raised:
            once.claim("mailer", id)
        self.assertTrue(raised.exception.in_doubt)
        self.assertEqual(once.claim("mailer", id).outcome, "busy", "the lost answer was a claim")
        request = raised.exception.request
        claim = once.claim_again(request)
        self.assertEqual((claim.outcome, claim.attempt), ("claimed", 1))
        with self.assertRaisesRegex(Invalid, "one run"):
            once.claim_again(request)
        claim.done()
        self.way.plan.append(Lose())
        self.assertEqual(self.claimed(self.named("lost-answer")).attempt, 1, "the second attempt gets the run of the first")

    def test_t286_a_claim_knows_its_end_by_the_callers_clock(self):
        before = time.monotonic()
        claim = self.claimed(self.named("deadline"), lease=600.0)
        self.assertTrue(before + 600 <= claim.deadline <= time.monotonic() + 600)
        before = time.monotonic()
        claim.extend(1200.0)
        self.assertTrue(before + 1200 <= claim.deadline <= time.monotonic() + 1200)
        claim.done()
        # A repeat starts a lease over, but not the time of an at-most-once claim.
        for at_most_once in (False, True):
            self.way.plan.append(problem(503, "unavailable"))
            asked = len(self.way.asked)
            claim = self.claimed(self.named("repeat"), lease=600.0, at_most_once=at_most_once)
            first_arrived = self.way.asked[asked][0]
            self.assertEqual(claim.deadline - 600 <= first_arrived, at_most_once)

    def test_t287_no_reason_keeps_a_run_from_being_settled(self):
        for reason, kept in (("é" * (1 << 20), "é" * 2048), (" \n", "no reason given"), ("", "no reason given")):
            id = self.named("reason")
            self.claimed(id, payload={"n": 1}).dead(reason)
            entry = self.entry("dead", id)
            self.assertEqual((entry["reason"], entry["payload"]), (kept, '{"n":1}'))

    def test_t288_fenced_after_a_lost_answer_is_in_doubt(self):
        claim = self.claimed(self.named("settled"))
        for before, doubt in (([Say(504, "<html>", "text/html")], True), ([], False)):
            self.way.plan.extend([*before, problem(409, "fenced")])
            with self.assertRaises(Fenced) as raised:
                claim.fail("no stock")
            self.assertEqual(raised.exception.in_doubt, doubt)

    def test_hostile_ids(self):
        for text in HOSTILE:
            id = (text[:200] + str(uuid.uuid4()))[:255] if len(text) < 219 else text[:219] + str(uuid.uuid4())
            with self.claimed(id):
                pass
            self.assertEqual(self.client.claim("mailer", id).outcome, "duplicate")
        for id, says in (("", "blank"), (" ", "blank"), ("x" * 256, "limit is 255"), ("a\0b", "NUL"), ("\ud800", "surrogate"), (7, "text")):
            with self.assertRaisesRegex(Invalid, says):
                self.client.claim("mailer", id)
        for lease in (0, -1, 1e9, float("nan")):
            with self.assertRaisesRegex(Invalid, "lease"):
                self.client.claim("mailer", "x", lease=lease)


class Asyncio(Case):
    def go(self, story):
        async def run():
            async with AsyncClient(self.way.url, settings=FAST) as client:
                await story(client)

        asyncio.run(run())

    def test_everything_once(self):
        async def story(client):
            mark = self.named("async")
            orders = client.data("orders")
            self.way.plan.append(Lose())
            written = await orders.create({"mark": mark})
            self.assertTrue(written.replayed)
            record = (await orders.update(written.record.id, 1, {"mark": mark, "n": 2})).record
            self.assertEqual((await orders.get(record.id)).seq, 2)
            self.assertEqual([r.id async for r in orders.records(page=2) if r.payload.get("mark") == mark], [record.id])
            tally = await client.data("orders").analytics().tally(approximate=True, after_write=record, wait=30.0)
            self.assertGreaterEqual(tally.groups[0].count, 1)
            event = self.named("event")
            self.way.plan.append(Lose())
            appended = await client.journal.append(mark, [NewEvent(event, {"n": 1})], expected="new")
            self.assertEqual(appended.events[0].placing, "repeat")
            self.assertEqual((await client.journal.aggregate(mark)).events[0].payload, {"n": 1})
            self.assertTrue((await client.journal.events(limit=1)).more)
            dead = self.named("dead")
            claim = await client.claim("mailer", dead)
            await claim.dead("no such order")
            self.assertEqual((await client.dead.list(id=dead))["entries"][0]["reason"], "no such order")
            await client.dead.redrive("mailer", ids=[dead], reason="mended")
            async with await client.claim("mailer", dead) as claim:
                self.assertEqual(claim.outcome, "claimed")
            self.assertEqual((await client.claim("mailer", dead)).outcome, "duplicate")
            self.assertEqual((await client.key(str(uuid7())))["state"], "unknown")
            self.assertEqual((await client.info())["keys"], "sqlite")
            self.assertEqual(self.count(mark), 1)

        self.go(story)

    def test_the_lease_is_kept_and_a_failure_is_reported(self):
        async def story(client):
            id = self.named("kept")
            async with await client.claim("mailer", id, lease=12.0) as claim:
                until = claim.until
                while claim.until == until:
                    await asyncio.sleep(0.01)
            self.assertEqual((await client.claim("mailer", id)).outcome, "duplicate")
            failed = self.named("failed")
            with self.assertRaisesRegex(RuntimeError, "no stock"):
                async with await client.claim("mailer", failed):
                    raise RuntimeError("no stock")
            has_failed(self, await client.claim("mailer", failed))

        self.go(story)

    def test_a_lost_lease_cancels_the_block(self):
        async def story(client):
            self.way.always["/v1/claims/extend"] = problem(503, "unavailable")
            id, ended = self.named("cancelled"), []
            with self.assertRaises(LeaseLost):
                async with await client.claim("mailer", id, lease=2.0):
                    try:
                        await asyncio.sleep(PATIENCE)
                    finally:
                        ended.append(True)
            self.assertEqual(ended, [True], "it was cancelled where it waited")
            await asyncio.sleep(0)  # the task itself is not cancelled
            # A caller that cancels the block itself is not told of a lost lease.
            self.way.always.clear()
            begun = asyncio.Event()

            async def block():
                async with await client.claim("mailer", self.named("by-caller"), lease=60.0):
                    begun.set()
                    await asyncio.sleep(PATIENCE)

            task = asyncio.create_task(block())
            await begun.wait()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task

        self.go(story)


    def test_the_heartbeat_keeps_what_the_effect_has_extended(self):
        async def story(client):
            async with await client.claim("mailer", self.named("extended"), lease=9.0) as claim:
                await claim.extend(600.0)
                asked = len(self.way.asked)
                await asyncio.sleep(3.5)  # the first beat of the lease before would have been due
                self.assertGreater(claim.deadline - time.monotonic(), 500)
                self.assertEqual(len(self.way.asked), asked, "nothing was due")

        self.go(story)

    def test_a_cancelled_block_ends_within_its_lease(self):
        async def story(client):
            begun = asyncio.Event()

            async def block():
                async with await client.claim("mailer", self.named("away"), lease=1.5):
                    begun.set()
                    await asyncio.sleep(PATIENCE)

            task = asyncio.create_task(block())
            await begun.wait()
            self.way.always["/v1/claims/fail"] = problem(503, "unavailable")
            task.cancel()
            before = time.monotonic()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertLess(time.monotonic() - before, PATIENCE / 4, "the deadline of a call is that long")

        self.go(story)


class Other(Case):
    def test_the_journal(self):
        aggregate, ids = self.named("order/17 ü"), [self.named("paid"), self.named("raw"), self.named("exact")]
        events = [
            NewEvent(ids[0], {"amount": 7}, kind="order.paid", headers=[("h", "v"), ("b", b"\xff")]),
            NewEvent(ids[1], b"\xff\x00"),
            NewEvent(ids[2], RawJson('{"a": 1,\n "b": 12345678901234567890.12}')),
        ]
        appended = self.client.journal.append(aggregate, events, expected="new")
        self.assertEqual((appended.last_seq, [e.placing for e in appended.events]), (3, ["new"] * 3))
        self.assertEqual(self.client.journal.append(aggregate, events, expected="new").events[2].placing, "repeat")
        read = self.client.journal.aggregate(aggregate)
        self.assertEqual([e.id for e in read.events], ids)
        self.assertEqual((read.events[0].payload, read.events[0].kind), ({"amount": 7}, "order.paid"))
        self.assertEqual(read.events[0].headers, [("h", b"v"), ("b", b"\xff")])
        self.assertEqual(read.events[1].payload_bytes, b"\xff\x00")
        self.assertEqual(read.events[2].payload_json, '{"a": 1,\n "b": 12345678901234567890.12}', "to the byte")
        self.assertEqual(self.client.journal.aggregate(aggregate, from_seq=3).events[0].id, ids[2])
        with self.assertRaises(Conflict) as raised:
            self.client.journal.append(aggregate, [NewEvent(self.named("x"))], expected=7)
        self.assertEqual((raised.exception.expected, raised.exception.actual), (7, 3))
        self.assertRaises(Mismatch, self.client.journal.append, aggregate, [NewEvent(ids[0], {})])
        page = self.client.journal.events(limit=1)
        seen = []
        while page.more or page.events:
            seen += [e.id for e in page.events]
            page = self.client.journal.events(page.next)
        self.assertEqual([id for id in seen if id in ids], ids)
        threading.Timer(0.2, lambda: self.client.journal.append(aggregate, [NewEvent(self.named("later"))])).start()
        wait_until(lambda: len(self.client.journal.events(page.next, wait=30.0).events) == 1, "the next one is there")
        for odd in (".", ".."):
            with self.assertRaisesRegex(Invalid, "URL"):
                self.client.journal.aggregate(odd)

    def test_t291_an_append_refuses_what_it_cannot_carry(self):
        asked = len(self.way.asked)
        for event, says in (
            (NewEvent("e", aggregate="order-2"), "aggregate"),
            (NewEvent("e", tenant="acme"), "tenant"),
            (NewEvent("e", seq=3), "seq"),
        ):
            with self.assertRaisesRegex(Invalid, says):
                self.client.journal.append("order-1", [event])
        self.assertRaises(Invalid, self.client.journal.append, "order-1", [])
        self.assertRaises(Invalid, self.client.journal.append, "order-1", [NewEvent("e")], expected=-1)
        self.assertEqual(len(self.way.asked), asked)

    def test_dead_letters(self):
        ids = [self.named("dead") for _ in range(3)]
        scope = self.named("scope")
        for id in ids:
            self.client.claim(scope, id, payload={"n": 1}).dead("no such order")
        page = self.client.dead.list(scope=scope, limit=2, payload=True)
        self.assertEqual([entry["reason"] for entry in page["entries"]], ["no such order"] * 2)
        rest = self.client.dead.list(scope=scope, after=page["next"])
        self.assertEqual(sorted(entry["id"] for entry in page["entries"] + rest["entries"]), sorted(ids))
        dry = self.client.dead.redrive(scope, ids=ids[:1], reason="mended", dry_run=True)
        self.assertTrue(dry["dry_run"])
        seen, after = [], None
        for more in (True, True, False):
            dry = self.client.dead.redrive(scope, all=True, reason="mended", dry_run=True, limit=1, after=after)
            seen, after = seen + [entry["id"] for entry in dry["entries"]], dry["next"]
            self.assertEqual((dry["more"], after is not None), (more, more))
        self.assertEqual(sorted(seen), sorted(ids))
        self.assertEqual(self.client.claim(scope, ids[0]).outcome, "dead")
        self.client.dead.redrive(scope, ids=ids[:1], reason="mended")
        with self.client.claim(scope, ids[0]) as claim:
            self.assertEqual(claim.outcome, "claimed")
        with self.assertRaises(Conflict) as raised:
            self.client.dead.redrive(scope, ids=ids[:1], reason="mended")
        self.assertFalse(raised.exception.in_doubt)
        self.way.plan.append(Lose())
        with self.assertRaises(Conflict) as raised:
            self.client.dead.redrive(scope, ids=ids[1:2], reason="mended")
        self.assertTrue(raised.exception.in_doubt, "the attempt whose answer was lost has done it")
        self.assertEqual(len(self.client.dead.drop(scope, all=True, reason="given up")["entries"]), 1)
        self.assertEqual(self.client.dead.list(scope=scope)["entries"], [])
        for wrong in ({}, {"ids": ids, "all": True}, {"ids": "abc"}):
            self.assertRaises(Invalid, self.client.dead.redrive, scope, reason="x", **wrong)

    def test_t307_a_limit_bounds_what_is_done_also_if_the_answer_is_lost(self):
        for how in ("redrive", "drop"):
            scope = self.named("limited")
            for at in range(5):
                self.client.claim(scope, f"e{at}", payload={"n": at}).dead("no such order")
            change = getattr(self.client.dead, how)
            for lost in (Lose(), Lose(half=True), problem(503, "unavailable"), Say(200, "{}")):
                before = self.client.dead.list(scope=scope)["entries"]
                asked = len(self.way.asked)
                self.way.plan.append(lost)
                with self.assertRaises(Unavailable) as raised:
                    change(scope, reason="two first", all=True, limit=2)
                self.assertEqual(len(self.way.asked), asked + 1, "it is not asked twice")
                self.assertTrue(raised.exception.in_doubt)
                self.assertFalse(raised.exception.is_retryable)
                after = self.client.dead.list(scope=scope)["entries"]
                self.assertEqual(len(after), len(before) - (2 if isinstance(lost, Lose) else 0))
            # What changed nothing for certain is asked again.
            self.way.plan.extend([problem(429, "rate-limited"), Lose()])
            self.assertRaises(Unavailable, change, scope, reason="two first", all=True, limit=2)
            self.assertEqual(self.client.dead.list(scope=scope)["entries"], [])
            self.way.plan.append(Lose())
            self.assertEqual(change(scope, reason="x", all=True, dry_run=True)["entries"], [], "a rehearsal is repeated")

    def test_analytics(self):
        mark = self.named("tally")
        amounts = ["0.1", "0.2", "12345678901234567890.123"]
        for at, amount in enumerate(amounts):
            last = self.orders.create(RawJson('{"of":"%s","kind":"%s","amount":%s}' % (mark, f"{mark}-{at % 2}", amount)))
        question = self.orders.analytics()
        tally = question.tally(sum="/amount", max=["/amount"], group_by="/kind", after_write=last, wait=30.0)
        groups = {group.key: group for group in tally.groups}
        even = groups[f"{mark}-0"]
        self.assertEqual((even.count, even.measures[0].value), (2, Decimal("12345678901234567890.223")))
        self.assertEqual(groups[f"{mark}-1"].measures[1].value, Decimal("0.2"))
        self.assertIn("lastSyncAt", tally.meta)
        page = question.records(limit=1000, since="1h", after_write=last.record, wait=30.0)
        self.assertEqual(sum(record.payload.get("of") == mark for record in page.records), 3)
        self.assertIn("stale", page.meta)
        # This read model is never wrong, and says so.
        self.assertIsNone(question.tally(approximate=True).meta["approximate"])
        self.assertIn("approximate=true", self.way.asked[-1][2])
        self.assertEqual(self.client.analytics("orders").records(approximate=True, limit=1).meta["approximate"], None)
        with self.assertRaises(Conflict):
            question.tally(after_write=f"orders/{last.record.id}@99", wait=0.0)
        self.assertRaises(Invalid, question.tally, sum="/a,b")

    def test_a_token_is_sent_and_a_wrong_one_is_denied(self):
        server = Server()
        self.addCleanup(server.stop)
        token = run("token", "create", "--name", "test", "--role", "write", "--by", "test", "--data", server.data)
        with Client(server.url, settings=FAST, token=token) as client:
            self.assertEqual(client.data("orders").create({}).record.seq, 1)
        for wrong in (None, "hpx_wrong"):
            with Client(server.url, settings=FAST, token=wrong) as client:
                self.assertRaises(Denied, client.data("orders").create, {})


class Recipe(Case):
    """What the Kafka consumer of the examples does with one message. `kafka_check.py` runs all of it."""

    def setUp(self):
        super().setUp()
        self.recipe = __import__("kafka_consumer")
        self.options = types.SimpleNamespace(scope=self.named("recipe"), lease=30.0)
        self.sink = sqlite3.connect(":memory:")
        self.sink.execute("create table effects (id text primary key, token integer not null, kind text)")

    def handle(self, value, offset=7):
        message = types.SimpleNamespace(value=lambda: value, topic=lambda: "orders", partition=lambda: 3, offset=lambda: offset)
        with contextlib.redirect_stderr(io.StringIO()):
            self.recipe.handle(self.client, self.options, self.sink, message)

    def effects(self):
        return [id for (id,) in self.sink.execute("select id from effects")]

    def test_a_message_that_is_no_event_becomes_a_dead_letter(self):
        for offset, value in enumerate((b"not JSON", b"\xff", b"7", b"[]", b"{}", b'{"event_id": 7}', None)):
            for delivery in ("first", "again"):
                self.handle(value, offset)
            entry = self.client.dead.list(scope=self.options.scope, id=f"orders-3-{offset}")["entries"][0]
            self.assertIn("not an event", entry["reason"])
        self.assertEqual(self.effects(), [])

    def test_t341_a_redriven_event_runs_when_it_is_published_again(self):
        event = b'{"event_id": "e-1", "kind": "order.paid"}'
        self.client.claim(self.options.scope, "e-1", payload=json.loads(event)).dead("no such order")
        self.handle(event)
        redriven = self.client.dead.redrive(self.options.scope, ids=["e-1"], reason="mended")
        self.assertTrue(redriven["entries"][0]["needs_delivery"], redriven)
        self.assertEqual(self.effects(), [])
        self.handle(event)
        self.assertEqual(self.effects(), ["e-1"])


if __name__ == "__main__":
    unittest.main()
