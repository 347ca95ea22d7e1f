//! Reads, and decides whether a position without an event is empty.
//!
//! All transactions draw positions from one sequence. Each holds a write lock on the journal's
//! table from before the draw until others can see its commit. So a reader asks, in this order, how
//! many positions were drawn and which transactions hold such a lock. Once all of those have ended,
//! every position drawn by then is decided: its event is visible, or it stays empty. The highest
//! position known to be decided is kept as one number, which costs nothing however many positions
//! below it were rolled back. Transactions that do not write to the journal are ignored, as are
//! those of other databases.
//!
//! All of that holds within one incarnation of the server. After a crash or a failover, the server may
//! draw positions again that were decided (a sequence survives only as far as its WAL was flushed),
//! and catch up with what was drawn before. So the number is kept with the incarnation in which it was
//! learned, and with every page the server says whether it is still in that incarnation.
//!
//! A hot standby shows what was committed on its primary, but not which transactions are writing
//! there. In recovery nothing is decided: a reader waits at every hole, even one whose writer
//! rolled back, until the server is promoted and knows its own writers.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use sqlx::AssertSqlSafe;
use tokio::sync::Mutex;

use super::{Inner, anchor};
use crate::backend::postgres::codes::{count, from_row, tenant, tenant_text};
use crate::backend::postgres::error::takes_no_writes;
use crate::clock::Time;
use crate::crash_point::mutant;
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint, TraceContext};
use crate::id::{Aggregate, EventId, Kind, Tenant};
use crate::journal::page::events_max;
use crate::journal::{EVENT_BYTES, Filling, JournalStat, Page, Position, ReadBatch, Stored};

/// Up to this many rows are counted one by one; beyond that, the server's estimate is good enough.
const COUNTED_MAX: i64 = 100_000;

/// The columns of [`Row`], from `j`.
pub(super) const COLUMNS: &str = "j.position, j.seq, (extract(epoch from j.at) * 1000000::numeric)::bigint as at, j.time_us, j.tenant, j.aggregate, \
     j.id, j.fingerprint, j.kind, j.trace, j.header_names, j.header_values, j.payload";

/// SQL for the rows of a query, up to and including the one that reaches `bytes_max`, as
/// [`bytes_of`](crate::journal::bytes_of) counts. The rest is not sent. A payload's length is known
/// without reading it.
pub(super) fn paged(from: &str, bytes_max: &str, same: &str, alive: &str) -> String {
    let headers = |column: &str| {
        format!(
            "case when j.{column} is null then 0 else \
             (select coalesce(sum(octet_length(part)), 0)::int from unnest(j.{column}) part) end"
        )
    };
    format!(
        "select {COLUMNS}, {same} as same, {alive} as alive from (select j.*, sum({EVENT_BYTES} + octet_length(j.payload) + {} + {}) \
         over (rows between unbounded preceding and 1 preceding) as before from {from} j) j \
         where coalesce(j.before, 0) < greatest({bytes_max}::bigint, 1)",
        headers("header_names"),
        headers("header_values"),
    )
}

from_row! {
    /// An event as stored.
    struct Row {
        position: i64,
        seq: i64,
        at: i64,
        time_us: Option<i64>,
        tenant: String,
        aggregate: String,
        id: Vec<u8>,
        fingerprint: Vec<u8>,
        kind: Option<String>,
        trace: Option<String>,
        header_names: Option<Vec<Vec<u8>>>,
        header_values: Option<Vec<Vec<u8>>>,
        payload: Vec<u8>,
        /// Whether the event before the page is unchanged.
        same: bool,
        /// Whether what is known to be decided still holds.
        alive: bool,
    }
}

from_row! { "o_",
    /// How many positions were drawn, and who may still fill some of them.
    struct HorizonRow { drawn: Option<i64>, writers: Vec<String>, incarnation: String }
}

/// SQL that identifies the incarnation of a server, readable by every role: when it started, when it last
/// recovered from a crash (which resets its statistics, even if only its processes were restarted),
/// whether it is still a replica, and whether database and table were made anew. A needless change
/// costs one more look at the next hole.
pub(super) const INCARNATION: &str = "(select pg_catalog.concat_ws('/', extract(epoch from pg_catalog.pg_postmaster_start_time()), \
     extract(epoch from pg_catalog.pg_stat_get_bgwriter_stat_reset_time()), pg_catalog.pg_is_in_recovery(), \
     '{s}.journal'::regclass::oid, (select d.oid from pg_catalog.pg_database d where d.datname = current_database())))";

