// A handler for `hapax consume --exec`: an event whose payload has `fail` goes to the dead letters with that reason.
import { createInterface } from "node:readline";

console.log(JSON.stringify({ v: 1, concurrency: 1 }));
for await (const line of createInterface({ input: process.stdin })) {
  const { id, token, event, cancel } = JSON.parse(line);
  if (cancel) continue;
  const why = process.env.HAPAX_TEST_MENDED ? undefined : event.payload?.fail;
  console.log(JSON.stringify(why === undefined ? { id, token, done: true } : { id, token, fatal: true, error: why }));
}
