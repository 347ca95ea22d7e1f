"""The types of the API, written by clients/generate from the server's description. Do not edit."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union

Route = Literal[
    "DELETE /v1/modules/{slug}/records/{id}",
    "DELETE /v1/tokens/{id}",
    "GET /healthz",
    "GET /metrics",
    "GET /readyz",
    "GET /v1/analytics/modules/{slug}/records",
    "GET /v1/analytics/modules/{slug}/tally",
    "GET /v1/analytics/status",
    "GET /v1/audit",
    "GET /v1/dead",
    "GET /v1/dead/groups",
    "GET /v1/doctor",
    "GET /v1/explain",
    "GET /v1/held",
    "GET /v1/info",
    "GET /v1/journal/aggregates/{aggregate}",
    "GET /v1/journal/events",
    "GET /v1/keys",
    "GET /v1/keys/{key}",
    "GET /v1/lost",
    "GET /v1/modules/{slug}/records",
    "GET /v1/modules/{slug}/records/{id}",
    "GET /v1/overview",
    "GET /v1/overview/live",
    "GET /v1/parked",
    "GET /v1/processed",
    "GET /v1/retention",
    "GET /v1/session",
    "GET /v1/stats",
    "GET /v1/tokens",
    "GET /v1/waiting",
    "POST /v1/claims",
    "POST /v1/claims/batch",
    "POST /v1/claims/done",
    "POST /v1/claims/done/batch",
    "POST /v1/claims/extend",
    "POST /v1/claims/fail",
    "POST /v1/claims/release",
    "POST /v1/dead/drop",
    "POST /v1/dead/preview",
    "POST /v1/dead/redrive",
    "POST /v1/journal/append",
    "POST /v1/login",
    "POST /v1/logout",
    "POST /v1/modules/{slug}/records",
    "POST /v1/parked/release",
    "POST /v1/tokens",
    "POST /v1/tokens/{id}/rotate",
    "PUT /v1/modules/{slug}/records/{id}",
]
"""Every route."""

CODES = frozenset(
    (
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
    )
)
"""The codes of problems; `docs/errors/<code>.md` explains each."""

AfterFailure = Literal["retry", "dead"]
"""What comes after a failure."""


class AggregateAnswer(TypedDict):
    """The events of an aggregate."""

    aggregate: str
    """The aggregate."""
    events: list[EventAnswer]
    """The events, in order."""
    last_seq: int
    """The seq of its last event; 0: it has none."""
    more: bool
    """Whether more follow: read on from the seq after the last one."""


class _AppendAnswer(TypedDict):
    aggregate: str
    """The aggregate."""
    events: list[PlacedAnswer]
    """The place of each event, in their order."""
    last_seq: int
    """The highest of the seqs."""


class AppendAnswer(_AppendAnswer, total=False):
    """What was appended."""

    warning: Union[str, None]
    """Set if an id was used before for other content, which was kept (`journal.mismatch = warn`)."""


class _AppendBody(TypedDict):
    aggregate: str
    """The aggregate."""
    events: list[EventBody]
    """The events, in the order in which they are numbered."""


class AppendBody(_AppendBody, total=False):
    """Events to append to one aggregate: all of them, or none."""

    expected: Union[ExpectedBody, None]


class AuditAnswer(TypedDict):
    """An audit row."""

    action: str
    """What."""
    at: str
    """When."""
    details: str
    """What else there is to say."""
    number: int
    """Its number."""
    reason: str
    """Why."""
    target: str
    """To what."""
    who: str
    """Who."""


class _AuditPageAnswer(TypedDict):
    rows: list[AuditAnswer]
    """Newest first."""


class AuditPageAnswer(_AuditPageAnswer, total=False):
    """Audit rows."""

    before: Union[int, None]
    """Ask for what is before this number; none: this was the last page."""


class BusOverview(TypedDict):
    """The bus."""

    bus: str
    """What it is."""
    lag: list[LagAnswer]
    """The groups that have committed something there."""
    topic: str
    """The topic to which the relay publishes."""


class _ChangeBody(TypedDict):
    reason: str
    """Why, for the audit row."""
    scope: str
    """Whose effect it is."""


class ChangeBody(_ChangeBody, total=False):
    """Which entries to change, and why."""

    after: Union[str, None]
    """With `all`, for dead letters: go on after an answer, with its `next`."""
    aggregate: Union[str, None]
    """With `all`: only of this aggregate."""
    all: bool
    """Every event of the scope that matches the filters below, up to `limit`. A dead letter that cannot be
    changed stays as it is and says why."""
    dry_run: bool
    """Say what would happen, change nothing."""
    how: Union[ReleaseHow, None]
    ids: list[str]
    """The events; or `all`. A release that resumes also takes a dead event that others wait behind, as its
    preview names it."""
    limit: Union[int, None]
    """With `all`: at most this many."""
    out_of_order: bool
    """Redrive: also events whose aggregate has moved past them. They then run without order."""
    pattern: Union[str, None]
    """With `all`: only dead letters whose reason has this pattern, as `GET /v1/dead/groups` says it."""
    tenant: Union[str, None]
    """Whose data, for those who see all tenants; unset: the caller's."""
    time: Union[str, None]
    """The event's time (RFC 3339), where the ledger's identity includes it."""
    tokens: dict[str, Any]
    """With `ids`: the token that each entry had when it was looked at (`POST /v1/dead/preview`). Then each
    event is changed for itself: one that has another token by now, or that cannot be changed, stays as it is
    and says why."""
    topic: Union[str, None]
    """With `all`: only from this topic."""


