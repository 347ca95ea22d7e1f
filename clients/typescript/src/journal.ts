// The journal: events to append, and events that were read.

import type { AppendAnswer, HeaderBody } from "./api.js";
import { Invalid } from "./errors.js";
import { type Call, Odd } from "./exchange.js";
import { checkLimit } from "./records.js";
import { base64, checkName, elements, member, members, stringify, unbase64, whole } from "./text.js";

/** What an append expects of its aggregate: its last seq, no event, or anything. */
export type Expected = number | "new" | "any";

/** An event to append. */
export interface NewEvent {
  /** The same event sent again is stored once. */
  readonly id: string;
  /** Its content: JSON, `RawJson` (sent to the byte), bytes, or nothing. */
  readonly payload?: unknown;
  /** What kind of fact it is. */
  readonly kind?: string | undefined;
  /** When it happened (RFC 3339). */
  readonly time?: string | undefined;
  readonly headers?: ReadonlyArray<readonly [string, string | Uint8Array]> | undefined;
  /** If it is said here too, it must be that of the append. */
  readonly aggregate?: string | undefined;
  /** If it is said here too, it must be that of the client. */
  readonly tenant?: string | undefined;
  /** The server gives it: an event that has one is refused. */
  readonly seq?: number | undefined;
}

/** An event as the journal has it. */
export class JournalEvent {
  constructor(
    readonly id: string,
    /** Its number within the aggregate. */
    readonly seq: number,
    /** Its place in the journal's order. */
    readonly position: string,
    readonly aggregate: string | undefined,
    readonly kind: string | undefined,
    /** When it happened. */
    readonly time: string | undefined,
    /** When it was stored. */
    readonly at: string,
    /** Its content as JSON text; numbers have all their digits. Undefined if it is not JSON. */
    readonly payloadJson: string | undefined,
    /** Its content, to the byte. */
    readonly payloadBytes: Uint8Array,
    readonly headers: ReadonlyArray<readonly [string, Uint8Array]>,
  ) {}

  /** Its content as a value; undefined if it is not JSON. */
  get payload(): unknown {
    return this.payloadJson === undefined ? undefined : JSON.parse(this.payloadJson);
  }
}

/** Where an event is stored. */
export interface Placed {
  readonly id: string;
  readonly seq: number;
  readonly position: string;
  /** `new`: stored now; `repeat`: it was there already; `kept`: another event is there under its id. */
  readonly placing: "new" | "repeat" | "kept";
}

/** What was appended. */
export interface Appended {
  readonly lastSeq: number;
  readonly events: readonly Placed[];
  /** Set if an id was used before for another content, and the server keeps the original. */
  readonly warning: string | undefined;
}

/** Events in the journal's order. */
export interface Events {
  readonly events: readonly JournalEvent[];
  /** Where to read on: the `after` of the next call. */
  readonly next: string;
  /** Whether more may follow at once. */
  readonly more: boolean;
}

/** The events of an aggregate. */
export interface AggregateEvents {
  readonly aggregate: string;
  /** The seq of its last event; 0: it has none. */
  readonly lastSeq: number;
  readonly events: readonly JournalEvent[];
  /** Whether more follow: read on from the seq after the last one. */
  readonly more: boolean;
}

function bodyOf(event: NewEvent, aggregate: string, tenant: string | null): string {
  const id = checkName("the event's id", event.id);
  const odd = (message: string): Invalid => new Invalid("the event", `${JSON.stringify(id)} ${message}`);
  // What the request has no field for must not be lost in silence.
  if (event.aggregate !== undefined && event.aggregate !== aggregate) throw odd("names another aggregate than the append");
  if (event.tenant !== undefined && event.tenant !== tenant) throw odd("names another tenant than the client");
  if (event.seq !== undefined) throw odd("has a seq, which the server gives; say what is there with `expected`");
  if (event.kind !== undefined) checkName("the event's kind", event.kind);
  const headers = event.headers?.map(([name, value]) =>
    typeof value === "string" ? { name, value } : { name, value_base64: base64(value) },
  );
  const head = JSON.stringify({ id, kind: event.kind, time: event.time, headers });
  const payload = payloadOf(event.payload);
  return payload === undefined ? head : `${head.slice(0, -1)},${payload}}`;
}

/**
 * The server stores the bytes of a JSON value, without the white space around it. What has some, and a null, which
 * many a parser on the way takes for no payload, is sent as bytes.
 */
