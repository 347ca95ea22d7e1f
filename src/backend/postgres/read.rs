//! Reads entries: single ones, pages, and counts.

use std::collections::BTreeSet;

use futures_util::TryStreamExt as _;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, FromRow as _, PgConnection};

use super::Inner;
use super::codes::{
    ALONE, HELD, SUSPECT, TRACKED, UNORDERED, count, current_state, from_row, tenant, tenant_text,
};
use super::error::{takes_no_writes, translate};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Fingerprint, Headers, Origin, Record};
use crate::id::{Aggregate, EventId, Owner, Scope, Tenant, Topic};
use crate::ledger::transition::{Head, HeadLease, Row};
use crate::ledger::{
    Audit, Cursor, CursorParts, Entry, Filter, Identity, LIST_BYTES_MAX, Metadata, Nonce, Page, Stat, State,
    Token, Week, WeekSize,
};

/// The columns of an [`EntryRow`]: `e` is the entry or held row, `w` its owner, `h` its bytes.
/// The reason is in the column `note`: binaries of an earlier build, at work while a schema is
/// migrated, would not find it under another name.
pub(super) fn columns(schema: &str) -> String {
    format!(
        "e.scope as scope_number, e.week, e.id, e.state::text as state, e.token, e.nonce, e.attempts, \
         {schema}.us(e.first_at) as first_at, {schema}.us(e.at) as at, w.name as owner, e.fingerprint, e.aggregate, e.seq, \
         e.topic, e.partition, e.\"offset\", e.metadata::text as metadata, e.note as reason, e.flags, \
         h.payload, h.header_names, h.header_values, h.key, {schema}.us(h.stamp) as stamp"
    )
}

from_row! {
    /// A row of a week or of `held`.
    struct EntryRow {
        scope_number: i32, week: i16, id: Vec<u8>, state: State, token: i64, nonce: i64,
        attempts: i16, first_at: i64, at: i64, owner: Option<String>, fingerprint: Option<Vec<u8>>,
        aggregate: Option<String>, seq: Option<i64>, topic: Option<String>, partition: Option<i32>,
        offset: Option<i64>, metadata: Option<String>, reason: Option<String>, flags: i16,
        payload: Option<Vec<u8>>, header_names: Option<Vec<Vec<u8>>>,
        header_values: Option<Vec<Vec<u8>>>, key: Option<Vec<u8>>, stamp: Option<i64>,
    }
}

from_row! {
    /// The names of a row's scope.
    struct ScopeRow { tenant: String, scope: String }
}

impl EntryRow {
    fn row(self) -> Result<Row> {
        let order = match (self.aggregate, self.seq) {
            (Some(aggregate), Some(seq)) => Some((Aggregate::new(aggregate)?, seq as u64)),
            _ => None,
        };
        let (partition, offset) = (self.partition.unwrap_or(0), self.offset.unwrap_or(0));
        let topic = self.topic.map(Topic::new).transpose()?;
        let body = self.header_names.map(|names| Record {
            payload: self.payload.map(Into::into),
            headers: names
                .into_iter()
                .map(|name| String::from_utf8_lossy(&name).into_owned())
                .zip(self.header_values.unwrap_or_default())
                .collect::<Headers>(),
            key: self.key.map(Into::into),
            timestamp: self.stamp.map(Time::from_micros),
        });
        Ok(Row {
            state: self.state,
            token: Token(self.token),
            nonce: Nonce(self.nonce),
            attempts: self.attempts as u32,
            first_at: Time::from_micros(self.first_at),
            at: Time::from_micros(self.at),
            owner: self.owner.map(Owner::new).transpose()?,
            fingerprint: self.fingerprint.and_then(|bytes| <[u8; 16]>::try_from(bytes).ok()).map(Fingerprint),
            order,
            origin: topic.map(|topic| Origin::new(topic, partition, offset)),
            metadata: self.metadata.map(Metadata::new).transpose()?,
            reason: self.reason.map(Into::into),
            tracked: self.flags & TRACKED != 0,
            alone: self.flags & ALONE != 0,
            suspect: self.flags & SUSPECT != 0,
            unordered: self.flags & UNORDERED != 0,
            body,
        })
    }
}