class _ChangedAnswer(TypedDict):
    dry_run: bool
    """Whether nothing was changed, because only that was asked."""
    entries: list[ChangedEntry]
    """Each entry."""
    more: bool
    """Whether more match: send the request again, with `next` if there is one."""


class ChangedAnswer(_ChangedAnswer, total=False):
    """What was changed."""

    next: Union[str, None]
    """Send it as `after` to go on behind these, also behind what stayed as it was; only for dead letters."""


class _ChangedEntry(TypedDict):
    id: str
    """The event."""
    needs_delivery: bool
    """Whether it runs only when it is delivered again: its bytes are not held, or it was claimed without a
    topic, so that no consumer is known to take it up. Publish it again."""
    what: str
    """What was done: `redrive`, `retry`, `drop` or `skip`; or would be done."""


class ChangedEntry(_ChangedEntry, total=False):
    """What was changed in one entry."""

    after: Union[dict[str, Any], None]
    """The entry after."""
    before: Union[dict[str, Any], None]
    """The entry before."""
    problem: Union[ProblemBody, None]


class CheckAnswer(TypedDict):
    """What one check found."""

    check: str
    """What was checked."""
    level: str
    """`fine`, `warning`, `refusal` (a promise cannot be kept) or `unreachable`."""
    message: str
    """What was found, in a sentence."""


class _ClaimAnswer(TypedDict):
    id: str
    """The event."""
    outcome: str
    """`claimed`, `duplicate`, `busy`, `retry_later`, `wait`, `stale`, `parked`, `dead`, `mismatch` or
    `too_old`; in a batch also `error`."""


class ClaimAnswer(_ClaimAnswer, total=False):
    """What became of a claim. Only with `claimed` may the event run."""

    at: Union[str, None]
    """Since when it has been in that state; or when a retry is due."""
    attempt: Union[int, None]
    """Which run this is, counted from 1."""
    attempts: Union[int, None]
    """How many runs it has had."""
    lease_ms: Union[int, None]
    """How long the lease lasts from the moment at which the ledger granted it: count from when the claim was
    sent, by a clock of your own. None for an at-most-once claim whose end is not reported."""
    problem: Union[ProblemBody, None]
    seq: Union[int, None]
    """The seq of its aggregate that is in the way, or the last one done."""
    state: Union[str, None]
    """The event's state before."""
    suspect: Union[bool, None]
    """Whether the last run's process died, so that this one should run alone."""
    token: Union[int, None]
    """The fencing token, if it is claimed. Settle with it; pass it to what dedups or fences."""
    until: Union[str, None]
    """When the lease (of this claim, or of the one that is in the way) ends, by the ledger's clock."""


class ClaimBatchAnswer(TypedDict):
    """What became of many claims."""

    outcomes: list[ClaimAnswer]
    """One for each claim, in their order."""


class _ClaimBatchBody(TypedDict):
    claims: list[ClaimBody]
    """The claims."""


class ClaimBatchBody(_ClaimBatchBody, total=False):
    """Many claims."""

    request_id: Union[str, None]
    """A name for this attempt, as that of a single claim, for those of the claims that have none."""


class _ClaimBody(TypedDict):
    id: str
    """The event's id."""
    scope: str
    """Whose effect it is: the name of a handler."""


