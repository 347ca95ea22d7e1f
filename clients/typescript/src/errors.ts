// What a call can end with, by what a caller can do about it.

import type { ClaimRequest } from "./claims.js";
import type { PreparedWrite } from "./prepared.js";

const DETAIL_CHARS_MAX = 1000;
const FIELDS_MAX = 32;

/** The text on one line, with everything escaped that does not print as itself. */
export function visible(text: string): string {
  return text.replace(/[\p{C}\u2028\u2029]/gu, (char) => `\\u{${(char.codePointAt(0) ?? 0).toString(16)}}`);
}

/** What a server answered instead of what it was asked for (RFC 9457). */
export interface Problem {
  /** Its stable name; `docs/errors/<code>.md` explains it. */
  readonly code: string;
  /** The HTTP status. Decide by the code. */
  readonly status: number;
  /** One sentence: what is wrong and what the limit is. */
  readonly detail: string;
  /** Of a reused key: the fields in which the two requests differ, if the server tells. */
  readonly fields: readonly string[];
  /** Of a reused key: the parts in which they differ, if the server tells. */
  readonly differs: readonly string[];
  /** Of a conflict: the seq that was expected, if it is a number. */
  readonly expected?: number | undefined;
  /** Of a conflict: the seq that was found, if it is a number. */
  readonly actual?: number | undefined;
}

/** Reads the body of a problem. Undefined if it is none of the server's: it has no code. */
export function parseProblem(status: number, body: unknown): Problem | undefined {
  if (typeof body !== "object" || body === null) return undefined;
  const of = body as Record<string, unknown>;
  if (typeof of["code"] !== "string" || !/^[a-z0-9-]{1,64}$/.test(of["code"])) return undefined;
  const detail = [...String(of["detail"] || of["title"] || "")].slice(0, DETAIL_CHARS_MAX).join("");
  const fields = texts(of["fields"]);
  const [expected, actual] = [number(of["expected"]), number(of["actual"])];
  return { code: of["code"], status, detail: visible(detail), fields, differs: texts(of["differs"]), expected, actual };
}

function texts(value: unknown): string[] {
  return Array.isArray(value) ? value.slice(0, FIELDS_MAX).map(String) : [];
}

/** A number, or a text that ends in one (`seq 7`). */
function number(value: unknown): number | undefined {
  const found = typeof value === "string" && /(^| )\d{1,16}$/.test(value) ? Number(value.split(" ").at(-1)) : value;
  return typeof found === "number" && Number.isSafeInteger(found) ? found : undefined;
}

/** Why a call did not succeed. The client has repeated what may be repeated before it throws one. */
export class HapaxError extends Error {
  /** The server's problem, if it answered with one. */
  problem?: Problem | undefined;
  /** The write that this is about, with its key. If the error is in doubt, store it and send it again. */
  prepared?: PreparedWrite | undefined;
  /** The request of a claim. Sent again (`claimAgain`), it gets the run that a lost answer has granted. */
  request?: ClaimRequest | undefined;
  /** How often the server was asked. */
  attempts = 0;
  protected doubt = false;

  override get name(): string {
    return this.constructor.name;
  }

  /** A stable name for this kind of error; `docs/errors/<code>.md` explains it. */
  get code(): string {
    return this.problem?.code ?? "unavailable";
  }

  /**
   * Whether the call may have taken effect: an attempt got no answer, in this call or in an earlier one of the
   * same prepared write. Sending the same prepared write again is safe and finds out; a new one could write twice.
   */
  get inDoubt(): boolean {
    return this.doubt;
  }

  /** Whether the same call may succeed later without any change. */
  get isRetryable(): boolean {
    return false;
  }
}

/** The input breaks a rule, and nothing was sent. */
export class Invalid extends HapaxError {
  constructor(what: string, problem: string) {
    super(`${what} is invalid: ${problem}`);
  }

  override get code(): string {
    return "invalid";
  }
}

/** The server answered with a problem that is not a reason to try again. */
export class Answered extends HapaxError {
  constructor(problem: Problem, doubt: boolean, message = `${problem.code}: ${problem.detail}`) {
    super(message);
    this.problem = problem;
    this.doubt = doubt;
  }
}

