// The client.

import * as analytics from "./analytics.js";
import type { ChangedAnswer, EntriesAnswer, InfoAnswer, KeyAnswer } from "./api.js";
import { type Claim, claim, type ClaimOptions, ClaimRequest, type NotClaimed } from "./claims.js";
import { Invalid, Unavailable } from "./errors.js";
import { type Call, type CallOptions, exchange, type Way } from "./exchange.js";
import * as journal from "./journal.js";
import * as letters from "./letters.js";
import { checkKey, type PreparedWrite } from "./prepared.js";
import * as records from "./records.js";
import { type ClientSettings, settingsOf } from "./settings.js";
import { checkName } from "./text.js";

const VERSION = "0.1.0";

/** Settings of a client besides its server. */
export interface ClientOptions {
  /** An API token. Use https then, except to the same machine. */
  readonly token?: string;
  /** The tenant, for a server without tokens. */
  readonly tenant?: string;
  readonly settings?: Partial<ClientSettings>;
  /** A `fetch` of yours, for certificates or proxies of your own. */
  readonly fetch?: typeof globalThis.fetch;
}

/**
 * A client of one server. Every write has a key, made before its first attempt and sent with every one, so a retry
 * never writes twice.
 */
export class Client {
  /** The server's URL, as prepared writes name it. */
  readonly server: string;
  readonly tenant: string | null;
  /** The journal. */
  readonly journal: Journal;
  /** Dead letters, for operators. */
  readonly dead: DeadLetters;
  readonly #way: Way;

