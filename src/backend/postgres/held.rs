//! Held events that are due, dead events to publish, and the markers of transactional batches.
//! Events are read from `held` and its indexes, never from the weeks.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use super::codes::{self, count, from_row, micros};
use super::database::Select;
use super::error::translate;
use super::sweep::Present;
use super::{Inner, read};
use crate::clock::Time;
use crate::error::Result;
use crate::event::{RECORD_OVERHEAD_BYTES, Record};
use crate::id::{Scope, Topic};
use crate::ledger::{Due, Entry, HeldQuery, Marker, PublishedDead, State};

/// Bodies, column by column. Header names are bytes, because a name may contain a NUL, which text
/// cannot. All headers are in one flat array, because nested arrays must have equal lengths.
#[derive(Default)]
pub(super) struct Bodies<'a> {
    payloads: Option<Vec<Option<&'a [u8]>>>,
    names: Option<Vec<&'a [u8]>>,
    values: Option<Vec<&'a [u8]>>,
    /// `None` if there is no body. (A body without a payload is a tombstone's.)
    counts: Option<Vec<Option<i32>>>,
    keys: Option<Vec<Option<&'a [u8]>>>,
    stamps: Option<Vec<Option<i64>>>,
}

impl<'a> Bodies<'a> {
    pub(super) fn of(bodies: impl Iterator<Item = Option<&'a Record>> + Clone) -> Self {
        if bodies.clone().all(|body| body.is_none()) {
            return Bodies::default();
        }
        let headers = || bodies.clone().flatten().flat_map(|body| body.headers.iter());
        let count = |body: Option<&Record>| body.map(|body| body.headers.iter().count() as i32);
        Bodies {
            payloads: Some(
                bodies.clone().map(|body| body.and_then(|body| body.payload.as_deref())).collect(),
            ),
            names: Some(headers().map(|(name, _)| name.as_bytes()).collect()),
            values: Some(headers().map(|(_, value)| value).collect()),
            counts: Some(bodies.clone().map(count).collect()),
            keys: Some(bodies.clone().map(|body| body.and_then(|body| body.key.as_deref())).collect()),
            stamps: Some(
                bodies.map(|body| body.and_then(|body| body.timestamp).map(Time::as_micros)).collect(),
            ),
        }
    }

    pub(super) fn bind<'q, O>(&'q self, query: Select<'q, O>) -> Select<'q, O> {
        query
            .bind(&self.payloads)
            .bind(&self.names)
            .bind(&self.values)
            .bind(&self.counts)
            .bind(&self.keys)
            .bind(&self.stamps)
    }
}

/// Selects all columns of the held rows in `from`, and `more`.
fn select(s: &str, from: &str, more: &str) -> String {
    format!(
        "select {columns}, c.tenant, c.scope{more} from {from} join {s}.scope c on c.number = e.scope \
         left join {s}.owner w on w.number = e.owner \
         cross join lateral (select e.payload, e.header_names, e.header_values, e.key, e.stamp) h",
        columns = read::columns(s)
    )
}

/// A century: PostgreSQL raises an error for a time out of its range.
const AGE_US_MAX: i64 = 3_155_760_000_000_000;

/// SQL for whether the query, which [`entries`] binds, matches a row. Same rule as
/// [`HeldQuery::matches`].
const MATCHES: &str = "($3::text[] is null or e.topic is null or e.topic = any ($3))";

/// SQL for the first chosen rows that fit into the query's bytes, which [`entries`] binds. A row
/// counts as in [`Record::memory_bytes`].
fn filled(s: &str) -> String {
    format!(
        "sized as (select r.*, sum(coalesce(octet_length(e.payload), 0) + coalesce(octet_length(e.key), 0) + {RECORD_OVERHEAD_BYTES} \
             + (select coalesce(sum(octet_length(n)), 0) from unnest(e.header_names || e.header_values) n)) \
             over (order by r.place rows between unbounded preceding and 1 preceding) as before \
            from chosen r join {s}.held e on e.scope = r.scope and e.week = r.week and e.id = r.id), \
         filled as materialized (select * from sized where coalesce(coalesce(before, 0) < $4, true))"
    )
}

async fn entries(
    connection: &mut PgConnection,
    sql: String,
    scope: &Scope,
    query: &HeldQuery,
    limit: usize,
    reserve: Option<Duration>,
) -> Result<Vec<PgRow>> {
    let topics: Option<Vec<&str>> =
        query.topics.as_ref().map(|topics| topics.iter().map(Topic::as_str).collect());
    let mut statement = sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(scope.as_str())
        .bind(count(limit as u64))
        .bind(topics)
        .bind(query.bytes_max.map(|max| count(max as u64)));
    if let Some(reserve) = reserve {
        statement = statement.bind(micros(reserve).min(AGE_US_MAX));
    }
    statement.fetch_all(connection).await.map_err(|e| translate("looking for what is held", e))
}