class ClaimBody(_ClaimBody, total=False):
    """A request for the right to run an event."""

    fingerprint: Union[str, None]
    """The fingerprint itself, instead of the content: 32 hexadecimal digits."""
    kind: Union[str, None]
    """The event's kind."""
    lease_ms: Union[int, None]
    """How long the lease lasts unless it is extended; at most once: within how long the end will be reported
    (unset: it will not)."""
    metadata: Any
    """JSON to store with the entry."""
    mode: ClaimMode
    """What the claimer intends to do."""
    payload: Any
    """The event's content. The ledger keeps its fingerprint, to notice an id that is used again."""
    request_id: Union[str, None]
    """A name for this attempt, unique in the world (best a UUID). The same claim sent again with it, because
    the answer was lost, gets the same token. Two workers must not share one. While an open transaction holds
    the event, a claim with a name is the problem `contended` and not `busy`: that transaction may be its own
    first try."""
    time: Union[str, None]
    """The event's time (RFC 3339), where the ledger's identity includes it."""

ClaimMode = Literal["lease", "at_most_once"]
"""What the claimer intends to do."""


class _CountAnswer(TypedDict):
    count: int
    """How many."""
    scope: str
    """Whose effect."""
    state: str
    """The state."""


class CountAnswer(_CountAnswer, total=False):
    """How many entries of a scope are in a state."""

    tenant: Union[str, None]
    """Whose data."""


class _CreateBody(TypedDict):
    payload: dict[str, Any]
    """Its content: a JSON object."""


class CreateBody(_CreateBody, total=False):
    """A record to create."""

    id: Union[str, None]
    """Its id; unset: a new UUIDv7."""


class _CreateTokenBody(TypedDict):
    name: str
    """Who or what uses it."""
    role: str
    """`read`, `write` or `admin`; no more than the caller's."""


class CreateTokenBody(_CreateTokenBody, total=False):
    """A token to make."""

    expires_s: Union[int, None]
    """After how many seconds it ends by itself; none: never. It never outlives the token that makes it."""
    reason: str
    """Why, for the audit row."""
    scopes: Union[list[str], None]
    """Only these scopes; none means all."""
    tenant: Union[str, None]
    """Whose data, if not the caller's: for an operator without a tenant."""
    token: Union[str, None]
    """The token itself, made by the client (`hapax token generate`): the same request sent again, because the
    answer was lost, then makes no second one. Only for an operator without a tenant and for all scopes:
    whether an id is taken says something about other tenants."""


class _DeadGroup(TypedDict):
    count: int
    """How many."""
    first_at: str
    """When the first of them died."""
    ids: list[str]
    """Some of them, the latest first."""
    last_at: str
    """When the latest of them died."""
    pattern: str
    """The reason, with `#` for ids and long numbers, which differ."""
    reason: str
    """The reason of the latest one."""
    scope: str
    """Whose effect."""


class DeadGroup(_DeadGroup, total=False):
    """Dead letters that failed alike."""

    tenant: Union[str, None]
    """Whose data."""


class DoctorAnswer(TypedDict):
    """What the checks found."""

    checked_at: str
    """When the checks were made."""
    findings: list[CheckAnswer]
    """Each check."""


class DoneBatchBody(TypedDict):
    """Many runs that took effect."""

    claims: list[DoneBody]
    """The runs."""


class _DoneBody(TypedDict):
    id: str
    """The event."""
    scope: str
    """The scope of the claim."""
    token: int
    """The token of the claim."""


class DoneBody(_DoneBody, total=False):
    """A run that took effect."""

    metadata: Any
    """JSON to store, replacing that of the claim."""
    time: Union[str, None]
    """The event's time, as in the claim."""


class DroppedWeek(TypedDict):
    """A week that is gone."""

    dropped_at: str
    """When it was dropped."""
    week: str
    """The Monday on which it began."""


class _EntriesAnswer(TypedDict):
    entries: list[dict[str, Any]]
    """The entries: tenant, scope, id, state, token, attempts, times, order, origin, reason. There may be none
    although there is a next page."""


class EntriesAnswer(_EntriesAnswer, total=False):
    """A page of entries."""

    next: Union[str, None]
    """Where the next page begins; none: this is the last."""


class _EventAnswer(TypedDict):
    at: str
    """When it was appended, by the journal's clock."""
    fingerprint: str
    """The fingerprint of its content."""
    id: str
    """Its id."""
    position: str
    """Its place in the journal's order."""
    seq: int
    """Its number within the aggregate."""


class EventAnswer(_EventAnswer, total=False):
    """An event of the journal."""

    aggregate: Union[str, None]
    """Its aggregate."""
    headers: list[HeaderBody]
    """Its headers."""
    kind: Union[str, None]
    """What kind of fact it is."""
    payload: Any
    """Its content, if it is JSON."""
    payload_base64: Union[str, None]
    """Its content in base64, if it is not JSON."""
    tenant: Union[str, None]
    """Whose data it is."""
    time: Union[str, None]
    """When it happened."""


class _EventBody(TypedDict):
    id: str
    """Its id. The same event sent again is stored once."""


