// The types of the API, written by clients/generate from the server's description. Do not edit.

/** Every route. */
export type Route =
  | "DELETE /v1/modules/{slug}/records/{id}"
  | "DELETE /v1/tokens/{id}"
  | "GET /healthz"
  | "GET /metrics"
  | "GET /readyz"
  | "GET /v1/analytics/modules/{slug}/records"
  | "GET /v1/analytics/modules/{slug}/tally"
  | "GET /v1/analytics/status"
  | "GET /v1/audit"
  | "GET /v1/dead"
  | "GET /v1/dead/groups"
  | "GET /v1/doctor"
  | "GET /v1/explain"
  | "GET /v1/held"
  | "GET /v1/info"
  | "GET /v1/journal/aggregates/{aggregate}"
  | "GET /v1/journal/events"
  | "GET /v1/keys"
  | "GET /v1/keys/{key}"
  | "GET /v1/lost"
  | "GET /v1/modules/{slug}/records"
  | "GET /v1/modules/{slug}/records/{id}"
  | "GET /v1/overview"
  | "GET /v1/overview/live"
  | "GET /v1/parked"
  | "GET /v1/processed"
  | "GET /v1/retention"
  | "GET /v1/session"
  | "GET /v1/stats"
  | "GET /v1/tokens"
  | "GET /v1/waiting"
  | "POST /v1/claims"
  | "POST /v1/claims/batch"
  | "POST /v1/claims/done"
  | "POST /v1/claims/done/batch"
  | "POST /v1/claims/extend"
  | "POST /v1/claims/fail"
  | "POST /v1/claims/release"
  | "POST /v1/dead/drop"
  | "POST /v1/dead/preview"
  | "POST /v1/dead/redrive"
  | "POST /v1/journal/append"
  | "POST /v1/login"
  | "POST /v1/logout"
  | "POST /v1/modules/{slug}/records"
  | "POST /v1/parked/release"
  | "POST /v1/tokens"
  | "POST /v1/tokens/{id}/rotate"
  | "PUT /v1/modules/{slug}/records/{id}";

/** The codes of problems; `docs/errors/<code>.md` explains each. */
export const CODES: ReadonlySet<string> = new Set([
  "answer-erased",
  "answer-too-large",
  "body-too-large",
  "body-unreadable",
  "config",
  "conflict",
  "contended",
  "corrupt",
  "fenced",
  "forbidden",
  "handler-failed",
  "handler-timeout",
  "head-too-large",
  "host-forbidden",
  "internal",
  "invalid",
  "json-invalid",
  "key-expired",
  "key-invalid",
  "key-mismatch",
  "key-missing",
  "key-running",
  "media-type",
  "method-not-allowed",
  "mismatch",
  "not-built-in",
  "not-found",
  "not-ready",
  "origin-forbidden",
  "outcome-unknown",
  "overloaded",
  "precondition-required",
  "rate-limited",
  "refused",
  "request-timeout",
  "route-unknown",
  "schema",
  "transaction-in-use",
  "transaction-missing",
  "unauthenticated",
  "unavailable",
  "unsupported",
  "week-missing",
]);

/** What comes after a failure. */
export type AfterFailure = "retry" | "dead";

/** The events of an aggregate. */
export interface AggregateAnswer {
  /** The aggregate. */
  aggregate: string;
  /** The events, in order. */
  events: Array<EventAnswer>;
  /** The seq of its last event; 0: it has none. */
  last_seq: number;
  /** Whether more follow: read on from the seq after the last one. */
  more: boolean;
}

/** What was appended. */
export interface AppendAnswer {
  /** The aggregate. */
  aggregate: string;
  /** The place of each event, in their order. */
  events: Array<PlacedAnswer>;
  /** The highest of the seqs. */
  last_seq: number;
  /** Set if an id was used before for other content, which was kept (`journal.mismatch = warn`). */
  warning?: string | null;
}

/** Events to append to one aggregate: all of them, or none. */
export interface AppendBody {
  /** The aggregate. */
  aggregate: string;
  /** The events, in the order in which they are numbered. */
  events: Array<EventBody>;
  expected?: ExpectedBody | null;
}

/** An audit row. */
export interface AuditAnswer {
  /** What. */
  action: string;
  /** When. */
  at: string;
  /** What else there is to say. */
  details: string;
  /** Its number. */
  number: number;
  /** Why. */
  reason: string;
  /** To what. */
  target: string;
  /** Who. */
  who: string;
}

