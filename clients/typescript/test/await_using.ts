// Compiled by the test below with the package's types: the surface as a TypeScript program sees it.
import { Client, LeaseLost, type Lease, PreparedWrite } from "@hapax/client";

interface Order {
  amount: number;
}

declare const process: { argv: string[] };
const client = new Client(process.argv[2] ?? "");
const orders = client.data<Order>("orders");
const { record } = await orders.create({ amount: 7 });
const amount: number = record.payload.amount;
const write: PreparedWrite = orders.prepareUpdate(record.id, record.seq, { amount: amount + 1 });
const updated = await client.send<Order>(PreparedWrite.fromJson(write.toJson()));

async function work(id: string, fails: boolean): Promise<string> {
  const claim = await client.claim("await-using", id);
  if (claim.outcome !== "claimed") return claim.outcome;
  await using lease: Lease = claim.keep();
  if (lease.signal.aborted) throw new LeaseLost("unreachable");
  if (fails) throw new Error("no stock");
  await lease.done();
  return `token ${typeof claim.token}`;
}

const id = record.id;
const first = await work(id, false);
const again = await work(id, false);
const failed = await work(`${id}-2`, true).catch((error: unknown) => String(error));
const later = await work(`${id}-2`, false);
console.log(JSON.stringify({ amount: updated.record.payload.amount, first, again, failed, later }));
