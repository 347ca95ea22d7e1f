// `Idempotency-Key` for Express 5 (pg), exactly once: the key, the handler's writes and the answer commit together,
// before the answer is sent.
//
//     npm install express@5 pg@8
//     hapax keys init --keys "$DATABASE_URL"
//     node express_idempotency.mjs
//
// A handler takes the transaction and returns its answer: `async (db, req) => ({ status, headers, body })`. The
// middleware begins and ends the transaction; a handler may make savepoints.
import { createHash } from 'node:crypto';
import express from 'express';
import pg from 'pg';

const BYTES_MAX = 1 << 20; // of a body, and of an answer
// The server ends a transaction whose service has stopped, so that its key is free again.
const LIMIT_MS = Number(process.env.REQUEST_LIMIT_MS ?? 30_000);
const KEPT_HEADERS = ['content-type', 'content-encoding', 'content-language', 'location', 'etag', 'last-modified', 'link'];
// Not you, not now, or sent in a wrong way: the retry runs again, as after a 5xx.
const NOT_KEPT = [401, 403, 406, 407, 408, 409, 411, 412, 413, 414, 415, 417, 421, 425, 426, 428, 429, 431];
const CREDENTIALS = ['authorization', 'cookie', 'x-api-key'];

// What to answer when the request does not run: status, code, and a sentence.
const REFUSALS = {
  running: [409, 'key-running', 'a request with this key is still running; send it again later to get its answer'],
  mismatch: [422, 'key-mismatch', 'the key was used before for another request; make a new key for this one'],
  expired: [410, 'key-expired', 'the key is older than answers are kept; find out whether its request was done'],
  ahead: [400, 'key-invalid', "the key says it was made more than 28 days from now; the client's clock is wrong"],
  'outcome-unknown': [409, 'outcome-unknown', 'a request with this key never ended; an operator decides'],
};

function problem(status, code, detail) {
  const headers = [['content-type', 'application/problem+json']];
  if (['key-running', 'unavailable'].includes(code)) headers.push(['retry-after', '1']);
  return { status, headers, body: Buffer.from(JSON.stringify({ title: code, status, code, detail })) };
}

