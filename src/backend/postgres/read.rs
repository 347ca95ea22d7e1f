//! Reads entries: single ones, pages, and counts.

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use super::Inner;
use super::error::translate;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Fingerprint, Headers, Origin, Record};
use crate::id::{Aggregate, EventId, Owner, Scope, Tenant, Topic};
use crate::ledger::transition::{Head, HeadLease, Row};
use crate::ledger::{
    Audit, Cursor, CursorParts, Entry, Filter, Identity, Metadata, Nonce, Page, Stat, State, Token, Week,
};

/// How a state is stored.
pub(super) fn letter(state: State) -> &'static str {
    match state {
        State::Leased => "L",
        State::Done => "D",
        State::Retry => "R",
        State::Dead => "X",
        State::Claimed => "C",
        State::Finished => "F",
        State::Lost => "O",
        State::Parked => "P",
        State::Stale => "S",
    }
}

pub(super) fn state(stored: Option<&str>) -> Result<State> {
    State::ALL
        .into_iter()
        .find(|state| Some(letter(*state)) == stored)
        .ok_or_else(|| Error::Corrupt(format!("an entry in state {stored:?}")))
}

/// The columns of a row: `e` is the entry or held row, `w` its owner, `h` its bytes. The reason is in
/// the column `note`: another name would need a migration, and the SQL functions say `p_note` too.
pub(super) fn columns(schema: &str) -> String {
    format!(
        "e.scope, e.week, e.id, e.state::text, e.token, e.nonce, e.attempts, {schema}.us(e.first_at), {schema}.us(e.at), \
         w.name, e.fingerprint, e.aggregate, e.seq, e.topic, e.partition, e.\"offset\", e.metadata::text, e.note, e.flags, \
         h.payload, h.header_names, h.header_values, h.key, {schema}.us(h.stamp)"
    )
}

fn row(found: &PgRow) -> Result<Row> {
    let flags: i16 = found.get(18);
    let aggregate: Option<String> = found.get(11);
    let seq: Option<i64> = found.get(12);
    let topic: Option<String> = found.get(13);
    let fingerprint: Option<Vec<u8>> = found.get(10);
    let payload: Option<Vec<u8>> = found.get(19);
    let names: Option<Vec<Vec<u8>>> = found.get(20);
    let values: Option<Vec<Vec<u8>>> = found.get(21);
    let order = match (aggregate, seq) {
        (Some(aggregate), Some(seq)) => Some((Aggregate::new(aggregate)?, seq as u64)),
        _ => None,
    };
    let origin = match topic {
        Some(topic) => Some(Origin::new(
            Topic::new(topic)?,
            found.get::<Option<i32>, _>(14).unwrap_or(0),
            found.get::<Option<i64>, _>(15).unwrap_or(0),
        )),
        None => None,
    };
    let body = names.map(|names| Record {
        payload: payload.map(Into::into),
        headers: names
            .into_iter()
            .map(|name| String::from_utf8_lossy(&name).into_owned())
            .zip(values.unwrap_or_default())
            .collect::<Headers>(),
        key: found.get::<Option<Vec<u8>>, _>(22).map(Into::into),
        timestamp: found.get::<Option<i64>, _>(23).map(Time::from_micros),
    });
    Ok(Row {
        state: state(Some(found.get::<&str, _>(3)))?,
        token: Token(found.get(4)),
        nonce: Nonce(found.get(5)),
        attempts: found.get::<i16, _>(6) as u32,
        first_at: Time::from_micros(found.get(7)),
        at: Time::from_micros(found.get(8)),
        owner: found.get::<Option<String>, _>(9).map(Owner::new).transpose()?,
        fingerprint: fingerprint.and_then(|bytes| <[u8; 16]>::try_from(bytes).ok()).map(Fingerprint),
        order,
        origin,
        metadata: found.get::<Option<String>, _>(16).map(Metadata::new).transpose()?,
        reason: found.get::<Option<String>, _>(17).map(Into::into),
        tracked: flags & 2 != 0,
        alone: flags & 1 != 0,
        suspect: flags & 8 != 0,
        unordered: flags & 16 != 0,
        body,
    })
}

