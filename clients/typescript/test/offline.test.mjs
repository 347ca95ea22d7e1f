// What needs no server: keys, stored writes, the rules of a retry, JSON as text.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { Client, DEFAULT_SETTINGS, Invalid, PreparedWrite, RawJson, uuid7, Uuid7Maker } from "@hapax/client";

// Not part of the package's surface.
const home = dirname(fileURLToPath(import.meta.resolve("@hapax/client")));
const { pauseMs, retryAfterMs, verdict } = await import(join(home, "exchange.js"));
const { errorOf, parseProblem } = await import(join(home, "errors.js"));
const { CODES } = await import(join(home, "api.js"));
const { reasonOf } = await import(join(home, "claims.js"));
const { elements, members } = await import(join(home, "text.js"));

const RECORD = "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
const orders = new Client("http://h").data("orders");
const bits = (id) => BigInt(`0x${id.replaceAll("-", "")}`);

test("a million ids are unique and increase", () => {
  let last = "";
  let [ones, zeros] = [0n, (1n << 128n) - 1n];
  for (let at = 0; at < 1_000_000; at += 1) {
    const made = uuid7();
    if (!(last < made)) assert.fail(`${made} after ${last}`);
    last = made;
    if (at % 1000 === 0) [ones, zeros] = [ones | bits(made), zeros & bits(made)];
  }
  assert.match(last, /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  // 74 bits vary: all but the version and the variant. (The time's upper bits are those of this year.)
  const random = (((1n << 12n) - 1n) << 64n) | ((1n << 62n) - 1n);
  assert.equal(ones & ~zeros & random, random);
  assert.equal([...random.toString(2)].filter((bit) => bit === "1").length, 74);
});

test("ids increase within a millisecond and while the clock goes back", () => {
  let now = 1_000_000;
  const maker = new Uuid7Maker(() => now);
  let last = maker.make();
  for (now of [1_000_000, 999_000, 5, 1_000_000, 1_000_001, 0, -7]) {
    for (let at = 0; at < 1000; at += 1) {
      const made = maker.make();
      assert.ok(last < made, `${made} after ${last}`);
      last = made;
    }
  }
  assert.equal(bits(last) >> 80n, 1_000_001n);
  // A step past the last number takes the next millisecond.
  const real = crypto.getRandomValues;
  try {
    crypto.getRandomValues = (into) => into.fill(0xffff_ffff);
    for (let at = 0; at < 1024; at += 1) uuid7(); // numbers that were drawn before
    const full = new Uuid7Maker(() => 77);
    assert.equal(full.make(), "00000000-004d-7fff-bfff-ffffffffffff");
    assert.equal(bits(full.make()) >> 80n, 78n);
  } finally {
    crypto.getRandomValues = real;
    for (let at = 0; at < 1024; at += 1) uuid7(); // numbers that were drawn meanwhile
  }
});

test("the stored form stays, and is that of the other clients", () => {
  for (const line of [
    `{"v":1,"operation":"create","key":"${RECORD}","tenant":null,"module":"orders","id":null,"expected_seq":null,"body":"{\\"payload\\":{\\"b\\":1.0, \\"a\\":2}}"}`,
    `{"v":1,"operation":"delete","key":"k","tenant":"t","module":"orders","id":"${RECORD}","expected_seq":7,"body":null}`,
  ]) {
    const write = PreparedWrite.fromJson(line);
    assert.equal(write.toJson(), `${line.slice(0, -1)},"server":null}`);
    assert.ok(write.maybeSent, "by the process that stored it");
  }
});

test("t254: what can be prepared can be stored and read again", () => {
  const deep = new RawJson(`{"a":${"[".repeat(5000)}${"]".repeat(5000)}}`);
  const write = orders.prepareCreate(deep);
  assert.equal(PreparedWrite.fromJson(write.toJson()).toJson(), write.toJson());
});

test("a write of a server with a long URL can be stored and read again", () => {
  const write = new Client(`http://h/${"a".repeat(300)}`).data("orders").prepareCreate({});
  assert.equal(PreparedWrite.fromJson(write.toJson()).toJson(), write.toJson());
});

test("content that JSON would change is refused", () => {
  const half = "\ud800";
  for (const [payload, says] of [
    [{ price: new RawJson("1.10") }, /"price": a RawJson/],
    [new Map([["a", 1]]), /a Map/],
    [{ a: [new Set([1])] }, /"0": a Set/],
    [{ a: () => 1 }, /"a": a function/],
    [{ a: Symbol("x") }, /"a": a symbol/],
    [{ a: [1, undefined] }, /"1": undefined/],
    [{ a: [1, , 2] }, /"1": undefined/],
    [{ a: new Uint8Array(2) }, /"a": a typed array/],
    [{ a: /x/ }, /"a": a RegExp/],
    [{ a: new Date(Number.NaN) }, /"a": it is not a valid date/],
    [new RawJson(`{"a":"${half}"}`), /half of a surrogate pair/],
  ]) {
    assert.throws(() => orders.prepareCreate(payload), { name: "Invalid", message: says });
  }
  class Order {
    amount = 7;
  }
  const kept = { at: new Date(0), order: new Order(), none: undefined, nothing: null, list: [null] };
  assert.match(orders.prepareCreate(kept).body, /\{"at":"1970-01-01T00:00:00.000Z","order":\{"amount":7\},"nothing":null,"list":\[null\]\}/);
  const stored = orders.prepareCreate({ a: "MARK" }).toJson().replace("MARK", half);
  assert.throws(() => PreparedWrite.fromJson(stored), Invalid);
});

test("settings are numbers above 0, and undefined chooses none", async () => {
  for (const name of Object.keys(DEFAULT_SETTINGS)) {
    for (const value of [Number.NaN, 0, -1, Infinity, null, "7", true]) {
      assert.throws(() => new Client("http://h", { settings: { [name]: value } }), { name: "Invalid", message: new RegExp(name) });
    }
  }
  // It has its deadline, so that it ends.
  let asked = 0;
  const fetch = () => Promise.reject(new Error(`away ${(asked += 1)}`));
  const settings = { deadlineMs: undefined, backoffBaseMs: 1e12, backoffMaxMs: 1e12 };
  await assert.rejects(new Client("http://h", { settings, fetch }).info(), { name: "Unavailable" });
  assert.equal(asked, 1);
});

test("what was tampered with gets a sentence", () => {
  const good = '{"v":1,"operation":"create","key":"k","module":"orders","body":"{\\"payload\\":{}}"}';
  PreparedWrite.fromJson(good);
  for (const [was, becomes, says] of [
    ['"v":1', '"v":2,"more":[]', /version is 2/],
    ['"create"', '"drop"', /not a create/],
    ['"create"', '"update"', /an update with an id/],
    ['"orders"', '"../keys"', /the module/],
    ['"k"', '"a b"', /Idempotency-Key/],
    ['{\\"payload\\":{}}', "[]", /payload/],
    ['{\\"payload\\":{}}', '{\\"payload\\":{}', /payload/],
    ['"body"', '"tenant":" ","body"', /tenant/],
    ['"module"', '"server":7,"module"', /server/],
  ]) {
    assert.throws(() => PreparedWrite.fromJson(good.replace(was, becomes)), { name: "Invalid", message: says });
  }
  for (const line of ["", "[]", "{", "null", '"x"']) assert.throws(() => PreparedWrite.fromJson(line), Invalid);
});

test("bad input gets a sentence that shows no secret", () => {
  for (const [url, says] of [
    ["", /not a URL/],
    ["ftp://h", /http or https/],
    ["http://", /not a URL/],
    ["http://u:s3cret@h", /pass a token/],
    ["http://h?x=1", /query/],
    ["http://h/?", /query/],
    ["http://h/#", /fragment/],
  ]) {
    assert.throws(() => new Client(url), (error) => says.test(error.message) && !error.message.includes("s3cret"));
  }
  for (const token of ["", "\n", "a b", "é"]) assert.throws(() => new Client("http://h", { token }), Invalid);
  for (const tenant of ["a\nb", " acme", "", "x".repeat(256)]) assert.throws(() => new Client("http://h", { tenant }), Invalid);
  assert.ok(!JSON.stringify(new Client("http://h", { token: "hpx_s3cret\n" })).includes("s3cret"));
  for (const payload of [[], 7, null, undefined, "x", new RawJson("[]"), new RawJson("{"), { n: Number.NaN }, { n: 1n }, () => 1]) {
    assert.throws(() => orders.prepareCreate(payload), Invalid);
  }
  for (const id of ["", "x", RECORD.slice(1), RECORD.replaceAll("-", ""), 7]) assert.throws(() => orders.prepareDelete(id, 1), Invalid);
  for (const seq of [-1, 1.5, "1", 2 ** 53]) assert.throws(() => orders.prepareDelete(RECORD, seq), Invalid);
  for (const module of ["Orders", "", "a".repeat(49), "../x", "é", "1a"]) {
    assert.throws(() => new Client("http://h").data(module).prepareCreate({}), Invalid);
  }
});

test("codes decide and not the status", () => {
  const of = (code, after) => verdict({ code, status: 409, detail: "d", fields: [], differs: [] }, after);
  const with_ = (next) => [...CODES].filter((code) => of(code, true).next === next).sort();
  assert.deepEqual(with_("a few times"), ["handler-failed", "internal"]);
  assert.deepEqual(with_("again"), [
    ...["body-unreadable", "contended", "handler-timeout", "key-running", "not-ready", "overloaded"],
    ...["rate-limited", "request-timeout", "unavailable", "week-missing"],
  ]);
  assert.equal(of("something-new", false).next, "stop");
  assert.deepEqual(of("something-new", true), { next: "again", inDoubt: true });
});

test("t284: pauses grow with jitter, on top of Retry-After", () => {
  for (const attempts of [1, 2, 10, 40, 1e9]) {
    const pause = pauseMs(DEFAULT_SETTINGS, attempts, undefined);
    assert.ok(pause > 0 && pause <= DEFAULT_SETTINGS.backoffMaxMs, String(pause));
  }
  for (const after of [0, 1000]) {
    const pauses = Array.from({ length: 100 }, () => pauseMs(DEFAULT_SETTINGS, 9, after));
    assert.ok(Math.min(...pauses) > after);
    assert.ok(Math.max(...pauses) > after + 5 * DEFAULT_SETTINGS.backoffBaseMs);
  }
  const [now, later] = ["Sun, 06 Nov 1994 08:49:07 GMT", "Sun, 06 Nov 1994 08:49:37 GMT"];
  assert.equal(retryAfterMs(later, now), 30_000, "a date counts from the answer's own date");
  assert.equal(retryAfterMs(now, later), 0);
  assert.equal(retryAfterMs(later, null), 0);
  assert.equal(retryAfterMs(" 7 ", now), 7000);
  for (const odd of ["soon", "", "-1", "1.5", null]) assert.equal(retryAfterMs(odd, now), undefined, String(odd));
});

test("t251: a mismatch that may be the caller's own write is in doubt", () => {
  for (const [differs, fields, doubt] of [
    [["principal"], [], true],
    [[], [], true],
    [["body"], [], false],
    [[], ["amount"], false],
    [["principal", "body"], [], false],
  ]) {
    const error = errorOf({ code: "key-mismatch", status: 422, detail: "d", fields, differs }, false, false);
    assert.equal(error.name, "KeyMismatch");
    assert.equal(error.inDoubt, doubt);
    assert.equal(error.message.includes("bytes of the first attempt"), doubt);
  }
});

test("what is not a problem of ours is none", () => {
  for (const body of [null, [], {}, { code: 7 }, { code: "" }, { code: "A b" }, { code: "x".repeat(65) }]) {
    assert.equal(parseProblem(500, body), undefined);
  }
  const both = parseProblem(409, { code: "conflict", expected: 3, actual: "seq 7", detail: "a\x1b[31m\u202eb" });
  assert.deepEqual([both.expected, both.actual], [3, 7]);
  assert.doesNotMatch(both.detail, /[\x1b\u202e]/);
  assert.equal([...parseProblem(400, { code: "x", detail: "é".repeat(5000) }).detail].length, 1000);
});

test("t287: reasons are bounded", () => {
  assert.equal(reasonOf("é".repeat(5000)), "é".repeat(2048));
  assert.equal(reasonOf("€".repeat(5000)), "€".repeat(1365));
  assert.deepEqual([reasonOf(" \n"), reasonOf("")], ["no reason given", "no reason given"]);
});

test("members and elements are found in hostile text", () => {
  const payload = { a: 'q"\\{}[],:', b: [1, { c: "]" }], "": null, "é\u202e": "\\" };
  for (const indent of [0, 2]) {
    const found = members(JSON.stringify({ x: 1, payload, next: null }, null, indent));
    assert.deepEqual(JSON.parse(found.get("payload")), payload);
    assert.deepEqual([found.get("x"), found.get("next")], ["1", "null"]);
  }
  assert.deepEqual(elements(' [ 1.50 , "," , [] ] '), ["1.50", '","', "[]"]);
  for (const odd of ["", "[", "{", '{"a"}', '{"a":', "7", '{"a":[}']) assert.throws(() => members(odd), SyntaxError);
});

test("the package has types and no dependencies", () => {
  const about = JSON.parse(readFileSync(join(home, "../package.json"), "utf8"));
  assert.equal(about.dependencies, undefined);
  assert.match(readFileSync(join(home, "index.d.ts"), "utf8"), /export \{ Analytics, Client/);
});