  /** Sends nothing yet. */
  constructor(url: string, options: ClientOptions = {}) {
    this.server = serverOf(url);
    this.tenant = options.tenant ?? null;
    const headers: Record<string, string> = {
      accept: "application/json, application/problem+json",
      "user-agent": `hapax-client-typescript/${VERSION}`,
    };
    if (options.token !== undefined) headers["authorization"] = `Bearer ${checkToken(options.token)}`;
    if (options.tenant !== undefined) headers["hapax-tenant"] = tenantHeader(options.tenant);
    const settings = settingsOf(options.settings);
    this.#way = { server: this.server, headers, settings, fetch: options.fetch ?? globalThis.fetch };
    const ask = <T>(call: Call<T>, how?: CallOptions): Promise<T> => exchange(this.#way, call, how?.signal);
    this.journal = new Journal(ask, this.tenant);
    this.dead = new DeadLetters(ask);
  }

  /** The records of a module. Nothing is asked yet. */
  data<P = unknown>(module: string): Data<P> {
    return new Data<P>(this, module, (call, how) => exchange(this.#way, call, how?.signal));
  }

  /** Questions to the read model of a module. */
  analytics<P = unknown>(module: string): Analytics<P> {
    return new Analytics<P>(module, (call, how) => exchange(this.#way, call, how?.signal));
  }

  /**
   * Sends a prepared write until there is an answer, within the deadline. It takes effect once, however often it is
   * sent. Refuses a write that was prepared for another server or tenant, which has not seen the key and would run
   * the write again.
   */
  async send<P = unknown>(write: PreparedWrite, options: CallOptions = {}): Promise<records.Written<P>> {
    return exchange(this.#way, records.write<P>(write, this.server, this.tenant), options.signal);
  }

  /**
   * Like `send`, to a server with another URL than the write was prepared for. Gives up: the check that it is the
   * same server. Use it for one that has moved with its data, or that is reached another way.
   */
  async sendAnywhere<P = unknown>(write: PreparedWrite, options: CallOptions = {}): Promise<records.Written<P>> {
    return exchange(this.#way, records.write<P>(write, undefined, this.tenant), options.signal);
  }

  /**
   * Asks for the right to run an event. Run it only if the `outcome` is `claimed`.
   *
   * A claim without an answer throws an error that has the request: `claimAgain(error.request)` gets the run that
   * the lost answer has granted.
   */
  async claim(scope: string, id: string, options: ClaimOptions = {}): Promise<Claim | NotClaimed> {
    return this.claimAgain(new ClaimRequest(scope, id, options), options);
  }

  /** Asks with a request that got no answer. It grants one run: a request that got one is refused. */
  async claimAgain(request: ClaimRequest, options: CallOptions = {}): Promise<Claim | NotClaimed> {
    request.take();
    try {
      return await exchange(this.#way, claim(this.#way, request), options.signal);
    } catch (error) {
      request.giveBack();
      throw error;
    }
  }

  /** What the server is, and its limits. */
  async info(options: CallOptions = {}): Promise<InfoAnswer> {
    const call: Call<InfoAnswer> = {
      what: "asking for the server's info",
      route: "GET /v1/info",
      read: (reply) => {
        const answer = JSON.parse(reply.body) as InfoAnswer;
        if (typeof answer.version !== "string") throw new SyntaxError("it has no version");
        return answer;
      },
    };
    return exchange(this.#way, call, options.signal);
  }

  /** What became of a write with this key. */
  async key(key: string, options: CallOptions = {}): Promise<KeyAnswer> {
    const call: Call<KeyAnswer> = {
      what: "asking for a key",
      route: "GET /v1/keys/{key}",
      path: { key: checkKey(key) },
      read: (reply) => {
        const answer = JSON.parse(reply.body) as KeyAnswer;
        if (answer.key !== key) throw new SyntaxError("it is about another key");
        return answer;
      },
    };
    return exchange(this.#way, call, options.signal);
  }
}

type Ask = <T>(call: Call<T>, how?: CallOptions) => Promise<T>;

/** The records of one module. See `Client.data`. */
export class Data<P = unknown> extends records.Writes {
  readonly #client: Client;
  readonly #ask: Ask;

  constructor(client: Client, module: string, ask: Ask) {
    super(client.server, client.tenant, module);
    this.#client = client;
    this.#ask = ask;
  }

  /** Questions to the read model of the module. */
  analytics(): Analytics<P> {
    return this.#client.analytics<P>(this.module);
  }

  /**
   * Creates a record. Retries by itself. If it fails without an answer, the error has the write with its key
   * (`error.prepared`): send that again.
   */
  async create(payload: unknown, options: CallOptions = {}): Promise<records.Written<P>> {
    return this.#client.send<P>(this.prepareCreate(payload), options);
  }

  /** Creates a record with an id of your own. */
  async createAs(id: string, payload: unknown, options: CallOptions = {}): Promise<records.Written<P>> {
    return this.#client.send<P>(this.prepareCreateAs(id, payload), options);
  }

  /** Replaces the content of a record that has this seq; `Conflict` if it has another. */
  async update(id: string, expectedSeq: number, payload: unknown, options: CallOptions = {}): Promise<records.Written<P>> {
    return this.#client.send<P>(this.prepareUpdate(id, expectedSeq, payload), options);
  }

  /** Deletes a record that has this seq; `Conflict` if it has another. */
  async delete(id: string, expectedSeq: number, options: CallOptions = {}): Promise<records.Written<P>> {
    return this.#client.send<P>(this.prepareDelete(id, expectedSeq), options);
  }

  /** Reads a record. */
  async get(id: string, options: CallOptions = {}): Promise<records.Record_<P>> {
    return this.#ask(records.get<P>(this.module, id), options);
  }

  /** Reads up to `limit` records (1 to 1000, 100 by default) in the order of their ids, from behind `after` on. */
  async list(which: { after?: string | undefined; limit?: number } = {}, options: CallOptions = {}): Promise<records.Page<P>> {
    return this.#ask(records.page<P>(this.module, which.after, which.limit ?? 100), options);
  }

  /**
   * All records in the order of their ids, read page by page. It is not a snapshot: what is written meanwhile may or
   * may not be seen.
   */
  async *records(limit = 100, options: CallOptions = {}): AsyncGenerator<records.Record_<P>, void, undefined> {
    let after: string | undefined;
    for (;;) {
      let page: records.Page<P>;
      try {
        page = await this.list({ after, limit }, options);
      } catch (error) {
        if (!(error instanceof Unavailable && error.tooLarge) || limit === 1) throw error;
        limit = Math.floor(limit / 2); // the client reads no answer of that size; half of the records may fit
        continue;
      }
      yield* page.records;
      if (page.next === undefined) return;
      after = page.next;
    }
  }
}

/** The journal of a server. */
export class Journal {
  readonly #ask: Ask;
  readonly #tenant: string | null;

  constructor(ask: Ask, tenant: string | null) {
    this.#ask = ask;
    this.#tenant = tenant;
  }

  /**
   * Appends events to an aggregate: all of them, or none. An event that is there already, because an answer was lost
   * or because it was sent before, keeps its seq.
   */
  async append(
    aggregate: string,
    events: readonly journal.NewEvent[],
    options: CallOptions & { expected?: journal.Expected } = {},
  ): Promise<journal.Appended> {
    return this.#ask(journal.append(this.#tenant, aggregate, events, options.expected ?? "any"), options);
  }

  /** Reads events in the journal's order. If there are none, waits for them for `waitMs` (30000 at most). */
  async events(
    which: { after?: string | undefined; limit?: number; waitMs?: number } = {},
    options: CallOptions = {},
  ): Promise<journal.Events> {
    return this.#ask(journal.read(which.after, which.limit ?? 100, which.waitMs ?? 0), options);
  }

  /** Reads the events of an aggregate. */
  async aggregate(
    aggregate: string,
    which: { fromSeq?: number; limit?: number } = {},
    options: CallOptions = {},
  ): Promise<journal.AggregateEvents> {
    return this.#ask(journal.readAggregate(aggregate, which.fromSeq ?? 1, which.limit ?? 100), options);
  }
}

/** Dead letters, for operators. */
export class DeadLetters {
  readonly #ask: Ask;

  constructor(ask: Ask) {
    this.#ask = ask;
  }

  /** A page of them, each with its reason. */
  async list(which: letters.EntriesOptions = {}, options: CallOptions = {}): Promise<EntriesAnswer> {
    return this.#ask(letters.entries(which), options);
  }

  /**
   * Runs them again, with attempts reset. A `Conflict` that is in doubt may be the work of an earlier attempt: look
   * at them. With `all`, a lost answer is not asked for again, which would take the next ones: `Unavailable`, in
   * doubt. One with `needs_delivery` in the answer runs when it is delivered again: publish it.
   */
  async redrive(scope: string, which: letters.ChangeOptions, options: CallOptions = {}): Promise<ChangedAnswer> {
    return this.#ask(letters.change("redrive", scope, which), options);
  }

  /** Gives them up: their aggregates go on past them. With `all`, a lost answer is `Unavailable`, in doubt, as with `redrive`. */
  async drop(scope: string, which: letters.ChangeOptions, options: CallOptions = {}): Promise<ChangedAnswer> {
    return this.#ask(letters.change("drop", scope, which), options);
  }
}

/** Questions to the read model of one module. */
export class Analytics<P = unknown> {
  readonly #module: string;
  readonly #ask: Ask;

  constructor(module: string, ask: Ask) {
    this.#module = module;
    this.#ask = ask;
  }

  /** A page of records, each once; `meta` says how current they are. */
  async records(which: analytics.RecordsOptions = {}, options: CallOptions = {}): Promise<records.ReadPage<P>> {
    return this.#ask(analytics.records<P>(this.#module, which), options);
  }

  /** Counts records, and computes exact sums, least and greatest numbers of fields. */
  async tally(what: analytics.TallyOptions = {}, options: CallOptions = {}): Promise<analytics.Tally> {
    return this.#ask(analytics.tally(this.#module, what), options);
  }
}

function serverOf(url: string): string {
  const bad = (problem: string): Invalid => new Invalid("the server's URL", `${problem}; write it like http://127.0.0.1:7070`);
  let parsed: URL;
  try {
    parsed = new URL(url);
  } catch {
    throw bad("it is not a URL");
  }
  if (parsed.protocol !== "http:" && parsed.protocol !== "https:") throw bad("it must be http or https");
  if (parsed.username !== "" || parsed.password !== "") throw bad("it has a user or a password; pass a token instead");
  if (/[?#]/.test(url)) throw bad("it has a query or a fragment");
  return parsed.href.replace(/\/+$/, "");
}

/** White space around it, as a file has, is left out. */
function checkToken(token: string): string {
  const trimmed = token.trim();
  if (/^[!-~]+$/.test(trimmed)) return trimmed;
  throw new Invalid("the token", "it is empty, or has characters that no token has");
}

function tenantHeader(tenant: string): string {
  checkName("the tenant", tenant);
  // A header is trimmed on its way: " acme" would arrive as another tenant.
  if (/^[ \t]|[ \t]$|[\u0000-\u001f\u007f]/.test(tenant)) {
    const shown = JSON.stringify(tenant);
    throw new Invalid("the tenant", `${shown} has a character that no header can carry; use a token of that tenant`);
  }
  // A header holds bytes: those of UTF-8, each as a character.
  return String.fromCharCode(...new TextEncoder().encode(tenant));
}
