// Records of modules: what is read and written, and the calls for it.

import type { MetaBody, Route } from "./api.js";
import { Invalid, visible } from "./errors.js";
import { type Call, Odd } from "./exchange.js";
import { checkId, checkModule, checkSeq, type Operation, PreparedWrite } from "./prepared.js";
import { elements, member, members, RawJson, stringify, whole } from "./text.js";

const ROUTES: Record<Operation, Route> = {
  create: "POST /v1/modules/{slug}/records",
  update: "PUT /v1/modules/{slug}/records/{id}",
  delete: "DELETE /v1/modules/{slug}/records/{id}",
};

/** A record as the server has it. */
export class Record_<P = unknown> {
  constructor(
    readonly id: string,
    readonly module: string,
    /** Its version: every write raises it. */
    readonly seq: number,
    /** Its content as JSON text; numbers have all their digits. Write it again with `RawJson`. */
    readonly payloadJson: string,
    readonly createdAt: string,
    readonly updatedAt: string,
  ) {}

  /** Its content. A number beyond what JavaScript holds is rounded: `payloadJson` has all its digits. */
  get payload(): P {
    return JSON.parse(this.payloadJson) as P;
  }

  /** Names this version, for `afterWrite` of a question to the read model. */
  get readToken(): string {
    return `${this.module}/${this.id}@${this.seq}`;
  }
}

/** The answer to a write. */
export interface Written<P = unknown> {
  /** The record as the write left it. Others may have written since. */
  readonly record: Record_<P>;
  /** Whether the write was done before: an earlier attempt got through. */
  readonly replayed: boolean;
}

/** Some records, ordered by id. */
export interface Page<P = unknown> {
  readonly records: ReadonlyArray<Record_<P>>;
  /** Where the next page begins; undefined: this is the last one. */
  readonly next: string | undefined;
}

/** Records as the read model has them. */
export interface ReadPage<P = unknown> extends Page<P> {
  /** How current they are. */
  readonly meta: MetaBody;
}

/** The record, if it is the one that was asked for. Anything else is somebody else's answer. */
export function readRecord<P>(body: string, module: string, id?: string): Record_<P> {
  const raw = members(body);
  const payload = raw.get("payload") ?? "null";
  JSON.parse(payload);
  const text = (name: string): string => String(JSON.parse(raw.get(name) ?? '""'));
  const found = new Record_<P>(
    checkId(JSON.parse(member(raw, "id"))),
    text("module"),
    whole(member(raw, "seq")),
    payload,
    text("created_at"),
    text("updated_at"),
  );
  if (found.module !== module || (id !== undefined && found.id !== id)) {
    throw new Odd(`the answer is about record ${found.id} of ${visible(found.module)}`);
  }
  return found;
}

/** A page that leads on: a cursor that does not move would go round for ever. */
export function readPage<P>(body: string, module: string, after: string | undefined): ReadPage<P> {
  const raw = members(body);
  const cursor: unknown = JSON.parse(member(raw, "next"));
  const next = cursor === null ? undefined : checkId(cursor);
  if (next !== undefined && after !== undefined && next <= after) throw new Odd("the server's cursor does not move");
  const records = elements(member(raw, "records")).map((text) => readRecord<P>(text, module));
  return { records, next, meta: JSON.parse(raw.get("meta") ?? "null") as MetaBody };
}

function content(payload: unknown): string {
  const json = stringify("the payload", payload);
  if (json.trimStart().startsWith("{")) return json;
  const kind = payload instanceof RawJson ? "JSON text" : Array.isArray(payload) ? "an array" : payload === null ? "null" : typeof payload;
  throw new Invalid("the payload", `it is ${kind}; the content of a record is a JSON object`);
}

/** Prepares writes of one module. Nothing is sent. */
export class Writes {
  readonly #of: { server: string; tenant: string | null; module: string };

  constructor(
    server: string,
    tenant: string | null,
    readonly module: string,
  ) {
    this.#of = { server, tenant, module };
  }

  /** A record to create, with its key. */
  prepareCreate(payload: unknown): PreparedWrite {
    return PreparedWrite.prepare("create", { ...this.#of, body: `{"payload":${content(payload)}}` });
  }

  /** The same with an id of your own. */
  prepareCreateAs(id: string, payload: unknown): PreparedWrite {
    return PreparedWrite.prepare("create", { ...this.#of, body: `{"payload":${content(payload)},"id":"${checkId(id)}"}` });
  }

  /** New content for the record that has this seq. */
  prepareUpdate(id: string, expectedSeq: number, payload: unknown): PreparedWrite {
    const body = `{"payload":${content(payload)},"expected_seq":${checkSeq(expectedSeq)}}`;
    return PreparedWrite.prepare("update", { ...this.#of, id: checkId(id), body });
  }

  /** A record to delete, if it has this seq. */
  prepareDelete(id: string, expectedSeq: number): PreparedWrite {
    return PreparedWrite.prepare("delete", { ...this.#of, id: checkId(id), expected_seq: checkSeq(expectedSeq) });
  }
}

/** Sends a prepared write, if it was prepared for this server and tenant (`server` is undefined: for any). */
export function write<P>(prepared: PreparedWrite, server: string | undefined, tenant: string | null): Call<Written<P>> {
  if (server !== undefined && prepared.server !== null && prepared.server !== server) {
    throw new Invalid(
      "the prepared write",
      `it was prepared for ${prepared.server}, and this is a client of ${server}; if both are one server, use sendAnywhere`,
    );
  }
  if (prepared.tenant !== tenant) {
    const [was, is] = [prepared.tenant, tenant].map((name) => (name === null ? "no tenant" : `tenant ${JSON.stringify(name)}`));
    throw new Invalid("the prepared write", `it was prepared for ${was}, and this client names ${is}`);
  }
  const wanted = prepared.recordId();
  return {
    what: `${prepared.operation} in ${prepared.module}`,
    route: ROUTES[prepared.operation],
    path: { slug: prepared.module, ...(prepared.id !== null && { id: prepared.id }) },
    query: { expected_seq: prepared.expectedSeq ?? undefined },
    key: prepared.key,
    body: prepared.body ?? undefined,
    read: (reply) => ({ record: readRecord<P>(reply.body, prepared.module, wanted), replayed: reply.replayed }),
    write: prepared,
  };
}

/** Reads a record. */
export function get<P>(module: string, id: string): Call<Record_<P>> {
  const wanted = checkId(id);
  return {
    what: `reading record ${wanted} of ${checkModule(module)}`,
    route: "GET /v1/modules/{slug}/records/{id}",
    path: { slug: module, id: wanted },
    read: (reply) => readRecord<P>(reply.body, module, wanted),
  };
}

/** How many lines a page may have. */
export function checkLimit(limit: number): number {
  if (Number.isInteger(limit) && limit >= 1 && limit <= 1000) return limit;
  throw new Invalid("the limit", `${limit} is not in 1 to 1000`);
}

/** Reads some records in the order of their ids. */
export function page<P>(module: string, after: string | undefined, limit: number): Call<Page<P>> {
  const start = after === undefined ? undefined : checkId(after, "the cursor");
  return {
    what: `listing records of ${checkModule(module)}`,
    route: "GET /v1/modules/{slug}/records",
    path: { slug: module },
    query: { after: start, limit: checkLimit(limit) },
    read: (reply) => {
      const { records, next } = readPage<P>(reply.body, module, start);
      return { records, next };
    },
  };
}