/** Audit rows. */
export interface AuditPageAnswer {
  /** Ask for what is before this number; none: this was the last page. */
  before?: number | null;
  /** Newest first. */
  rows: Array<AuditAnswer>;
}

/** The bus. */
export interface BusOverview {
  /** What it is. */
  bus: string;
  /** The groups that have committed something there. */
  lag: Array<LagAnswer>;
  /** The topic to which the relay publishes. */
  topic: string;
}

/** Which entries to change, and why. */
export interface ChangeBody {
  /** With `all`, for dead letters: go on after an answer, with its `next`. */
  after?: string | null;
  /** With `all`: only of this aggregate. */
  aggregate?: string | null;
  /**
   * Every event of the scope that matches the filters below, up to `limit`. A dead letter that cannot be changed
   * stays as it is and says why.
   */
  all?: boolean;
  /** Say what would happen, change nothing. */
  dry_run?: boolean;
  how?: ReleaseHow | null;
  /**
   * The events; or `all`. A release that resumes also takes a dead event that others wait behind, as its preview
   * names it.
   */
  ids?: Array<string>;
  /** With `all`: at most this many. */
  limit?: number | null;
  /** Redrive: also events whose aggregate has moved past them. They then run without order. */
  out_of_order?: boolean;
  /** With `all`: only dead letters whose reason has this pattern, as `GET /v1/dead/groups` says it. */
  pattern?: string | null;
  /** Why, for the audit row. */
  reason: string;
  /** Whose effect it is. */
  scope: string;
  /** Whose data, for those who see all tenants; unset: the caller's. */
  tenant?: string | null;
  /** The event's time (RFC 3339), where the ledger's identity includes it. */
  time?: string | null;
  /**
   * With `ids`: the token that each entry had when it was looked at (`POST /v1/dead/preview`). Then each event is
   * changed for itself: one that has another token by now, or that cannot be changed, stays as it is and says why.
   */
  tokens?: Record<string, unknown>;
  /** With `all`: only from this topic. */
  topic?: string | null;
}

/** What was changed. */
export interface ChangedAnswer {
  /** Whether nothing was changed, because only that was asked. */
  dry_run: boolean;
  /** Each entry. */
  entries: Array<ChangedEntry>;
  /** Whether more match: send the request again, with `next` if there is one. */
  more: boolean;
  /** Send it as `after` to go on behind these, also behind what stayed as it was; only for dead letters. */
  next?: string | null;
}

/** What was changed in one entry. */
export interface ChangedEntry {
  /** The entry after. */
  after?: Record<string, unknown> | null;
  /** The entry before. */
  before?: Record<string, unknown> | null;
  /** The event. */
  id: string;
  /**
   * Whether it runs only when it is delivered again: its bytes are not held, or it was claimed without a topic, so
   * that no consumer is known to take it up. Publish it again.
   */
  needs_delivery: boolean;
  problem?: ProblemBody | null;
  /** What was done: `redrive`, `retry`, `drop` or `skip`; or would be done. */
  what: string;
}

/** What one check found. */
export interface CheckAnswer {
  /** What was checked. */
  check: string;
  /** `fine`, `warning`, `refusal` (a promise cannot be kept) or `unreachable`. */
  level: string;
  /** What was found, in a sentence. */
  message: string;
}

/** What became of a claim. Only with `claimed` may the event run. */
export interface ClaimAnswer {
  /** Since when it has been in that state; or when a retry is due. */
  at?: string | null;
  /** Which run this is, counted from 1. */
  attempt?: number | null;
  /** How many runs it has had. */
  attempts?: number | null;
  /** The event. */
  id: string;
  /**
   * How long the lease lasts from the moment at which the ledger granted it: count from when the claim was sent,
   * by a clock of your own. None for an at-most-once claim whose end is not reported.
   */
  lease_ms?: number | null;
  /**
   * `claimed`, `duplicate`, `busy`, `retry_later`, `wait`, `stale`, `parked`, `dead`, `mismatch` or `too_old`; in
   * a batch also `error`.
   */
  outcome: string;
  problem?: ProblemBody | null;
  /** The seq of its aggregate that is in the way, or the last one done. */
  seq?: number | null;
  /** The event's state before. */
  state?: string | null;
  /** Whether the last run's process died, so that this one should run alone. */
  suspect?: boolean | null;
  /** The fencing token, if it is claimed. Settle with it; pass it to what dedups or fences. */
  token?: number | null;
  /** When the lease (of this claim, or of the one that is in the way) ends, by the ledger's clock. */
  until?: string | null;
}