class EventBody(_EventBody, total=False):
    """An event to append."""

    headers: list[HeaderBody]
    """Its headers, in order."""
    kind: Union[str, None]
    """What kind of fact it is. Kinds that begin with `record.` are reserved for writes of records."""
    payload: Any
    """Its content: any JSON, also `null`. An update or delete command (`metadata.kind` is `command`) must say
    which seq it expects."""
    payload_base64: Union[str, None]
    """Its content in base64, if it is not JSON."""
    time: Union[str, None]
    """When it happened (RFC 3339)."""


class EventsAnswer(TypedDict):
    """Events in the journal's order."""

    at_hole: bool
    """Whether reading ends before an event whose writer has not committed yet."""
    events: list[EventAnswer]
    """The events. There may be none although there are more: those of other tenants are left out."""
    more: bool
    """Whether more may follow at once."""
    next: str
    """Where to read on: the `after` of the next request. To a reader of one tenant it says nothing about the
    events of others but how far the journal is."""

ExpectedBody = Union[int, "ExpectedWord"]
"""What an append expects of its aggregate's last seq."""

ExpectedWord = Literal["new", "any"]
"""What an append expects, in a word."""


class _ExplainAnswer(TypedDict):
    asked_at: str
    """When the stores were asked."""
    not_recorded: str
    """What is not recorded, in a sentence."""
    of: dict[str, Any]
    """What it is about: `event`, `key` or `aggregate`, with its name."""
    scopes: list[dict[str, Any]]
    """How each scope stands with the aggregate."""
    steps: list[dict[str, Any]]
    """What happened and how it stands, in order: `at`, `layer`, `name` (the scope or the relay), `event`,
    `seq`, `what` and `facts`."""
    stores: list[dict[str, Any]]
    """What stores said besides: `store`, `message` and whether it was `unreachable`."""


class ExplainAnswer(_ExplainAnswer, total=False):
    """The history of an event, of a keyed write or of an aggregate."""

    tenant: Union[str, None]
    """Whose data."""


class _ExtendBody(TypedDict):
    id: str
    """The event."""
    scope: str
    """The scope of the claim."""
    token: int
    """The token of the claim."""


class ExtendBody(_ExtendBody, total=False):
    """A lease to extend."""

    lease_ms: Union[int, None]
    """How long it lasts from now."""
    time: Union[str, None]
    """The event's time, as in the claim."""


class _FailBody(TypedDict):
    id: str
    """The event."""
    reason: str
    """Why it failed."""
    scope: str
    """The scope of the claim."""
    token: int
    """The token of the claim."""


class FailBody(_FailBody, total=False):
    """A run that failed."""

    payload: Any
    """The event's content, kept with the dead letter so that it can be run again. Not for an at-most-once
    claim, which never runs again."""
    then: AfterFailure
    """What comes next."""
    time: Union[str, None]
    """The event's time, as in the claim."""


class GroupBody(TypedDict):
    """Records that share a value."""

    count: int
    """How many records."""
    key: Any
    """That value; null if the field is missing, or if nothing groups."""
    measures: list[MeasureBody]
    """The measures, in the order sum, min, max."""


class GroupsAnswer(TypedDict):
    """Dead letters by reason."""

    age_s: float
    """How long ago that was, in seconds. A ledger that takes long to answer is asked less often."""
    groups: list[DeadGroup]
    """The groups, the largest first."""
    looked: int
    """How many dead letters were looked at."""
    more: bool
    """Whether there are more groups."""


class _HeaderBody(TypedDict):
    name: str
    """Its name."""


class HeaderBody(_HeaderBody, total=False):
    """A header of an event."""

    value: Union[str, None]
    """Its value, if it is text."""
    value_base64: Union[str, None]
    """Its value in base64, if it is not text."""


class Healthy(TypedDict):
    """The process runs."""

    status: str
    """Always `ok`."""


class _InfoAnswer(TypedDict):
    batch_max: int
    """How many events one request may have."""
    body_bytes_max: int
    """The largest body of a request."""
    journal: str
    """The backend of the journal."""
    key_retention_s: int
    """How long the answer to a keyed write is kept, in seconds."""
    keys: str
    """The backend of the keys."""
    lease_ms: int
    """How long a lease lasts if a claim does not say, in milliseconds."""
    ledger: str
    """The backend of the ledger."""
    ledger_retention_s: int
    """How long the ledger remembers a settled event, in seconds."""
    version: str
    """Its version."""


class InfoAnswer(_InfoAnswer, total=False):
    """What this server is."""

    bus: Union[str, None]
    """The bus to which the relay of this server publishes; none if it has no relay."""
    topic: Union[str, None]
    """The topic to which it publishes."""


