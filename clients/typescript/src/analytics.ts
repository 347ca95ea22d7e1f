// Questions to the read model: records as it has them, and numbers about them.

import type { MetaBody } from "./api.js";
import { Invalid } from "./errors.js";
import type { Call } from "./exchange.js";
import { checkId, checkModule } from "./prepared.js";
import { checkLimit, type ReadPage, readPage, Record_, type Written } from "./records.js";
import { elements, member, members, whole } from "./text.js";

/** A write to wait for: its answer, the record, or its read token. */
export type Write = Written | Record_ | string;

/** What all questions may say. */
export interface QuestionOptions {
  /** Only records written within this time, as `7d`, `24h` or `90s`. */
  readonly since?: string | undefined;
  /** Accept that replaced and deleted versions may count, which is faster on some read models; `meta` says so. */
  readonly approximate?: boolean;
  /** Wait until this write of yours is visible. */
  readonly afterWrite?: Write | undefined;
  /** How long to wait for it; 5000 if it is not said, 30000 at most. */
  readonly waitMs?: number;
}

/** Which records. */
export interface RecordsOptions extends QuestionOptions {
  /** Only records with a greater id: `next` of the page before. */
  readonly after?: string | undefined;
  readonly limit?: number;
}

/** What to compute. Fields are JSON pointers. */
export interface TallyOptions extends QuestionOptions {
  readonly sum?: string | readonly string[];
  readonly min?: string | readonly string[];
  readonly max?: string | readonly string[];
  readonly groupBy?: string | undefined;
}

/** One number of a group. */
export interface Measure {
  readonly measure: "sum" | "min" | "max";
  /** The field, as a JSON pointer. */
  readonly field: string;
  /** The number, rounded to what JavaScript holds; undefined if no record has one. */
  readonly value: number | undefined;
  /** The number with all its digits. */
  readonly exact: string | undefined;
  /** How many records have something else in the field than a number that fits. */
  readonly leftOut: number;
}

/** Records that share a value. */
export interface Group {
  /** That value; null if the field is missing, or if nothing groups. */
  readonly key: unknown;
  readonly count: number;
  readonly measures: readonly Measure[];
}

/** Numbers about records. */
export interface Tally {
  /** By their values; one if nothing groups. */
  readonly groups: readonly Group[];
  /** Whether there are more groups than these. */
  readonly more: boolean;
  /** How current they are. */
  readonly meta: MetaBody;
}

function common(options: QuestionOptions): { query: Record<string, string | number | undefined>; waitMs: number } {
  const { since, afterWrite, waitMs = 5000 } = options;
  const approximate = options.approximate ? "true" : undefined;
  if (!(waitMs >= 0 && waitMs <= 30_000)) throw new Invalid("the wait", `it is ${waitMs} ms; it must be 0 to 30000`);
  if (afterWrite === undefined) return { query: { since, approximate }, waitMs: 0 };
  const record = typeof afterWrite === "object" && "record" in afterWrite ? afterWrite.record : afterWrite;
  const token = typeof record === "string" ? record : record.readToken;
  return { query: { since, approximate, after_write: token, wait_ms: Math.round(waitMs) }, waitMs };
}

/** Records as the read model has them. */
export function records<P>(module: string, options: RecordsOptions): Call<ReadPage<P>> {
  const after = options.after === undefined ? undefined : checkId(options.after, "the cursor");
  const { query, waitMs } = common(options);
  return {
    what: `asking for records of ${checkModule(module)}`,
    route: "GET /v1/analytics/modules/{slug}/records",
    path: { slug: module },
    query: { after, limit: checkLimit(options.limit ?? 100), ...query },
    waitMs,
    read: (reply) => readPage<P>(reply.body, module, after),
  };
}

function fields(of: string | readonly string[] | undefined): string | undefined {
  const pointers = of === undefined ? [] : typeof of === "string" ? [of] : of;
  for (const pointer of pointers) {
    if (pointer.includes(",")) throw new Invalid("the field", `"${pointer}" has a comma, which separates fields in the request`);
  }
  return pointers.join(",") || undefined;
}

/** Counts records, and computes numbers of their fields. */
export function tally(module: string, options: TallyOptions): Call<Tally> {
  const { query, waitMs } = common(options);
  return {
    what: `counting records of ${checkModule(module)}`,
    route: "GET /v1/analytics/modules/{slug}/tally",
    path: { slug: module },
    query: { sum: fields(options.sum), min: fields(options.min), max: fields(options.max), group_by: options.groupBy, ...query },
    waitMs,
    read: (reply) => {
      const raw = members(reply.body);
      const groups = elements(member(raw, "groups")).map(readGroup);
      return { groups, more: member(raw, "more") === "true", meta: JSON.parse(member(raw, "meta")) as MetaBody };
    },
  };
}

function readGroup(text: string): Group {
  const raw = members(text);
  const measures = elements(member(raw, "measures")).map((one): Measure => {
    const of = members(one);
    const exact = member(of, "value") === "null" ? undefined : member(of, "value");
    return {
      measure: JSON.parse(member(of, "measure")) as Measure["measure"],
      field: String(JSON.parse(member(of, "field"))),
      value: exact === undefined ? undefined : Number(exact),
      exact,
      leftOut: whole(member(of, "left_out")),
    };
  });
  return { key: JSON.parse(member(raw, "key")), count: whole(member(raw, "count")), measures };
}