// The key of a request: the quoted form of the Internet draft, or the bare text. Undefined if it is not a key.
function keyOf(req) {
  const values = valuesOf(req, 'idempotency-key');
  let text = values[0].trim();
  const quoted = /^"((?:[^"\\]|\\["\\])*)"$/.exec(text); // a string of structured fields (RFC 8941)
  if (quoted) text = quoted[1].replace(/\\(.)/g, '$1');
  else if (/[,"]/.test(text)) return undefined; // two keys, or half a quoted one
  return values.length === 1 && /^[\x21-\x7e]{1,255}$/.test(text) ? text : undefined;
}

// All values of a header, as sent.
const valuesOf = (req, name) => req.rawHeaders.filter((_, n) => n % 2 && req.rawHeaders[n - 1].toLowerCase() === name);

// Whoever sends the same credentials: all values of all of these headers, byte for byte.
const byCredentials = (req) => hashed(CREDENTIALS.flatMap((name) => valuesOf(req, name).flatMap((value) => [name, value])));

// What makes two requests the same: who asks, method, path and query as sent, body.
const fingerprint = (req, principal) => hashed([principal, req.method, req.originalUrl, req.body]);

function hashed(parts) {
  const hash = createHash('sha256');
  for (const part of parts) {
    const bytes = Buffer.from(part);
    const length = Buffer.alloc(8);
    length.writeBigUInt64BE(BigInt(bytes.length));
    hash.update(length).update(bytes);
  }
  return hash.digest();
}

// Whether the request may succeed when it is sent again: the connection broke, the server is going down or full, or
// another transaction was in the way. An error of the server has a SQLSTATE, one of the network a code of Node's, and pg
// says itself that a connection ended or was not there in time. Any other error is a mistake, which a retry would repeat.
function isPassing(error) {
  if (error instanceof pg.DatabaseError) {
    return ['08', '40', '53', '57'].includes(error.code.slice(0, 2)) || ['25P03', '25P04', '55P03'].includes(error.code);
  }
  const network = ['ECONNREFUSED', 'ECONNRESET', 'ECONNABORTED', 'EPIPE', 'ETIMEDOUT', 'ENOTFOUND', 'EAI_AGAIN', 'EHOSTUNREACH', 'ENETUNREACH'];
  const ended = /^(Connection terminated|timeout exceeded when trying to connect|Client has encountered a connection error|Query read timeout)/;
  return network.includes(error.code) || ended.test(error.message);
}

// What a handler gets of the connection. pg does not begin a transaction by itself: after a handler's own COMMIT or
// ROLLBACK each statement would be committed alone, and a retry would repeat it. So statements run one after another, one
// at a time (the extended protocol takes no second one behind a semicolon), and only while the transaction is open.
function lent(db) {
  const ends = /^\s*(begin|start|commit|end|abort|prepare\s+transaction|rollback(?!\s+to))\b/i;
  let last = Promise.resolve();
  const query = (statement, values) => {
    const config = typeof statement === 'string' ? { text: statement, values } : { ...statement, values: values ?? statement.values };
    last = last.catch(ignored).then(() => {
      if (ends.test(config.text) || db.getTransactionStatus() === 'I') {
        throw new Error('the transaction of a request with a key is begun and ended by the middleware');
      }
      return db.query({ ...config, queryMode: 'extended' });
    });
    return last;
  };
  return { query };
}

// An answer of a handler in the form that is stored and sent: headers as names and values, body as bytes.
function formed({ status, headers = {}, body }) {
  const pairs = Object.entries(headers).flatMap(([name, value]) => [value].flat().map((one) => [name.toLowerCase(), String(one)]));
  if (body === undefined) return { status, headers: pairs, body: Buffer.alloc(0) };
  if (!pairs.some(([name]) => name === 'content-type')) pairs.push(['content-type', 'application/json']);
  const bytes = Buffer.from(JSON.stringify(body));
  if (bytes.length > BYTES_MAX) throw new Error(`the answer to a request with a key may have ${BYTES_MAX} bytes`);
  return { status, headers: pairs, body: bytes };
}

// Runs a handler in a transaction with its key.
async function inTransaction(db, key, req, handler, principal) {
  await db.query(`begin; set local idle_in_transaction_session_timeout = ${LIMIT_MS}; set local statement_timeout = ${LIMIT_MS}`);
  const begun = await db.query('select outcome, token, status, headers, body from hapax.key_begin($1, $2)', [key, fingerprint(req, principal(req))]);
  const { outcome, token, status, headers, body } = begun.rows[0];
  if (outcome === 'done') {
    await db.query('rollback');
    return { status, headers: [...headers, ['idempotency-replayed', 'true']], body };
  }
  if (outcome !== 'first') {
    await db.query('rollback');
    return problem(...REFUSALS[outcome]);
  }
  await db.query('savepoint handler');
  let answer;
  try {
    answer = formed(await handler(lent(db), req));
  } catch (error) {
    await db.query('rollback'); // fails if the connection is lost
    if (isPassing(error)) throw error;
    return problem(500, 'handler-failed', 'the handler of the request failed; nothing was done');
  }
  if (answer.status >= 500 || NOT_KEPT.includes(answer.status)) {
    await db.query('rollback');
    return answer;
  }
  if (answer.status >= 400) await db.query('rollback to savepoint handler'); // a refusal is kept, its writes are not
  const kept = answer.headers.filter(([name]) => KEPT_HEADERS.includes(name));
  // It fails if this transaction is not the one that began the key.
  await db.query('select hapax.key_finish($1, $2, $3, $4, $5)', [key, token, answer.status, answer.body, JSON.stringify(kept)]);
  await db.query('commit');
  return { ...answer, committed: true };
}

// A connection that is lost while no statement runs is an event, and without a listener the end of the process. The
// next statement says so too.
const ignored = () => {};

// Express middleware for one route. Put it behind whatever authenticates, and before whatever reads the body
// (`express.json()`): the bytes of the body are part of the request, and a handler gets them as `req.body`, a Buffer.
//
// `principal` says who asks, in words that do not change between retries: nobody gets the answer of another. By default
// that is whoever sends the same Authorization, Cookie and X-Api-Key headers. A service that knows its users by anything
// else (a client certificate, a header of a gateway), or whose cookies change between retries, must say it.
export function idempotent(pool, handler, { committed = () => {}, principal = byCredentials } = {}) {
  const run = async (req, res) => {
    if (req.headers['idempotency-key'] === undefined) {
      return problem(400, 'key-missing', 'this request needs an Idempotency-Key header');
    }
    const key = keyOf(req);
    if (key === undefined) return problem(400, 'key-invalid', 'Idempotency-Key needs 1 to 255 visible ASCII characters, once');
    let db;
    const release = (broken) => {
      db.off('error', ignored);
      db.release(broken);
    };
    try {
      db = await pool.connect();
      db.on('error', ignored);
      const answer = await inTransaction(db, key, req, handler, principal);
      release();
      if (answer.committed) committed();
      return answer;
    } catch (error) {
      await db?.query('rollback').then(() => release(), () => release(true));
      if (isPassing(error)) {
        // Whether the COMMIT came through is not known here. The retry, with the same key, finds out.
        return problem(503, 'unavailable', 'the database is away; send the request again with the same key');
      }
      // The server said no, to the answer or to the COMMIT: nothing is kept, and a retry hears the same.
      return problem(500, 'handler-failed', 'the answer of the request could not be kept; nothing was done');
    }
  };
  const reply = (res, { status, headers, body }) => {
    for (const name of new Set(headers.map(([name]) => name))) {
      const values = headers.filter(([other]) => other === name).map(([, value]) => value);
      res.setHeader(name, values.length > 1 ? values : values[0]);
    }
    res.status(status).end(body);
  };
  const send = async (req, res) => {
    req.body ??= Buffer.alloc(0);
    if (!Buffer.isBuffer(req.body)) {
      const detail = 'the body was read before the middleware of keys, which needs its bytes: put express.json() behind it; nothing was done';
      return reply(res, problem(500, 'handler-failed', detail));
    }
    reply(res, await run(req, res));
  };
  const unread = (error, req, res, next) => {
    if (error.type === 'entity.too.large') {
      return reply(res, problem(413, 'body-too-large', `the body may have ${BYTES_MAX} bytes; nothing was done`));
    }
    if (error.type === undefined) return next(error);
    return reply(res, problem(400, 'body-unreadable', 'the body could not be read to its end; nothing was done'));
  };
  return [express.raw({ type: () => true, limit: BYTES_MAX }), send, unread];
}

// A service that uses it.

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 8 });
pool.on('error', () => {}); // an idle connection was lost; the pool makes another

