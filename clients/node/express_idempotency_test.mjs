// Runs the service of express_idempotency.mjs and retries against it. Needs DATABASE_URL, with the keys' tables,
// and the binary in HAPAX_TEST_SERVER.
//
//     node express_idempotency_test.mjs
import assert from 'node:assert/strict';
import { spawn, spawnSync } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import pg from 'pg';

const PATIENCE = 60_000; // milliseconds until a test that hangs has failed
setTimeout(() => { throw new Error('the test hangs'); }, 4 * PATIENCE).unref();

async function serve(environment = {}) {
  const file = fileURLToPath(new URL('express_idempotency.mjs', import.meta.url));
  const server = spawn(process.execPath, [file], { env: { ...process.env, ...environment }, stdio: ['ignore', 'pipe', 'inherit'] });
  const [line] = await once(createInterface(server.stdout), 'line');
  server.url = `http://127.0.0.1:${line.split(' ').at(-1)}/orders`;
  server.ended = once(server, 'exit');
  return server;
}

async function post(server, key, item, credentials = {}, url = server.url) {
  const headers = { 'content-type': 'application/json', 'idempotency-key': key, ...credentials };
  const got = await fetch(url, { method: 'POST', headers, body: JSON.stringify({ item }), signal: AbortSignal.timeout(PATIENCE) });
  const body = await got.text();
  const header = (name) => got.headers.get(name);
  return { status: got.status, replayed: header('idempotency-replayed'), location: header('location'), link: header('link'), body: body && JSON.parse(body) };
}