class _JournalStats(TypedDict):
    aggregates: int
    """How many aggregates."""
    events: int
    """How many events it has."""
    exact: bool
    """Whether these numbers are exact."""


class JournalStats(_JournalStats, total=False):
    """The journal's numbers."""

    last: Union[str, None]
    """The position of the newest event."""


class _KeyAnswer(TypedDict):
    key: str
    """The key."""
    state: str
    """`running`, `done`, `outcome-unknown` (a person decides), `free` (it failed and may be sent again),
    `expired` (too old to know) or `unknown` (nobody used it, and no request with it runs)."""


class KeyAnswer(_KeyAnswer, total=False):
    """What became of a key."""

    answer: Union[StoredAnswer, None]
    at: Union[str, None]
    """When it began, or when it was done."""
    until: Union[str, None]
    """Until when the request may run, unless it runs in a transaction."""


class _KeyLine(TypedDict):
    begun_at: str
    """When that run began."""
    key: str
    """The key."""
    state: str
    """`running`, `outcome-unknown`, `free` or `done`."""
    token: int
    """The token of its last run."""


class KeyLine(_KeyLine, total=False):
    """A key."""

    settled_at: Union[str, None]
    """When its answer was stored."""
    status: Union[int, None]
    """The status of its answer."""
    tenant: Union[str, None]
    """Whose key."""


class KeysAnswer(TypedDict):
    """Keys in order."""

    keys: list[KeyLine]
    """The keys."""
    more: bool
    """Whether more follow: go on after the last one."""


class _KeysOverview(TypedDict):
    open: int
    """How many have no answer, up to 1000."""


class KeysOverview(_KeysOverview, total=False):
    """The keys of writes."""

    swept_at: Union[str, None]
    """When they were last swept."""


class LagAnswer(TypedDict):
    """How far a consumer group is behind."""

    records: int
    """The records of the relay's topic that the group has not committed."""
    scope: str
    """The scope, after which its group is named unless configured otherwise."""


class _ListAnswer(TypedDict):
    records: list[RecordBody]
    """The records, by id."""


class ListAnswer(_ListAnswer, total=False):
    """A page of records."""

    next: Union[str, None]
    """Where the next page begins, if there may be one: send it as `after`."""


class LoginBody(TypedDict):
    """A token to log in with."""

    token: str
    """The API token (`hapax token create`)."""


class _MeasureBody(TypedDict):
    field: str
    """The field."""
    left_out: int
    """How many records have something else in the field than a number that fits."""
    measure: str
    """`sum`, `min` or `max`."""


class MeasureBody(_MeasureBody, total=False):
    """One measure of a group."""

    value: Union[float, None]
    """The number, exactly; null if no record has one."""


class _MetaBody(TypedDict):
    stale: bool
    """Whether that is unknown, or more than five seconds ago."""


class MetaBody(_MetaBody, total=False):
    """How current an answer is."""

    approximate: Union[str, None]
    """What an approximate answer may count wrongly; null: nothing."""
    lastSyncAt: Union[str, None]
    """Every write that was acknowledged before this time is in the answer (RFC 3339, UTC, milliseconds);
    null: nothing is known yet."""


class _OverviewAnswer(TypedDict):
    age_s: float
    """How long ago that was, in seconds. A ledger that takes long to count is counted less often."""
    now: str
    """The ledger's clock when the ledger was counted."""
    scopes: list[ScopeAnswer]
    """Entries by scope."""
    took_s: float
    """How long counting took, in seconds."""


class OverviewAnswer(_OverviewAnswer, total=False):
    """The path of an event in numbers."""

    bus: Union[BusOverview, None]
    counters: Union[dict[str, Any], None]
    """What this process has counted since its start, by metric and label: only for those who see the whole
    server."""
    journal: Union[JournalStats, None]
    keys: Union[KeysOverview, None]
    prevented: Union[PreventedOverview, None]
    read_model: Union[ReadModelOverview, None]
    relay: Union[RelayStats, None]
    relay_state: Union[str, None]
    """What the relay does: `starting`, `leads`, `follows` or `failed`; none if it does not run here."""


class _PartitionBody(TypedDict):
    partition: int
    """The partition."""
    topic: str
    """The topic."""


class PartitionBody(_PartitionBody, total=False):
    """How far a partition was applied."""

    offset: Union[int, None]
    """The offset after the last record that was applied."""
    pulse: Union[str, None]
    """The last pulse: everything acknowledged before it is applied."""


class _PlacedAnswer(TypedDict):
    id: str
    """The event."""
    placing: str
    """`new`: stored now; `repeat`: it was there already; `kept`: another event is there under its id, and
    this one was not stored."""
    position: str
    """Its place in the journal's order."""
    seq: int
    """Its number within the aggregate."""