/** The record or the aggregate has another seq than expected, or a write is not visible yet. Nothing was changed. */
export class Conflict extends Answered {
  /** The seq that was expected, if it is a number. */
  get expected(): number | undefined {
    return this.problem?.expected;
  }

  /** The seq that was found, if it is a number. */
  get actual(): number | undefined {
    return this.problem?.actual;
  }
}

/** There is no such record or module. */
export class NotFound extends Answered {}

/**
 * The key belongs to another request. If the error is in doubt, that may be this one, sent before by another
 * caller or in other bytes: send the first attempt's bytes with the same token. If it is not, prepare it again.
 */
export class KeyMismatch extends Answered {
  constructor(problem: Problem, doubt: boolean) {
    const { differs, fields } = problem;
    const own = differs.length + fields.length === 0 || (differs.length === 1 && differs[0] === "principal");
    const advice =
      "; it may have taken effect: send exactly the bytes of the first attempt, with the same token " +
      "(a rotated one is the same)";
    super(problem, doubt || own, `${problem.code}: ${problem.detail}${doubt || own ? advice : ""}`);
  }
}

/** The key is older than answers are kept: whether the write was done is not known any more. */
export class KeyExpired extends Answered {
  override get inDoubt(): boolean {
    return true;
  }
}

/** A write with this key began and never ended. Keep it, and send it again once an operator has decided. */
export class OutcomeUnknown extends Answered {
  override get inDoubt(): boolean {
    return true;
  }
}

/** The id of an event was used before for another content. Nothing was changed. */
export class Mismatch extends Answered {}

/**
 * The token no longer holds the lease, and this attempt changed nothing. If the error is in doubt, an earlier
 * attempt may have settled the run before.
 */
export class Fenced extends Answered {}

/** The credentials are missing, wrong or not enough. */
export class Denied extends Answered {}

/** The server refuses the call for another reason; the code says which. */
export class Refused extends Answered {
  override get inDoubt(): boolean {
    return this.doubt || this.code === "answer-too-large"; // it did the work, and could not keep its answer
  }
}

/** No answer of the server came within the deadline. Send the same prepared write again later. */
export class Unavailable extends HapaxError {
  /** Whether the answer was larger than the client reads: it is as large the next time. */
  readonly tooLarge: boolean;
  /** Whether the same call again could do more than the lost one: look at what is there first. */
  readonly repeats: boolean;

  constructor(what: string, attempts: number, doubt: boolean, problem?: Problem, tooLarge = false, repeats = false) {
    const times = attempts === 1 ? "1 attempt" : `${attempts} attempts`;
    super(`unavailable after ${times}: ${what}${doubt ? "; it may have taken effect" : ""}`);
    this.problem = problem;
    this.attempts = attempts;
    this.doubt = doubt;
    this.tooLarge = tooLarge;
    this.repeats = repeats;
  }

  override get isRetryable(): boolean {
    return !this.tooLarge && !this.repeats;
  }
}

/** The lease of a run could not be kept: another worker may run the event. Stop the effect. */
export class LeaseLost extends HapaxError {
  override get code(): string {
    return "lease-lost";
  }
}

const BY_CODE = new Map<string, new (problem: Problem, doubt: boolean) => Answered>([
  ["conflict", Conflict],
  ["not-found", NotFound],
  ["key-mismatch", KeyMismatch],
  ["key-expired", KeyExpired],
  ["outcome-unknown", OutcomeUnknown],
  ["mismatch", Mismatch],
  ["fenced", Fenced],
  ["unauthenticated", Denied],
  ["forbidden", Denied],
  ["host-forbidden", Denied],
  ["origin-forbidden", Denied],
]);

/** The meaning of a problem that is not a reason to try again. */
export function errorOf(problem: Problem, doubt: boolean, conflictInDoubt: boolean): HapaxError {
  const Kind = BY_CODE.get(problem.code) ?? Refused;
  // The server looked the key or the id up before it answered so.
  const settled = Kind === Conflict || Kind === Mismatch;
  return new Kind(problem, doubt && (conflictInDoubt || !settled));
}