pub(super) async fn find_scope(
    inner: &Inner,
    connection: &mut PgConnection,
    identity: &Identity,
) -> Result<Option<i32>> {
    let s = &inner.settings.schema;
    sqlx::query_scalar(AssertSqlSafe(format!(
        "select number from {s}.scope where tenant = $1 and scope = $2"
    )))
    .persistent(!inner.pooled())
    .bind(identity.tenant.as_ref().map_or("", Tenant::as_str))
    .bind(identity.scope.as_str())
    .fetch_optional(connection)
    .await
    .map_err(|e| translate("looking for a scope", e))
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
    let scope = match inner.known_scope(identity) {
        Some(scope) => Some(scope),
        None => find_scope(inner, &mut *connection, identity).await?,
    };
    let Some(scope) = scope else { return Ok(None) };
    let lock = if lock { "for update of e" } else { "" };
    let in_week = format!(
        "select {} from {s}.entry e left join {s}.owner w on w.number = e.owner \
         left join {s}.held h on (e.flags & 4::smallint) <> 0 and h.week = e.week and h.scope = e.scope and h.id = e.id \
         where e.week = $1 and e.scope = $2 and e.id = $3 {lock}",
        columns(s)
    );
    let in_held = format!(
        "select {} from {s}.held e left join {s}.owner w on w.number = e.owner cross join lateral \
         (select e.payload, e.header_names, e.header_values, e.key, e.stamp) h where e.week = $1 and e.scope = $2 and e.id = $3 {lock}",
        columns(s)
    );
    for sql in [in_week, in_held] {
        let found = sqlx::query(AssertSqlSafe(sql))
            .persistent(!inner.pooled())
            .bind(week.number())
            .bind(scope)
            .bind(&*identity.id.key())
            .fetch_optional(&mut *connection)
            .await
            .map_err(|e| translate(what, e))?;
        if let Some(found) = found {
            return Ok(Some(Found { scope, row: row(&found)? }));
        }
    }
    Ok(None)
}