/** What became of many claims. */
export interface ClaimBatchAnswer {
  /** One for each claim, in their order. */
  outcomes: Array<ClaimAnswer>;
}

/** Many claims. */
export interface ClaimBatchBody {
  /** The claims. */
  claims: Array<ClaimBody>;
  /** A name for this attempt, as that of a single claim, for those of the claims that have none. */
  request_id?: string | null;
}

/** A request for the right to run an event. */
export interface ClaimBody {
  /** The fingerprint itself, instead of the content: 32 hexadecimal digits. */
  fingerprint?: string | null;
  /** The event's id. */
  id: string;
  /** The event's kind. */
  kind?: string | null;
  /**
   * How long the lease lasts unless it is extended; at most once: within how long the end will be reported (unset:
   * it will not).
   */
  lease_ms?: number | null;
  /** JSON to store with the entry. */
  metadata?: unknown;
  /** What the claimer intends to do. */
  mode?: ClaimMode;
  /** The event's content. The ledger keeps its fingerprint, to notice an id that is used again. */
  payload?: unknown;
  /**
   * A name for this attempt, unique in the world (best a UUID). The same claim sent again with it, because the
   * answer was lost, gets the same token. Two workers must not share one. While an open transaction holds the
   * event, a claim with a name is the problem `contended` and not `busy`: that transaction may be its own first
   * try.
   */
  request_id?: string | null;
  /** Whose effect it is: the name of a handler. */
  scope: string;
  /** The event's time (RFC 3339), where the ledger's identity includes it. */
  time?: string | null;
}

/** What the claimer intends to do. */
export type ClaimMode = "lease" | "at_most_once";

/** How many entries of a scope are in a state. */
export interface CountAnswer {
  /** How many. */
  count: number;
  /** Whose effect. */
  scope: string;
  /** The state. */
  state: string;
  /** Whose data. */
  tenant?: string | null;
}

/** A record to create. */
export interface CreateBody {
  /** Its id; unset: a new UUIDv7. */
  id?: string | null;
  /** Its content: a JSON object. */
  payload: Record<string, unknown>;
}

/** A token to make. */
export interface CreateTokenBody {
  /** After how many seconds it ends by itself; none: never. It never outlives the token that makes it. */
  expires_s?: number | null;
  /** Who or what uses it. */
  name: string;
  /** Why, for the audit row. */
  reason?: string;
  /** `read`, `write` or `admin`; no more than the caller's. */
  role: string;
  /** Only these scopes; none means all. */
  scopes?: Array<string> | null;
  /** Whose data, if not the caller's: for an operator without a tenant. */
  tenant?: string | null;
  /**
   * The token itself, made by the client (`hapax token generate`): the same request sent again, because the answer
   * was lost, then makes no second one. Only for an operator without a tenant and for all scopes: whether an id is
   * taken says something about other tenants.
   */
  token?: string | null;
}

/** Dead letters that failed alike. */
export interface DeadGroup {
  /** How many. */
  count: number;
  /** When the first of them died. */
  first_at: string;
  /** Some of them, the latest first. */
  ids: Array<string>;
  /** When the latest of them died. */
  last_at: string;
  /** The reason, with `#` for ids and long numbers, which differ. */
  pattern: string;
  /** The reason of the latest one. */
  reason: string;
  /** Whose effect. */
  scope: string;
  /** Whose data. */
  tenant?: string | null;
}

/** What the checks found. */
export interface DoctorAnswer {
  /** When the checks were made. */
  checked_at: string;
  /** Each check. */
  findings: Array<CheckAnswer>;
}

/** Many runs that took effect. */
export interface DoneBatchBody {
  /** The runs. */
  claims: Array<DoneBody>;
}

/** A run that took effect. */
export interface DoneBody {
  /** The event. */
  id: string;
  /** JSON to store, replacing that of the claim. */
  metadata?: unknown;
  /** The scope of the claim. */
  scope: string;
  /** The event's time, as in the claim. */
  time?: string | null;
  /** The token of the claim. */
  token: number;
}

/** A week that is gone. */
export interface DroppedWeek {
  /** When it was dropped. */
  dropped_at: string;
  /** The Monday on which it began. */
  week: string;
}

/** A page of entries. */
export interface EntriesAnswer {
  /**
   * The entries: tenant, scope, id, state, token, attempts, times, order, origin, reason. There may be none
   * although there is a next page.
   */
  entries: Array<Record<string, unknown>>;
  /** Where the next page begins; none: this is the last. */
  next?: string | null;
}