class PlacedAnswer(_PlacedAnswer, total=False):
    """Where an event is stored."""

    original: Union[EventAnswer, None]


class PreventedOverview(TypedDict):
    """Effects that were not done twice, of the last seven days."""

    count: int
    """How many."""
    layers: dict[str, Any]
    """How many, by layer: `keys`, `window` and `claims`."""
    since: str
    """The first of these days (UTC)."""
    value: str
    """The sum of their values, an exact decimal."""
    valued: int
    """How many had a value (`ledger.value`)."""


class _PreviewAnswer(TypedDict):
    events: list[PreviewedEvent]
    """Each event, in the order in which they would run."""
    more: bool
    """Whether more match."""


class PreviewAnswer(_PreviewAnswer, total=False):
    """What would be done."""

    next: Union[str, None]
    """Send it as `after` to go on with those; only for dead letters."""


class _PreviewBody(TypedDict):
    scope: str
    """Whose effect it is."""


class PreviewBody(_PreviewBody, total=False):
    """Which events are meant, and what for."""

    after: Union[str, None]
    """Go on after an answer, with its `next`; only for dead letters."""
    aggregate: Union[str, None]
    """Only of this aggregate."""
    limit: Union[int, None]
    """At most this many (1000 unless set)."""
    out_of_order: bool
    """Also events whose aggregate has moved past them. They then run without order."""
    pattern: Union[str, None]
    """Only dead letters whose reason has this pattern, as `GET /v1/dead/groups` says it."""
    tenant: Union[str, None]
    """Whose data, for those who see all tenants; unset: the caller's."""
    what: PreviewWhat
    """What would be done (`redrive` unless set)."""

PreviewWhat = Literal["redrive", "drop", "resume", "skip"]
"""What is previewed."""


class _PreviewedEvent(TypedDict):
    changes: bool
    """Whether anything would change."""
    id: str
    """The event."""
    outcome: str
    """What would happen, or why nothing would."""
    runs: bool
    """Whether it would run again."""
    token: int
    """Its token. Send it with the request: an event that has changed since is left as it is."""
    what: str
    """What would be done: `redrive`, `retry`, `drop` or `skip`."""


class PreviewedEvent(_PreviewedEvent, total=False):
    """What would be done to one event."""

    aggregate: Union[str, None]
    """Its aggregate."""
    reason: Union[str, None]
    """Why it is dead."""
    seq: Union[int, None]
    """Its number in it."""
    time: Union[str, None]
    """A time of its week (RFC 3339), where the ledger's identity includes the time."""


class ProblemBody(TypedDict):
    """A problem (RFC 9457)."""

    code: str
    """The stable code to decide by."""
    detail: str
    """A sentence about this request."""
    status: int
    """The HTTP status."""
    title: str
    """What kind of problem it is."""
    type: str
    """The page that explains the code."""


class _ProcessedAnswer(TypedDict):
    processed: bool
    """Whether it took effect."""


class ProcessedAnswer(_ProcessedAnswer, total=False):
    """What the ledger knows about an event."""

    at: Union[str, None]
    """Since when; or when a retry is due, or a lease ends."""
    attempts: Union[int, None]
    """How many runs it has had."""
    state: Union[str, None]
    """Its state; none if the ledger does not know it."""


class _ReadModelOverview(TypedDict):
    stale: bool
    """Whether that is unknown, or more than five seconds ago."""


class ReadModelOverview(_ReadModelOverview, total=False):
    """The read model."""

    feed: Union[str, None]
    """What its feed does, if it runs here."""
    last_sync_at: Union[str, None]
    """Every write that was acknowledged before this time is in it."""
    rejected: Union[int, None]
    """How many changes could not be read, up to 100. Only for those who see the whole server."""


class _ReadPageAnswer(TypedDict):
    meta: MetaBody
    """How current they are."""
    records: list[RecordBody]
    """The records, by id."""


class ReadPageAnswer(_ReadPageAnswer, total=False):
    """A page of records."""

    next: Union[str, None]
    """Where the next page begins, if there may be one."""


class Ready(TypedDict):
    """Every dependency answers."""

    checks: dict[str, Any]
    """Each dependency: `ok`. The relay `leads` or `follows`; the feed of the read model (`analytics`)
    `follows`, or is `starting`."""
    ready: bool
    """Always true."""


class RecordBody(TypedDict):
    """A record."""

    created_at: str
    """When it was created."""
    id: str
    """Its id."""
    module: str
    """Its module."""
    payload: dict[str, Any]
    """Its content."""
    seq: int
    """Its version: the seq of its last event. It is the ETag too."""
    updated_at: str
    """When it was last written."""


