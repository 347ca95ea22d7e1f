// The client and the real server: answers that get lost, a server that is killed, leases that are lost.

import assert from "node:assert/strict";
import { after, before, beforeEach, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import {
  Client,
  Conflict,
  Denied,
  Fenced,
  HapaxError,
  Invalid,
  KeyMismatch,
  LeaseLost,
  Mismatch,
  NotFound,
  PreparedWrite,
  RawJson,
  Refused,
  Unavailable,
  uuid7,
} from "@hapax/client";
import { closedPort, errorOf, FAST, LOSE, LOSE_AND_CLOSE, LOSE_HALF, ONCE, page, PATIENCE_MS, problem, run, say, Server, waitUntil, Way } from "./support.mjs";

const HOSTILE = ["\"\\'; drop table x; --", "<script>alert(1)</script>", "\u202ertl\u200f", "字".repeat(255), "a/b?c#d%2F..", "\x1b[31m\n\t"];
let server, way, client, orders, direct;

before(async () => {
  server = await Server.start();
  way = await Way.to(server);
  direct = new Client(server.url, { settings: FAST });
});
after(async () => {
  way.stop();
  await server.stop();
});
beforeEach(() => {
  way.plan.length = 0;
  way.always.clear();
  client = way.client();
  orders = client.data("orders");
});

/** An id that no other test has. */
const named = (what) => `${what}-${crypto.randomUUID()}`;

/** How many records have this mark, by the direct way. */
async function count(mark) {
  let found = 0;
  for await (const record of direct.data("orders").records()) found += record.payload.mark === mark;
  return found;
}

describe("writes", () => {
  test("records are written, read and deleted", async () => {
    const { record, replayed } = await orders.create({ amount: 7 });
    assert.deepEqual([replayed, record.seq, record.payload], [false, 1, { amount: 7 }]);
    assert.deepEqual(await orders.get(record.id), record);
    assert.equal((await orders.update(record.id, 1, { amount: 8 })).record.seq, 2);
    const conflict = await errorOf(orders.update(record.id, 1, { amount: 9 }), Conflict);
    assert.deepEqual([conflict.expected, conflict.actual, conflict.inDoubt], [1, 2, false]);
    const own = uuid7();
    assert.equal((await orders.createAs(own.toUpperCase(), {})).record.id, own);
    const ids = [];
    for await (const one of orders.records(1)) ids.push(one.id);
    assert.ok(ids.includes(own));
    const first = await orders.list({ limit: 1 });
    assert.ok((await orders.list({ after: first.next, limit: 1 })).records[0].id > first.records[0].id);
    assert.equal((await orders.delete(record.id, 2)).record.seq, 3);
    await errorOf(orders.get(record.id), NotFound);
    await errorOf(client.data("invoices").create({}), NotFound);
    const info = await client.info();
    assert.deepEqual([info.key_retention_s, info.keys], [30 * 86_400, "sqlite"]);
  });

  test("t190: a lost answer is asked for again, and the write is done once", async () => {
    for (const lost of [LOSE, LOSE_HALF]) {
      const mark = named("lost");
      way.plan.push(lost);
      const written = await orders.create({ mark });
      assert.deepEqual([written.replayed, await count(mark)], [true, 1]);
      way.plan.push(lost);
      assert.ok((await orders.update(written.record.id, 1, { mark, n: 2 })).replayed);
      way.plan.push(lost);
      const deleted = await orders.delete(written.record.id, 2);
      assert.deepEqual([deleted.replayed, deleted.record.seq], [true, 3]);
    }
  });

  test("t280: a write in doubt comes back with its key", async () => {
    const mark = named("doubt");
    const once = way.client(ONCE);
    way.plan.push(LOSE);
    const error = await errorOf(once.data("orders").create({ mark }), Unavailable);
    assert.ok(error.inDoubt && error.isRetryable && error.message.includes("may have taken effect"));
    assert.equal((await client.key(error.prepared.key)).state, "done");
    assert.ok((await once.send(error.prepared)).replayed);
    assert.equal(await count(mark), 1);
    way.plan.push(problem(401, "unauthenticated"));
    const write = orders.prepareDelete(uuid7(), 1);
    assert.equal((await errorOf(client.send(write), Denied)).prepared, write);
    assert.equal((await errorOf(client.data("Orders").create({}), Invalid)).prepared, undefined);
  });

  test("t281: a doubt outlives the call and the process", async () => {
    const nobody = new Client(await closedPort(), { settings: ONCE });
    const write = nobody.data("orders").prepareCreate({});
    for (const _ of [1, 2]) assert.ok(!(await errorOf(nobody.send(write), Unavailable)).inDoubt, "nobody has seen it");
    for (const maybe of [PreparedWrite.fromJson(write.toJson()), write.withKey("form-17")]) {
      assert.ok((await errorOf(nobody.send(maybe), Unavailable)).inDoubt);
    }
    const denied = problem(401, "unauthenticated");
    for (const [first, doubt] of [[[page(504)], true], [[problem(409, "contended")], false], [[], false]]) {
      const next = orders.prepareCreate({});
      way.plan.push(...first, denied, denied);
      for (const _ of [1, 2]) assert.equal((await errorOf(client.send(next), Denied)).inDoubt, doubt);
      assert.equal(way.plan.length, 0);
    }
    // A caller that gives up leaves a doubt, whatever came of its request; the error has the write.
    way.always.set("/v1/modules/orders/records", problem(503, "unavailable"));
    const given_up = new AbortController();
    const asked = way.askedAt.length;
    const sending = errorOf(orders.create({}, { signal: given_up.signal }), Unavailable);
    await waitUntil(() => way.askedAt.length > asked, "it was sent");
    given_up.abort(new Error("enough"));
    const error = await sending;
    assert.ok(error.inDoubt && error.prepared.maybeSent, error.message);
  });

  test("t282: the same fields in other bytes are the same write", async () => {
    const key = named("form");
    const prepare = (json) => orders.prepareCreate(new RawJson(json)).withKey(key);
    const first = await client.send(prepare('{"a":1,"b":2}'));
    const again = await client.send(prepare('{"b": 2, "a": 1}'));
    assert.deepEqual([again.replayed, again.record], [true, first.record]);
    const other = await errorOf(client.send(prepare('{"a":1,"b":3}')), KeyMismatch);
    assert.deepEqual(other.problem.fields, ["/payload"]);
    way.plan.push(problem(422, "key-mismatch"));
    const own = await errorOf(client.send(prepare('{"a":1,"b":2}')), KeyMismatch);
    assert.ok(own.inDoubt, "the server knows of no part that differs");
  });

  test("t192: codes decide about a retry", async () => {
    const mark = named("codes");
    const passing = ["key-running", "unavailable", "contended", "overloaded", "not-ready", "rate-limited", "internal"];
    way.plan.push(...passing.map((code) => problem(418, code)), page(502), page(200), say(200, "{"));
    assert.ok(!(await orders.create({ mark })).replayed);
    assert.equal(way.plan.length, 0);
    for (const [code, kind] of [["outcome-unknown", "OutcomeUnknown"], ["key-expired", "KeyExpired"], ["invalid", "Refused"]]) {
      way.plan.push(problem(503, code, { "retry-after": "1" }));
      const error = await errorOf(orders.create({ mark }), HapaxError);
      assert.deepEqual([error.name, error.code, error.inDoubt], [kind, code, code !== "invalid"]);
    }
    way.plan.push(...Array(9).fill(problem(500, "handler-failed")));
    const error = await errorOf(orders.create({ mark }), Refused);
    assert.deepEqual([error.attempts, error.inDoubt, await count(mark)], [5, true, 1]);
  });

  test("t193: a refusal after a lost answer does not end the doubt", async () => {
    way.plan.push(LOSE, problem(403, "forbidden"));
    assert.ok((await errorOf(orders.create({}), Denied)).inDoubt);
  });

  test("a key that runs is asked for until it is done; Retry-After is a lower bound", async () => {
    const mark = named("running");
    way.plan.push(LOSE, problem(409, "key-running", { "retry-after": "1" }));
    const began = performance.now();
    assert.ok((await orders.create({ mark })).replayed);
    assert.ok(performance.now() - began > 1000);
    assert.equal(await count(mark), 1);
  });

  test("twenty calls with one write make one record", async () => {
    const mark = named("parallel");
    const stored = orders.prepareCreate({ mark }).toJson();
    const sent = await Promise.all(Array.from({ length: 20 }, () => client.send(PreparedWrite.fromJson(stored))));
    assert.equal(new Set(sent.map((written) => written.record.id)).size, 1);
    assert.equal(await count(mark), 1);
  });

  test("the deadline ends a call", async () => {
    way.always.set("/v1/info", problem(503, "unavailable", { "retry-after": "3000" }));
    assert.equal((await errorOf(client.info(), Unavailable)).attempts, 1, "the server asks for more time than there is");
    way.always.set("/v1/info", problem(503, "unavailable"));
    const hasty = way.client({ deadlineMs: 500, backoffBaseMs: 20, backoffMaxMs: 20 });
    assert.ok(!(await errorOf(hasty.info(), Unavailable)).inDoubt, "what is read changes nothing");
  });

  test("t289: an answer about something else is not an answer", async () => {
    const record = (module, id) => say(200, { id, module, seq: 1, payload: { of: "another" } });
    const mark = named("mixed");
    way.plan.push(record("invoices", uuid7()));
    const created = (await orders.create({ mark })).record;
    assert.deepEqual([created.module, await count(mark)], ["orders", 1]);
    way.plan.push(record("orders", uuid7()), record("invoices", created.id));
    assert.deepEqual((await orders.get(created.id)).payload, { mark });
    way.plan.push(say(200, { records: [], next: created.id }), say(200, { records: [{ id: uuid7(), module: "x", seq: 1 }], next: null }));
    await orders.list({ after: created.id });
    way.plan.push(say(200, { outcome: "duplicate", id: "another" }), say(200, { outcome: "duplicate", id: mark }));
    assert.equal((await client.claim("mailer", mark)).outcome, "duplicate");
    // A token that JavaScript would round settles nothing.
    way.plan.push(say(200, `{"outcome":"claimed","id":"${mark}","token":9007199254740993}`), say(200, { outcome: "duplicate", id: mark }));
    assert.equal((await client.claim("mailer", mark)).outcome, "duplicate");
    const placed = (id) => say(200, { last_seq: 1, events: [{ id, seq: 1, position: "1", placing: "new" }] });
    way.plan.push(placed("another"), placed("e"));
    await client.journal.append("order-1", [{ id: "e" }]);
    assert.equal(way.plan.length, 0, "each wrong answer was passed over");
  });

  test("t290: a write is not sent to another server by mistake", async () => {
    const mark = named("elsewhere");
    const stored = PreparedWrite.fromJson(orders.prepareCreate({ mark }).toJson());
    assert.match((await errorOf(direct.send(stored), Invalid)).message, /sendAnywhere/);
    assert.equal(await count(mark), 0);
    assert.ok(!(await direct.sendAnywhere(stored)).replayed);
    const other = way.client(FAST, { tenant: crypto.randomUUID() });
    assert.match((await errorOf(other.send(stored), Invalid)).message, /no tenant/);
    const same = new Client(`${way.url}/`, { settings: FAST });
    assert.ok((await same.send(stored)).replayed);
    assert.equal(await count(mark), 1);
  });

  test("t252: what is read can be written again to the digit", async () => {
    const digits = '{"amount":12345678901234567890.12,"n":1.50,"big":123456789012345678901234567890}';
    const { record } = await orders.create(new RawJson(digits));
    assert.match(record.payloadJson, /12345678901234567890\.12/);
    const again = await orders.update(record.id, 1, new RawJson(record.payloadJson));
    assert.equal(again.record.payloadJson, record.payloadJson);
  });

  test("t255: records that are too large for one page are read in smaller ones", async () => {
    const made = new Set();
    for (let at = 0; at < 5; at += 1) made.add((await orders.create({ large: "x".repeat(20_000) })).record.id);
    const small = way.client({ deadlineMs: PATIENCE_MS, answerBytesMax: 60_000 });
    for await (const record of small.data("orders").records(1000)) made.delete(record.id);
    assert.equal(made.size, 0);
    assert.ok(!(await errorOf(small.data("orders").list({ limit: 1000 }), Unavailable)).isRetryable);
  });

  test("hostile content comes back as it was; bad content is refused in a sentence", async () => {
    for (const text of HOSTILE) {
      const payload = { text, [text]: [text, { deep: text }] };
      const { record } = await orders.create(payload);
      assert.deepEqual((await orders.get(record.id)).payload, payload);
    }
    for (const [payload, says] of [
      [new RawJson('{"a":1,"a":2}'), /a/],
      [{ nul: "a\0b" }, /U\+0000|NUL/],
      [{ half: "\ud800" }, /surrogate|escape/],
      [new RawJson('{"n":1e999}'), /number|exponent|double/],
    ]) {
      const error = await errorOf(orders.create(payload), Refused);
      assert.match(error.message, says);
      assert.ok(!error.inDoubt);
    }
    assert.match((await errorOf(orders.create({ x: "x".repeat(1 << 20) }), Invalid)).message, /the limit is 1048576/);
    for (const key of ["", "a b", "é", "x".repeat(256), "a\nb"]) {
      assert.throws(() => orders.prepareCreate({}).withKey(key), { message: /Idempotency-Key/ });
    }
    const odd = named('"quo\\ted,key"');
    assert.ok(!(await client.send(orders.prepareCreate({}).withKey(odd))).replayed);
    assert.equal((await client.key(odd)).state, "done");
  });

  test("t194: a server killed between commit and answer is met again", async () => {
    const other = await Server.start();
    const path = await Way.to(other);
    try {
      const client = path.client();
      const write = client.data("orders").prepareCreate({ amount: 1.5 });
      const stored = write.toJson();
      path.plan.push(LOSE_AND_CLOSE);
      const sending = client.send(write);
      await waitUntil(() => path.lost === 1, "the server has done it");
      await other.kill();
      await other.begin();
      path.target = other.url;
      const written = await sending;
      assert.ok(written.replayed);
      // The next process of the client sends what was stored.
      assert.deepEqual((await client.send(PreparedWrite.fromJson(stored))).record, written.record);
      assert.equal((await client.data("orders").list()).records.length, 1);
    } finally {
      path.stop();
      await other.stop();
    }
  });
});

describe("claims", () => {
  async function claimed(id, options) {
    const claim = await client.claim("mailer", id, options);
    assert.equal(claim.outcome, "claimed");
    return claim;
  }

  async function entry(which, id) {
    const answer = await fetch(`${server.url}/v1/${which}?payload=true&id=${encodeURIComponent(id)}`);
    return (await answer.json()).entries[0];
  }

  test("a run is claimed, kept and done", async () => {
    const id = named("order");
    const claim = await claimed(id, { leaseMs: 12_000 });
    const value = await claim.run(async (lease) => {
      const [until, deadline] = [claim.until, claim.deadlineMs];
      assert.deepEqual([claim.attempt, claim.suspect], [1, false]);
      assert.equal((await client.claim("mailer", id)).outcome, "busy");
      await waitUntil(() => claim.until !== until, "the heartbeat has extended the lease");
      assert.ok(claim.deadlineMs > deadline);
      lease.check();
      return 17;
    });
    assert.equal(value, 17);
    assert.equal((await client.claim("mailer", id)).outcome, "duplicate");
  });

  test("a run that throws has failed", async () => {
    const id = named("throws");
    const claim = await claimed(id);
    await assert.rejects(claim.run(() => { throw new RangeError("no stock"); }), /no stock/);
    // The pause before the next attempt is drawn at random from up to a second, so it may be over.
    const next = await client.claim("mailer", id);
    assert.ok(next.outcome === "retry_later" || (next.outcome === "claimed" && next.attempt === 2), next.outcome);
    const dead = named("dead");
    await (await claimed(dead, { payload: { n: 1.5 } })).run((lease) => lease.claim.dead("no such order"));
    assert.equal((await entry("dead", dead)).reason, "no such order");
    const released = named("released");
    const first = await claimed(released);
    await first.release();
    const again = await claimed(released);
    assert.ok(!(await errorOf(first.done(), Fenced)).inDoubt);
    await again.done();
  });

  test("a lease that cannot be kept is lost: the effect is cancelled", async () => {
    const id = named("lost");
    way.always.set("/v1/claims/extend", problem(503, "unavailable"));
    const claim = await claimed(id, { leaseMs: 2000 });
    let cancelled;
    await errorOf(
      claim.run((lease) => sleep(PATIENCE_MS, undefined, { signal: lease.signal }).catch((error) => (cancelled = error))),
      LeaseLost,
    );
    await waitUntil(() => cancelled !== undefined, "the effect was cancelled");
    assert.equal(cancelled.name, "AbortError");
    assert.ok(cancelled.cause instanceof LeaseLost);
    way.always.clear();
    await waitUntil(async () => (await client.claim("mailer", id, { leaseMs: 600_000 })).outcome === "claimed", "another run has it");
    await errorOf(claim.done(), Fenced);
  });

  test("the heartbeat keeps what the effect has extended", async () => {
    const claim = await client.claim("mailer", named("extended"), { leaseMs: 9000 });
    await claim.run(async () => {
      await claim.extend(600_000);
      const asked = way.askedAt.length;
      await sleep(3500); // the first beat of the lease before would have been due
      assert.ok(claim.deadlineMs - performance.now() > 500_000, "the lease is not shortened");
      assert.equal(way.askedAt.length, asked, "nothing was due");
    });
  });

  test("a run that fails ends within its lease", async () => {
    way.always.set("/v1/claims/fail", problem(503, "unavailable"));
    for (const end of ["run", "keep"]) {
      const claim = await client.claim("mailer", named("away"), { leaseMs: 1500 });
      const before = performance.now();
      if (end === "run") await errorOf(claim.run(() => Promise.reject(new RangeError("no stock"))), RangeError);
      else await claim.keep()[Symbol.asyncDispose]();
      assert.ok(performance.now() - before < PATIENCE_MS / 4, "the deadline of a call is that long");
    }
  });

  test("a lease that is fenced is lost at once; a late process knows it", async () => {
    way.always.set("/v1/claims/extend", problem(409, "fenced"));
    const claim = await claimed(named("fenced"), { leaseMs: 9000 });
    assert.match((await errorOf(claim.run(() => sleep(PATIENCE_MS, undefined, { ref: false })), LeaseLost)).message, /fenced/);
    const late = (await claimed(named("late"), { leaseMs: 50 })).keep();
    const ends = performance.now() + 60;
    while (performance.now() < ends); // as if it had been stopped: no heartbeat ran
    assert.throws(() => late.check(), LeaseLost);
    late.stop();
  });

  test("t283: an at-most-once run can fail whatever it was claimed with", async () => {
    const id = named("at-most-once");
    const claim = await claimed(id, { atMostOnce: true, payload: { n: 1 } });
    assert.equal(claim.deadlineMs, undefined);
    await claim.fail("no such order");
    assert.equal((await entry("lost", id)).reason, "no such order");
  });

  test("t285: a claim without an answer is asked for again", async () => {
    const id = named("asked-twice");
    const once = way.client(ONCE);
    way.plan.push(LOSE);
    const error = await errorOf(once.claim("mailer", id), Unavailable);
    assert.ok(error.inDoubt);
    assert.equal((await once.claim("mailer", id)).outcome, "busy", "the lost answer was a claim");
    const claim = await once.claimAgain(error.request);
    assert.deepEqual([claim.outcome, claim.attempt], ["claimed", 1]);
    assert.match((await errorOf(once.claimAgain(error.request), Invalid)).message, /one run/);
    await claim.done();
    way.plan.push(LOSE);
    assert.equal((await claimed(named("lost-answer"))).attempt, 1, "the second attempt gets the run of the first");
  });

  test("t286: a claim knows its end by the caller's clock", async () => {
    let began = performance.now();
    const claim = await claimed(named("deadline"), { leaseMs: 600_000 });
    assert.ok(claim.deadlineMs >= began + 600_000 && claim.deadlineMs <= performance.now() + 600_000);
    began = performance.now();
    await claim.extend(1_200_000);
    assert.ok(claim.deadlineMs >= began + 1_200_000 && claim.deadlineMs <= performance.now() + 1_200_000);
    // A repeat starts a lease over, but not the time of an at-most-once claim.
    for (const atMostOnce of [false, true]) {
      way.plan.push(problem(503, "unavailable"));
      const asked = way.askedAt.length;
      const repeated = await claimed(named("repeat"), { leaseMs: 600_000, atMostOnce });
      assert.equal(repeated.deadlineMs - 600_000 <= way.askedAt[asked], atMostOnce);
    }
  });

  test("t287: no reason keeps a run from being settled", async () => {
    for (const [reason, kept] of [["é".repeat(1 << 20), "é".repeat(2048)], [" \n", "no reason given"], ["", "no reason given"]]) {
      const id = named("reason");
      await (await claimed(id, { payload: { n: 1 } })).dead(reason);
      const { reason: recorded, payload } = await entry("dead", id);
      assert.deepEqual([recorded, payload], [kept, '{"n":1}']);
    }
  });

  test("t288: fenced after a lost answer is in doubt", async () => {
    const claim = await claimed(named("settled"));
    for (const [first, doubt] of [[[page(504)], true], [[], false]]) {
      way.plan.push(...first, problem(409, "fenced"));
      assert.equal((await errorOf(claim.fail("no stock"), Fenced)).inDoubt, doubt);
    }
  });

  test("hostile ids", async () => {
    for (const text of HOSTILE) {
      const id = [...text].slice(0, 219).join("") + crypto.randomUUID();
      await (await claimed(id)).run(() => undefined);
      assert.equal((await client.claim("mailer", id)).outcome, "duplicate");
    }
    for (const [id, says] of [["", /blank/], [" ", /blank/], ["x".repeat(256), /limit is 255/], ["a\0b", /NUL/], ["\ud800", /surrogate/], [7, /text/]]) {
      assert.match((await errorOf(client.claim("mailer", id), Invalid)).message, says);
    }
    for (const leaseMs of [0, -1, 1e12, Number.NaN]) {
      assert.match((await errorOf(client.claim("mailer", "x", { leaseMs }), Invalid)).message, /lease/);
    }
  });
});

describe("the rest", () => {
  test("the journal", async () => {
    const [aggregate, ids] = [named("order/17 ü"), [named("paid"), named("raw"), named("exact")]];
    const events = [
      { id: ids[0], payload: { amount: 7 }, kind: "order.paid", headers: [["h", "v"], ["b", Uint8Array.of(255)]] },
      { id: ids[1], payload: Uint8Array.of(255, 0) },
      { id: ids[2], payload: new RawJson('{"a": 1,\n "b": 12345678901234567890.12}') },
    ];
    way.plan.push(LOSE);
    const appended = await client.journal.append(aggregate, events, { expected: "new" });
    assert.deepEqual([appended.lastSeq, appended.events[2].placing], [3, "repeat"]);
    const read = await client.journal.aggregate(aggregate);
    assert.deepEqual(read.events.map((event) => event.id), ids);
    assert.deepEqual([read.events[0].payload, read.events[0].kind], [{ amount: 7 }, "order.paid"]);
    assert.deepEqual(read.events[0].headers.map(([name, value]) => [name, [...value]]), [["h", [118]], ["b", [255]]]);
    assert.deepEqual([...read.events[1].payloadBytes], [255, 0]);
    assert.equal(read.events[2].payloadJson, '{"a": 1,\n "b": 12345678901234567890.12}', "to the byte");
    assert.equal((await client.journal.aggregate(aggregate, { fromSeq: 3 })).events[0].id, ids[2]);
    const conflict = await errorOf(client.journal.append(aggregate, [{ id: named("x") }], { expected: 7 }), Conflict);
    assert.deepEqual([conflict.expected, conflict.actual], [7, 3]);
    await errorOf(client.journal.append(aggregate, [{ id: ids[0], payload: {} }]), Mismatch);
    const seen = [];
    let found = await client.journal.events({ limit: 1 });
    while (found.more || found.events.length > 0) {
      seen.push(...found.events.map((event) => event.id));
      found = await client.journal.events({ after: found.next });
    }
    assert.deepEqual(seen.filter((id) => ids.includes(id)), ids);
    const later = sleep(200).then(() => client.journal.append(aggregate, [{ id: named("later") }]));
    await waitUntil(async () => (await client.journal.events({ after: found.next, waitMs: 30_000 })).events.length === 1, "the next one is there");
    await later;
    for (const odd of [".", ".."]) assert.match((await errorOf(client.journal.aggregate(odd), Invalid)).message, /URL/);
  });

  test("t291: an append refuses what it cannot carry", async () => {
    const asked = way.askedAt.length;
    for (const [more, says] of [[{ aggregate: "order-2" }, /aggregate/], [{ tenant: "acme" }, /tenant/], [{ seq: 3 }, /seq/]]) {
      assert.match((await errorOf(client.journal.append("order-1", [{ id: "e", ...more }]), Invalid)).message, says);
    }
    await errorOf(client.journal.append("order-1", []), Invalid);
    await errorOf(client.journal.append("order-1", [{ id: "e" }], { expected: -1 }), Invalid);
    assert.equal(way.askedAt.length, asked);
  });

  test("dead letters", async () => {
    const [scope, ids] = [named("scope"), [named("dead"), named("dead"), named("dead")]];
    for (const id of ids) await (await client.claim(scope, id, { payload: { n: 1 } })).dead("no such order");
    const first = await client.dead.list({ scope, limit: 2, payload: true });
    const rest = await client.dead.list({ scope, after: first.next });
    const found = [...first.entries, ...rest.entries];
    assert.deepEqual(found.map((entry) => entry.id).sort(), [...ids].sort());
    assert.equal(found[0].reason, "no such order");
    const [one, two] = ids;
    assert.ok((await client.dead.redrive(scope, { ids: [one], reason: "mended", dryRun: true })).dry_run);
    const seen = [];
    let after;
    for (const more of [true, true, false]) {
      const dry = await client.dead.redrive(scope, { all: true, reason: "mended", dryRun: true, limit: 1, after });
      seen.push(...dry.entries.map((entry) => entry.id));
      after = dry.next;
      assert.deepEqual([dry.more, after !== null], [more, more]);
    }
    assert.deepEqual(seen.sort(), [...ids].sort());
    assert.equal((await client.claim(scope, one)).outcome, "dead");
    await client.dead.redrive(scope, { ids: [one], reason: "mended" });
    await (await client.claim(scope, one)).run(() => undefined);
    assert.ok(!(await errorOf(client.dead.redrive(scope, { ids: [one], reason: "mended" }), Conflict)).inDoubt);
    way.plan.push(LOSE);
    const error = await errorOf(client.dead.redrive(scope, { ids: [two], reason: "mended" }), Conflict);
    assert.ok(error.inDoubt, "the attempt whose answer was lost has done it");
    assert.equal((await client.dead.drop(scope, { all: true, reason: "given up" })).entries.length, 1);
    assert.deepEqual((await client.dead.list({ scope })).entries, []);
    for (const wrong of [{}, { ids, all: true }]) await errorOf(client.dead.redrive(scope, { reason: "x", ...wrong }), Invalid);
  });

  test("t307: a limit bounds what is done, also if the answer is lost", async () => {
    for (const how of ["redrive", "drop"]) {
      const scope = named("limited");
      for (let at = 0; at < 5; at += 1) await (await client.claim(scope, `e${at}`, { payload: { n: at } })).dead("no such order");
      const left = async () => (await client.dead.list({ scope })).entries.length;
      for (const lost of [LOSE, LOSE_HALF, problem(503, "unavailable"), say(200, "{}")]) {
        const [before, asked] = [await left(), way.askedAt.length];
        way.plan.push(lost);
        const error = await errorOf(client.dead[how](scope, { reason: "two first", all: true, limit: 2 }), Unavailable);
        assert.equal(way.askedAt.length, asked + 1, "it is not asked twice");
        assert.deepEqual([error.inDoubt, error.isRetryable], [true, false]);
        assert.equal(await left(), before - (lost.lose ? 2 : 0));
      }
      // What changed nothing for certain is asked again.
      way.plan.push(problem(429, "rate-limited"), LOSE);
      await errorOf(client.dead[how](scope, { reason: "two first", all: true, limit: 2 }), Unavailable);
      assert.equal(await left(), 0);
      way.plan.push(LOSE);
      assert.deepEqual((await client.dead[how](scope, { reason: "x", all: true, dryRun: true })).entries, [], "a rehearsal is repeated");
    }
  });

  test("analytics", async () => {
    const mark = named("tally");
    let last;
    for (const [at, amount] of ["0.1", "0.2", "12345678901234567890.123"].entries()) {
      last = await orders.create(new RawJson(`{"of":"${mark}","kind":"${mark}-${at % 2}","amount":${amount}}`));
    }
    const question = orders.analytics();
    const tally = await question.tally({ sum: "/amount", max: ["/amount"], groupBy: "/kind", afterWrite: last, waitMs: 30_000 });
    const groups = new Map(tally.groups.map((group) => [group.key, group]));
    const even = groups.get(`${mark}-0`);
    assert.deepEqual([even.count, even.measures[0].exact], [2, "12345678901234567890.223"]);
    assert.deepEqual([groups.get(`${mark}-1`).measures[1].value, "lastSyncAt" in tally.meta], [0.2, true]);
    const found = await question.records({ limit: 1000, since: "1h", afterWrite: last.record, waitMs: 30_000 });
    assert.equal(found.records.filter((record) => record.payload.of === mark).length, 3);
    assert.equal(typeof found.meta.stale, "boolean");
    // This read model is never wrong, and says so.
    assert.equal((await question.tally({ approximate: true })).meta.approximate, null);
    assert.equal((await client.analytics("orders").records({ approximate: true, limit: 1 })).meta.approximate, null);
    assert.ok(way.lastUrl.includes("approximate=true"), way.lastUrl);
    await errorOf(question.tally({ afterWrite: `orders/${last.record.id}@99`, waitMs: 0 }), Conflict);
    await errorOf(question.tally({ sum: "/a,b" }), Invalid);
  });

  test("a token is sent, and a wrong one is denied", async () => {
    const other = await Server.start();
    try {
      const token = run("token", "create", "--name", "test", "--role", "write", "--by", "test", "--data", other.data);
      const allowed = new Client(other.url, { settings: FAST, token });
      assert.equal((await allowed.data("orders").create({})).record.seq, 1);
      for (const wrong of [{}, { token: "hpx_wrong" }]) {
        await errorOf(new Client(other.url, { settings: FAST, ...wrong }).data("orders").create({}), Denied);
      }
    } finally {
      await other.stop();
    }
  });
});