/// SQL for whether the server is still in the incarnation `incarnation`, in which everything up to `settled` was
/// decided.
pub(super) fn is_same_incarnation(incarnation: &str, settled: &str) -> String {
    format!("(select {INCARNATION} = {incarnation}::text and {settled}::bigint <= {})", anchor::DRAWN)
}

/// Up to where everything is decided, and in which incarnation of the server this was learned.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    pub(super) settled: u64,
    incarnation: Arc<str>,
}

impl Known {
    /// Up to where everything is decided, if the server that returned these rows is still in the
    /// incarnation in which this was learned; else 0.
    fn settled_for(&self, rows: &[Row]) -> u64 {
        if mutant!("journal_skips_holes") {
            return u64::MAX;
        }
        rows.first().filter(|row| row.alive).map_or(0, |_| self.settled)
    }
}

#[derive(Debug, Default)]
pub(super) struct Horizon {
    known: std::sync::Mutex<Known>,
    /// Locked while the server is queried: an older answer must never be applied to a newer watch.
    watch: Mutex<Option<Watch>>,
}

/// Once these writers have ended, everything up to `up_to` is decided.
#[derive(Debug)]
struct Watch {
    up_to: u64,
    writers: HashSet<String>,
}

impl Horizon {
    /// The position up to which everything was decided *before* this call; a later read sees all of
    /// it.
    pub(super) fn known(&self) -> Known {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The server was put back: what was decided may no longer be.
    pub(super) async fn forget(&self) {
        let mut watch = self.watch.lock().await;
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Known::default();
        *watch = None;
    }

    fn apply(&self, watch: &mut Option<Watch>, incarnation: &str, drawn: u64, writers: HashSet<String>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let decided = watch.as_ref().map_or(0, |watch| watch.up_to).max(known.settled);
        if *known.incarnation != *incarnation || drawn < decided {
            // The positions and writers seen before belong to another incarnation.
            *known = Known { settled: 0, incarnation: incarnation.into() };
            *watch = None;
        }
        let is_prepared = |writer: &&String| writer.starts_with('p');
        if let Some(waited) = watch {
            // PREPARE TRANSACTION renames a writer, so one that is gone may be any of those
            // prepared now.
            let live_gone = waited.writers.iter().any(|one| !is_prepared(&one) && !writers.contains(one));
            waited.writers.retain(|one| writers.contains(one));
            if live_gone {
                waited.writers.extend(writers.iter().filter(is_prepared).cloned());
            }
            if waited.writers.is_empty() {
                known.settled = known.settled.max(waited.up_to);
                *watch = None;
            }
        }
        if writers.is_empty() {
            known.settled = known.settled.max(drawn);
        } else if watch.is_none() {
            *watch = Some(Watch { up_to: drawn, writers });
        }
    }
}

/// Looks for writers, and returns up to where everything is decided now.
pub(super) async fn settle(inner: &Inner) -> Result<Known> {
    let mut watch = inner.horizon.watch.lock().await;
    let query = sqlx::query_as::<_, HorizonRow>(AssertSqlSafe(Arc::clone(&inner.sql.horizon)));
    let found = inner.fetch_first("looking for writers", query).await?;
    let HorizonRow { drawn, writers, incarnation } =
        found.ok_or_else(|| Error::Corrupt("the journal's horizon is missing".into()))?;
    if drawn.is_none() && *inner.horizon.known().incarnation != *incarnation {
        tracing::warn!(
            target: "hapax",
            "this server is a standby and does not show who writes on its primary: a reader waits at each position that has no event, \
             also where a transaction was rolled back; read on the primary"
        );
    }
    inner.horizon.apply(&mut watch, &incarnation, drawn.unwrap_or(0) as u64, writers.into_iter().collect());
    Ok(inner.horizon.known())
}

/// How many of these rows can be returned: those before the first position that is missing and not
/// known to be empty.
fn decided(after: u64, rows: &[Row], settled: u64) -> usize {
    let mut last = after;
    for (at, row) in rows.iter().enumerate() {
        let position = row.position as u64;
        if !follows(last, position, settled) {
            return at;
        }
        last = position;
    }
    rows.len()
}

/// Whether no event can appear any more between two positions.
pub(super) fn follows(after: u64, position: u64, settled: u64) -> bool {
    position.saturating_sub(1) <= after.max(settled)
}

pub(super) async fn read(inner: &Inner, after: &Position, limit: usize) -> Result<ReadBatch> {
    let from = after.number();
    let bytes_max = inner.settings.journal.page_bytes_max;
    let anchor = inner.anchors.at(from);
    let page = async |known: &Known| {
        let query = sqlx::query_as::<_, Row>(AssertSqlSafe(Arc::clone(&inner.sql.read)))
            .bind(count(from))
            .bind(count(limit.min(events_max(bytes_max)) as u64))
            .bind(count(bytes_max as u64))
            .bind(anchor)
            .bind(known.incarnation.to_string())
            .bind(count(known.settled));
        let rows = inner.fetch_all("reading the journal", query).await?;
        if limit > 0 && anchor.is_some() && rows.first().is_none_or(|row| !row.same) {
            // An empty page does not say whether the event before it is unchanged.
            anchor::check(inner, from, anchor, None).await?;
        }
        Ok::<_, Error>(rows)
    };
    let known = inner.horizon.known(); // before the rows are read
    let mut rows = page(&known).await?;
    let mut readable = decided(from, &rows, known.settled_for(&rows));
    if readable < rows.len() {
        let known = settle(inner).await?;
        let last = if readable == 0 { from } else { rows[readable - 1].position as u64 };
        if follows(last, rows[readable].position as u64, known.settled) {
            // The missing event is there now or never will be: only another read can tell.
            rows = page(&known).await?;
            readable = decided(from, &rows, known.settled_for(&rows));
        }
    }
    let at_hole = readable < rows.len();
    rows.truncate(readable);
    let page = filled(rows, limit, bytes_max)?;
    inner.anchors.learn(&page.events);
    let next = page.events.last().map_or_else(|| after.clone(), |stored| stored.position.clone());
    Ok(ReadBatch::new(page.events, next, at_hole).more(page.more && !at_hole))
}

/// Builds a page from rows that the server limited by count and bytes, counted as we do.
fn filled(rows: Vec<Row>, limit: usize, bytes_max: usize) -> Result<Page> {
    let mut page = Filling::new(limit, bytes_max);
    for row in rows {
        let taken = page.take(row.stored()?);
        debug_assert!(taken, "the server sends more than a page takes");
    }
    Ok(page.done())
}

/// The first position after `after` that has an event.
pub(super) async fn next(inner: &Inner, after: u64) -> Result<Option<u64>> {
    let query = sqlx::query_as::<_, (Option<i64>,)>(AssertSqlSafe(Arc::clone(&inner.sql.next)));
    let found = inner.fetch_first("reading the journal", query.bind(count(after))).await?;
    Ok(found.and_then(|(position,)| position).map(|position| position as u64))
}

impl Row {
    fn stored(self) -> Result<Stored> {
        let strange =
            |what: &str| Error::Corrupt(format!("{what} of the event at position {}", self.position));
        let mut event = Event::new(EventId::from_key(&self.id)?).payload(self.payload);
        event.time = self.time_us.map(Time::from_micros);
        event.kind = self.kind.map(Kind::new).transpose()?;
        event.tenant = tenant(self.tenant)?;
        event.trace = self.trace.map(|trace| TraceContext::parse(trace.as_bytes())).transpose()?;
        let names = self.header_names.unwrap_or_default().into_iter().map(String::from_utf8);
        let names = names.collect::<Result<Vec<_>, _>>().map_err(|_| strange("a header's name"))?;
        event.headers = names.into_iter().zip(self.header_values.unwrap_or_default()).collect();
        let fingerprint = self.fingerprint.try_into().map_err(|_| strange("the fingerprint"))?;
        let (position, at) = (Position::of(self.position as u64), Time::from_micros(self.at));
        let aggregate = Aggregate::new(self.aggregate)?;
        Ok(Stored::new(position, at, Fingerprint(fingerprint), event, aggregate, self.seq as u64))
    }
}

pub(super) async fn read_aggregate(
    inner: &Inner,
    tenant: Option<&Tenant>,
    aggregate: &Aggregate,
    from: u64,
    limit: usize,
) -> Result<Page> {
    let bytes_max = inner.settings.journal.page_bytes_max;
    let query = sqlx::query_as::<_, Row>(AssertSqlSafe(Arc::clone(&inner.sql.read_aggregate)))
        .bind(tenant_text(tenant))
        .bind(aggregate.as_str())
        .bind(count(from))
        .bind(count(limit.min(events_max(bytes_max)) as u64))
        .bind(count(bytes_max as u64));
    filled(inner.fetch_all("reading an aggregate", query).await?, limit, bytes_max)
}

pub(super) async fn find(inner: &Inner, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
    let key = id.key();
    let query = sqlx::query_as::<_, Row>(AssertSqlSafe(Arc::clone(&inner.sql.find)))
        .bind(tenant_text(tenant))
        .bind(&*key);
    inner.fetch_first("looking for an event", query).await?.map(Row::stored).transpose()
}

pub(super) async fn head(inner: &Inner, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64> {
    let query = sqlx::query_as::<_, (i64,)>(AssertSqlSafe(Arc::clone(&inner.sql.head)))
        .persistent(false) // planned for the table's current size
        .bind(tenant_text(tenant))
        .bind(aggregate.as_str());
    let found = inner.fetch_first("reading an aggregate's head", query).await?;
    Ok(found.map_or(0, |(last,)| last as u64))
}

pub(super) async fn count_after(inner: &Inner, after: &Position, limit: u64) -> Result<u64> {
    let s = &inner.settings.schema;
    let sql = format!("select count(*) from (select from {s}.journal where position > $1 limit $2) x");
    let query = sqlx::query_as::<_, (i64,)>(AssertSqlSafe(sql))
        .persistent(false)
        .bind(count(after.number()))
        .bind(count(limit));
    Ok(inner.fetch_first("counting events", query).await?.map_or(0, |(events,)| events as u64))
}

from_row! {
    struct Counts {
        events: i64,
        aggregates: i64,
        /// As the server estimates them.
        events_about: i64,
        aggregates_about: i64,
        oldest_at: Option<i64>,
        last: Option<i64>,
    }
}

pub(super) async fn stat(inner: &Inner) -> Result<JournalStat> {
    let s = &inner.settings.schema;
    let few = COUNTED_MAX + 1;
    let estimate = |table: &str| {
        format!("(select reltuples::bigint from pg_class where oid = '{s}.{table}'::regclass::oid)")
    };
    let sql = format!(
        "select (select count(*) from (select from {s}.journal limit {few}) x) as events, \
         (select count(*) from (select from {s}.journal_head limit {few}) x) as aggregates, \
         {} as events_about, {} as aggregates_about, \
         (select (extract(epoch from at) * 1000000::numeric)::bigint from {s}.journal order by position limit 1) as oldest_at, \
         (select position from {s}.journal order by position desc limit 1) as last",
        estimate("journal"),
        estimate("journal_head"),
    );
    let query = sqlx::query_as::<_, Counts>(AssertSqlSafe(sql)).persistent(false);
    let counts = inner.fetch_first("counting events", query).await?;
    let counts = counts.ok_or_else(|| Error::Corrupt("the journal cannot be counted".into()))?;
    let of = |counted: i64, about: i64| if counted < few { counted } else { about.max(counted) } as u64;
    Ok(JournalStat {
        events: of(counts.events, counts.events_about),
        aggregates: of(counts.aggregates, counts.aggregates_about),
        exact: counts.events < few && counts.aggregates < few,
        oldest_at: counts.oldest_at.map(Time::from_micros),
        last: counts.last.map(|position| Position::of(position as u64)),
    })
}

pub(super) async fn now(inner: &Inner) -> Result<Time> {
    let sql = format!(
        "select (extract(epoch from {}.journal_now()) * 1000000::numeric)::bigint",
        inner.settings.schema
    );
    let query = sqlx::query_as::<_, (i64,)>(AssertSqlSafe(sql)).persistent(false);
    let now = inner.fetch_first("reading the journal's clock", query).await?;
    now.map(|(now,)| Time::from_micros(now)).ok_or_else(|| Error::Corrupt("the journal has no clock".into()))
}

/// The clock, and then the last position that was drawn: two statements, so that their order is
/// certain. A sequence is read as it is now, whoever has drawn from it: whatever was acknowledged
/// before the first statement had drawn its position by then, and drawn positions that are not
/// committed count too, which is harmless in an upper bound.
pub(super) async fn horizon(inner: &Inner) -> Result<(Time, Position)> {
    let time = now(inner).await?;
    let sql = format!("select {}, pg_catalog.pg_is_in_recovery()", anchor::DRAWN);
    let sql = sql.replace("{s}", &inner.settings.schema);
    let query = sqlx::query_as::<_, (i64, bool)>(AssertSqlSafe(sql)).persistent(false);
    match inner.fetch_first("reading the last position", query).await? {
        Some((drawn, false)) => Ok((time, Position::of(drawn as u64))),
        Some((_, true)) => Err(Error::Unsupported(
            "this server is a standby: it does not know what its primary has acknowledged; ask the primary"
                .into(),
        )),
        None => Err(Error::Corrupt("the journal's sequence is missing".into())),
    }
}

/// Asks for the clock, and whether the server takes writes: a standby answers reads.
pub(super) async fn probe(inner: &Inner) -> Result<()> {
    let sql = format!(
        "select pg_catalog.current_setting('transaction_read_only'::text) from (select {}.journal_now() offset 0) as clock",
        inner.settings.schema
    );
    let query = sqlx::query_as::<_, (String,)>(AssertSqlSafe(sql)).persistent(false);
    let what = "asking whether the journal takes writes";
    match inner.fetch_first(what, query).await? {
        Some((read_only,)) if read_only != "on" => Ok(()),
        _ => Err(takes_no_writes(what, None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(names: &[&str]) -> HashSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn apply(horizon: &Horizon, watch: &mut Option<Watch>, drawn: u64, names: &[&str]) -> u64 {
        apply_in("one", horizon, watch, drawn, names)
    }

    fn apply_in(
        incarnation: &str,
        horizon: &Horizon,
        watch: &mut Option<Watch>,
        drawn: u64,
        names: &[&str],
    ) -> u64 {
        horizon.apply(watch, incarnation, drawn, writers(names));
        horizon.known().settled
    }

    #[test]
    fn another_life_of_the_server_has_decided_nothing() {
        let (horizon, mut watch) = (Horizon::default(), None);
        assert_eq!(apply(&horizon, &mut watch, 25, &[]), 25);
        assert_eq!(apply_in("two", &horizon, &mut watch, 40, &["1/1"]), 0, "however far it has drawn");
        assert_eq!(apply_in("three", &horizon, &mut watch, 30, &["1/1"]), 0);
        assert_eq!(apply_in("three", &horizon, &mut watch, 35, &[]), 35, "not 40, which nobody waits for");
    }

    #[test]
    fn what_was_drawn_never_goes_back_within_a_life() {
        let (horizon, mut watch) = (Horizon::default(), None);
        assert_eq!(apply(&horizon, &mut watch, 25, &[]), 25);
        assert_eq!(apply(&horizon, &mut watch, 7, &["1/1"]), 0);
        assert_eq!(apply(&horizon, &mut watch, 7, &[]), 7);
        assert_eq!(apply(&horizon, &mut watch, 20, &["1/1"]), 7);
        assert_eq!(apply(&horizon, &mut watch, 10, &["2/1"]), 0, "nor what is waited for");
        assert_eq!(apply(&horizon, &mut watch, 12, &["3/1"]), 10);
    }

    #[test]
    fn only_those_who_wrote_when_it_was_drawn_are_waited_for() {
        let (horizon, mut watch) = (Horizon::default(), None);
        assert_eq!(apply(&horizon, &mut watch, 10, &["1/1", "2/1"]), 0);
        assert_eq!(apply(&horizon, &mut watch, 20, &["2/1", "3/1"]), 0);
        assert_eq!(
            apply(&horizon, &mut watch, 30, &["3/1", "4/1"]),
            10,
            "busy writers after it do not matter"
        );
        assert_eq!(apply(&horizon, &mut watch, 40, &["5/1"]), 30, "and the next watch began with that look");
        assert_eq!(apply(&horizon, &mut watch, 50, &[]), 50, "nobody writes: everything is decided");
    }

    #[test]
    fn a_writer_that_is_prepared_is_still_waited_for() {
        let (horizon, mut watch) = (Horizon::default(), None);
        assert_eq!(apply(&horizon, &mut watch, 10, &["1/1"]), 0);
        assert_eq!(apply(&horizon, &mut watch, 10, &["p-1/700"]), 0, "1/1 goes by another name now");
        assert_eq!(apply(&horizon, &mut watch, 11, &["p-1/700", "p-1/701"]), 0);
        assert_eq!(apply(&horizon, &mut watch, 12, &["p-1/701"]), 10, "701 came later");
    }

    #[test]
    fn a_hole_is_what_is_missing_and_undecided() {
        assert!(follows(4, 5, 0) && follows(4, 9, 8) && follows(9, 10, 3));
        assert!(!follows(4, 6, 0) && !follows(4, 9, 7));
    }
}