async fn find_scope(
    inner: &Inner,
    connection: &mut PgConnection,
    identity: &Identity,
) -> Result<Option<i32>> {
    let s = &inner.settings.schema;
    sqlx::query_scalar(AssertSqlSafe(format!(
        "select number from {s}.scope where tenant = $1 and scope = $2"
    )))
    .persistent(!inner.database.pooled())
    .bind(tenant_text(identity.tenant.as_ref()))
    .bind(identity.scope.as_str())
    .fetch_optional(connection)
    .await
    .map_err(|e| translate("looking for a scope", e))
}

/// The number of (tenant, scope), if it is registered, as a transaction sees it.
pub(super) async fn scope_in(
    inner: &Inner,
    connection: &mut PgConnection,
    identity: &Identity,
) -> Result<Option<i32>> {
    match inner.known_scope(identity) {
        Some(scope) => Ok(Some(scope)),
        None => find_scope(inner, connection, identity).await,
    }
}

/// A row and the number of its scope.
pub(super) struct Found {
    pub scope: i32,
    pub row: Row,
}

/// The row of an identity, in its week or in `held`.
pub(super) async fn find(
    inner: &Inner,
    connection: &mut PgConnection,
    identity: &Identity,
    week: Week,
    lock: bool,
) -> Result<Option<Found>> {
    let what = "reading an entry";
    let s = &inner.settings.schema;
    let Some(scope) = scope_in(inner, &mut *connection, identity).await? else { return Ok(None) };
    let lock = if lock { "for update of e" } else { "" };
    let in_week = format!(
        "select {} from {s}.entry e left join {s}.owner w on w.number = e.owner \
         left join {s}.held h on (e.flags & {HELD}::smallint) <> 0 and h.week = e.week and h.scope = e.scope and h.id = e.id \
         where e.week = $1 and e.scope = $2 and e.id = $3 {lock}",
        columns(s)
    );
    let in_held = format!(
        "select {} from {s}.held e left join {s}.owner w on w.number = e.owner cross join lateral \
         (select e.payload, e.header_names, e.header_values, e.key, e.stamp) h where e.week = $1 and e.scope = $2 and e.id = $3 {lock}",
        columns(s)
    );
    for sql in [in_week, in_held] {
        let found: Option<EntryRow> = sqlx::query_as(AssertSqlSafe(sql))
            .persistent(!inner.database.pooled())
            .bind(week.number())
            .bind(scope)
            .bind(&*identity.id.key())
            .fetch_optional(&mut *connection)
            .await
            .map_err(|e| translate(what, e))?;
        if let Some(found) = found {
            return Ok(Some(Found { scope, row: found.row()? }));
        }
    }
    Ok(None)
}

from_row! {
    /// The head of an aggregate.
    struct HeadRow {
        last: Option<i64>, lease_seq: Option<i64>, lease_token: Option<i64>,
        lease_until: Option<i64>, retrying: Vec<i64>, parked: Option<i64>, gap_at: Option<i64>,
    }
}

/// Reads and locks the head of a row's aggregate.
pub(super) async fn head(
    inner: &Inner,
    connection: &mut PgConnection,
    scope: i32,
    row: &Row,
) -> Result<Head> {
    let Some((aggregate, _)) = &row.order else { return Ok(Head::default()) };
    let s = &inner.settings.schema;
    let sql = format!(
        "select last, lease_seq, lease_token, {s}.us(lease_until) as lease_until, retrying, parked, {s}.us(gap_at) as gap_at \
         from {s}.head where scope = $1 and aggregate = $2 for update"
    );
    let found: Option<HeadRow> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!inner.database.pooled())
        .bind(scope)
        .bind(aggregate.as_str())
        .fetch_optional(connection)
        .await
        .map_err(|e| translate("reading an aggregate's head", e))?;
    Ok(found.map_or_else(Head::default, |head| Head {
        last: head.last.map(|n| n as u64),
        lease: match (head.lease_seq, head.lease_token, head.lease_until) {
            (Some(seq), Some(token), Some(until)) => {
                Some(HeadLease { seq: seq as u64, token: Token(token), until: Time::from_micros(until) })
            }
            _ => None,
        },
        retrying: head.retrying.into_iter().map(|n| n as u64).collect(),
        parked: head.parked.map(|n| n as u64),
        gap_at: head.gap_at.map(Time::from_micros),
    }))
}

