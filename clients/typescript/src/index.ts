/**
 * A client of `hapax serve`: a retry never writes twice.
 *
 *     import { Client } from "@hapax/client";
 *
 *     const client = new Client("http://127.0.0.1:7070");
 *     const { record, replayed } = await client.data("orders").create({ amount: 7 });
 *
 * Each write has a key, made before the first attempt and sent with every one. The client repeats what may be
 * repeated; it decides by the `code` of the server's problem, never by the status. A write that ends without an
 * answer comes back with its key: `error.prepared`.
 */

export type { Group, Measure, QuestionOptions, RecordsOptions, Tally, TallyOptions, Write } from "./analytics.js";
export type * from "./api.js";
export { Claim, type ClaimOptions, ClaimRequest, Lease, type NotClaimed } from "./claims.js";
export { Analytics, Client, type ClientOptions, Data, DeadLetters, Journal } from "./client.js";
export {
  Answered,
  Conflict,
  Denied,
  Fenced,
  HapaxError,
  Invalid,
  KeyExpired,
  KeyMismatch,
  LeaseLost,
  Mismatch,
  NotFound,
  OutcomeUnknown,
  type Problem,
  Refused,
  Unavailable,
} from "./errors.js";
export type { CallOptions } from "./exchange.js";
export { type AggregateEvents, type Appended, type Events, type Expected, JournalEvent, type NewEvent, type Placed } from "./journal.js";
export type { ChangeOptions, EntriesOptions } from "./letters.js";
export { type Operation, PreparedWrite } from "./prepared.js";
export { type Page, type ReadPage, Record_ as Record, type Written } from "./records.js";
export { type ClientSettings, DEFAULT_SETTINGS } from "./settings.js";
export { RawJson } from "./text.js";
export { uuid7, Uuid7Maker } from "./uuid7.js";
