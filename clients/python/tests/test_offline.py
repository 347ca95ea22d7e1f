"""What needs no server: keys, stored writes, the rules of a retry, JSON as text."""

import asyncio
import dataclasses
import json
import multiprocessing
import sys
import unittest
import uuid

import httpx

import hapax_client
from hapax_client import AsyncClient, Client, ClientSettings, Invalid, KeyMismatch, PreparedWrite, Problem, RawJson, exchange, text, uuid7
from hapax_client.api import CODES
from hapax_client.claims import reason_of
from hapax_client.errors import error_of
from hapax_client.exchange import Next
from hapax_client.uuid7 import Uuid7Maker

RECORD = "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10"


def _forked(queue):
    queue.put(uuid7().int)


class Keys(unittest.TestCase):
    def test_a_million_ids_are_unique_and_increase(self):
        last = uuid.UUID(int=0)
        ones, zeros = 0, (1 << 128) - 1
        for _ in range(1_000_000):
            made = uuid7()
            if not last < made:  # assertLess takes longer than the ids
                self.fail(f"{made} after {last}")
            last, ones, zeros = made, ones | made.int, zeros & made.int
        self.assertEqual((last.version, last.variant), (7, uuid.RFC_4122))
        # 74 bits vary: all but the version and the variant. (The time's upper bits are those of this year.)
        random_bits = ((1 << 12) - 1) << 64 | (1 << 62) - 1
        self.assertEqual((ones & ~zeros) & random_bits, random_bits)
        self.assertEqual(bin(random_bits).count("1"), 74)

    def test_ids_increase_within_a_millisecond_and_while_the_clock_goes_back(self):
        now = [1_000_000]
        maker = Uuid7Maker(lambda: now[0])
        last = maker.make()
        for at in (1_000_000, 999_000, 5, 1_000_000, 1_000_001, 0, -7):
            now[0] = at
            for _ in range(1000):
                made = maker.make()
                self.assertLess(last, made)
                last = made
        self.assertEqual(last.int >> 80, 1_000_001)

    def test_an_overflow_takes_the_next_millisecond(self):
        maker = Uuid7Maker(lambda: 77)
        first = maker.make()
        maker._random = (1 << 74) - 1
        second = maker.make()
        self.assertLess(first, second)
        self.assertEqual((second.int >> 80, second.version), (78, 7))

    def test_a_forked_process_does_not_go_on_where_its_parent_was(self):
        maker = sys.modules["hapax_client.uuid7"]._maker
        maker._ms = 1 << 47  # so that it is seen who goes on
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_forked, args=(queue,))
        try:
            child.start()
            theirs = queue.get(timeout=60)
            child.join(60)
            self.assertEqual(uuid7().int >> 80, 1 << 47)
        finally:
            maker._ms = -1
        self.assertLess(theirs >> 80, 1 << 47)


