#!/usr/bin/env node
// A Kafka consumer in Node (kafkajs) that claims each event over HTTP before its effect.
//
//     node kafka_consumer.mjs --kafka localhost:9092 --topic orders --server http://127.0.0.1:7070 --sink effects
//
// What it promises is the leased mode: at any time one process runs an event, an event that is done never runs again,
// and one whose process died runs again. A process that dies between its effect and `done` leaves an effect that the
// next run would repeat, so the effect dedups on the event's id, as the link below does. With both, each event takes
// effect once, whatever Kafka delivers again and whoever is killed. An effect that cannot dedup happens at least once.
//
// An event that is dead is passed: its offset is committed, so Kafka does not deliver it again. If you redrive it
// (`client.dead.redrive`), publish it to the topic again too, with the same event_id: only then does it run
// (`needs_delivery` in the answer says so).

import { linkSync, mkdirSync, unlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";
import { Client } from "@hapax/client";
import kafkajs from "kafkajs";

const { values: options } = parseArgs({
  options: {
    kafka: { type: "string" },
    topic: { type: "string" },
    server: { type: "string" },
    sink: { type: "string" }, // a directory
    scope: { type: "string", default: "kafka-node" },
    lease: { type: "string", default: "30" }, // seconds
  },
});
for (const name of ["kafka", "topic", "server", "sink"]) {
  if (options[name] === undefined) {
    console.error(`--${name} is missing`);
    process.exit(2);
  }
}

/** Your effect: a file for each event. The id makes a second run harmless; a sink that knows versions can fence by the token. */
function effect(id, token, event) {
  const name = encodeURIComponent(id);
  const draft = join(options.sink, `.${name}.${token}`);
  writeFileSync(draft, JSON.stringify({ id, token, kind: event.kind }));
  try {
    linkSync(draft, join(options.sink, name)); // whole or not at all, and once
  } catch (error) {
    if (error.code !== "EEXIST") throw error;
  } finally {
    unlinkSync(draft);
  }
}

/** Ends when the event has taken effect, or when the ledger has recorded that it will not. */
async function handle(client, place, message, heartbeat) {
  let event;
  try {
    event = JSON.parse(message.value.toString());
    if (typeof event.event_id !== "string" || event.event_id.trim() === "") throw new TypeError("event_id is not text");
  } catch (error) {
    return bury(client, place, message, `it is not an event: ${error.message}`, heartbeat);
  }
  for (;;) {
    const claim = await client.claim(options.scope, event.event_id, { leaseMs: options.lease * 1000, payload: event });
    if (claim.outcome === "claimed") {
      try {
        await claim.run(() => effect(event.event_id, claim.token, event)); // keeps the lease; then done, or failed
        return;
      } catch (error) {
        console.error(`${event.event_id} failed and will be tried again: ${error.message}`);
      }
    } else if (!["busy", "retry_later", "wait"].includes(claim.outcome)) {
      return; // a duplicate; or recorded for a person to look at: dead, parked, mismatch, too old
    }
    // Somebody else runs it, or it is not due yet. The offset waits, so that it is not lost.
    await heartbeat();
    await sleep(200);
  }
}

/** What is not an event never becomes one: it is a dead letter, named after its place, and does not stop the others. */
async function bury(client, place, message, reason, heartbeat) {
  console.error(`${place}: ${reason}`);
  for (;;) {
    const payload = message.value?.toString() ?? "";
    const claim = await client.claim(options.scope, place, { leaseMs: options.lease * 1000, payload });
    if (claim.outcome === "claimed") return claim.dead(reason);
    if (!["busy", "retry_later", "wait"].includes(claim.outcome)) return;
    await heartbeat();
    await sleep(200);
  }
}

mkdirSync(options.sink, { recursive: true });
const client = new Client(options.server);
const kafka = new kafkajs.Kafka({ clientId: "hapax-example", brokers: [options.kafka], logLevel: kafkajs.logLevel.ERROR });
// After its session timeout, the partitions of a killed process go to another.
const consumer = kafka.consumer({ groupId: options.scope, sessionTimeout: 6000, heartbeatInterval: 1500 });
await consumer.connect();
await consumer.subscribe({ topics: [options.topic], fromBeginning: true });
await consumer.run({
  autoCommit: false, // an offset is committed after its event is done
  eachMessage: async ({ topic, partition, message, heartbeat }) => {
    await handle(client, `${topic}-${partition}-${message.offset}`, message, heartbeat);
    await consumer.commitOffsets([{ topic, partition, offset: String(BigInt(message.offset) + 1n) }]);
  },
});
for (const name of ["SIGINT", "SIGTERM"]) {
  process.once(name, async () => {
    await consumer.disconnect();
    process.exit(0);
  });
}