/** An event of the journal. */
export interface EventAnswer {
  /** Its aggregate. */
  aggregate?: string | null;
  /** When it was appended, by the journal's clock. */
  at: string;
  /** The fingerprint of its content. */
  fingerprint: string;
  /** Its headers. */
  headers?: Array<HeaderBody>;
  /** Its id. */
  id: string;
  /** What kind of fact it is. */
  kind?: string | null;
  /** Its content, if it is JSON. */
  payload?: unknown;
  /** Its content in base64, if it is not JSON. */
  payload_base64?: string | null;
  /** Its place in the journal's order. */
  position: string;
  /** Its number within the aggregate. */
  seq: number;
  /** Whose data it is. */
  tenant?: string | null;
  /** When it happened. */
  time?: string | null;
}

/** An event to append. */
export interface EventBody {
  /** Its headers, in order. */
  headers?: Array<HeaderBody>;
  /** Its id. The same event sent again is stored once. */
  id: string;
  /** What kind of fact it is. Kinds that begin with `record.` are reserved for writes of records. */
  kind?: string | null;
  /**
   * Its content: any JSON, also `null`. An update or delete command (`metadata.kind` is `command`) must say which
   * seq it expects.
   */
  payload?: unknown;
  /** Its content in base64, if it is not JSON. */
  payload_base64?: string | null;
  /** When it happened (RFC 3339). */
  time?: string | null;
}

/** Events in the journal's order. */
export interface EventsAnswer {
  /** Whether reading ends before an event whose writer has not committed yet. */
  at_hole: boolean;
  /** The events. There may be none although there are more: those of other tenants are left out. */
  events: Array<EventAnswer>;
  /** Whether more may follow at once. */
  more: boolean;
  /**
   * Where to read on: the `after` of the next request. To a reader of one tenant it says nothing about the events
   * of others but how far the journal is.
   */
  next: string;
}

/** What an append expects of its aggregate's last seq. */
export type ExpectedBody = number | ExpectedWord;

/** What an append expects, in a word. */
export type ExpectedWord = "new" | "any";

/** The history of an event, of a keyed write or of an aggregate. */
export interface ExplainAnswer {
  /** When the stores were asked. */
  asked_at: string;
  /** What is not recorded, in a sentence. */
  not_recorded: string;
  /** What it is about: `event`, `key` or `aggregate`, with its name. */
  of: Record<string, unknown>;
  /** How each scope stands with the aggregate. */
  scopes: Array<Record<string, unknown>>;
  /**
   * What happened and how it stands, in order: `at`, `layer`, `name` (the scope or the relay), `event`, `seq`,
   * `what` and `facts`.
   */
  steps: Array<Record<string, unknown>>;
  /** What stores said besides: `store`, `message` and whether it was `unreachable`. */
  stores: Array<Record<string, unknown>>;
  /** Whose data. */
  tenant?: string | null;
}

/** A lease to extend. */
export interface ExtendBody {
  /** The event. */
  id: string;
  /** How long it lasts from now. */
  lease_ms?: number | null;
  /** The scope of the claim. */
  scope: string;
  /** The event's time, as in the claim. */
  time?: string | null;
  /** The token of the claim. */
  token: number;
}

/** A run that failed. */
export interface FailBody {
  /** The event. */
  id: string;
  /**
   * The event's content, kept with the dead letter so that it can be run again. Not for an at-most-once claim,
   * which never runs again.
   */
  payload?: unknown;
  /** Why it failed. */
  reason: string;
  /** The scope of the claim. */
  scope: string;
  /** What comes next. */
  then?: AfterFailure;
  /** The event's time, as in the claim. */
  time?: string | null;
  /** The token of the claim. */
  token: number;
}

/** Records that share a value. */
export interface GroupBody {
  /** How many records. */
  count: number;
  /** That value; null if the field is missing, or if nothing groups. */
  key: unknown;
  /** The measures, in the order sum, min, max. */
  measures: Array<MeasureBody>;
}

/** Dead letters by reason. */
export interface GroupsAnswer {
  /** How long ago that was, in seconds. A ledger that takes long to answer is asked less often. */
  age_s: number;
  /** The groups, the largest first. */
  groups: Array<DeadGroup>;
  /** How many dead letters were looked at. */
  looked: number;
  /** Whether there are more groups. */
  more: boolean;
}

/** A header of an event. */
export interface HeaderBody {
  /** Its name. */
  name: string;
  /** Its value, if it is text. */
  value?: string | null;
  /** Its value in base64, if it is not text. */
  value_base64?: string | null;
}