class _RejectedBody(TypedDict):
    offset: int
    """The offset."""
    partition: int
    """The partition."""
    reason: str
    """Why it could not be read."""
    topic: str
    """The topic."""


class RejectedBody(_RejectedBody, total=False):
    """A change that could not be read."""

    tenant: Union[str, None]
    """Whose it is; null: unknown, or no tenant's."""


class RelayStats(TypedDict):
    """The numbers of the relay in this process."""

    behind: int
    """Aggregates of which something could not be published yet."""
    lag_s: float
    """The age of the oldest event that is not published, in seconds."""
    leads: bool
    """Whether it leads; if not, another process publishes."""
    parked: int
    """Those of them that wait for an operator."""
    position: str
    """Up to where it has published."""
    published: int
    """How many records the bus has acknowledged since the start."""


class _ReleaseBody(TypedDict):
    id: str
    """The event."""
    scope: str
    """The scope of the claim."""
    token: int
    """The token of the claim."""


class ReleaseBody(_ReleaseBody, total=False):
    """A lease to give back."""

    time: Union[str, None]
    """The event's time, as in the claim."""

ReleaseHow = Literal["resume", "skip"]
"""How parked events go on."""


class _RetentionAnswer(TypedDict):
    age_s: float
    """How long ago the entries were counted, in seconds."""
    audit_retention_s: int
    """How long audit rows are kept, in seconds (serve.audit_retention_days)."""
    dropped: list[DroppedWeek]
    """The weeks that it dropped, the latest first."""
    entries: int
    """How many entries it has."""
    held: int
    """How many of them it holds with their bytes, which outlive their week."""
    key_retention_s: int
    """How long the answer to a keyed write is kept, in seconds (keys.retention_days)."""
    ledger_retention_s: int
    """How long an entry stays after it was settled, in seconds (ledger.retention_days)."""
    now: str
    """The ledger's clock."""
    sweep_removes: int
    """How many entries a sweep would remove now."""
    sweep_timeless: int
    """How many of them are in no week."""
    weeks: list[WeekAnswer]
    """The weeks that the ledger has, the oldest first."""


class RetentionAnswer(_RetentionAnswer, total=False):
    """What is kept for how long."""

    journal_oldest_at: Union[str, None]
    """When the oldest event of the journal was appended. The journal is never swept by the server."""
    keys_swept_at: Union[str, None]
    """When keys were last swept."""
    sweep_paused_until: Union[str, None]
    """Set if the clock leapt: nothing is removed before this time."""

RevokedAnswer = Any
"""A token that was revoked."""


class _RotateBody(TypedDict):
    rotations: int
    """How often it was rotated before, as the list of tokens says: two who rotate at once do not lock each
    other out."""


class RotateBody(_RotateBody, total=False):
    """How to rotate."""

    overlap_s: int
    """For how many seconds the old secret stays good beside the new one."""
    reason: str
    """Why, for the audit row."""
    token: Union[str, None]
    """The new token, made by the client, as for a creation. It has the id of the old one."""


class _ScopeAnswer(TypedDict):
    held: int
    """How many the ledger holds with their bytes."""
    scope: str
    """Whose effect."""
    states: dict[str, Any]
    """How many entries, by state."""


class ScopeAnswer(_ScopeAnswer, total=False):
    """How many entries of a scope are in each state."""

    tenant: Union[str, None]
    """Whose data."""


class _SessionAnswer(TypedDict):
    demo: bool
    """Whether this is the page of `hapax demo`, which has buttons of its own."""
    local: bool
    """Whether the server asks for no token, because there is none and only this machine can call."""
    role: str
    """`read`, `write` or `admin`."""
    version: str
    """The version of the server."""
    who: str
    """Who it is, as audit rows name it."""
    whole: bool
    """Whether what is counted for the whole server may be seen, and what all tenants have."""


class SessionAnswer(_SessionAnswer, total=False):
    """Who visits."""

    command: Union[str, None]
    """How commands reach the same stores: `hapax` with the flags that this server was started with. Only for
    those who see the whole server."""
    scopes: Union[list[str], None]
    """The scopes, if only some may be seen."""
    tenant: Union[str, None]
    """Whose data; none is a tenant of its own."""


class _SettledAnswer(TypedDict):
    id: str
    """The event."""
    state: str
    """Its state now; in a batch `error` if it was not settled."""


class SettledAnswer(_SettledAnswer, total=False):
    """What a run was settled as."""

    at: Union[str, None]
    """Since when; or when a retry is due, or a lease ends."""
    problem: Union[ProblemBody, None]


