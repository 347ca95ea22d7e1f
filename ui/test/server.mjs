// A server with its own data, and what the tests ask it.
import { spawn, spawnSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
export const binary = process.env.HAPAX_TEST_SERVER ?? join(here, "../../target/debug/hapax");

export class Server {
  constructor() {
    this.dir = mkdtempSync(join(tmpdir(), "hapax-page-"));
    this.data = join(this.dir, "data");
  }

  run(...args) {
    const done = spawnSync(binary, ["--data", this.data, ...args], { encoding: "utf8", timeout: 120_000 });
    if (done.status !== 0) throw new Error(`hapax ${args.join(" ")}: ${done.stderr}`);
    return done.stdout.trim();
  }

  /** Runs a line that the page shows, in a shell. */
  shell(line) {
    const env = { ...process.env, LC_ALL: "C.UTF-8" };
    return spawnSync("bash", ["-c", line.replace(/^hapax /, `${binary} `)], { encoding: "utf8", timeout: 120_000, env });
  }

  async start(listen = "127.0.0.1:0") {
    this.process = spawn(binary, ["serve", "--listen", listen, "--json", "--data", this.data], { stdio: ["ignore", "pipe", "inherit"] });
    for await (const line of createInterface({ input: this.process.stdout })) {
      this.address = JSON.parse(line).address;
      this.url = `http://${this.address}`;
      return this;
    }
    throw new Error("the server did not start");
  }

  async stop(signal = "SIGTERM") {
    const ended = new Promise((resolve) => this.process.once("exit", resolve));
    this.process.kill(signal);
    await ended;
  }

  async remove() {
    if (this.process.exitCode === null && this.process.signalCode === null) await this.stop();
    rmSync(this.dir, { recursive: true, force: true });
  }

  async ask(method, path, body, headers = {}) {
    const response = await fetch(this.url + path, {
      method, headers: { ...(body ? { "content-type": "application/json" } : {}), ...headers }, body: body && JSON.stringify(body),
    });
    const text = await response.text();
    return { status: response.status, headers: response.headers, text, json: text.startsWith("{") ? JSON.parse(text) : null };
  }

  async must(method, path, body, headers) {
    const answer = await this.ask(method, path, body, headers);
    if (answer.status >= 300) throw new Error(`${method} ${path}: ${answer.status} ${answer.text}`);
    return answer.json;
  }

  append(aggregate, events, tenant) {
    // A header has bytes: those of the name in UTF-8.
    const headers = tenant ? { "hapax-tenant": Buffer.from(tenant).toString("latin1") } : {};
    return this.must("POST", "/v1/journal/append", { aggregate, events }, headers);
  }

  /** Claims an event and lets it die, without a consumer. */
  async die(scope, id, reason) {
    const { token } = await this.must("POST", "/v1/claims", { scope, id });
    await this.must("POST", "/v1/claims/fail", { scope, id, token, reason, then: "dead", payload: {} });
  }

  /** Runs the handler until something is so. */
  async consume(scope, isSo) {
    const exec = `${process.execPath} ${join(here, "handler.mjs")}`;
    const args = ["consume", "--topic", "events", "--scope", scope, "--order", "strict", "--on-dead", "park", "--exec", exec];
    const consumer = spawn(binary, ["--data", this.data, ...args], { stdio: ["ignore", "ignore", "inherit"] });
    const ended = new Promise((resolve) => consumer.once("exit", resolve));
    try {
      await until(isSo);
    } finally {
      consumer.kill("SIGTERM");
      await ended;
    }
  }

  /** How many entries of all tenants are in a state. */
  async count(state) {
    const { ledger } = await this.must("GET", "/v1/stats?all_tenants=true");
    return ledger.filter((one) => one.state === state).reduce((sum, one) => sum + one.count, 0);
  }

  /** Waits until the relay has published everything. */
  async published() {
    await until(async () => {
      const { journal, relay } = await this.must("GET", "/v1/stats?all_tenants=true");
      return journal.last === null || journal.last === relay.position;
    });
  }
}

export async function until(what, ms = 60_000) {
  const end = Date.now() + ms;
  for (;;) {
    const found = await what();
    if (found) return found;
    if (Date.now() > end) throw new Error(`it never came true: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

/** Text that a page must not act upon. */
export const HOSTILE = {
  markup: `<img src=x onerror="window.pwned=1">"'><script>window.pwned=1</script>{{7*7}}`,
  direction: "invoice\u202egpj.exe\u2066\u200f\u0007",
  long: "漢".repeat(255),
  plain: "x".repeat(255),
};

/** A tenant of that name, as far as a header can carry it. */
export function tenantOf(text) {
  return text.replace("\u0007", "");
}

/** A shop with everything in it: done, dead, parked and hostile events, records, two tenants. */
export async function fill(server) {
  for (let n = 0; n < 4; n += 1) {
    await server.must("POST", "/v1/modules/orders/records", { payload: { total: n } }, { "idempotency-key": `"order-${n}"` });
  }
  // Two retries, which are answered with the first answer.
  for (let n = 0; n < 2; n += 1) {
    await server.must("POST", "/v1/modules/orders/records", { payload: { total: n } }, { "idempotency-key": `"order-${n}"` });
  }
  for (let n = 1; n <= 6; n += 1) {
    const declined = { fail: `card of customer-${1000 + n} was declined: HTTP 402` };
    await server.append(`order-${n}`, [
      { id: `order-${n}-placed`, kind: "order.placed", payload: {} },
      { id: `order-${n}-paid`, kind: "order.paid", payload: n <= 3 ? declined : {} },
      { id: `order-${n}-packed`, payload: {} },
      { id: `order-${n}-shipped`, payload: {} },
    ], n === 2 ? "acme" : undefined);
  }
  for (const [name, text] of Object.entries(HOSTILE)) {
    await server.append(text, [{ id: text, payload: { fail: `${text} (${name})` } }, { id: `${name}-after`, payload: {} }]);
  }
  // Tenants and scopes, too.
  for (const [name, text] of Object.entries(HOSTILE)) {
    const torn = { id: `tenant-${name}-paid`, payload: { fail: "the label is torn" } };
    await server.append(`tenant-${name}`, [torn, { id: `tenant-${name}-after`, payload: {} }], tenantOf(text));
    await server.die(text, `scope-${name}-paid`, "the label is torn");
  }
  await server.published();
  await server.consume("mailer", async () => (await server.count("dead")) === 15 && (await server.count("parked")) === 14);
}