/// Stores the head of an aggregate after an intervention.
pub(super) async fn put_head(
    inner: &Inner,
    connection: &mut PgConnection,
    scope: i32,
    aggregate: &Aggregate,
    head: &Head,
) -> Result<()> {
    let s = &inner.settings.schema;
    let sql = format!(
        "update {s}.head set last = $3, lease_seq = $4, lease_token = case when $4::bigint is null then null else lease_token end, \
         lease_until = case when $4::bigint is null then null else lease_until end, retrying = $5, parked = $6, \
         gap_at = timestamptz 'epoch' + $7 * interval '1 microsecond' \
         where scope = $1 and aggregate = $2"
    );
    let stored = sqlx::query(AssertSqlSafe(sql))
        .persistent(!inner.database.pooled())
        .bind(scope)
        .bind(aggregate.as_str())
        .bind(head.last.map(|n| n as i64))
        .bind(head.lease.map(|lease| lease.seq as i64))
        .bind(head.retrying.iter().map(|n| *n as i64).collect::<Vec<_>>())
        .bind(head.parked.map(|n| n as i64))
        .bind(head.gap_at.map(Time::as_micros))
        .execute(connection)
        .await
        .map_err(|e| translate("storing an aggregate's head", e))?;
    if stored.rows_affected() == 0 {
        return Err(Error::Corrupt(format!("the head of aggregate {aggregate} is missing")));
    }
    Ok(())
}

pub(super) async fn now_in(inner: &Inner, connection: &mut PgConnection) -> Result<Time> {
    let s = &inner.settings.schema;
    sqlx::query_scalar(AssertSqlSafe(format!("select {s}.us({s}.ledger_now())")))
        .persistent(!inner.database.pooled())
        .fetch_one(connection)
        .await
        .map(Time::from_micros)
        .map_err(|e| translate("reading the ledger's clock", e))
}

pub(super) async fn now(inner: &Inner) -> Result<Time> {
    now_in(inner, &mut *inner.begin().await?).await
}

/// Asks for the clock, and whether the server takes writes: a standby answers reads.
pub(super) async fn probe(inner: &Inner) -> Result<()> {
    let s = &inner.settings.schema;
    let sql = format!(
        "select pg_catalog.current_setting('transaction_read_only'::text) from (select {s}.ledger_now() offset 0) as clock"
    );
    let query = sqlx::query_as::<_, (String,)>(AssertSqlSafe(sql));
    let what = "asking whether the ledger takes writes";
    match &*inner.fetch_one(what, query).await?.0 {
        "on" => Err(takes_no_writes(what, None)),
        _ => Ok(()),
    }
}

pub(super) async fn get(inner: &Inner, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
    let week = Week::route(inner.settings.ledger.identity, &identity.id, time)?;
    let found = if inner.database.needs_transaction() {
        find(inner, &mut *inner.begin().await?, identity, week, false).await?
    } else {
        // A single query needs no transaction, which saves two round trips.
        let mut connection =
            inner.database.pool().acquire().await.map_err(|e| translate("reading an entry", e))?;
        find(inner, &mut connection, identity, week, false).await?
    };
    Ok(found.map(|found| found.row.entry(identity.clone(), week)))
}

