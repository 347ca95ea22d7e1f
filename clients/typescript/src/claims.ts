// Claims: the right to run an event, the lease that is kept meanwhile, and how the run ended.

import type { ClaimAnswer, Route, SettledAnswer } from "./api.js";
import { HapaxError, Invalid, LeaseLost, visible } from "./errors.js";
import { type Call, type CallOptions, exchange, Odd, type Reply, sleep, type Way } from "./exchange.js";
import { checkName, stringify } from "./text.js";

/** Of a longer reason the rest is left out, so that it does not keep a run from being settled. */
const REASON_BYTES_MAX = 4096;
/** What a settling has besides payload and reason, at most: a scope, an id, a time. */
const ENVELOPE_BYTES = 4096;
const LEASE_MS_MAX = 86_400_000;
/**
 * The lease is extended when a third of it is used up, and counts as lost when a sixth is left: what is cancelled
 * then has that time to end.
 */
const BEAT_AFTER = 1 / 3;
const LOST_BEFORE = 1 / 6;
/** Between an extension that failed and the next one. */
const BEAT_PAUSE_MS = 50;
/** How long the end of a block may try to report a failure, though its lease is over. */
const SETTLE_MS_MIN = 1000;

const NOT_CLAIMED = ["duplicate", "busy", "retry_later", "wait", "stale", "parked", "dead", "mismatch", "too_old"] as const;

/** What a claim may say besides scope and id. */
export interface ClaimOptions extends CallOptions {
  /** How long the run may take unless its lease is extended; the server's default otherwise. */
  readonly leaseMs?: number;
  /** What fails or crashes after the claim is lost, and listed. */
  readonly atMostOnce?: boolean;
  /** The event's time (RFC 3339), where the ledger's identity includes it. */
  readonly time?: string;
  /**
   * The event's content. It is kept with the dead letter if the event becomes one, and an id that is used again
   * for another content is noticed.
   */
  readonly payload?: unknown;
}

function checkLease(ms: number): number {
  const rounded = Math.round(ms);
  if (rounded >= 1 && rounded <= LEASE_MS_MAX) return rounded;
  throw new Invalid("the lease", `it is ${ms} ms; it must be 1 to ${LEASE_MS_MAX} (a day)`);
}

/**
 * A request to claim, with a name of its own: repeated because an answer was lost, it gets the same token. It
 * grants one run. `claim` makes one; an error without an answer has it, to ask again with `claimAgain`.
 */
export class ClaimRequest {
  readonly payloadJson: string | undefined;
  readonly atMostOnce: boolean;
  readonly time: string | undefined;
  readonly body: string;
  #used = false;

  constructor(
    readonly scope: string,
    readonly id: string,
    options: ClaimOptions = {},
  ) {
    checkName("the scope", scope);
    checkName("the event's id", id);
    this.payloadJson = options.payload === undefined ? undefined : stringify("the payload", options.payload);
    this.atMostOnce = options.atMostOnce ?? false;
    this.time = options.time;
    const fields: Record<string, unknown> = { scope, id, time: options.time };
    fields["mode"] = this.atMostOnce ? "at_most_once" : "lease";
    if (options.leaseMs !== undefined) fields["lease_ms"] = checkLease(options.leaseMs);
    fields["request_id"] = crypto.randomUUID();
    const head = JSON.stringify(fields);
    this.body = this.payloadJson === undefined ? head : `${head.slice(0, -1)},"payload":${this.payloadJson}}`;
  }

  /** Two claims with one request would be one permission for two runs. */
  take(): void {
    if (this.#used) {
      throw new Invalid("the claim's request", "it was used already; a request grants one run, so make a new one");
    }
    this.#used = true;
  }

  giveBack(): void {
    this.#used = false;
  }
}

/** The event is not this caller's to run. */
export interface NotClaimed {
  /**
   * Why: `duplicate` (it took effect before), `busy` (somebody else runs it), `retry_later` (it failed and is not
   * due yet), `wait` and `parked` (another event comes first), `stale` (a later one is done), `dead` (only an
   * operator runs it again), `mismatch` (its id was used for another content), `too_old`.
   */
  readonly outcome: (typeof NOT_CLAIMED)[number];
  /** When the lease in the way ends, by the ledger's clock. */
  readonly until: string | undefined;
  /** When a retry is due, or since when it has been so, by the ledger's clock. */
  readonly at: string | undefined;
}