/** The process runs. */
export interface Healthy {
  /** Always `ok`. */
  status: string;
}

/** What this server is. */
export interface InfoAnswer {
  /** How many events one request may have. */
  batch_max: number;
  /** The largest body of a request. */
  body_bytes_max: number;
  /** The bus to which the relay of this server publishes; none if it has no relay. */
  bus?: string | null;
  /** The backend of the journal. */
  journal: string;
  /** How long the answer to a keyed write is kept, in seconds. */
  key_retention_s: number;
  /** The backend of the keys. */
  keys: string;
  /** How long a lease lasts if a claim does not say, in milliseconds. */
  lease_ms: number;
  /** The backend of the ledger. */
  ledger: string;
  /** How long the ledger remembers a settled event, in seconds. */
  ledger_retention_s: number;
  /** The topic to which it publishes. */
  topic?: string | null;
  /** Its version. */
  version: string;
}

/** The journal's numbers. */
export interface JournalStats {
  /** How many aggregates. */
  aggregates: number;
  /** How many events it has. */
  events: number;
  /** Whether these numbers are exact. */
  exact: boolean;
  /** The position of the newest event. */
  last?: string | null;
}

/** What became of a key. */
export interface KeyAnswer {
  answer?: StoredAnswer | null;
  /** When it began, or when it was done. */
  at?: string | null;
  /** The key. */
  key: string;
  /**
   * `running`, `done`, `outcome-unknown` (a person decides), `free` (it failed and may be sent again), `expired`
   * (too old to know) or `unknown` (nobody used it, and no request with it runs).
   */
  state: string;
  /** Until when the request may run, unless it runs in a transaction. */
  until?: string | null;
}

/** A key. */
export interface KeyLine {
  /** When that run began. */
  begun_at: string;
  /** The key. */
  key: string;
  /** When its answer was stored. */
  settled_at?: string | null;
  /** `running`, `outcome-unknown`, `free` or `done`. */
  state: string;
  /** The status of its answer. */
  status?: number | null;
  /** Whose key. */
  tenant?: string | null;
  /** The token of its last run. */
  token: number;
}

/** Keys in order. */
export interface KeysAnswer {
  /** The keys. */
  keys: Array<KeyLine>;
  /** Whether more follow: go on after the last one. */
  more: boolean;
}

/** The keys of writes. */
export interface KeysOverview {
  /** How many have no answer, up to 1000. */
  open: number;
  /** When they were last swept. */
  swept_at?: string | null;
}

/** How far a consumer group is behind. */
export interface LagAnswer {
  /** The records of the relay's topic that the group has not committed. */
  records: number;
  /** The scope, after which its group is named unless configured otherwise. */
  scope: string;
}

/** A page of records. */
export interface ListAnswer {
  /** Where the next page begins, if there may be one: send it as `after`. */
  next?: string | null;
  /** The records, by id. */
  records: Array<RecordBody>;
}

/** A token to log in with. */
export interface LoginBody {
  /** The API token (`hapax token create`). */
  token: string;
}

/** One measure of a group. */
export interface MeasureBody {
  /** The field. */
  field: string;
  /** How many records have something else in the field than a number that fits. */
  left_out: number;
  /** `sum`, `min` or `max`. */
  measure: string;
  /** The number, exactly; null if no record has one. */
  value?: number | null;
}

/** How current an answer is. */
export interface MetaBody {
  /** What an approximate answer may count wrongly; null: nothing. */
  approximate?: string | null;
  /**
   * Every write that was acknowledged before this time is in the answer (RFC 3339, UTC, milliseconds); null:
   * nothing is known yet.
   */
  lastSyncAt?: string | null;
  /** Whether that is unknown, or more than five seconds ago. */
  stale: boolean;
}

/** The path of an event in numbers. */
export interface OverviewAnswer {
  /** How long ago that was, in seconds. A ledger that takes long to count is counted less often. */
  age_s: number;
  bus?: BusOverview | null;
  /** What this process has counted since its start, by metric and label: only for those who see the whole server. */
  counters?: Record<string, unknown> | null;
  journal?: JournalStats | null;
  keys?: KeysOverview | null;
  /** The ledger's clock when the ledger was counted. */
  now: string;
  prevented?: PreventedOverview | null;
  read_model?: ReadModelOverview | null;
  relay?: RelayStats | null;
  /** What the relay does: `starting`, `leads`, `follows` or `failed`; none if it does not run here. */
  relay_state?: string | null;
  /** Entries by scope. */
  scopes: Array<ScopeAnswer>;
  /** How long counting took, in seconds. */
  took_s: number;
}