/// The number of (tenant, scope), if it is registered. Does not register it.
pub(super) async fn scope(inner: &Inner, identity: &Identity) -> Result<Option<i32>> {
    if let Some(number) = inner.known_scope(identity) {
        return Ok(Some(number));
    }
    let mut connection = inner.begin().await?;
    let number = find_scope(inner, &mut connection, identity).await?;
    if let Some(number) = number {
        inner.remember_scope(identity, number);
    }
    Ok(number)
}

/// Which identities took effect before, in one statement.
pub(super) async fn known(inner: &Inner, identities: &[Identity]) -> Result<Vec<bool>> {
    let mut known = vec![false; identities.len()];
    let (mut places, mut scopes, mut weeks, mut keys) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (at, identity) in identities.iter().enumerate() {
        let week = Week::route(inner.settings.ledger.identity, &identity.id, None)?;
        if let Some(scope) = scope(inner, identity).await? {
            places.push(at);
            scopes.push(scope);
            weeks.push(week.number());
            keys.push(identity.id.key());
        }
    }
    if places.is_empty() {
        return Ok(known);
    }
    let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
    let query = sqlx::query_as::<_, (i64,)>(AssertSqlSafe(std::sync::Arc::clone(&inner.sql.known)))
        .bind(&scopes)
        .bind(&weeks)
        .bind(&keys);
    let found = inner.database.fetch_all(query).await.map_err(|e| translate("looking for entries", e))?;
    for (place,) in found {
        if let Some(at) = usize::try_from(place - 1).ok().and_then(|at| places.get(at)) {
            known[*at] = true;
        }
    }
    Ok(known)
}

/// An entry and its place in a listing, from [`columns`] and the names of tenant and scope.
pub(super) fn entry(found: &PgRow) -> Result<(Entry, CursorParts)> {
    let decoded = EntryRow::from_row(found).and_then(|row| Ok((row, ScopeRow::from_row(found)?)));
    let (row, names) = decoded.map_err(|e| translate("reading an entry", e))?;
    let identity = Identity {
        tenant: tenant(names.tenant)?,
        scope: Scope::new(names.scope)?,
        id: EventId::from_key(&row.id)?,
    };
    let place = CursorParts { week: row.week, scope: row.scope_number, key: row.id.clone() };
    let week = Week::from_number(row.week)?;
    Ok((row.row()?.entry(identity, week), place))
}