/** Asks for the right to run an event. */
export function claim(way: Way, request: ClaimRequest): Call<Claim | NotClaimed> {
  return {
    what: `claiming ${JSON.stringify(request.id)} for ${JSON.stringify(request.scope)}`,
    route: "POST /v1/claims",
    body: request.body,
    claim: request,
    read: (reply) => {
      const answer = JSON.parse(reply.body) as ClaimAnswer;
      isAbout(request.id, answer.id);
      const outcome = NOT_CLAIMED.find((name) => name === answer.outcome);
      if (outcome !== undefined) return { outcome, until: answer.until ?? undefined, at: answer.at ?? undefined };
      if (answer.outcome !== "claimed") {
        throw new Odd(`the answer has an outcome that this client does not know: ${visible(String(answer.outcome))}`);
      }
      if (!Number.isSafeInteger(answer.token)) throw new Odd("the answer's token is not a safe integer");
      return new Claim(way, request, answer, reply);
    },
  };
}

function isAbout(asked: string, answered: unknown): void {
  if (asked !== answered) throw new Odd(`the answer is about ${visible(String(answered))}`);
}

/** A reason that the server takes: not blank, and bounded. */
export function reasonOf(reason: string): string {
  const bytes = new TextEncoder().encode(reason);
  let end = Math.min(bytes.length, REASON_BYTES_MAX);
  while (end < bytes.length && ((bytes[end] ?? 0) & 0xc0) === 0x80) end -= 1; // at the end of a character
  const kept = new TextDecoder().decode(bytes.subarray(0, end));
  return kept.trim() === "" ? "no reason given" : kept;
}

/** An event that is this caller's to run. `keep` keeps its lease, `run` does that and settles it too. */
export class Claim {
  readonly outcome = "claimed";
  readonly scope: string;
  readonly id: string;
  /** The fencing token: pass it to what dedups or fences. */
  readonly token: number;
  /** Which run this is, counted from 1. */
  readonly attempt: number;
  /** Whether the last run's process died. */
  readonly suspect: boolean;
  readonly #way: Way;
  readonly #request: ClaimRequest;
  #until: string | undefined;
  #deadlineMs: number | undefined;
  #leaseMs: number | undefined;
  #payloadJson: string | undefined;
  #settled = false;
  #extending: Promise<unknown> = Promise.resolve();
  #extensions = 0;

  constructor(way: Way, request: ClaimRequest, answer: ClaimAnswer, reply: Reply) {
    this.#way = way;
    this.#request = request;
    this.scope = request.scope;
    this.id = request.id;
    this.token = answer.token ?? 0;
    this.attempt = answer.attempt ?? 1;
    this.suspect = answer.suspect ?? false;
    this.#until = answer.until ?? undefined;
    this.#leaseMs = answer.lease_ms ?? undefined;
    // A lease starts over with every attempt at its claim; an at-most-once claim does not.
    const sent = request.atMostOnce ? reply.firstSentMs : reply.lastSentMs;
    this.#deadlineMs = this.#leaseMs === undefined ? undefined : sent + this.#leaseMs;
    this.#payloadJson = request.payloadJson;
  }

  /** When the lease ends, by the ledger's clock. */
  get until(): string | undefined {
    return this.#until;
  }

  /**
   * When it ends at the earliest, by `performance.now()`: counted from before the claim was sent. Undefined: the
   * claim has no lease.
   */
  get deadlineMs(): number | undefined {
    return this.#deadlineMs;
  }

  /** Whether an extension is under way. */
  get extending(): boolean {
    return this.#extensions > 0;
  }

  /** How long the lease is; undefined if there is none to keep. */
  get keptMs(): number | undefined {
    return this.#request.atMostOnce ? undefined : this.#leaseMs;
  }

  /** Whether a settling was sent: then nothing else is. */
  get settled(): boolean {
    return this.#settled;
  }

