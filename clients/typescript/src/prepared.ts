// A write that can be sent any number of times and takes effect once.

import { Invalid, visible } from "./errors.js";
import { checkName, members } from "./text.js";
import { uuid7 } from "./uuid7.js";

const VERSION = 1;
const KEY_CHARS_MAX = 255;
const SLUG_CHARS_MAX = 48;

/** What a write does. */
export type Operation = "create" | "update" | "delete";

/** 1 to 255 visible ASCII characters. */
export function checkKey(key: unknown): string {
  if (typeof key !== "string" || key.length < 1 || key.length > KEY_CHARS_MAX) {
    throw new Invalid("the Idempotency-Key", `it needs 1 to ${KEY_CHARS_MAX} characters`);
  }
  const odd = key.search(/[^!-~]/u);
  if (odd >= 0) throw new Invalid("the Idempotency-Key", `character ${odd + 1} is not visible ASCII`);
  return key;
}

/** A module's name is part of a path. */
export function checkModule(module: unknown): string {
  if (typeof module === "string" && /^[a-z][a-z0-9_]{0,47}$/.test(module)) return module;
  const shown = visible(String(module).slice(0, SLUG_CHARS_MAX));
  throw new Invalid(
    "the module",
    `its name is "${shown}"; it needs 1 to ${SLUG_CHARS_MAX} characters a-z, 0-9 or _, beginning with a letter`,
  );
}

/** A record's id, in lower case. */
export function checkId(id: unknown, what = "the record's id"): string {
  if (typeof id === "string" && /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(id)) return id.toLowerCase();
  const shown = visible(String(id).slice(0, 64));
  throw new Invalid(what, `it is "${shown}"; it needs to be a UUID of 32 hexadecimal digits with hyphens`);
}

/** A record's version. */
export function checkSeq(seq: unknown): number {
  if (typeof seq === "number" && Number.isSafeInteger(seq) && seq >= 0) return seq;
  throw new Invalid("the expected seq", `it is ${String(seq)}; it needs to be a whole number from 0 on`);
}

interface Fields {
  operation: Operation;
  key: string;
  tenant: string | null;
  module: string;
  id: string | null;
  expected_seq: number | null;
  body: string | null;
  server: string | null;
}

/**
 * A write with its key, made before the first attempt.
 *
 * Store it before you send it (`toJson`), and after a crash send what you stored (`PreparedWrite.fromJson`). It
 * holds the bytes of the request, because the server compares them. The stored form is that of the other
 * clients too.
 *
 * Send it to the server and the tenant it was prepared for: another one has not seen the key and would run the
 * write again. It therefore remembers both, and `send` refuses any other.
 */
export class PreparedWrite {
  readonly operation: Operation;
  /** The key: a UUIDv7, unless you chose another. */
  readonly key: string;
  readonly tenant: string | null;
  readonly module: string;
  /** The record of an update or a delete. */
  readonly id: string | null;
  /** Of a delete; that of an update is in its body. */
  readonly expectedSeq: number | null;
  /** The request's body, to the byte. */
  readonly body: string | null;
  /** The URL of the server it was prepared for. */
  readonly server: string | null;
  #maybeSent: boolean;

  private constructor(fields: Fields, maybeSent: boolean) {
    this.operation = fields.operation;
    this.key = fields.key;
    this.tenant = fields.tenant;
    this.module = fields.module;
    this.id = fields.id;
    this.expectedSeq = fields.expected_seq;
    this.body = fields.body;
    this.server = fields.server;
    this.#maybeSent = maybeSent;
  }

  /** A new write with a new key. */
  static prepare(operation: Operation, of: Partial<Fields> & { module: string; server: string; tenant: string | null }): PreparedWrite {
    const fields = { id: null, expected_seq: null, body: null, ...of, operation, key: uuid7() };
    checkModule(fields.module);
    return new PreparedWrite(fields, false);
  }

  /**
   * Whether it may have reached a server before. It is not stored: what comes back from a store may have been
   * sent.
   */
  get maybeSent(): boolean {
    return this.#maybeSent;
  }

  /** Notes that it may have reached a server. */
  noteSent(): void {
    this.#maybeSent = true;
  }

  /**
   * The same write with a key that you derive from its cause, such as the id of a form: two processes that
   * prepare it then have one key. Both must prepare the same content.
   *
   * Gives up: the expiry of UUIDv7 keys (a retry after the server's retention is a new write), and knowing that
   * nothing was sent: another process may have sent the key, so a write that fails is in doubt.
   */
  withKey(key: string): PreparedWrite {
    return new PreparedWrite({ ...this.#fields(), key: checkKey(key) }, true);
  }

  #fields(): Fields {
    const { operation, key, tenant, module, id, body, server } = this;
    return { operation, key, tenant, module, id, expected_seq: this.expectedSeq, body, server };
  }

  /** The stored form, as a value for `JSON.stringify`. */
  toJSON(): object {
    return { v: VERSION, ...this.#fields() };
  }

  /** The stored form. */
  toJson(): string {
    return JSON.stringify(this);
  }

  /** Reads the stored form. The write counts as sent: the process that stored it may have done so. */
  static fromJson(stored: string): PreparedWrite {
    let wire: Record<string, unknown>;
    try {
      wire = JSON.parse(stored);
    } catch (error) {
      throw bad(`it is not JSON: ${visible(String(error))}`);
    }
    if (typeof wire !== "object" || wire === null || Array.isArray(wire)) throw bad("it is not a JSON object");
    if (wire["v"] !== VERSION) {
      throw bad(`its version is ${visible(JSON.stringify(wire["v"]) ?? "missing")}; this client reads version ${VERSION}`);
    }
    const { operation, id = null, expected_seq: seq = null, body = null } = wire;
    const form = [operation, id !== null, seq !== null].join();
    if (form !== "create,false,false" && form !== "update,true,false" && form !== "delete,true,true") {
      throw bad("it is not a create, an update with an id, or a delete with id and expected_seq");
    }
    if ((operation === "delete") !== (body === null)) throw bad("a create and an update have a body, a delete has none");
    return new PreparedWrite(
      {
        operation: operation as Operation,
        key: checkKey(wire["key"]),
        tenant: text("tenant", wire["tenant"]),
        module: checkModule(wire["module"]),
        id: id === null ? null : checkId(id),
        expected_seq: seq === null ? null : checkSeq(seq),
        body: body === null ? null : checkBody(body),
        server: url(wire["server"]),
      },
      true,
    );
  }

  /** The id of the record, unless the server chooses it. */
  recordId(): string | undefined {
    if (this.id !== null || this.body === null) return this.id ?? undefined;
    const named = members(this.body).get("id");
    return named === undefined ? undefined : checkId(JSON.parse(named));
  }
}

function bad(problem: string): Invalid {
  return new Invalid("the prepared write", problem);
}

function text(what: string, value: unknown): string | null {
  if (value === null || value === undefined) return null;
  if (typeof value !== "string") throw bad(`its ${what} is not text`);
  return checkName(`the prepared write's ${what}`, value);
}

/** A URL may be longer than a name. */
function url(value: unknown): string | null {
  if (value === null || value === undefined) return null;
  if (typeof value !== "string" || value.trim() === "") throw bad("its server is not a URL");
  return value;
}

/** The payload is not looked into: however deep it is, it was sent before. */
function checkBody(body: unknown): string {
  try {
    if (typeof body === "string" && members(body).has("payload") && !/\p{Surrogate}/u.test(body)) return body;
  } catch {
    // answered below
  }
  throw bad("its body is not a JSON object with a payload");
}