pub(super) async fn list(
    inner: &Inner,
    filter: &Filter,
    after: Option<&Cursor>,
    limit: usize,
) -> Result<Page> {
    let what = "listing entries";
    let s = &inner.settings.schema;
    let after = after.map(|cursor| CursorParts::decode(&cursor.0)).transpose()?;
    // Dead and parked entries are in `held` with all their columns; all others are read from their
    // week.
    let held_only = !filter.states.is_empty()
        && filter.states.iter().all(|state| matches!(state, State::Dead | State::Parked));
    let wanted = format!(
        "and ($4::text is null or c.tenant = $4) and ($5::text is null or c.scope = $5) \
         and ($6::bytea is null or e.id = $6) \
         and (cardinality($7::text[]) = 0 or {state} = any ($7)) \
         and ($8::bigint is null or {s}.us(e.first_at) >= $8) and ($9::bigint is null or {s}.us(e.first_at) < $9) \
         and ($10::text is null or e.metadata ->> $10 = $11) \
         and ($13::text is null or e.aggregate = $13) and ($14::text is null or e.topic = $14) \
         and ($15::int is null or e.partition = $15) and ($16::text[] is null or c.scope = any ($16))",
        state = current_state(s, "e")
    );
    let page = "and ($1::smallint is null or (e.week, e.scope, e.id) > ($1, $2, $3)) order by e.week, e.scope, e.id limit $12";
    let in_weeks = format!(
        "(select {columns}, c.tenant, c.scope from {s}.entry e join {s}.scope c on c.number = e.scope \
         left join {s}.owner w on w.number = e.owner \
         left join {s}.held h on (e.flags & {HELD}::smallint) <> 0 and h.week = e.week and h.scope = e.scope and h.id = e.id \
         where true {wanted} {page})",
        columns = columns(s)
    );
    let in_held = format!(
        "(select {columns}, c.tenant, c.scope from {s}.held e join {s}.scope c on c.number = e.scope \
         left join {s}.owner w on w.number = e.owner \
         cross join lateral (select e.payload, e.header_names, e.header_values, e.key, e.stamp) h \
         where {gone} {wanted} {page})",
        columns = columns(s),
        gone = if held_only {
            "true".to_owned()
        } else {
            format!(
                "not exists (select from {s}.entry x where x.week = e.week and x.scope = e.scope and x.id = e.id)"
            )
        }
    );
    let sql = if held_only {
        in_held
    } else {
        format!("select * from ({in_weeks} union all {in_held}) u order by 2, 1, 3 limit $12")
    };
    let mut connection = inner.begin().await?;
    let mut rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(after.as_ref().map(|after| after.week))
        .bind(after.as_ref().map(|after| after.scope))
        .bind(after.as_ref().map(|after| &after.key[..]))
        .bind(filter.tenant.as_ref().map(|tenant| tenant_text(tenant.as_ref())))
        .bind(filter.scope.as_ref().map(Scope::as_str))
        .bind(filter.id.as_ref().map(|id| id.key().into_owned()))
        .bind(&filter.states)
        .bind(filter.since.map(Time::as_micros))
        .bind(filter.until.map(Time::as_micros))
        .bind(filter.metadata.as_ref().map(|(key, _)| key))
        .bind(filter.metadata.as_ref().map(|(_, value)| value))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX - 1).saturating_add(1))
        .bind(filter.aggregate.as_ref().map(Aggregate::as_str))
        .bind(filter.topic.as_ref().map(Topic::as_str))
        .bind(filter.partition)
        .bind(filter.scopes.as_ref().map(|scopes| scopes.iter().map(Scope::as_str).collect::<Vec<_>>()))
        .fetch(&mut *connection);
    let (mut page, mut bytes, mut more): (Vec<(Entry, CursorParts)>, usize, bool) = (Vec::new(), 0, false);
    // Row by row: a page of large bodies ends before they are all in memory.
    while let Some(row) = rows.try_next().await.map_err(|e| translate(what, e))? {
        if page.len() == limit || bytes >= LIST_BYTES_MAX {
            more = true;
            break;
        }
        let found = entry(&row)?;
        bytes += found.0.page_bytes();
        page.push(found);
    }
    let next = page.last().filter(|_| more).map(|(_, place)| place.encode());
    Ok(Page { entries: page.into_iter().map(|(entry, _)| entry).collect(), next })
}

from_row! {
    /// How many entries of a scope are in a state.
    struct Counted { tenant: String, scope: String, state: State, week: Option<i16>, count: i64 }
}

from_row! {
    struct DroppedRow { week: i16, at: i64 }
}

from_row! {
    struct WeekRow { week: i16, bytes: Option<i64> }
}

pub(super) async fn scopes(inner: &Inner) -> Result<BTreeSet<Scope>> {
    let sql = format!("select distinct scope from {}.scope", inner.settings.schema);
    let scopes: Vec<(String,)> =
        inner.fetch_all("listing scopes", sqlx::query_as(AssertSqlSafe(sql))).await?;
    scopes.into_iter().map(|(scope,)| Scope::new(scope)).collect()
}