/// Held events that may be claimed now. Same rule as `Head::lets`.
pub(super) async fn due(inner: &Inner, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
    let s = &inner.settings.schema;
    // Each head is read once, however many events wait behind it. Bodies are read only for chosen
    // rows.
    let ready = format!(
        "with present as materialized (select {s}.ledger_now() as now), \
         waiting as materialized (select e.scope, e.week, e.id, e.at, e.aggregate, e.seq, e.topic \
            from {s}.scope c join {s}.held e on e.scope = c.number \
           where c.scope = $1 and e.header_names is not null and e.state in {waiting} and e.at <= (select now from present)), \
         heads as materialized (select g.scope, g.aggregate, g.last, g.parked, g.lease_until, g.lease_seq, \
             (select min(o) from unnest(g.retrying) o) as owed \
            from (select distinct scope, aggregate from waiting where aggregate is not null) w \
            join {s}.head g on g.scope = w.scope and g.aggregate = w.aggregate), \
         ready as (select e.scope, e.week, e.id, e.topic, rank() over (partition by e.scope, e.aggregate, \
             case when e.aggregate is null then e.id end, case when e.aggregate is null then e.week end order by e.seq) as n \
            from waiting e left join heads g on g.scope = e.scope and g.aggregate = e.aggregate \
           where e.aggregate is null or g.scope is null or e.seq <= g.last or \
                  ((e.seq > g.parked) is not true and (g.lease_until > (select now from present) or g.lease_seq < e.seq) \
                   is not true and (g.owed < e.seq) is not true)), \
         chosen as materialized (select scope, week, id, row_number() over (order by pg_catalog.random()) as place, \
             count(*) over () as claimable from ready e where n = 1 and {MATCHES} order by place limit $2), \
         {filled}",
        waiting = codes::list([State::Leased, State::Retry, State::Parked]),
        filled = filled(s)
    );
    let from = format!("filled r join {s}.held e on e.scope = r.scope and e.week = r.week and e.id = r.id");
    let mut connection = inner.begin().await?;
    let sql = format!("{ready} {} order by r.place", select(s, &from, ", r.claimable"));
    let rows = entries(&mut connection, sql, scope, query, limit, None).await?;
    let claimable: i64 = rows.first().map_or(0, |row| row.get("claimable"));
    let held: i64 = sqlx::query_scalar(AssertSqlSafe(format!(
        "select count(*) from {s}.held e join {s}.scope c on c.number = e.scope \
          where c.scope = $1 and e.header_names is not null"
    )))
    .persistent(false)
    .bind(scope.as_str())
    .fetch_one(&mut *connection)
    .await
    .map_err(|e| translate("counting what is held", e))?;
    let entries = rows.iter().map(|row| Ok(read::entry(row)?.0)).collect::<Result<_>>()?;
    Ok(Due { entries, claimable: claimable as u64, held: held as u64 })
}

/// Dead events that are not published yet.
pub(super) async fn unpublished_dead(
    inner: &Inner,
    scope: &Scope,
    query: &HeldQuery,
    limit: usize,
    reserve: Option<Duration>,
) -> Result<Vec<Entry>> {
    let s = &inner.settings.schema;
    let on = "on e.scope = r.scope and e.week = r.week and e.id = r.id";
    // A row that someone else is changing or reserving right now is skipped: nobody waits here.
    let is_free = "(e.reserved is null or e.reserved <= (select now from present))";
    let (only_free, reserved, from) = match reserve {
        None => ("true", String::new(), "filled"),
        Some(_) => (
            is_free,
            format!(
                ", free as (select r.scope, r.week, r.id, r.place from filled r join {s}.held e {on} where {is_free} \
                    for update of e skip locked), \
                 mine as (update {s}.held e set reserved = (select now from present) + $5 * interval '1 microsecond' \
                    from free r where e.scope = r.scope and e.week = r.week and e.id = r.id \
                    returning r.scope, r.week, r.id, r.place)"
            ),
            "mine",
        ),
    };
    // Bodies are measured only for chosen rows, and read only for those that fit.
    let sql = format!(
        "with present as materialized (select {s}.ledger_now() as now), \
         chosen as materialized (select e.scope, e.week, e.id, \
             row_number() over (order by coalesce(e.reserved, e.at), e.scope, e.week, e.id) as place \
            from {s}.scope c join {s}.held e on e.scope = c.number \
           where c.scope = $1 and e.header_names is not null and e.state in {dead} and e.copied is distinct from e.token \
             and {MATCHES} and {only_free} order by place limit $2), {filled}{reserved} {} order by r.place",
        select(s, &format!("{from} r join {s}.held e {on}"), ""),
        dead = codes::list([State::Dead]),
        filled = filled(s)
    );
    let mut tx = inner.begin().await?;
    let rows = entries(&mut tx, sql, scope, query, limit, reserve).await?;
    if reserve.is_some() {
        tx.commit().await.map_err(|e| translate("reserving what is dead", e))?;
    }
    rows.iter().map(|row| Ok(read::entry(row)?.0)).collect()
}