/// A head as stored: last, lease (seq, token, until), retrying, parked, gap.
type Stored = (Option<i64>, Option<i64>, Option<i64>, Option<i64>, Vec<i64>, Option<i64>, Option<i64>);

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
        "select last, lease_seq, lease_token, {s}.us(lease_until), retrying, parked, {s}.us(gap_at) \
         from {s}.head where scope = $1 and aggregate = $2 for update"
    );
    let found: Option<Stored> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!inner.pooled())
        .bind(scope)
        .bind(aggregate.as_str())
        .fetch_optional(connection)
        .await
        .map_err(|e| translate("reading an aggregate's head", e))?;
    Ok(found.map_or_else(Head::default, |(last, seq, token, until, retrying, parked, gap_at)| Head {
        last: last.map(|n| n as u64),
        lease: match (seq, token, until) {
            (Some(seq), Some(token), Some(until)) => {
                Some(HeadLease { seq: seq as u64, token: Token(token), until: Time::from_micros(until) })
            }
            _ => None,
        },
        retrying: retrying.into_iter().map(|n| n as u64).collect(),
        parked: parked.map(|n| n as u64),
        gap_at: gap_at.map(Time::from_micros),
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
        .persistent(!inner.pooled())
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
        .persistent(!inner.pooled())
        .fetch_one(connection)
        .await
        .map(Time::from_micros)
        .map_err(|e| translate("reading the ledger's clock", e))
}

pub(super) async fn now(inner: &Inner) -> Result<Time> {
    now_in(inner, &mut *inner.begin().await?).await
}

pub(super) async fn get(inner: &Inner, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
    let week = Week::route(inner.settings.ledger.identity, &identity.id, time)?;
    let found = if inner.pooled() {
        find(inner, &mut *inner.begin().await?, identity, week, false).await?
    } else {
        // A single query needs no transaction, which saves two round trips.
        let mut connection = inner.pool.acquire().await.map_err(|e| translate("reading an entry", e))?;
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
    let query = sqlx::query_scalar::<_, i64>(AssertSqlSafe(std::sync::Arc::clone(&inner.sql.known)))
        .persistent(!inner.pooled())
        .bind(&scopes)
        .bind(&weeks)
        .bind(&keys);
    let found = if inner.pooled() {
        query.fetch_all(&mut *inner.begin().await?).await
    } else {
        query.fetch_all(&inner.pool).await
    };
    for place in found.map_err(|e| translate("looking for entries", e))? {
        if let Some(at) = usize::try_from(place - 1).ok().and_then(|at| places.get(at)) {
            known[*at] = true;
        }
    }
    Ok(known)
}

/// Decodes an entry from the columns of a row, followed by the names of tenant and scope.
pub(super) fn entry(found: &PgRow) -> Result<Entry> {
    let tenant: String = found.get(24);
    let identity = Identity {
        tenant: if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) },
        scope: Scope::new(found.get::<String, _>(25))?,
        id: EventId::from_key(&found.get::<Vec<u8>, _>(2))?,
    };
    Ok(row(found)?.entry(identity, Week::from_number(found.get(1))?))
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
    let wanted = "\
         and ($4::text is null or c.tenant = $4) and ($5::text is null or c.scope = $5) \
         and ($6::bytea is null or e.id = $6) \
         and (cardinality($7::text[]) = 0 or (case when e.state = 'C' and (e.flags & 2) <> 0 and e.at <= {s}.ledger_now() \
              then 'O' else e.state::text end) = any ($7)) \
         and ($8::bigint is null or {s}.us(e.first_at) >= $8) and ($9::bigint is null or {s}.us(e.first_at) < $9) \
         and ($10::text is null or e.metadata ->> $10 = $11) \
         and ($13::text is null or e.aggregate = $13) and ($14::text is null or e.topic = $14) \
         and ($15::int is null or e.partition = $15)"
        .replace("{s}", s);
    let page = "and ($1::smallint is null or (e.week, e.scope, e.id) > ($1, $2, $3)) order by e.week, e.scope, e.id limit $12";
    let in_weeks = format!(
        "(select {columns}, c.tenant, c.scope from {s}.entry e join {s}.scope c on c.number = e.scope \
         left join {s}.owner w on w.number = e.owner \
         left join {s}.held h on (e.flags & 4::smallint) <> 0 and h.week = e.week and h.scope = e.scope and h.id = e.id \
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
    let states: Vec<&str> = filter.states.iter().map(|state| letter(*state)).collect();
    let mut connection = inner.begin().await?;
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(after.as_ref().map(|after| after.week))
        .bind(after.as_ref().map(|after| after.scope))
        .bind(after.as_ref().map(|after| &after.key[..]))
        .bind(filter.tenant.as_ref().map(Tenant::as_str))
        .bind(filter.scope.as_ref().map(Scope::as_str))
        .bind(filter.id.as_ref().map(|id| id.key().into_owned()))
        .bind(states)
        .bind(filter.since.map(Time::as_micros))
        .bind(filter.until.map(Time::as_micros))
        .bind(filter.metadata.as_ref().map(|(key, _)| key))
        .bind(filter.metadata.as_ref().map(|(_, value)| value))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX - 1).saturating_add(1))
        .bind(filter.aggregate.as_ref().map(Aggregate::as_str))
        .bind(filter.topic.as_ref().map(Topic::as_str))
        .bind(filter.partition)
        .fetch_all(&mut *connection)
        .await
        .map_err(|e| translate(what, e))?;
    let more = rows.len() > limit;
    let mut entries = Vec::with_capacity(rows.len().min(limit));
    let mut last = None;
    for found in rows.iter().take(limit) {
        entries.push(entry(found)?);
        last = Some(CursorParts { week: found.get(1), scope: found.get(0), key: found.get(2) });
    }
    Ok(Page { entries, next: if more { last.map(|parts| parts.encode()) } else { None } })
}

