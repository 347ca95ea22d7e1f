// A handler for `hapax consume --exec`, version 1 of its protocol (docs/handlers.md). Standard library only.
//
//     hapax consume --topic orders --scope mailer --exec 'node clients/node/handler.mjs'
//
// Write your effect in `handle`. Requests run side by side (how many at once, it tells hapax when it starts), and replies
// leave in whatever order they are ready. Standard output belongs to the protocol: print with console.error.

import { createInterface } from "node:readline";

/** It may succeed next time; `afterMs` is the shortest pause. */
export class Retry extends Error {
  constructor(message, afterMs) {
    super(message);
    this.afterMs = afterMs;
  }
}

/** No run will succeed: straight to the dead letters. */
export class Fatal extends Error {}

/**
 * Your effect. `request.key` is the same for every attempt: let the sink dedup on it, and pass `request.token` on. `signal` is
 * aborted when nobody waits for the reply any more: hand it to fetch and the like.
 */
async function handle(request, signal) {
  if (request.event.tombstone) {
    // There is no payload: whatever stands under the record's key is to be deleted.
    console.error(`${request.event.record_key} is gone (event ${request.id})`);
    return;
  }
  const order = request.event.payload?.order ?? request.event.payload?.aggregate ?? "?";
  console.error(`mail for order ${order} (event ${request.id}, attempt ${request.attempt})`);
}

/** Speaks the protocol until the input ends, with so many requests at once. */
export async function run(handle, concurrency = 64) {
  process.stdout.write(JSON.stringify({ v: 1, concurrency }) + "\n");
  const running = new Map();
  const name = ({ id, token }) => JSON.stringify([id, token]);
  const reply = ({ id, token }, outcome) => process.stdout.write(JSON.stringify({ id, token, ...outcome }) + "\n");
  const runOne = async (request) => {
    const abort = new AbortController();
    running.set(name(request), abort);
    try {
      await handle(request, abort.signal);
      reply(request, { done: true });
    } catch (error) {
      if (error instanceof Fatal) reply(request, { fatal: true, error: error.message });
      else reply(request, { retry: true, error: String(error?.message ?? error), after_ms: error?.afterMs ?? null });
    } finally {
      running.delete(name(request));
    }
  };
  for await (const line of createInterface({ input: process.stdin })) {
    const message = JSON.parse(line);
    if (message.v !== 1) {
      console.error(`this handler speaks version 1, not ${message.v}`);
      process.exit(1);
    }
    if (message.cancel) running.get(name(message.cancel))?.abort();
    else runOne(message);
  }
}

if (import.meta.url === `file://${process.argv[1]}` || process.argv[1]?.endsWith("handler.mjs")) await run(handle);