/** How far a partition was applied. */
export interface PartitionBody {
  /** The offset after the last record that was applied. */
  offset?: number | null;
  /** The partition. */
  partition: number;
  /** The last pulse: everything acknowledged before it is applied. */
  pulse?: string | null;
  /** The topic. */
  topic: string;
}

/** Where an event is stored. */
export interface PlacedAnswer {
  /** The event. */
  id: string;
  original?: EventAnswer | null;
  /**
   * `new`: stored now; `repeat`: it was there already; `kept`: another event is there under its id, and this one
   * was not stored.
   */
  placing: string;
  /** Its place in the journal's order. */
  position: string;
  /** Its number within the aggregate. */
  seq: number;
}

/** Effects that were not done twice, of the last seven days. */
export interface PreventedOverview {
  /** How many. */
  count: number;
  /** How many, by layer: `keys`, `window` and `claims`. */
  layers: Record<string, unknown>;
  /** The first of these days (UTC). */
  since: string;
  /** The sum of their values, an exact decimal. */
  value: string;
  /** How many had a value (`ledger.value`). */
  valued: number;
}

/** What would be done. */
export interface PreviewAnswer {
  /** Each event, in the order in which they would run. */
  events: Array<PreviewedEvent>;
  /** Whether more match. */
  more: boolean;
  /** Send it as `after` to go on with those; only for dead letters. */
  next?: string | null;
}

/** Which events are meant, and what for. */
export interface PreviewBody {
  /** Go on after an answer, with its `next`; only for dead letters. */
  after?: string | null;
  /** Only of this aggregate. */
  aggregate?: string | null;
  /** At most this many (1000 unless set). */
  limit?: number | null;
  /** Also events whose aggregate has moved past them. They then run without order. */
  out_of_order?: boolean;
  /** Only dead letters whose reason has this pattern, as `GET /v1/dead/groups` says it. */
  pattern?: string | null;
  /** Whose effect it is. */
  scope: string;
  /** Whose data, for those who see all tenants; unset: the caller's. */
  tenant?: string | null;
  /** What would be done (`redrive` unless set). */
  what?: PreviewWhat;
}

/** What is previewed. */
export type PreviewWhat = "redrive" | "drop" | "resume" | "skip";

/** What would be done to one event. */
export interface PreviewedEvent {
  /** Its aggregate. */
  aggregate?: string | null;
  /** Whether anything would change. */
  changes: boolean;
  /** The event. */
  id: string;
  /** What would happen, or why nothing would. */
  outcome: string;
  /** Why it is dead. */
  reason?: string | null;
  /** Whether it would run again. */
  runs: boolean;
  /** Its number in it. */
  seq?: number | null;
  /** A time of its week (RFC 3339), where the ledger's identity includes the time. */
  time?: string | null;
  /** Its token. Send it with the request: an event that has changed since is left as it is. */
  token: number;
  /** What would be done: `redrive`, `retry`, `drop` or `skip`. */
  what: string;
}

/** A problem (RFC 9457). */
export interface ProblemBody {
  /** The stable code to decide by. */
  code: string;
  /** A sentence about this request. */
  detail: string;
  /** The HTTP status. */
  status: number;
  /** What kind of problem it is. */
  title: string;
  /** The page that explains the code. */
  type: string;
}

/** What the ledger knows about an event. */
export interface ProcessedAnswer {
  /** Since when; or when a retry is due, or a lease ends. */
  at?: string | null;
  /** How many runs it has had. */
  attempts?: number | null;
  /** Whether it took effect. */
  processed: boolean;
  /** Its state; none if the ledger does not know it. */
  state?: string | null;
}

/** The read model. */
export interface ReadModelOverview {
  /** What its feed does, if it runs here. */
  feed?: string | null;
  /** Every write that was acknowledged before this time is in it. */
  last_sync_at?: string | null;
  /** How many changes could not be read, up to 100. Only for those who see the whole server. */
  rejected?: number | null;
  /** Whether that is unknown, or more than five seconds ago. */
  stale: boolean;
}

/** A page of records. */
export interface ReadPageAnswer {
  /** How current they are. */
  meta: MetaBody;
  /** Where the next page begins, if there may be one. */
  next?: string | null;
  /** The records, by id. */
  records: Array<RecordBody>;
}

/** Every dependency answers. */
export interface Ready {
  /**
   * Each dependency: `ok`. The relay `leads` or `follows`; the feed of the read model (`analytics`) `follows`, or
   * is `starting`.
   */
  checks: Record<string, unknown>;
  /** Always true. */
  ready: boolean;
}