pub(super) async fn stat(inner: &Inner) -> Result<Stat> {
    let what = "counting entries";
    let s = &inner.settings.schema;
    let now = now(inner).await?;
    let counts = format!(
        "select c.tenant, c.scope, x.state, x.week, sum(x.n)::bigint as count from ( \
           select e.scope, {in_week} as state, e.week, count(*) n from {s}.entry e group by 1, 2, 3 \
           union all \
           select h.scope, {in_held}, null, count(*) n from {s}.held h where not exists \
             (select from {s}.entry x where x.week = h.week and x.scope = h.scope and x.id = h.id) group by 1, 2 \
         ) x join {s}.scope c on c.number = x.scope group by 1, 2, 3, 4 order by 1, 2, 3",
        in_week = current_state(s, "e"),
        in_held = current_state(s, "h")
    );
    let counts: Vec<Counted> = inner.fetch_all(what, sqlx::query_as(AssertSqlSafe(counts))).await?;
    let weeks = format!(
        "select split_part(c.relname, '_', 2)::smallint as week, pg_total_relation_size(c.oid) as bytes from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = '{s}.entry'::regclass order by 1"
    );
    let weeks: Vec<WeekRow> = inner.fetch_all(what, sqlx::query_as(AssertSqlSafe(weeks))).await?;
    let sizes = weeks.into_iter().map(|row| {
        // A week that is dropped at this moment has no size any more.
        let bytes = row.bytes.map(i64::unsigned_abs);
        let entries = counts.iter().filter(|counted| counted.week == Some(row.week));
        let entries = entries.map(|counted| counted.count.unsigned_abs()).sum();
        Ok(WeekSize { week: Week::from_number(row.week)?, entries, bytes })
    });
    let week_sizes = sizes.collect::<Result<Vec<_>>>()?;
    let dropped =
        format!("select week, {s}.us(at) as at from {s}.dropped where scope_max is not null order by week");
    let dropped: Vec<DroppedRow> = inner.fetch_all(what, sqlx::query_as(AssertSqlSafe(dropped))).await?;
    let held = format!(
        "select c.tenant, c.scope, count(*) from {s}.held h join {s}.scope c on c.number = h.scope \
         where h.header_names is not null group by 1, 2 order by 1, 2"
    );
    let held: Vec<(String, String, i64)> = inner.fetch_all(what, sqlx::query_as(AssertSqlSafe(held))).await?;
    let held_by = held
        .into_iter()
        .map(|(of, scope, count)| Ok((tenant(of)?, Scope::new(scope)?, count as u64)))
        .collect::<Result<Vec<_>>>()?;
    let mut rows: Vec<(Option<Tenant>, Scope, State, u64)> = Vec::with_capacity(counts.len());
    for counted in counts {
        let (of, scope) = (tenant(counted.tenant)?, Scope::new(counted.scope)?);
        match rows.last_mut() {
            // The same in another week.
            Some(last) if (&last.0, &last.1, last.2) == (&of, &scope, counted.state) => {
                last.3 += counted.count as u64;
            }
            _ => rows.push((of, scope, counted.state, counted.count as u64)),
        }
    }
    let dropped =
        dropped.into_iter().map(|row| Ok((Week::from_number(row.week)?, Time::from_micros(row.at))));
    Ok(Stat {
        now,
        counts: rows,
        weeks: week_sizes.iter().map(|size| size.week).collect(),
        week_sizes,
        dropped: dropped.collect::<Result<_>>()?,
        held: held_by.iter().map(|(.., count)| count).sum(),
        held_by,
    })
}

from_row! {
    struct AuditRow { at: i64, by: String, what: String, identity: String, reason: String }
}

/// The latest audit rows, of all entries or of these.
pub(super) async fn audit(inner: &Inner, of: Option<&[Identity]>, limit: usize) -> Result<Vec<Audit>> {
    let s = &inner.settings.schema;
    let sql = format!(
        "select {s}.us(at) as at, by, what, identity, why as reason from {s}.audit \
         where $2::text[] is null or identity = any ($2::text[]) order by number desc limit $1"
    );
    let names: Option<Vec<_>> = of.map(|of| of.iter().map(Audit::name).collect());
    let query = sqlx::query_as::<_, AuditRow>(AssertSqlSafe(sql)).bind(count(limit as u64)).bind(names);
    let rows = inner.fetch_all("reading the audit", query).await?;
    let line =
        |row: AuditRow| Audit::stored(Time::from_micros(row.at), row.by, row.what, row.identity, row.reason);
    Ok(rows.into_iter().map(line).collect())
}