class SettledBatchAnswer(TypedDict):
    """What many runs were settled as."""

    outcomes: list[SettledAnswer]
    """One for each run, in their order."""


class _StatsAnswer(TypedDict):
    held: int
    """Events that the ledger holds with their bytes."""
    ledger: list[CountAnswer]
    """Entries by scope and state."""
    now: str
    """The ledger's clock."""


class StatsAnswer(_StatsAnswer, total=False):
    """How much there is."""

    journal: Union[JournalStats, None]
    relay: Union[RelayStats, None]


class StatusAnswer(TypedDict):
    """How far the read model is."""

    partitions: list[PartitionBody]
    """Each partition."""
    rejected: list[RejectedBody]
    """What could not be read, and holds `lastSyncAt` back; a hundred at most."""


class _StoredAnswer(TypedDict):
    headers: list[list[str]]
    """Its headers that are kept, as names and values."""
    status: int
    """Its status."""


class StoredAnswer(_StoredAnswer, total=False):
    """A stored answer."""

    body: Union[str, None]
    """Its body, if it is text."""
    body_base64: Union[str, None]
    """Its body in base64, if it is not text."""


class TallyAnswer(TypedDict):
    """Numbers about records."""

    groups: list[GroupBody]
    """The groups, by their values; one if nothing groups."""
    meta: MetaBody
    """How current they are."""
    more: bool
    """Whether there are more groups than these."""


class _TokenAnswer(TypedDict):
    created_at: str
    """When it was made."""
    id: str
    """Its id. It stays the same when the secret is rotated."""
    name: str
    """Who or what uses it."""
    role: str
    """`read`, `write` or `admin`."""
    rotations: int
    """How often its secret was rotated."""
    state: str
    """`live`, `expired` or `revoked`."""


class TokenAnswer(_TokenAnswer, total=False):
    """A token, without its secret."""

    expires_at: Union[str, None]
    """When it ends by itself."""
    last_used_at: Union[str, None]
    """When it was last used, to within ten minutes."""
    made_by: Union[str, None]
    """The id of the token that made it; none: a person did, by the command line."""
    overlap_until: Union[str, None]
    """Until when the secret before the last rotation is good."""
    revoked_at: Union[str, None]
    """When it was revoked."""
    scopes: Union[list[str], None]
    """For which scopes; none means all."""
    tenant: Union[str, None]
    """Whose data; none is the default tenant."""
    token: Union[str, None]
    """The whole token. Only the answer that made it has it."""


class _TokensAnswer(TypedDict):
    tokens: list[TokenAnswer]
    """Oldest first."""


class TokensAnswer(_TokensAnswer, total=False):
    """Tokens."""

    after: Union[str, None]
    """Ask for what comes after this id; none: this was the last page."""


class _UpdateBody(TypedDict):
    payload: dict[str, Any]
    """The new content, which replaces the old one: a JSON object."""


class UpdateBody(_UpdateBody, total=False):
    """New content for a record."""

    expected_seq: Union[int, None]
    """The seq that the record has; `If-Match: "SEQ"` may say it instead."""


class _WaitingAggregate(TypedDict):
    aggregate: str
    """The aggregate."""
    scope: str
    """Whose effect."""
    waiting: list[int]
    """The seqs that are parked."""
    what: str
    """All of that in words."""


class WaitingAggregate(_WaitingAggregate, total=False):
    """How a scope stands with an aggregate."""

    done_up_to: Union[int, None]
    """The highest seq that took effect."""
    head: Union[int, None]
    """The lowest seq that is not settled."""
    head_state: Union[str, None]
    """Its state."""
    last_seq: Union[int, None]
    """The last seq that the journal has of it; none: it is not in this journal."""
    tenant: Union[str, None]
    """Whose data."""


class WaitingAnswer(TypedDict):
    """Aggregates that wait."""

    age_s: float
    """How long ago the ledger was asked, in seconds. One that takes long to answer is asked less often."""
    aggregates: list[WaitingAggregate]
    """Those with the most parked events first."""
    more: bool
    """Whether there are more."""


class _WeekAnswer(TypedDict):
    entries: int
    """How many entries it has."""
    week: str
    """The Monday on which it begins; `timeless` is that of ids without a time, which go one by one."""


class WeekAnswer(_WeekAnswer, total=False):
    """A week of the ledger."""

    bytes: Union[int, None]
    """What they and their index occupy, if the store can tell."""
    drops_after: Union[str, None]
    """It goes with the first sweep after this time, unless something in it was settled later."""
    ends_at: Union[str, None]
    """The Monday before which it ends."""
    removes: Union[int, None]
    """How many entries a sweep would remove with it now; none: it stays."""
