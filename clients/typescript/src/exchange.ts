// One call: attempts until there is an answer that counts, or no time left.

import { CODES, type Route } from "./api.js";
import type { ClaimRequest } from "./claims.js";
import { errorOf, type HapaxError, Invalid, parseProblem, type Problem, Unavailable, visible } from "./errors.js";
import type { PreparedWrite } from "./prepared.js";
import type { ClientSettings } from "./settings.js";

/** How often to repeat what a repeat probably does not mend: a failing handler, a proxy's refusal. */
const A_FEW_TIMES = 5;
/** No attempt begins with less time than this: it could only leave a doubt. */
const ATTEMPT_MIN_MS = 50;
/** A longer timer would be none at all. */
const TIMER_MS_MAX = 2 ** 31 - 1;

const AGAIN_IN_DOUBT = new Set(["key-running", "unavailable", "handler-timeout", "request-timeout"]);
const AGAIN = new Set(["contended", "week-missing", "rate-limited", "body-unreadable", "overloaded", "not-ready"]);
const A_FEW = new Set(["handler-failed", "internal"]);

/** What a call may be given besides its content. */
export interface CallOptions {
  /** Gives the call up. A write that is given up is in doubt: the error has it, with its key. */
  readonly signal?: AbortSignal | undefined;
}

/** An answer of the right form that is not the answer to this call. */
export class Odd extends Error {}

/** What comes after an attempt: ask again until the deadline, or a few times, or never. */
export type Next = "again" | "a few times" | "stop";

/** A success. */
export interface Reply {
  readonly body: string;
  readonly replayed: boolean;
  /** Before the first attempt, by this process's clock. */
  readonly firstSentMs: number;
  /** Before the attempt that was answered. */
  readonly lastSentMs: number;
}

/** What is asked. Every attempt sends the same bytes. */
export interface Call<T> {
  /** In words, for errors: `creating a record of orders`. */
  readonly what: string;
  readonly route: Route;
  /** Makes the value of a success; throws `Odd` if it does not answer this. */
  readonly read: (reply: Reply) => T;
  readonly path?: Readonly<Record<string, string>>;
  readonly query?: Readonly<Record<string, string | number | undefined>>;
  readonly body?: string | undefined;
  readonly key?: string;
  /** How long the server may wait before it answers, on top of an attempt's time. */
  readonly waitMs?: number;
  /** In place of the settings' deadline. */
  readonly deadlineMs?: number;
  readonly write?: PreparedWrite;
  readonly claim?: ClaimRequest;
  /** Whether a conflict may be the work of an earlier attempt. */
  readonly conflictInDoubt?: boolean;
  /** Whether a second attempt would do more than the first: an attempt that may have taken effect is not repeated. */
  readonly once?: boolean;
}

/** Where calls go, and how. */
export interface Way {
  readonly server: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly settings: ClientSettings;
  readonly fetch: typeof globalThis.fetch;
}

type Attempt =
  | { readonly kind: "reply"; readonly body: string; readonly replayed: boolean }
  | { readonly kind: "problem"; readonly problem: Problem; readonly afterMs: number | undefined }
  | {
      readonly kind: "nothing";
      readonly said: string;
      readonly next: Next;
      readonly inDoubt: boolean;
      readonly afterMs?: number | undefined;
      readonly error?: unknown;
      readonly tooLarge?: boolean;
    };

/**
 * What to do about a problem, and whether it leaves a doubt. Known codes decide; of an unknown one the server
 * says by `Retry-After` whether it passes.
 */
export function verdict(problem: Problem, hasRetryAfter: boolean): { next: Next; inDoubt: boolean } {
  if (AGAIN_IN_DOUBT.has(problem.code)) return { next: "again", inDoubt: true };
  if (AGAIN.has(problem.code)) return { next: "again", inDoubt: false };
  if (A_FEW.has(problem.code)) return { next: "a few times", inDoubt: true };
  if (CODES.has(problem.code) || !hasRetryAfter) return { next: "stop", inDoubt: false };
  return { next: "again", inDoubt: true };
}

/** The pause that a server asks for, in milliseconds. A date counts from the answer's own `Date`. */
export function retryAfterMs(value: string | null, date: string | null): number | undefined {
  const text = (value ?? "").trim();
  if (/^\d+$/.test(text)) return Number(text.slice(0, 12)) * 1000;
  const at = instant(text);
  if (at === undefined) return undefined;
  return Math.max(0, at - (instant(date ?? "") ?? Date.now()));
}

function instant(text: string): number | undefined {
  // Not any text that JavaScript takes for a date.
  const at = /^[A-Z][a-z]{2,8}, /.test(text) ? Date.parse(text) : Number.NaN;
  return Number.isNaN(at) ? undefined : at;
}

/**
 * Full jitter up to an exponential bound, on top of what the server asks for: whoever asks everybody to come back
 * in a second does not get them all at once, nor every second.
 */