/** A record. */
export interface RecordBody {
  /** When it was created. */
  created_at: string;
  /** Its id. */
  id: string;
  /** Its module. */
  module: string;
  /** Its content. */
  payload: Record<string, unknown>;
  /** Its version: the seq of its last event. It is the ETag too. */
  seq: number;
  /** When it was last written. */
  updated_at: string;
}

/** A change that could not be read. */
export interface RejectedBody {
  /** The offset. */
  offset: number;
  /** The partition. */
  partition: number;
  /** Why it could not be read. */
  reason: string;
  /** Whose it is; null: unknown, or no tenant's. */
  tenant?: string | null;
  /** The topic. */
  topic: string;
}

/** The numbers of the relay in this process. */
export interface RelayStats {
  /** Aggregates of which something could not be published yet. */
  behind: number;
  /** The age of the oldest event that is not published, in seconds. */
  lag_s: number;
  /** Whether it leads; if not, another process publishes. */
  leads: boolean;
  /** Those of them that wait for an operator. */
  parked: number;
  /** Up to where it has published. */
  position: string;
  /** How many records the bus has acknowledged since the start. */
  published: number;
}

/** A lease to give back. */
export interface ReleaseBody {
  /** The event. */
  id: string;
  /** The scope of the claim. */
  scope: string;
  /** The event's time, as in the claim. */
  time?: string | null;
  /** The token of the claim. */
  token: number;
}

/** How parked events go on. */
export type ReleaseHow = "resume" | "skip";

/** What is kept for how long. */
export interface RetentionAnswer {
  /** How long ago the entries were counted, in seconds. */
  age_s: number;
  /** How long audit rows are kept, in seconds (serve.audit_retention_days). */
  audit_retention_s: number;
  /** The weeks that it dropped, the latest first. */
  dropped: Array<DroppedWeek>;
  /** How many entries it has. */
  entries: number;
  /** How many of them it holds with their bytes, which outlive their week. */
  held: number;
  /** When the oldest event of the journal was appended. The journal is never swept by the server. */
  journal_oldest_at?: string | null;
  /** How long the answer to a keyed write is kept, in seconds (keys.retention_days). */
  key_retention_s: number;
  /** When keys were last swept. */
  keys_swept_at?: string | null;
  /** How long an entry stays after it was settled, in seconds (ledger.retention_days). */
  ledger_retention_s: number;
  /** The ledger's clock. */
  now: string;
  /** Set if the clock leapt: nothing is removed before this time. */
  sweep_paused_until?: string | null;
  /** How many entries a sweep would remove now. */
  sweep_removes: number;
  /** How many of them are in no week. */
  sweep_timeless: number;
  /** The weeks that the ledger has, the oldest first. */
  weeks: Array<WeekAnswer>;
}

/** A token that was revoked. */
export type RevokedAnswer = unknown;

/** How to rotate. */
export interface RotateBody {
  /** For how many seconds the old secret stays good beside the new one. */
  overlap_s?: number;
  /** Why, for the audit row. */
  reason?: string;
  /**
   * How often it was rotated before, as the list of tokens says: two who rotate at once do not lock each other
   * out.
   */
  rotations: number;
  /** The new token, made by the client, as for a creation. It has the id of the old one. */
  token?: string | null;
}

/** How many entries of a scope are in each state. */
export interface ScopeAnswer {
  /** How many the ledger holds with their bytes. */
  held: number;
  /** Whose effect. */
  scope: string;
  /** How many entries, by state. */
  states: Record<string, unknown>;
  /** Whose data. */
  tenant?: string | null;
}

/** Who visits. */
export interface SessionAnswer {
  /**
   * How commands reach the same stores: `hapax` with the flags that this server was started with. Only for those
   * who see the whole server.
   */
  command?: string | null;
  /** Whether this is the page of `hapax demo`, which has buttons of its own. */
  demo: boolean;
  /** Whether the server asks for no token, because there is none and only this machine can call. */
  local: boolean;
  /** `read`, `write` or `admin`. */
  role: string;
  /** The scopes, if only some may be seen. */
  scopes?: Array<string> | null;
  /** Whose data; none is a tenant of its own. */
  tenant?: string | null;
  /** The version of the server. */
  version: string;
  /** Who it is, as audit rows name it. */
  who: string;
  /** Whether what is counted for the whole server may be seen, and what all tenants have. */
  whole: boolean;
}

