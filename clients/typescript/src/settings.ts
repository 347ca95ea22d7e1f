import { Invalid } from "./errors.js";

/** The settings of a client: numbers above 0. */
export interface ClientSettings {
  /** How long a call may take, with all its attempts and pauses. */
  readonly deadlineMs: number;
  /**
   * How long one attempt may take. The server goes on with a write whose attempt took too long; the next attempt
   * gets its answer.
   */
  readonly attemptTimeoutMs: number;
  /** The longest pause after a first attempt; doubles with each. */
  readonly backoffBaseMs: number;
  /** The longest pause. */
  readonly backoffMaxMs: number;
  /** The longest `Retry-After` to honour; pauses grow on top of it. One beyond the deadline ends the call. */
  readonly retryAfterMaxMs: number;
  /** The largest request. */
  readonly bodyBytesMax: number;
  /** The largest answer. */
  readonly answerBytesMax: number;
}

export const DEFAULT_SETTINGS: ClientSettings = {
  deadlineMs: 60_000,
  attemptTimeoutMs: 20_000,
  backoffBaseMs: 100,
  backoffMaxMs: 10_000,
  retryAfterMaxMs: 3_600_000,
  bodyBytesMax: 1 << 20,
  answerBytesMax: 32 << 20,
};

/** The defaults, with what was chosen in their place; `undefined` chooses nothing. */
export function settingsOf(chosen: Partial<ClientSettings> = {}): ClientSettings {
  const given = Object.entries(chosen).filter(([, value]) => value !== undefined);
  const settings: ClientSettings = { ...DEFAULT_SETTINGS, ...Object.fromEntries(given) };
  for (const [name, value] of Object.entries(settings)) {
    if (typeof value !== "number" || !Number.isFinite(value) || value <= 0) {
      throw new Invalid(`the setting ${name}`, `it is ${String(value)}; it needs to be a number above 0`);
    }
  }
  return settings;
}