class Stored(unittest.TestCase):
    def setUp(self):
        self.orders = Client("http://h").data("orders")

    def test_the_stored_form_stays(self):
        """These lines are those of the Rust client, from the first day, when they did not name the server yet."""
        for line, path in (
            (
                '{"v":1,"operation":"create","key":"%s","tenant":null,"module":"orders","id":null,"expected_seq":null,'
                '"body":"{\\"payload\\":{\\"b\\":1.0, \\"a\\":2}}"}' % RECORD,
                None,
            ),
            (
                '{"v":1,"operation":"delete","key":"k","tenant":"t","module":"orders","id":"%s","expected_seq":7,'
                '"body":null}' % RECORD,
                RECORD,
            ),
        ):
            write = PreparedWrite.from_json(line)
            self.assertEqual(write.to_json(), line[:-1] + ',"server":null}')
            self.assertTrue(write.maybe_sent, "by the process that stored it")
            self.assertEqual(None if path is None else uuid.UUID(path), write.id)

    def test_t254_what_can_be_prepared_can_be_stored_and_read_again(self):
        deep = RawJson('{"a":' + "[" * 5000 + "]" * 5000 + "}")
        write = self.orders.prepare_create(deep)
        again = PreparedWrite.from_json(write.to_json())
        self.assertEqual((again, again.body), (write, write.body))

    def test_what_was_tampered_with_is_told_in_a_sentence(self):
        good = '{"v":1,"operation":"create","key":"k","module":"orders","body":"{\\"payload\\":{}}"}'
        PreparedWrite.from_json(good)
        for was, becomes, says in (
            ('"v":1', '"v":2,"more":[]', "version is 2"),
            ('"create"', '"drop"', "not a create"),
            ('"create"', '"update"', "an update with an id"),
            ('"orders"', '"../keys"', "the module"),
            ('"k"', '"a b"', "Idempotency-Key"),
            ('{\\"payload\\":{}}', "[]", "payload"),
            ('{\\"payload\\":{}}', '{\\"payload\\":{}', "payload"),
            ('"body"', '"tenant":" ","body"', "tenant"),
            ('"module"', '"server":7,"module"', "server"),
        ):
            with self.assertRaisesRegex(Invalid, says):
                PreparedWrite.from_json(good.replace(was, becomes, 1))
        for line in ("", "[]", "{", "null", '"x"'):
            self.assertRaises(Invalid, PreparedWrite.from_json, line)

    def test_settings_are_numbers_above_0(self):
        for name in (field.name for field in dataclasses.fields(ClientSettings)):
            for value in (float("nan"), 0, -1, float("inf"), None, "7", True):
                with self.assertRaisesRegex(Invalid, name):
                    ClientSettings(**{name: value})

    def test_texts_have_no_content_and_no_secret(self):
        write = self.orders.prepare_create({"card": 4711})
        self.assertNotIn("4711", repr(write))
        self.assertNotIn("s3cret", repr(Client("http://h", token="hpx_s3cret\n")))

    def test_bad_input_is_told_in_a_sentence(self):
        for url, says in (
            ("", "http or https"),
            ("ftp://h", "http or https"),
            ("http://", "host"),
            ("http://u:s3cret@h", "pass a token"),
            ("http://h?x=1", "query"),
            ("http://h/?", "query"),
            ("http://h/#", "fragment"),
        ):
            with self.assertRaisesRegex(Invalid, says) as raised:
                Client(url)
            self.assertNotIn("s3cret", str(raised.exception))
        for token in ("", "\n", "a b", "é"):
            self.assertRaises(Invalid, Client, "http://h", token=token)
        for tenant in ("a\nb", " acme", "", "x" * 256):
            self.assertRaises(Invalid, Client, "http://h", tenant=tenant)
        for payload in ([], 7, None, "x", RawJson("[]"), RawJson("{"), {"n": float("nan")}, {"x": object()}, {"x": "\ud800"}):
            self.assertRaises(Invalid, self.orders.prepare_create, payload)
        for id in ("", "x", RECORD[:-1], RECORD.replace("-", ""), 7):
            self.assertRaises(Invalid, self.orders.prepare_delete, id, 1)
        for seq in (-1, 1.5, "1", True):
            self.assertRaises(Invalid, self.orders.prepare_delete, RECORD, seq)
        for module in ("Orders", "", "a" * 49, "../x", "é", "1a"):
            self.assertRaises(Invalid, Client("http://h").data(module).prepare_create, {})


