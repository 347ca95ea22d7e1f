// Exactly once from Node (pg): the claim commits or rolls back with the effect.
//
//     npm install pg
//     hapax --ledger "$DATABASE_URL" ledger init
//     node claim_in_transaction.mjs
import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import pg from 'pg';

const SCOPE = 'node-demo';

// One delivery. The outcome says what to do with it: acknowledge 'claimed' and 'duplicate', redeliver the rest.
async function handle(client, eventId, amount, fail = false) {
  await client.query('begin');
  try {
    const { rows } = await client.query('select outcome from hapax.claim_in($1, $2)', [SCOPE, eventId]);
    if (rows[0].outcome === 'claimed') {
      await client.query('update node_demo_account set balance = balance + $1', [amount]);
      if (fail) throw new Error('the handler failed after its write');
    }
    await client.query('commit');
    return rows[0].outcome;
  } catch (error) {
    await client.query('rollback');
    throw error;
  }
}

const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
await client.query('drop table if exists node_demo_account; create table node_demo_account (balance int not null)');
await client.query('insert into node_demo_account values (0)');
const balance = async () => (await client.query('select balance from node_demo_account')).rows[0].balance;
const paid = `payment-${randomUUID()}`;

await assert.rejects(handle(client, paid, 7, true), /failed after its write/);
assert.equal(await balance(), 0, 'effect and claim were rolled back together');
assert.equal(await handle(client, paid, 7), 'claimed', 'the rollback gave the event back');
assert.equal(await handle(client, paid, 7), 'duplicate', 'a redelivery');
assert.equal(await balance(), 7, 'it took effect once');

await client.query('drop table node_demo_account');
await client.end();
console.log('node: 1 failure rolled back, 1 claim, 1 duplicate, 1 effect');