/// Records that dead events were published.
pub(super) async fn mark_dead_published(inner: &Inner, copied: &[PublishedDead]) -> Result<()> {
    let s = &inner.settings.schema;
    let (mut scopes, mut weeks, mut keys, mut tokens) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (identity, week, token) in copied {
        if let Some(scope) = read::scope(inner, identity).await? {
            scopes.push(scope);
            weeks.push(week.number());
            keys.push(identity.id.key());
            tokens.push(token.0);
        }
    }
    let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
    let sql = format!(
        "update {s}.held h set copied = h.token from unnest($1::int[], $2::smallint[], $3::bytea[], $4::bigint[]) \
           as u(scope, week, id, token) \
          where h.scope = u.scope and h.week = u.week and h.id = u.id and h.token = u.token and h.state in {}",
        codes::list([State::Dead])
    );
    let query = sqlx::query(AssertSqlSafe(sql)).bind(&scopes).bind(&weeks).bind(&keys).bind(&tokens);
    inner.execute("recording what was published", query).await.map(drop)
}

pub(super) async fn set_markers(inner: &Inner, scope: &Scope, markers: &[Marker]) -> Result<()> {
    let mut tx = inner.begin().await?;
    set_markers_in(inner, &mut tx, scope, markers).await?;
    tx.commit().await.map_err(|e| translate("noting a marker", e))
}

/// Sets markers; an empty one is deleted. They are written in one order, so that two callers that
/// mark the same partitions do not deadlock.
pub(super) async fn set_markers_in(
    inner: &Inner,
    connection: &mut PgConnection,
    scope: &Scope,
    markers: &[Marker],
) -> Result<()> {
    let s = &inner.settings.schema;
    let upsert = format!(
        "insert into {s}.marker (scope, topic, partition, last, tried, at) values ($1, $2, $3, $4, $5, {s}.ledger_now()) \
         on conflict (scope, topic, partition) do update set last = excluded.last, tried = excluded.tried, at = excluded.at"
    );
    let delete = format!("delete from {s}.marker where scope = $1 and topic = $2 and partition = $3");
    let mut sorted: Vec<&Marker> = markers.iter().collect();
    sorted.sort_by(|a, b| (a.topic.as_str(), a.partition).cmp(&(b.topic.as_str(), b.partition)));
    for marker in sorted {
        let sql = if marker.is_empty() { &delete } else { &upsert };
        let mut query = sqlx::query(AssertSqlSafe(sql.clone()))
            .persistent(!inner.database.pooled())
            .bind(scope.as_str())
            .bind(marker.topic.as_str())
            .bind(marker.partition);
        if !marker.is_empty() {
            query = query.bind(marker.last).bind(marker.tried_text());
        }
        query.execute(&mut *connection).await.map_err(|e| translate("noting a marker", e))?;
    }
    Ok(())
}

from_row! {
    struct MarkerRow { partition: i32, last: i64, tried: String }
}

/// The markers of partitions, ordered by partition.
pub(super) async fn markers(
    inner: &Inner,
    scope: &Scope,
    topic: &Topic,
    partitions: &[i32],
) -> Result<Vec<Marker>> {
    let sql = format!(
        "select partition, last, tried from {}.marker where scope = $1 and topic = $2 and partition = any ($3) order by 1",
        inner.settings.schema
    );
    let query = sqlx::query_as::<_, MarkerRow>(AssertSqlSafe(sql))
        .bind(scope.as_str())
        .bind(topic.as_str())
        .bind(partitions);
    let rows = inner.fetch_all("reading markers", query).await?;
    rows.iter().map(|row| Marker::stored(topic, row.partition, row.last, &row.tried)).collect()
}

/// Deletes markers that were not set again within the retention: those of scopes no longer in use.
pub(super) async fn forget_markers(inner: &Inner, now: &Present, retention_us: i64) -> Result<()> {
    let sql = format!(
        "delete from {}.marker where at < {now} - least($1, {AGE_US_MAX}) * interval '1 microsecond'",
        inner.settings.schema
    );
    let query = sqlx::query(AssertSqlSafe(sql)).bind(retention_us);
    inner.execute("forgetting markers", query).await.map(drop)
}
