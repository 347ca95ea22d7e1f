// Dead letters: what failed for good, to be looked at, run again or given up.

import type { ChangedAnswer, EntriesAnswer } from "./api.js";
import { Invalid } from "./errors.js";
import type { Call } from "./exchange.js";
import { checkLimit } from "./records.js";
import { checkName } from "./text.js";

/** Which dead letters to list. */
export interface EntriesOptions {
  readonly scope?: string | undefined;
  readonly id?: string | undefined;
  readonly aggregate?: string | undefined;
  /** With headers and payload. */
  readonly payload?: boolean;
  readonly limit?: number;
  /** `next` of the page before. */
  readonly after?: string | undefined;
}

/** Which dead letters to change, and why. */
export interface ChangeOptions {
  /** Why, for the audit row. */
  readonly reason: string;
  /** The events; or `all`. */
  readonly ids?: readonly string[];
  /** Every dead letter of the scope. */
  readonly all?: boolean;
  /** Say what would happen, change nothing. */
  readonly dryRun?: boolean;
  /** With `all`: at most this many. */
  readonly limit?: number;
  /** With `all`: `next` of the answer before, to go on also behind what could not be changed and has a `problem`. */
  readonly after?: string | null | undefined;
}

/** Lists dead letters. */
export function entries(options: EntriesOptions): Call<EntriesAnswer> {
  const { scope, id, aggregate, after } = options;
  const payload = options.payload === true ? "true" : undefined;
  return {
    what: "listing dead letters",
    route: "GET /v1/dead",
    query: { scope, id, aggregate, after, limit: checkLimit(options.limit ?? 100), payload },
    read: (reply) => {
      const answer = JSON.parse(reply.body) as EntriesAnswer;
      if (!Array.isArray(answer.entries)) throw new SyntaxError("it has no entries");
      return answer;
    },
  };
}

/** Runs dead letters again, or gives them up. */
export function change(how: "redrive" | "drop", scope: string, options: ChangeOptions): Call<ChangedAnswer> {
  const { reason, ids = [], all = false, dryRun = false, limit, after } = options;
  if (all === ids.length > 0) throw new Invalid("the dead letters", "name their ids, or say all: true, and not both");
  checkName("the scope", scope);
  for (const id of ids) checkName("the event's id", id);
  const body: Record<string, unknown> = { scope, reason, all, dry_run: dryRun };
  if (ids.length > 0) body["ids"] = ids;
  if (limit !== undefined) body["limit"] = checkLimit(limit);
  if (after !== undefined && after !== null) body["after"] = after;
  return {
    what: `${how} of dead letters of ${JSON.stringify(scope)}`,
    route: how === "redrive" ? "POST /v1/dead/redrive" : "POST /v1/dead/drop",
    body: JSON.stringify(body),
    // An event that is not dead any more may have been changed by the attempt whose answer was lost.
    conflictInDoubt: true,
    // A second attempt would take the next ones.
    once: all && !dryRun,
    read: (reply) => {
      const answer = JSON.parse(reply.body) as ChangedAnswer;
      if (!Array.isArray(answer.entries)) throw new SyntaxError("it has no entries");
      return answer;
    },
  };
}