class Retries(unittest.TestCase):
    def verdict(self, code, after):
        return exchange.verdict(Problem(code, 409, "d"), after)

    def test_codes_decide_and_not_the_status(self):
        again = {code for code in CODES if self.verdict(code, True)[0] is Next.AGAIN}
        few = {code for code in CODES if self.verdict(code, True)[0] is Next.A_FEW_TIMES}
        self.assertEqual(few, {"handler-failed", "internal"})
        self.assertEqual(
            again,
            {"body-unreadable", "contended", "handler-timeout", "key-running", "not-ready", "overloaded"}
            | {"rate-limited", "request-timeout", "unavailable", "week-missing"},
        )
        self.assertEqual(self.verdict("something-new", False)[0], Next.STOP)
        self.assertEqual(self.verdict("something-new", True), (Next.AGAIN, True))

    def test_pauses_grow_with_jitter(self):
        settings = ClientSettings()
        for attempts in (1, 2, 10, 40, 10**9):
            pause = exchange.pause(settings, attempts, None)
            self.assertTrue(0 < pause <= settings.backoff_max, pause)
        self.assertLessEqual(exchange.pause(settings, 1, None), settings.backoff_base)

    def test_t284_retry_after_does_not_switch_the_backoff_off(self):
        settings = ClientSettings()
        for after in (0.0, 1.0):
            pauses = [exchange.pause(settings, 9, after) for _ in range(100)]
            self.assertGreater(min(pauses), after)
            self.assertGreater(max(pauses), after + 5 * settings.backoff_base)

    def test_t284_a_date_to_come_back_counts_from_the_date_of_the_answer(self):
        now, later = "Sun, 06 Nov 1994 08:49:07 GMT", "Sun, 06 Nov 1994 08:49:37 GMT"
        self.assertEqual(exchange.retry_after(later, now), 30)
        self.assertEqual(exchange.retry_after(now, later), 0)
        self.assertEqual(exchange.retry_after(later, None), 0)
        self.assertEqual(exchange.retry_after(" 7 ", now), 7)
        for odd in ("soon", "", "-1", "1.5", None):
            self.assertIsNone(exchange.retry_after(odd, now), odd)

    def test_t251_a_mismatch_that_may_be_the_callers_own_write_is_in_doubt(self):
        for differs, fields, doubt in (
            (("principal",), (), True),
            ((), (), True),
            (("body",), (), False),
            ((), ("amount",), False),
            (("principal", "body"), (), False),
        ):
            error = error_of(Problem("key-mismatch", 422, "d", fields, differs), False, False)
            self.assertIsInstance(error, KeyMismatch)
            self.assertEqual(error.in_doubt, doubt, (differs, fields))
            self.assertEqual("bytes of the first attempt" in str(error), doubt)

    def test_what_is_no_problem_of_ours_is_none(self):
        for body in (None, [], {}, {"code": 7}, {"code": ""}, {"code": "A b"}, {"code": "x" * 65}):
            self.assertIsNone(Problem.parse(500, body), body)
        both = Problem.parse(409, {"code": "conflict", "expected": 3, "actual": "seq 7", "detail": "a\x1b[31m\u202eb"})
        self.assertEqual((both.expected, both.actual), (3, 7))
        self.assertNotRegex(str(both), "[\x1b\u202e]")
        self.assertEqual(len(Problem.parse(400, {"code": "x", "detail": "é" * 5000}).detail), 1000)

    def test_t287_reasons_are_bounded(self):
        self.assertEqual(reason_of("é" * 5000), "é" * 2048)
        self.assertEqual(reason_of("€" * 5000), "€" * 1365)
        self.assertEqual([reason_of(" \n"), reason_of("")], ["no reason given"] * 2)


class Cancelled(unittest.TestCase):
    def test_a_cancellation_that_comes_together_with_an_answer_is_heard(self):
        class AtTheAnswer(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request):
                sending.cancel()
                body = {"code": "unavailable", "detail": "d"}
                return httpx.Response(503, json=body, headers={"content-type": "application/problem+json"})

        async def story():
            nonlocal sending
            settings = ClientSettings(deadline=2.0, backoff_base=0.01)
            async with AsyncClient("http://h", settings=settings, http=httpx.AsyncClient(transport=AtTheAnswer())) as client:
                write = client.data("orders").prepare_create({})
                sending = asyncio.ensure_future(client.send(write))
                with self.assertRaises(asyncio.CancelledError):
                    await sending
                self.assertTrue(write.maybe_sent)

        sending = None
        asyncio.run(story())


class Text(unittest.TestCase):
    def test_members_and_elements_are_found_in_hostile_text(self):
        payload = {"a": 'q"\\{}[],:', "b": [1, {"c": "]"}], "": None, "é\u202e": "\\"}
        for style in ({}, {"indent": 2}, {"ensure_ascii": False, "separators": (",", ":")}):
            raw = json.dumps({"x": 1, "payload": payload, "next": None}, **style)
            found = text.members(raw)
            self.assertEqual(json.loads(found["payload"]), payload)
            self.assertEqual((found["x"], found["next"]), ("1", "null"))
        self.assertEqual(text.elements(' [ 1.50 , "," , [] ] '), ["1.50", '","', "[]"])
        for odd in ("", "[", "{", '{"a"}', '{"a":', "7", '{"a":[}'):
            self.assertRaises((ValueError, IndexError), text.members, odd)

    def test_the_package_says_its_version_and_has_types(self):
        import importlib.metadata
        import importlib.resources

        self.assertEqual(importlib.metadata.version("hapax-client"), hapax_client.__version__)
        self.assertTrue(importlib.resources.files("hapax_client").joinpath("py.typed").is_file())


if __name__ == "__main__":
    unittest.main()