function payloadOf(payload: unknown): string | undefined {
  if (payload === undefined) return undefined;
  if (payload instanceof Uint8Array) return `"payload_base64":"${base64(payload)}"`;
  const json = stringify("the payload", payload);
  if (json.trim() === json && json !== "null") return `"payload":${json}`;
  return `"payload_base64":"${base64(new TextEncoder().encode(json))}"`;
}

function readEvent(text: string): JournalEvent {
  const raw = members(text);
  const word = (name: string): string | undefined => {
    const value: unknown = JSON.parse(raw.get(name) ?? "null");
    return value === null ? undefined : String(value);
  };
  const json = raw.get("payload");
  const encoded = word("payload_base64");
  const bytes = encoded === undefined ? new TextEncoder().encode(json ?? "") : unbase64(encoded);
  const headers = (JSON.parse(raw.get("headers") ?? "[]") as HeaderBody[]).map(
    ({ name, value, value_base64 }) =>
      [name, typeof value === "string" ? new TextEncoder().encode(value) : unbase64(value_base64 ?? "")] as const,
  );
  const text_of = (name: string): string => String(JSON.parse(member(raw, name)));
  return new JournalEvent(
    text_of("id"),
    whole(member(raw, "seq")),
    text_of("position"),
    word("aggregate"),
    word("kind"),
    word("time"),
    text_of("at"),
    json,
    bytes,
    headers,
  );
}

/** Appends events to an aggregate: all of them, or none. */
export function append(tenant: string | null, aggregate: string, events: readonly NewEvent[], expected: Expected): Call<Appended> {
  checkName("the aggregate", aggregate);
  if (events.length === 0) throw new Invalid("the events", "there are none; append at least one");
  if (expected !== "new" && expected !== "any" && !(Number.isSafeInteger(expected) && expected >= 0)) {
    throw new Invalid("expected", `it is ${String(expected)}; it must be a whole number from 0 on, "new" or "any"`);
  }
  const bodies = events.map((event) => bodyOf(event, aggregate, tenant)).join(",");
  return {
    what: `appending to ${JSON.stringify(aggregate)}`,
    route: "POST /v1/journal/append",
    body: `{"aggregate":${JSON.stringify(aggregate)},"expected":${JSON.stringify(expected)},"events":[${bodies}]}`,
    read: (reply) => {
      const answer = JSON.parse(reply.body) as AppendAnswer;
      const same = answer.events.length === events.length && answer.events.every((placed, at) => placed.id === events[at]?.id);
      if (!same) throw new Odd("the answer is about other events");
      const placed = answer.events.map(({ id, seq, position, placing }) => ({ id, seq, position, placing: placing as Placed["placing"] }));
      return { lastSeq: answer.last_seq, events: placed, warning: answer.warning ?? undefined };
    },
  };
}

/** Reads events in the journal's order. */
export function read(after: string | undefined, limit: number, waitMs: number): Call<Events> {
  if (!(waitMs >= 0 && waitMs <= 30_000)) throw new Invalid("the wait", `it is ${waitMs} ms; it must be 0 to 30000`);
  return {
    what: "reading the journal",
    route: "GET /v1/journal/events",
    query: { after, limit: checkLimit(limit), wait_ms: Math.round(waitMs) || undefined },
    waitMs,
    read: (reply) => {
      const raw = members(reply.body);
      const events = elements(member(raw, "events")).map(readEvent);
      return { events, next: String(JSON.parse(member(raw, "next"))), more: member(raw, "more") === "true" };
    },
  };
}

/** Reads the events of an aggregate. */
export function readAggregate(aggregate: string, fromSeq: number, limit: number): Call<AggregateEvents> {
  checkName("the aggregate", aggregate);
  return {
    what: `reading ${JSON.stringify(aggregate)}`,
    route: "GET /v1/journal/aggregates/{aggregate}",
    path: { aggregate },
    query: { from: fromSeq, limit: checkLimit(limit) },
    read: (reply) => {
      const raw = members(reply.body);
      if (JSON.parse(member(raw, "aggregate")) !== aggregate) throw new Odd("the answer is about another aggregate");
      const events = elements(member(raw, "events")).map(readEvent);
      return { aggregate, lastSeq: whole(member(raw, "last_seq")), events, more: member(raw, "more") === "true" };
    },
  };
}