export function pauseMs(settings: ClientSettings, attempts: number, afterMs: number | undefined): number {
  const longest = Math.min(settings.backoffBaseMs * 2 ** Math.min(attempts - 1, 60), settings.backoffMaxMs);
  return (afterMs ?? 0) + longest * ((1 + Math.floor(Math.random() * 1000)) / 1000);
}

/** Sends a call until its answer can be read, the server refuses it, or the deadline is over. */
export async function exchange<T>(way: Way, call: Call<T>, signal?: AbortSignal): Promise<T> {
  const { settings } = way;
  const bytes = call.body === undefined ? undefined : new TextEncoder().encode(call.body);
  if (bytes !== undefined && bytes.length > settings.bodyBytesMax) {
    throw new Invalid("the request", `it has ${bytes.length} bytes; the limit is ${settings.bodyBytesMax}`);
  }
  const url = urlOf(way.server, call);
  const reads = call.route.startsWith("GET ");
  const firstSentMs = performance.now();
  const deadline = firstSentMs + (call.waitMs ?? 0) + (call.deadlineMs ?? settings.deadlineMs);
  let [attempts, aFew, inDoubt] = [0, 0, call.write?.maybeSent ?? false];
  let last: Attempt | undefined;

  const end = (next: Next): HapaxError => {
    const doubt = inDoubt && !reads;
    const problem = last?.kind === "problem" ? last.problem : undefined;
    let error: HapaxError;
    if (problem !== undefined && next !== "again") {
      error = errorOf(problem, doubt, call.conflictInDoubt ?? false);
    } else {
      const said = problem ? `${problem.code}: ${problem.detail}` : last?.kind === "nothing" ? last.said : "it was given up";
      const tooLarge = last?.kind === "nothing" && last.tooLarge === true;
      error = new Unavailable(`${call.what}: ${said}`, attempts, doubt, problem, tooLarge, doubt && call.once === true);
      if (last?.kind === "nothing" && last.error !== undefined) error.cause = last.error;
    }
    error.attempts = attempts;
    error.prepared = call.write;
    error.request = call.claim;
    if (error.inDoubt) call.write?.noteSent();
    return error;
  };

  for (;;) {
    const lastSentMs = performance.now();
    if (signal?.aborted) {
      last = { kind: "nothing", said: "it was given up", next: "again", inDoubt: false, error: signal.reason };
      throw end("again");
    }
    const timeout = Math.max(1, Math.min(deadline - lastSentMs, settings.attemptTimeoutMs + (call.waitMs ?? 0)));
    last = await attempt(way, call, url, bytes, timeout, signal);
    attempts += 1;
    let next: Next;
    let doubtful: boolean;
    let afterMs: number | undefined;
    if (last.kind === "reply") {
      try {
        const value = call.read({ body: last.body, replayed: last.replayed, firstSentMs, lastSentMs });
        call.write?.noteSent();
        return value;
      } catch (error) {
        if (!(error instanceof Odd || error instanceof SyntaxError || error instanceof TypeError || error instanceof RangeError || error instanceof Invalid)) {
          throw error;
        }
        const said = error instanceof Odd ? error.message : `the answer is not what the server answers to this (${visible(error.message)})`;
        last = { kind: "nothing", said, next: "again", inDoubt: true };
      }
    }
    if (last.kind === "problem") {
      afterMs = last.afterMs;
      ({ next, inDoubt: doubtful } = verdict(last.problem, afterMs !== undefined));
    } else {
      ({ next, inDoubt: doubtful, afterMs } = last);
      // What is read changes nothing, and is as large the next time.
      if (last.tooLarge === true && reads) next = "stop";
    }
    if (next === "stop") throw end(next);
    inDoubt ||= doubtful;
    if (inDoubt && call.once === true) throw end(next);
    if (next === "a few times" && ++aFew >= A_FEW_TIMES) throw end(next);
    const pause = pauseMs(settings, attempts, afterMs);
    if (performance.now() + pause + ATTEMPT_MIN_MS >= deadline) throw end(next);
    await sleep(pause, signal);
  }
}

