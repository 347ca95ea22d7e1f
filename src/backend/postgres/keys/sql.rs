//! The statements of the keys, with the schema's name in them.

use std::sync::Arc;

/// Statements with the schema's name in them. Those from `extend` on, but for `is_open` and `info`, run only in transactions
/// whose search path is pinned; the others anywhere, also in a caller's transaction.
pub(super) struct Sql {
    pub(super) begin: Arc<str>,
    pub(super) finish: Arc<str>,
    pub(super) extend: Arc<str>,
    pub(super) release: Arc<str>,
    pub(super) rerun: Arc<str>,
    pub(super) answer: Arc<str>,
    pub(super) get: Arc<str>,
    pub(super) lock: Arc<str>,
    pub(super) is_open: Arc<str>,
    pub(super) list: Arc<str>,
    pub(super) entry: Arc<str>,
    pub(super) info: Arc<str>,
}

/// A time in microseconds since 1970; the end of a lease for ever is the greatest number. Its names are PostgreSQL's own,
/// whatever the search path.
pub(super) fn us(at: &str) -> String {
    format!(
        "case when {at} operator(pg_catalog.=) 'infinity'::pg_catalog.timestamptz then 9223372036854775807 \
         else (extract(epoch from {at}) operator(pg_catalog.*) 1000000::numeric)::bigint end"
    )
}

/// The state of a key as a word; `v_now` is the time.
const STATE: &str = "case when k.settled_at is not null then 'done' when k.ended and not k.bound then 'free' \
                     when now.at < k.until then 'running' \
                     when now.at < k.held_until then 'outcome-unknown' else 'free' end";

impl Sql {
    pub(super) fn new(schema: &str) -> Self {
        let sql = |text: &str| -> Arc<str> { text.replace("{s}", schema).into() };
        let now = "(select {s}.keys_now() as at) now";
        let entry = format!(
            "select k.tenant, k.key, {STATE}, k.token, {}, {}, k.status, {}, k.resolved_by, k.resolved_why from {{s}}.keys k, {now}",
            us("k.begun_at"),
            us("k.settled_at"),
            us("k.resolved_at")
        );
        let decided = "resolved_at = now.at, resolved_by = $4, resolved_why = $5";
        let unknown = "now.at >= k.until and now.at < k.held_until";
        // Whoever has the lease is fenced.
        let token = "token = nextval('{s}.keys_token'::regclass)";
        let over = "ended = true, bound = true";
        let held = "k.tenant = $1 and k.key = $2 and k.token = $3 and k.settled_at is null";
        Sql {
            begin: sql(&format!(
                "select o_kind, o_token, {}, o_mine, o_parts, o_status, o_headers, o_body \
                 from {{s}}.keys_begin($1, $2, $3, $4, $5, $6, $7, $8)",
                us("o_at")
            )),
            finish: sql("select {s}.keys_finish($1, $2, $3, $4, $5, $6)"),
            extend: sql(&format!(
                "update {{s}}.keys k set until = now.at + $4 * interval '1 microsecond', \
                 held_until = case when k.held_until = 'infinity'::timestamptz then k.held_until \
                 else now.at + $4 * interval '1 microsecond' + (k.held_until - k.until) end from {now} where {held}"
            )),
            // $4: whether it did nothing.
            release: sql(&format!(
                "update {{s}}.keys k set {token}, ended = true, bound = k.bound or not $4, until = now.at, held_until = case when $4 then now.at \
                 when k.held_until = 'infinity'::timestamptz then k.held_until else now.at + (k.held_until - k.until) end \
                 from {now} where {held}"
            )),
            rerun: sql(&format!(
                "update {{s}}.keys k set {token}, {over}, held_until = now.at, {decided} from {now} where {held} and {unknown}"
            )),
            answer: sql(&format!(
                "update {{s}}.keys k set {token}, {over}, settled_at = now.at, status = $6, headers = $7, body = $8, {decided}, aged_from = \
                 greatest(now.at, {{s}}.key_time($2)) \
                 from {now} where {held} and {unknown}"
            )),
            get: sql(&format!(
                "select {STATE}, {}, {}, {}, k.status, k.headers, k.body, k.parts from {{s}}.keys k, {now} where k.tenant = $1 and k.key = $2",
                us("k.until"),
                us("k.begun_at"),
                us("k.settled_at")
            )),
            lock: sql("select from {s}.keys k where k.tenant = $1 and k.key = $2 for update"),
            is_open: sql("select {s}.keys_is_open($1, $2)"),
            list: sql(&format!(
                "{entry} where ($1::text is null or k.tenant = $1) and (not $2 or k.settled_at is null) \
                 and ($3::text is null or (k.tenant, k.key) > ($3, $4)) order by k.tenant, k.key limit $5"
            )),
            entry: sql(&format!("{entry} where k.tenant = $1 and k.key = $2")),
            info: sql(&format!(
                "select {}, {}, {} from {{s}}.keys_meta m",
                us("{s}.keys_now()"),
                us("m.horizon"),
                us("m.swept_at")
            )),
        }
    }
}