  /** The event's content, to be kept with the dead letter if it becomes one. */
  withPayload(payload: unknown): this {
    this.#payloadJson = stringify("the payload", payload);
    return this;
  }

  /** It took effect. May be repeated; a token that another run has fenced is `Fenced`. */
  async done(options: CallOptions = {}): Promise<void> {
    this.#settled = true;
    await this.#settle("done", "POST /v1/claims/done", {}, options);
  }

  /**
   * It failed: it runs again after a pause, until its attempts are used up. Then it is a dead letter. An
   * at-most-once event is lost. Of the reason 4096 bytes are kept.
   */
  async fail(reason: string, options: CallOptions = {}): Promise<void> {
    await this.#failed(reason, "retry", options);
  }

  /** It failed for good: only an operator runs it again. */
  async dead(reason: string, options: CallOptions = {}): Promise<void> {
    await this.#failed(reason, "dead", options);
  }

  async #failed(reason: string, then: string, options: CallOptions & { deadlineMs?: number }): Promise<void> {
    this.#settled = true;
    const kept = reasonOf(reason);
    const size = (text: string): number => new TextEncoder().encode(text).length;
    // What is too large for one request together with the reason must not keep it from failing. And the server
    // refuses content that it would not keep: an at-most-once event never runs again.
    const room = this.#way.settings.bodyBytesMax - 6 * size(kept) - ENVELOPE_BYTES;
    const fits = this.#payloadJson !== undefined && !this.#request.atMostOnce && size(this.#payloadJson) <= room;
    await this.#settle("fail", "POST /v1/claims/fail", { reason: kept, then }, options, fits ? this.#payloadJson : undefined);
  }

  /** Gives the claim back, without having run the event. */
  async release(options: CallOptions = {}): Promise<void> {
    this.#settled = true;
    await this.#settle("release", "POST /v1/claims/release", {}, options);
  }

  /** Extends the lease from now on; `deadlineMs` says until when. */
  async extend(leaseMs: number, options: CallOptions & { deadlineMs?: number } = {}): Promise<void> {
    const lease = checkLease(leaseMs);
    // One after the other: the last one counts, on the server as here.
    const extended = this.#extending.then(async () => {
      const [at, sent] = await this.#settle("extend", "POST /v1/claims/extend", { lease_ms: lease }, options);
      this.#until = at;
      this.#leaseMs = lease;
      this.#deadlineMs = sent + lease;
    });
    this.#extensions += 1;
    this.#extending = extended.catch(() => undefined).finally(() => (this.#extensions -= 1));
    await extended;
  }

  /** Reports a failure within the rest of the lease: after that it ends by itself. The caller has an error of its own. */
  async failAtTheEnd(reason: string): Promise<void> {
    const rest = this.#deadlineMs === undefined ? undefined : Math.max(SETTLE_MS_MIN, this.#deadlineMs - performance.now());
    const deadlineMs = rest === undefined ? undefined : Math.min(rest, this.#way.settings.deadlineMs);
    await this.#failed(reason, "retry", deadlineMs === undefined ? {} : { deadlineMs }).catch(unsettled);
  }

  /**
   * Keeps the lease until the block ends: `await using lease = claim.keep()`. Call `done` at the end of the block.
   * A block that ends without it, because of an exception, has failed: the event runs again.
   */
  keep(): Lease {
    return new Lease(this);
  }

  /**
   * Runs the effect under its lease, then settles it: done, or failed if `effect` throws. If the lease is lost,
   * `lease.signal` is aborted, and this throws `LeaseLost` without waiting for the effect.
   */
  async run<T>(effect: (lease: Lease) => Promise<T> | T): Promise<T> {
    const lease = this.keep();
    const lost = new Promise<never>((_, reject) => {
      lease.signal.addEventListener("abort", () => reject(lease.signal.reason), { once: true });
    });
    lost.catch(() => undefined);
    try {
      const running = Promise.resolve(lease).then(effect);
      running.catch(() => undefined);
      const value = await Promise.race([running, lost]);
      lease.stop();
      if (!this.#settled) await this.done();
      return value;
    } catch (error) {
      lease.stop();
      if (lease.signal.aborted) throw lease.signal.reason;
      if (!this.#settled) {
        const reason = error instanceof Error ? `${error.name}: ${error.message}` : String(error);
        await this.failAtTheEnd(reason);
      }
      throw error;
    }
  }

  async #settle(
    what: string,
    route: Route,
    fields: object,
    options: CallOptions & { deadlineMs?: number },
    payload?: string,
  ): Promise<[string | undefined, number]> {
    const { scope, id, token } = this;
    const head = JSON.stringify({ scope, id, time: this.#request.time, token, ...fields });
    const call: Call<[string | undefined, number]> = {
      what: `${what} of ${JSON.stringify(id)} for ${JSON.stringify(scope)}`,
      route,
      body: payload === undefined ? head : `${head.slice(0, -1)},"payload":${payload}}`,
      ...(options.deadlineMs !== undefined && { deadlineMs: options.deadlineMs }),
      read: (reply) => {
        const answer = JSON.parse(reply.body) as SettledAnswer;
        isAbout(id, answer.id);
        return [answer.at ?? undefined, reply.lastSentMs];
      },
    };
    return exchange(this.#way, call, options.signal);
  }
}

/** A settling that failed: the lease ends by itself, and the event runs again. */
function unsettled(error: unknown): void {
  if (!(error instanceof HapaxError)) throw error;
}

/** A lease that is kept by a heartbeat. */
export class Lease implements AsyncDisposable {
  readonly #lost = new AbortController();
  readonly #stopped = new AbortController();

  constructor(readonly claim: Claim) {
    if (claim.keptMs !== undefined) void this.#keep();
  }

  /** Aborted when the lease is lost; its reason is a `LeaseLost`. Pass it to whatever the effect waits for. */
  get signal(): AbortSignal {
    return this.#lost.signal;
  }

  /** Throws `LeaseLost` if the lease is lost. Call it between the steps of a long effect. */
  check(): void {
    const end = this.claim.deadlineMs;
    if (end !== undefined && performance.now() >= end) this.#lose("its time is over");
    this.signal.throwIfAborted();
  }

  /** Ends the heartbeat; the lease then lasts until its time is over. */
  stop(): void {
    this.#stopped.abort();
  }

  /** It took effect. */
  async done(): Promise<void> {
    await this.claim.done();
  }

  /** It failed: it runs again after a pause, until its attempts are used up. */
  async fail(reason: string): Promise<void> {
    await this.claim.fail(reason);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.stop();
    if (this.claim.settled || this.signal.aborted) return;
    await this.claim.failAtTheEnd("the run ended without done");
  }

  #lose(why: string): void {
    const { id, scope } = this.claim;
    this.#lost.abort(new LeaseLost(`the lease of ${JSON.stringify(id)} for ${JSON.stringify(scope)} is lost: ${why}`));
  }

  /** How long until so much of the lease is left; the effect may extend it at any time. */
  #untilLeft(part: number): number {
    return (this.claim.deadlineMs ?? 0) - (this.claim.keptMs ?? 0) * part - performance.now();
  }

  async #keep(): Promise<void> {
    const stopped = this.#stopped.signal;
    for (;;) {
      await sleep(this.#untilLeft(1 - BEAT_AFTER), stopped);
      if (stopped.aborted) return;
      if (this.#untilLeft(1 - BEAT_AFTER) > 0) continue; // it was extended meanwhile
      const [leaseMs, left] = [this.claim.keptMs ?? 0, this.#untilLeft(LOST_BEFORE)];
      if (left <= 0) return this.#lose("its time is over");
      if (this.claim.extending) {
        await sleep(BEAT_PAUSE_MS, stopped); // the effect extends it
        continue;
      }
      try {
        await this.claim.extend(leaseMs, { signal: stopped, deadlineMs: left });
      } catch (error) {
        if (stopped.aborted || this.claim.settled) return;
        const passes = error instanceof HapaxError && error.isRetryable;
        if (!passes) return this.#lose(error instanceof Error ? error.message : String(error));
        await sleep(BEAT_PAUSE_MS, stopped);
      }
    }
  }
}