// Tries again while the answer says so.
async function postUntil(server, key, item) {
  const deadline = Date.now() + PATIENCE;
  for (;;) {
    const got = await post(server, key, item);
    if (!['key-running', 'unavailable'].includes(got.body.code)) return got;
    assert.ok(Date.now() < deadline, `no answer for ${key}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const db = new pg.Client({ connectionString: process.env.DATABASE_URL });
await db.connect();
await db.query('drop table if exists express_orders; create table express_orders (id bigserial primary key, item text not null)');
await db.query('drop table if exists express_late; create table express_late (n int unique deferrable initially deferred)');
await db.query('insert into express_late values (1)');
const rows = async (item) => Number((await db.query('select count(*) from express_orders where item = $1', [item])).rows[0].count);
const key = () => `express-${randomUUID()}`;
let server = await serve();
try {
  const same = key();
  const got = await Promise.all(Array.from({ length: 20 }, () => postUntil(server, same, 'book')));
  for (const { status, body } of got) assert.deepEqual([status, body], [201, got[0].body], 'one answer');
  assert.equal(await rows('book'), 1, 'one row');

  const again = await post(server, `"${same}"`, 'book');
  assert.deepEqual([again.status, again.body, again.replayed], [201, got[0].body, 'true'], 'a replay, quoted');
  assert.equal(again.location, `/orders/${again.body.id}`);
  const other = await post(server, same, 'pen');
  assert.deepEqual([other.status, other.body.code, await rows('pen')], [422, 'key-mismatch', 0]);

  // The probe finds nothing, and every key that it used is one row: nine keys of writes that succeed.
  const bodies = ['--body', '{"item": "probe"}', '--other-body', '{"item": "another probe"}'];
  const probe = spawnSync(process.env.HAPAX_TEST_SERVER, ['probe', server.url, ...bodies, '--json'], { encoding: 'utf8', timeout: 2 * PATIENCE });
  assert.equal(probe.status, 0, probe.stdout + probe.stderr);
  const seen = Object.fromEntries(JSON.parse(probe.stdout).checks.map(({ check, verdict }) => [check, verdict]));
  for (const name of ['retry', 'parallel', 'other body', 'bare key', 'no key', 'hang-up in the body']) assert.equal(seen[name], 'ok', name);
  assert.deepEqual([await rows('probe'), await rows('another probe')], [9, 0]);

  const refused = key();
  for (const replayed of [null, 'true']) {
    const answer = await post(server, refused, 'unknown');
    assert.deepEqual([answer.status, answer.replayed, await rows('unknown')], [404, replayed, 0], 'a refusal is kept, its row is not');
  }
  const broken = key();
  for (let n = 0; n < 2; n++) assert.deepEqual([(await post(server, broken, 'broken')).status, await rows('broken')], [500, 0]);
  for (const bad of ['a b', '"a","b"', 'a,b', '"a', '"a\\\\b"c"', '""']) {
    assert.deepEqual([(await post(server, bad, 'x')).body.code, await rows('x')], ['key-invalid', 0], bad);
  }
  const large = await post(server, key(), 'x'.repeat(2 << 20));
  assert.deepEqual([large.status, large.body.code], [413, 'body-too-large']);

  const empty = key();
  for (const replayed of [null, 'true']) {
    const answer = await post(server, empty, 'empty');
    assert.deepEqual([answer.status, answer.body, answer.replayed, await rows('empty')], [204, '', replayed, 1]);
    assert.equal(answer.link, '</a>; rel=prev, </b>; rel=next', 'both links');
  }

  // Two users with one key: the other one does not get the answer, however it is known.
  for (const header of ['authorization', 'cookie', 'x-api-key']) {
    const shared = key();
    assert.equal((await post(server, shared, 'ring', { [header]: 'ann' })).status, 201);
    for (const credentials of [{ [header]: 'bob' }, {}]) {
      const answer = await post(server, shared, 'ring', credentials);
      assert.deepEqual([answer.status, answer.body.code, answer.replayed], [422, 'key-mismatch', null], header);
    }
    assert.equal((await post(server, shared, 'ring', { [header]: 'ann' })).replayed, 'true', header);
  }
  // What says that it was sent in a wrong way is not kept: the next one may be better.
  const wrong = key();
  for (let n = 0; n < 2; n++) {
    const answer = await post(server, wrong, 'a wrong type');
    assert.deepEqual([answer.status, answer.replayed, await rows('a wrong type')], [415, null, 0]);
  }
  // A body that was read before: refused with a sentence, not "later"; nothing is done.
  const parsed = key();
  for (const item of ['vase', 'jug']) {
    const answer = await post(server, parsed, item, {}, server.url.replace('/orders', '/parsed/orders'));
    assert.deepEqual([answer.status, answer.body.code, await rows(item)], [500, 'handler-failed', 0]);
    assert.match(answer.body.detail, /express\.json/);
  }

  // A handler that ends the transaction, and a COMMIT that the server refuses: a retry hears the same.
  for (const item of ['undone', 'undone within', 'undone in a comment', 'refused at the end']) {
    const ended = key();
    for (let n = 0; n < 2; n++) {
      const answer = await post(server, ended, item);
      assert.deepEqual([answer.status, answer.body.code, await rows(item)], [500, 'handler-failed', 0], item);
    }
  }

  // The server of the database ends a transaction whose service has stopped.
  server.kill('SIGKILL');
  await server.ended;
  server = await serve({ REQUEST_LIMIT_MS: '300' });
  const stalled = await post(server, key(), 'stalled');
  assert.deepEqual([stalled.status, stalled.body.code, await rows('stalled')], [503, 'unavailable', 0]);

  // kill -9 between the commit and the answer; the client retries.
  server.kill('SIGKILL');
  await server.ended;
  server = await serve({ DIE_ONCE_COMMITTED: '1' });
  const lost = key();
  await assert.rejects(post(server, lost, 'lamp'), 'it dies without an answer');
  await server.ended;
  assert.equal(await rows('lamp'), 1, 'committed, and not answered');
  server = await serve();
  const replay = await postUntil(server, lost, 'lamp');
  assert.deepEqual([replay.status, replay.replayed, await rows('lamp')], [201, 'true', 1]);
} finally {
  server.kill('SIGKILL');
}
await db.query('drop table express_orders, express_late');
await db.end();
console.log('express: 20 posts at once, 1 row; replayed; another body refused; killed after the commit, 1 row');