// For the test of the worst moment: after the commit, before the answer.
const dieOnceCommitted = () => process.env.DIE_ONCE_COMMITTED && process.kill(process.pid, 'SIGKILL');

export const app = express();

const createOrder = async (db, req) => {
  const { item } = JSON.parse(req.body);
  const { rows } = await db.query('insert into express_orders (item) values ($1) returning id', [item]);
  if (item === 'unknown') return { status: 404, body: { detail: 'no such item' } };
  if (item === 'broken') throw new Error('the handler failed after its write');
  if (item === 'empty') return { status: 204, headers: { link: ['</a>; rel=prev', '</b>; rel=next'] } };
  if (item === 'stalled') await new Promise((resolve) => setTimeout(resolve, 2000));
  if (item === 'undone') await db.query('rollback');
  const hidden = { 'undone within': 'select 1; rollback', 'undone in a comment': '/* */ rollback' }[item];
  if (hidden) { // a handler that ends the transaction, and goes on
    await db.query(hidden).catch(() => {});
    await db.query('insert into express_orders (item) values ($1)', [item]);
  }
  if (item === 'a wrong type') return { status: 415, body: { detail: 'not in this form' } };
  if (item === 'refused at the end') await db.query('insert into express_late values (1)');
  return { status: 201, headers: { location: `/orders/${rows[0].id}` }, body: { id: rows[0].id, item } };
};

app.post('/orders', idempotent(pool, createOrder, { committed: dieOnceCommitted }));
// A mistake: the body is read before its bytes are seen.
app.post('/parsed/orders', express.json(), idempotent(pool, createOrder));

if (process.argv[1] === import.meta.filename) {
  const server = app.listen(Number(process.env.PORT ?? 0), '127.0.0.1', () => console.log(`listening on ${server.address().port}`));
}
