// The real server, and a way to it that loses answers.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, openSync, readFileSync, rmSync } from "node:fs";
import http from "node:http";
import net from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { Client } from "@hapax/client";

export const PATIENCE_MS = 120_000;
const HAPAX = process.env.HAPAX_TEST_SERVER ?? "target/debug/hapax";
export const FAST = { deadlineMs: PATIENCE_MS, attemptTimeoutMs: PATIENCE_MS, backoffBaseMs: 10 };
/** Every call has one attempt: the pause after it would outlast the deadline. */
export const ONCE = { deadlineMs: PATIENCE_MS, backoffBaseMs: 1e12, backoffMaxMs: 1e12 };

/** Waits for a state. */
export async function waitUntil(condition, what) {
  const ends = performance.now() + PATIENCE_MS;
  while (!(await condition())) {
    assert.ok(performance.now() < ends, `waited in vain until ${what}`);
    await sleep(5);
  }
}

/** Runs the binary; returns what it prints. */
export function run(...parameters) {
  return execFileSync(HAPAX, parameters, { encoding: "utf8", timeout: PATIENCE_MS, stdio: ["ignore", "pipe", "pipe"] });
}

/** `hapax serve` on its embedded defaults, with a module `orders`. */
export class Server {
  static async start() {
    const server = new Server();
    server.dir = mkdtempSync(join(tmpdir(), "hapax-client-"));
    server.data = join(server.dir, "data");
    run("modules", "create", "orders", "--data", server.data);
    await server.begin();
    return server;
  }

  async begin() {
    const log = join(this.dir, "log");
    const parameters = ["serve", "--listen", "127.0.0.1:0", "--json", "--data", this.data];
    this.process = spawn(HAPAX, parameters, { stdio: ["ignore", "pipe", openSync(log, "a")] });
    let text = "";
    for await (const chunk of this.process.stdout) {
      text += chunk;
      if (text.includes("\n")) break;
    }
    assert.ok(text.includes("\n"), `the server did not start: ${readFileSync(log, "utf8")}`);
    this.url = JSON.parse(text).url;
  }

  /** kill -9. */
  async kill() {
    if (this.process.exitCode === null && this.process.signalCode === null) {
      this.process.kill("SIGKILL");
      await once(this.process, "exit");
    }
  }

  async stop() {
    await this.kill();
    rmSync(this.dir, { recursive: true, force: true });
  }
}

/** Somebody else answers in place of the server. */
export function say(status, body, { type = "application/json", headers = {} } = {}) {
  return { status, body: typeof body === "string" ? body : JSON.stringify(body), headers: { "content-type": type, ...headers } };
}

export function problem(status, code, headers = {}, more = {}) {
  const body = { type: "about:blank", title: code, status, code, detail: "d", ...more };
  return say(status, body, { type: "application/problem+json", headers });
}

export const page = (status) => say(status, "<html>", { type: "text/html" });
/** The server does the work, and its answer is lost; then the way may be closed. */
export const LOSE = { lose: true };
export const LOSE_HALF = { lose: true, half: true };
export const LOSE_AND_CLOSE = { lose: true, close: true };

/** Forwards to a server that may come back at another port, unless it was told what to do with a request. */
export class Way {
  plan = [];
  always = new Map();
  askedAt = [];
  lastUrl = "";
  lost = 0;

  static async to(server) {
    const way = new Way();
    way.target = server.url;
    way.http = http.createServer((request, response) => way.#carry(request, response).catch(() => request.socket.destroy()));
    way.http.listen(0, "127.0.0.1");
    await once(way.http, "listening");
    way.url = `http://127.0.0.1:${way.http.address().port}`;
    return way;
  }

  async #carry(request, response) {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    this.askedAt.push(performance.now());
    this.lastUrl = request.url;
    const step = this.always.get(request.url.split("?")[0]) ?? this.plan.shift();
    if (step?.status) {
      response.writeHead(step.status, step.headers).end(step.body);
      return;
    }
    if (this.target === undefined) throw new Error("the way is closed");
    const { host: _, connection: __, ...headers } = request.headers;
    const to = http.request(this.target + request.url, { method: request.method, headers, agent: false });
    to.end(Buffer.concat(chunks));
    const [answer] = await once(to, "response");
    const said = [];
    for await (const chunk of answer) said.push(chunk);
    if (step?.lose) {
      if (step.close) this.target = undefined;
      this.lost += 1;
      if (step.half) response.writeHead(200, { "content-type": "application/json", "content-length": 500 }).write("{");
      setImmediate(() => request.socket.destroy());
      return;
    }
    const { "transfer-encoding": ___, connection: ____, ...kept } = answer.headers;
    response.writeHead(answer.statusCode, kept).end(Buffer.concat(said));
  }

  client(settings = FAST, more = {}) {
    return new Client(this.url, { settings, ...more });
  }

  stop() {
    this.http.closeAllConnections();
    this.http.close();
  }
}

/** A URL where nobody listens. */
export async function closedPort() {
  const probe = net.createServer().listen(0, "127.0.0.1");
  await once(probe, "listening");
  const { port } = probe.address();
  probe.close();
  return `http://127.0.0.1:${port}`;
}

/** The error that a call ends with. */
export async function errorOf(call, kind) {
  try {
    await (typeof call === "function" ? call() : call);
  } catch (error) {
    assert.ok(error instanceof kind, `${error.name}: ${error.message}; ${kind.name} was expected`);
    return error;
  }
  assert.fail(`${kind.name} was expected`);
}
