// Asks the server. Whatever is refused is an Error with the problem's own sentence.

export class Refused extends Error {
  constructor(readonly status: number, readonly code: string, detail: string) {
    super(detail);
  }
}

/** The server did not answer at all. */
export class Away extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

async function answered(asked: Promise<Response>): Promise<Response> {
  let response: Response;
  try {
    response = await asked;
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Away();
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  const detail = typeof problem.detail === "string" ? problem.detail : `the server answered ${response.status}`;
  throw new Refused(response.status, String(problem.code ?? ""), detail);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await answered(fetch(path, { signal, headers: { accept: "application/json" } }));
  return response.json();
}

export async function post<T>(path: string, body?: unknown): Promise<T> {
  const sent = body === undefined ? {} : { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  const response = await answered(fetch(path, { method: "POST", ...sent }));
  return response.status === 204 ? (undefined as T) : response.json();
}

export interface ServerEvent {
  name: string;
  data: string;
}

/** Server-sent events by fetch: unlike EventSource it says why it was refused. */
export async function* events(path: string, signal: AbortSignal): AsyncGenerator<ServerEvent> {
  const response = await answered(fetch(path, { signal, headers: { accept: "text/event-stream" } }));
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const event = { name: "message", data: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      yield event;
    }
  }
}

export interface Session {
  who: string;
  role: string;
  tenant: string | null;
  scopes: string[] | null;
  whole: boolean;
  local: boolean;
  command: string | null;
  demo: boolean;
  version: string;
}

export interface Scope {
  tenant: string | null;
  scope: string;
  states: Record<string, number>;
  held: number;
}

export interface Overview {
  now: string;
  age_s: number;
  took_s: number;
  scopes: Scope[];
  keys: { open: number; swept_at: string | null } | null;
  journal: { events: number; aggregates: number; exact: boolean; last: string | null } | null;
  relay: { leads: boolean; published: number; position: string; behind: number; parked: number; lag_s: number } | null;
  relay_state: string | null;
  bus: { bus: string; topic: string; lag: { scope: string; records: number }[] } | null;
  read_model: { feed: string | null; last_sync_at: string | null; stale: boolean; rejected: number | null } | null;
  prevented: { since: string; count: number; layers: Record<string, number>; valued: number; value: string } | null;
  counters: Record<string, Record<string, number>> | null;
}

export interface Step {
  at: string | null;
  layer: string;
  name: string | null;
  event: string | null;
  seq: number | null;
  what: string;
  facts: Record<string, unknown>;
}

export interface Explanation {
  of: { event?: string; key?: string; aggregate?: string };
  tenant: string | null;
  asked_at: string;
  steps: Step[];
  scopes: { scope: string; what: string }[];
  stores: { store: string; unreachable: boolean; message: string }[];
  not_recorded: string;
}

export interface Group {
  tenant: string | null;
  scope: string;
  pattern: string;
  reason: string;
  count: number;
  first_at: string;
  last_at: string;
  ids: string[];
}

export interface Previewed {
  id: string;
  aggregate: string | null;
  seq: number | null;
  time: string | null;
  token: number;
  reason: string | null;
  changes: boolean;
  runs: boolean;
  outcome: string;
}

export interface Waiting {
  tenant: string | null;
  scope: string;
  aggregate: string;
  last_seq: number | null;
  done_up_to: number | null;
  head: number | null;
  head_state: string | null;
  waiting: number[];
  what: string;
}

export interface Retention {
  now: string;
  age_s: number;
  ledger_retention_s: number;
  key_retention_s: number;
  audit_retention_s: number;
  weeks: { week: string; ends_at: string | null; drops_after: string | null; removes: number | null; entries: number; bytes: number | null }[];
  dropped: { week: string; dropped_at: string }[];
  entries: number;
  held: number;
  sweep_removes: number;
  sweep_timeless: number;
  sweep_paused_until: string | null;
  keys_swept_at: string | null;
  journal_oldest_at: string | null;
}

export interface Demo {
  elapsed_s: number;
  events: number;
  effects: number;
  kills: number;
  frozen: number;
  fenced: number;
  copied: number;
  retried: number;
  caught: number;
  news: { at_s: number; said: string }[];
}

export interface Doctor {
  findings: { level: string; check: string; message: string }[];
  checked_at: string;
}