/** What a run was settled as. */
export interface SettledAnswer {
  /** Since when; or when a retry is due, or a lease ends. */
  at?: string | null;
  /** The event. */
  id: string;
  problem?: ProblemBody | null;
  /** Its state now; in a batch `error` if it was not settled. */
  state: string;
}

/** What many runs were settled as. */
export interface SettledBatchAnswer {
  /** One for each run, in their order. */
  outcomes: Array<SettledAnswer>;
}

/** How much there is. */
export interface StatsAnswer {
  /** Events that the ledger holds with their bytes. */
  held: number;
  journal?: JournalStats | null;
  /** Entries by scope and state. */
  ledger: Array<CountAnswer>;
  /** The ledger's clock. */
  now: string;
  relay?: RelayStats | null;
}

/** How far the read model is. */
export interface StatusAnswer {
  /** Each partition. */
  partitions: Array<PartitionBody>;
  /** What could not be read, and holds `lastSyncAt` back; a hundred at most. */
  rejected: Array<RejectedBody>;
}

/** A stored answer. */
export interface StoredAnswer {
  /** Its body, if it is text. */
  body?: string | null;
  /** Its body in base64, if it is not text. */
  body_base64?: string | null;
  /** Its headers that are kept, as names and values. */
  headers: Array<[string, string]>;
  /** Its status. */
  status: number;
}

/** Numbers about records. */
export interface TallyAnswer {
  /** The groups, by their values; one if nothing groups. */
  groups: Array<GroupBody>;
  /** How current they are. */
  meta: MetaBody;
  /** Whether there are more groups than these. */
  more: boolean;
}

/** A token, without its secret. */
export interface TokenAnswer {
  /** When it was made. */
  created_at: string;
  /** When it ends by itself. */
  expires_at?: string | null;
  /** Its id. It stays the same when the secret is rotated. */
  id: string;
  /** When it was last used, to within ten minutes. */
  last_used_at?: string | null;
  /** The id of the token that made it; none: a person did, by the command line. */
  made_by?: string | null;
  /** Who or what uses it. */
  name: string;
  /** Until when the secret before the last rotation is good. */
  overlap_until?: string | null;
  /** When it was revoked. */
  revoked_at?: string | null;
  /** `read`, `write` or `admin`. */
  role: string;
  /** How often its secret was rotated. */
  rotations: number;
  /** For which scopes; none means all. */
  scopes?: Array<string> | null;
  /** `live`, `expired` or `revoked`. */
  state: string;
  /** Whose data; none is the default tenant. */
  tenant?: string | null;
  /** The whole token. Only the answer that made it has it. */
  token?: string | null;
}

/** Tokens. */
export interface TokensAnswer {
  /** Ask for what comes after this id; none: this was the last page. */
  after?: string | null;
  /** Oldest first. */
  tokens: Array<TokenAnswer>;
}

/** New content for a record. */
export interface UpdateBody {
  /** The seq that the record has; `If-Match: "SEQ"` may say it instead. */
  expected_seq?: number | null;
  /** The new content, which replaces the old one: a JSON object. */
  payload: Record<string, unknown>;
}

/** How a scope stands with an aggregate. */
export interface WaitingAggregate {
  /** The aggregate. */
  aggregate: string;
  /** The highest seq that took effect. */
  done_up_to?: number | null;
  /** The lowest seq that is not settled. */
  head?: number | null;
  /** Its state. */
  head_state?: string | null;
  /** The last seq that the journal has of it; none: it is not in this journal. */
  last_seq?: number | null;
  /** Whose effect. */
  scope: string;
  /** Whose data. */
  tenant?: string | null;
  /** The seqs that are parked. */
  waiting: Array<number>;
  /** All of that in words. */
  what: string;
}

/** Aggregates that wait. */
export interface WaitingAnswer {
  /** How long ago the ledger was asked, in seconds. One that takes long to answer is asked less often. */
  age_s: number;
  /** Those with the most parked events first. */
  aggregates: Array<WaitingAggregate>;
  /** Whether there are more. */
  more: boolean;
}

/** A week of the ledger. */
export interface WeekAnswer {
  /** What they and their index occupy, if the store can tell. */
  bytes?: number | null;
  /** It goes with the first sweep after this time, unless something in it was settled later. */
  drops_after?: string | null;
  /** The Monday before which it ends. */
  ends_at?: string | null;
  /** How many entries it has. */
  entries: number;
  /** How many entries a sweep would remove with it now; none: it stays. */
  removes?: number | null;
  /** The Monday on which it begins; `timeless` is that of ids without a time, which go one by one. */
  week: string;
}