pub(super) async fn stat(inner: &Inner) -> Result<Stat> {
    let what = "counting entries";
    let s = &inner.settings.schema;
    let mut connection = inner.begin().await?;
    let now = now_in(inner, &mut connection).await?;
    let counts: Vec<(String, String, String, i64)> = sqlx::query_as(AssertSqlSafe(format!(
        "select c.tenant, c.scope, x.state, sum(x.n)::bigint from ( \
           select e.scope, case when e.state = 'C' and (e.flags & 2) <> 0 and e.at <= {s}.ledger_now() then 'O' \
                                else e.state::text end as state, count(*) n from {s}.entry e group by 1, 2 \
           union all \
           select h.scope, case when h.state = 'C' and (h.flags & 2) <> 0 and h.at <= {s}.ledger_now() then 'O' \
                                else h.state::text end, count(*) n from {s}.held h where not exists \
             (select from {s}.entry x where x.week = h.week and x.scope = h.scope and x.id = h.id) group by 1, 2 \
         ) x join {s}.scope c on c.number = x.scope group by 1, 2, 3 order by 1, 2, 3"
    )))
    .persistent(false)
    .fetch_all(&mut *connection)
    .await
    .map_err(|e| translate(what, e))?;
    let weeks: Vec<i16> = weeks(inner, &mut connection).await?;
    let dropped: Vec<(i16, i64)> = sqlx::query_as(AssertSqlSafe(format!(
        "select week, {s}.us(at) from {s}.dropped where scope_max is not null order by week"
    )))
    .persistent(false)
    .fetch_all(&mut *connection)
    .await
    .map_err(|e| translate(what, e))?;
    let held: i64 = sqlx::query_scalar(AssertSqlSafe(format!(
        "select count(*) from {s}.held where header_names is not null"
    )))
    .persistent(false)
    .fetch_one(&mut *connection)
    .await
    .map_err(|e| translate(what, e))?;
    let mut rows = Vec::with_capacity(counts.len());
    for (tenant, scope, letter, count) in counts {
        let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) };
        rows.push((tenant, Scope::new(scope)?, state(Some(&letter))?, count as u64));
    }
    let dropped = dropped
        .into_iter()
        .map(|(week, at)| Ok((Week::from_number(week)?, Time::from_micros(at))))
        .collect::<Result<_>>()?;
    Ok(Stat {
        now,
        counts: rows,
        weeks: weeks.into_iter().map(Week::from_number).collect::<Result<_>>()?,
        dropped,
        held: held as u64,
    })
}

/// The numbers of the existing weeks.
pub(super) async fn weeks(inner: &Inner, connection: &mut PgConnection) -> Result<Vec<i16>> {
    let s = &inner.settings.schema;
    sqlx::query_scalar(AssertSqlSafe(format!(
        "select split_part(c.relname, '_', 2)::smallint from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = '{s}.entry'::regclass order by 1"
    )))
    .persistent(false)
    .fetch_all(connection)
    .await
    .map_err(|e| translate("listing weeks", e))
}

pub(super) async fn audit(inner: &Inner, limit: usize) -> Result<Vec<Audit>> {
    let s = &inner.settings.schema;
    let mut connection = inner.begin().await?;
    let rows: Vec<(i64, String, String, String, String)> = sqlx::query_as(AssertSqlSafe(format!(
        "select {s}.us(at), by, what, identity, why from {s}.audit order by number desc limit $1"
    )))
    .persistent(false)
    .bind(limit as i64)
    .fetch_all(&mut *connection)
    .await
    .map_err(|e| translate("reading the audit", e))?;
    let line = |(at, by, what, identity, why)| Audit { at: Time::from_micros(at), by, what, identity, why };
    Ok(rows.into_iter().map(line).collect())
}