/** Waits; an aborted signal ends it early. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const finish = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", finish);
      resolve();
    };
    const timer = setTimeout(finish, Math.min(Math.max(0, ms), TIMER_MS_MAX));
    if (signal?.aborted) finish();
    else signal?.addEventListener("abort", finish, { once: true });
  });
}

function urlOf(server: string, call: Call<unknown>): string {
  let path = call.route.slice(call.route.indexOf(" ") + 1);
  for (const [name, value] of Object.entries(call.path ?? {})) {
    // A URL would lead elsewhere, escaped or not.
    if (value === "." || value === "..") throw new Invalid(`the ${name}`, `"${value}" cannot be part of a URL's path`);
    path = path.replace(`{${name}}`, () => encodeURIComponent(value));
  }
  const query = Object.entries(call.query ?? {}).flatMap(([name, value]) =>
    value === undefined ? [] : [`${name}=${encodeURIComponent(value)}`],
  );
  return server + path + (query.length > 0 ? `?${query.join("&")}` : "");
}

/** Sends a call once. */
async function attempt(
  way: Way,
  call: Call<unknown>,
  url: string,
  bytes: Uint8Array | undefined,
  timeout: number,
  signal: AbortSignal | undefined,
): Promise<Attempt> {
  const headers: Record<string, string> = { ...way.headers };
  if (call.key !== undefined) headers["idempotency-key"] = `"${call.key.replace(/["\\]/g, "\\$&")}"`;
  if (bytes !== undefined) headers["content-type"] = "application/json";
  const ended = new AbortController();
  const timer = setTimeout(() => ended.abort(new Error("the attempt took too long")), Math.min(timeout, TIMER_MS_MAX));
  const give_up = (): void => ended.abort(signal?.reason);
  signal?.addEventListener("abort", give_up, { once: true });
  let begun = false;
  try {
    const method = call.route.slice(0, call.route.indexOf(" "));
    const body = bytes as BodyInit | undefined;
    const response = await way.fetch(url, { method, headers, redirect: "manual", signal: ended.signal, ...(body && { body }) });
    begun = true;
    const answer = await readBody(response, way.settings.answerBytesMax);
    if (answer === undefined) {
      const said = `the answer has more than ${way.settings.answerBytesMax} bytes (answerBytesMax)`;
      return { kind: "nothing", said, next: "a few times", inDoubt: true, tooLarge: true };
    }
    return judge(response, answer, way.settings);
  } catch (error) {
    const said = `${begun ? "the answer broke off" : "there was no answer"} (${visible(textOf(error))})`;
    return { kind: "nothing", said, next: "again", inDoubt: !carriedNothing(error), error };
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", give_up);
  }
}

/** The answer's body, if it is not too long. */
async function readBody(response: Response, bytesMax: number): Promise<Uint8Array | undefined> {
  const chunks: Uint8Array[] = [];
  let length = 0;
  const reader = response.body?.getReader();
  while (reader !== undefined) {
    const { done, value } = await reader.read();
    if (done) break;
    length += value.length;
    if (length > bytesMax) {
      await reader.cancel().catch(() => undefined);
      return undefined;
    }
    chunks.push(value);
  }
  const body = new Uint8Array(length);
  let at = 0;
  for (const chunk of chunks) {
    body.set(chunk, at);
    at += chunk.length;
  }
  return body;
}

/** A connection that was never made carried nothing. */
function carriedNothing(error: unknown): boolean {
  const cause: unknown = error instanceof Error ? error.cause : undefined;
  const causes: unknown[] = cause instanceof AggregateError && cause.errors.length > 0 ? cause.errors : [cause];
  return causes.every((of) => {
    const { syscall, code } = (of ?? {}) as { syscall?: unknown; code?: unknown };
    return syscall === "connect" || syscall === "getaddrinfo" || code === "UND_ERR_CONNECT_TIMEOUT";
  });
}

function textOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return error.cause instanceof Error ? `${error.message}: ${error.cause.message || error.cause.name}` : error.message;
}

/** What an answer is: a success, a problem of the server, or somebody else's page. */
function judge(response: Response, body: Uint8Array, settings: ClientSettings): Attempt {
  const { status, headers } = response;
  let afterMs = retryAfterMs(headers.get("retry-after"), headers.get("date"));
  if (afterMs !== undefined) afterMs = Math.min(afterMs, settings.retryAfterMaxMs);
  const kind = (headers.get("content-type") ?? "").split(";")[0]?.trim().toLowerCase() ?? "";
  const success = status >= 200 && status < 300;
  let text: string | undefined;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(body);
  } catch {
    // not UTF-8, so not the server's
  }
  if (text !== undefined && success && kind === "application/json") {
    return { kind: "reply", body: text, replayed: headers.get("idempotency-replayed") === "true" };
  }
  if (text !== undefined && !success && kind === "application/problem+json") {
    const problem = parseProblem(status, parsed(text));
    if (problem !== undefined) return { kind: "problem", problem, afterMs };
  }
  // A proxy has only its status to say: 5xx, 408, 425 and 429 pass; another refusal, and a redirect, which is not
  // followed, probably does not.
  const passes = success || status >= 500 || [408, 425, 429].includes(status) || afterMs !== undefined;
  const page = new TextDecoder().decode(body.subarray(0, 400)).split(/\s+/u).join(" ").slice(0, 120);
  const said = `${status} is not the server's own answer (content-type "${visible(kind)}": ${visible(page)})`;
  return { kind: "nothing", said, next: passes ? "again" : "a few times", inDoubt: true, afterMs };
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
