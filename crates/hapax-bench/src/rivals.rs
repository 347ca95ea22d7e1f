//! What a user would write instead of hapax.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax::EventId;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

use crate::harness::{Fallible, rate};
use crate::pg::{Schema, execute, pool};

/// The table of a check-then-insert library, with its indexes.
pub async fn rival_table(schema: &Schema, on: &PgPool) -> Fallible<()> {
    let s = &schema.name;
    execute(
        on,
        format!(
            "create table {s}.processed_events (id uuid default gen_random_uuid() primary key, \
             event_id varchar(255) not null unique, processed_at timestamptz default now(), metadata jsonb); \
             create index idx_processed_events_processed_at on {s}.processed_events (processed_at)"
        ),
    )
    .await
    .map(drop)
}

/// The same, but with a second unique index on the id beside that of the constraint: an easy mistake,
/// and some such libraries make it.
pub async fn doubled_table(schema: &Schema, on: &PgPool) -> Fallible<()> {
    rival_table(schema, on).await?;
    let s = &schema.name;
    let sql = format!("create unique index idx_processed_events_event_id on {s}.processed_events (event_id)");
    execute(on, sql).await.map(drop)
}

/// The smallest table with the same key: the target of the best hand-written statement.
pub async fn bare_table(schema: &Schema, on: &PgPool) -> Fallible<()> {
    let s = &schema.name;
    execute(
        on,
        format!(
            "create table {s}.bare (at timestamptz not null, scope int not null, state \"char\" not null default 'D', \
             id bytea not null); create unique index bare_key on {s}.bare (scope, id)"
        ),
    )
    .await
    .map(drop)
}

/// A plain table with the ledger's columns and key: the same row, without the ledger.
pub async fn twin_table(schema: &Schema, on: &PgPool) -> Fallible<()> {
    let s = &schema.name;
    execute(
        on,
        format!(
            "create table {s}.twin (first_at timestamptz not null, at timestamptz not null, token bigint not null, \
             nonce bigint not null, scope int not null, owner int, week smallint not null, attempts smallint not null, \
             flags smallint not null, state \"char\" not null, id bytea not null, fingerprint bytea); \
             create unique index twin_key on {s}.twin (scope, id)"
        ),
    )
    .await
    .map(drop)
}

/// An operation on one event over a connection.
pub trait PerEvent: Send + Sync + 'static {
    /// Runs the operation.
    fn run(
        &self,
        connection: &mut PgConnection,
        id: &EventId,
    ) -> impl Future<Output = sqlx::Result<()>> + Send;
}

/// Events per second with this many workers, each with its own connection, processing one event
/// after the other.
pub async fn per_event(on: &PgPool, workers: usize, ids: Vec<EventId>, what: impl PerEvent) -> Fallible<f64> {
    work(on, workers, ids, what, true).await
}

/// The same, but each call takes a connection from the pool, as a plain library does.
pub async fn per_call(on: &PgPool, workers: usize, ids: Vec<EventId>, what: impl PerEvent) -> Fallible<f64> {
    work(on, workers, ids, what, false).await
}

async fn work(
    on: &PgPool,
    workers: usize,
    ids: Vec<EventId>,
    what: impl PerEvent,
    keep: bool,
) -> Fallible<f64> {
    let (ids, next, what) = (Arc::new(ids), Arc::new(AtomicUsize::new(0)), Arc::new(what));
    rate(ids.len(), async {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..workers {
            let (ids, next, what, on) = (Arc::clone(&ids), Arc::clone(&next), Arc::clone(&what), on.clone());
            tasks.spawn(async move {
                let mut kept = if keep { Some(on.acquire().await?) } else { None };
                while let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match &mut kept {
                        Some(connection) => what.run(connection, id).await?,
                        None => what.run(&mut *on.acquire().await?, id).await?,
                    }
                }
                Ok::<(), sqlx::Error>(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(())
    })
    .await
}

/// A pool with the best number of workers, found by a short trial of each.
pub async fn best_pool<W: PerEvent + Clone>(what: &W, events: usize) -> Fallible<(PgPool, usize)> {
    let mut best = (0.0, None);
    for workers in [8, 16, 32, 64] {
        let on = pool(workers as u32).await?;
        per_event(&on, workers, crate::pg::ids(events / 4), what.clone()).await?; // prepares the statements
        let reached = per_event(&on, workers, crate::pg::ids(events), what.clone()).await?;
        if reached > best.0 {
            best = (reached, Some((on, workers)));
        }
    }
    best.1.ok_or_else(|| "no number of workers got anything done".into())
}

/// Check-then-insert: `SELECT EXISTS`, then `INSERT … ON CONFLICT DO NOTHING`, per event.
#[derive(Debug, Clone)]
pub struct CheckThenInsert {
    check: Arc<str>,
    insert: Arc<str>,
}

impl CheckThenInsert {
    /// Uses the rival's table in this schema.
    pub fn new(schema: &Schema) -> Self {
        CheckThenInsert { check: check_sql(&schema.name), insert: insert_sql(&schema.name) }
    }
}

/// The `is_processed` of check-then-insert.
pub fn check_sql(schema: &str) -> Arc<str> {
    format!("select exists (select 1 from {schema}.processed_events where event_id = $1)").into()
}

/// The `mark_processed` of check-then-insert.
pub fn insert_sql(schema: &str) -> Arc<str> {
    format!(
        "insert into {schema}.processed_events (event_id, processed_at, metadata) values ($1, now(), $2::text::jsonb) \
         on conflict (event_id) do nothing"
    )
    .into()
}

impl PerEvent for CheckThenInsert {
    async fn run(&self, connection: &mut PgConnection, id: &EventId) -> sqlx::Result<()> {
        let id = id.as_str();
        let there: bool = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.check)))
            .bind(&*id)
            .fetch_one(&mut *connection)
            .await?;
        if !there {
            sqlx::query(AssertSqlSafe(Arc::clone(&self.insert)))
                .bind(&*id)
                .bind(None::<&str>)
                .execute(connection)
                .await?;
        }
        Ok(())
    }
}

/// Two bare statements per event: insert a row, then update it by its key.
#[derive(Debug, Clone)]
pub struct InsertThenUpdate {
    insert: Arc<str>,
    update: Arc<str>,
}

impl InsertThenUpdate {
    /// Uses the bare table in this schema.
    pub fn new(schema: &Schema) -> Self {
        let s = &schema.name;
        InsertThenUpdate {
            insert: format!(
                "insert into {s}.bare (at, scope, state, id) values (clock_timestamp(), 1, 'L', $1) on conflict do nothing"
            )
            .into(),
            update: format!(
                "update {s}.bare set state = 'D', at = clock_timestamp() where scope = 1 and id = $1 and state = 'L'"
            )
            .into(),
        }
    }
}

impl PerEvent for InsertThenUpdate {
    async fn run(&self, connection: &mut PgConnection, id: &EventId) -> sqlx::Result<()> {
        for sql in [&self.insert, &self.update] {
            sqlx::query(AssertSqlSafe(Arc::clone(sql))).bind(&*id.key()).execute(&mut *connection).await?;
        }
        Ok(())
    }
}

/// Leases by hand, in batches: a multi-row insert of rows as leased, then a multi-row update of the
/// same to done, each committed by itself, over two connections. Events per second.
pub async fn lease_batches(on: &PgPool, schema: &Schema, batch: usize, ids: Vec<EventId>) -> Fallible<f64> {
    let s = &schema.name;
    let statements: [Arc<str>; 2] = [
        format!(
            "insert into {s}.bare (at, scope, state, id) select clock_timestamp(), 1, 'L', u \
             from unnest($1::bytea[]) u on conflict do nothing"
        )
        .into(),
        format!(
            "update {s}.bare set state = 'D', at = clock_timestamp() \
             where scope = 1 and id = any($1::bytea[]) and state = 'L'"
        )
        .into(),
    ];
    let (parts, next) = (Arc::new(ids), Arc::new(AtomicUsize::new(0)));
    rate(parts.len(), async {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let (ids, next, statements, on) =
                (Arc::clone(&parts), Arc::clone(&next), statements.clone(), on.clone());
            tasks.spawn(async move {
                let mut connection = on.acquire().await?;
                while let Some(part) = ids.chunks(batch).nth(next.fetch_add(1, Ordering::Relaxed)) {
                    let keys: Vec<_> = part.iter().map(EventId::key).collect();
                    let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
                    for sql in &statements {
                        let query = sqlx::query(AssertSqlSafe(Arc::clone(sql))).bind(&keys);
                        query.execute(&mut *connection).await?;
                    }
                }
                Ok::<(), sqlx::Error>(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(())
    })
    .await
}

/// The target table of a multi-row statement.
#[derive(Debug, Clone, Copy)]
pub enum Into {
    /// The smallest table with the key.
    Bare,
    /// The table with the ledger's columns.
    Twin,
}

/// Events per second of the best hand-written multi-row `INSERT … ON CONFLICT`, over two
/// connections.
pub async fn multi_row(
    on: &PgPool,
    schema: &Schema,
    into: Into,
    batch: usize,
    ids: Vec<EventId>,
) -> Fallible<f64> {
    let s = &schema.name;
    let sql: Arc<str> = match into {
        Into::Bare => format!(
            "insert into {s}.bare (at, scope, id) select clock_timestamp(), 1, u from unnest($1::bytea[]) u \
             on conflict do nothing"
        ),
        Into::Twin => format!(
            "insert into {s}.twin (first_at, at, token, nonce, scope, week, attempts, flags, state, id) \
             select now(), now(), 1, u.nonce, 1, 1, 1, 0, 'D', u.id from unnest($1::bytea[], $2::bigint[]) u(id, nonce) \
             on conflict do nothing"
        ),
    }
    .into();
    let count = ids.len();
    let ids = Arc::new(ids);
    let next = Arc::new(AtomicUsize::new(0));
    rate(count, async {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let (ids, next, sql, on) = (Arc::clone(&ids), Arc::clone(&next), Arc::clone(&sql), on.clone());
            tasks.spawn(async move {
                let mut connection = on.acquire().await?;
                loop {
                    let from = next.fetch_add(batch, Ordering::Relaxed);
                    let Some(part) = ids.get(from.min(ids.len())..(from + batch).min(ids.len())) else {
                        break;
                    };
                    if part.is_empty() {
                        break;
                    }
                    let keys: Vec<_> = part.iter().map(EventId::key).collect();
                    let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
                    let mut query = sqlx::query(AssertSqlSafe(Arc::clone(&sql))).bind(&keys);
                    if matches!(into, Into::Twin) {
                        query = query.bind((0..part.len() as i64).collect::<Vec<_>>());
                    }
                    query.execute(&mut *connection).await?;
                }
                Ok::<(), sqlx::Error>(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(())
    })
    .await
}

/// `COPY` of the same rows into the bare table, one batch per transaction, over two connections. It
/// cannot skip duplicates.
pub async fn copy(on: &PgPool, schema: &Schema, batch: usize, ids: Vec<EventId>) -> Fallible<f64> {
    let sql: Arc<str> =
        format!("copy {}.bare (at, scope, id) from stdin (format binary)", schema.name).into();
    let at = 800_000_000_000_000_i64.to_be_bytes(); // microseconds since 2000
    let parts: Vec<Vec<Uuid>> =
        ids.chunks(batch).map(|part| part.iter().filter_map(EventId::as_uuid).collect()).collect();
    let (parts, next) = (Arc::new(parts), Arc::new(AtomicUsize::new(0)));
    rate(ids.len(), async {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let (parts, next, sql, on) =
                (Arc::clone(&parts), Arc::clone(&next), Arc::clone(&sql), on.clone());
            tasks.spawn(async move {
                let mut connection = on.acquire().await?;
                while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut bytes = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0".to_vec();
                    for id in part {
                        bytes.extend_from_slice(&3_i16.to_be_bytes());
                        for value in [&at[..], &1_i32.to_be_bytes()[..], &id.as_bytes()[..]] {
                            bytes.extend_from_slice(&(value.len() as i32).to_be_bytes());
                            bytes.extend_from_slice(value);
                        }
                    }
                    bytes.extend_from_slice(&(-1_i16).to_be_bytes());
                    let mut copy = connection.copy_in_raw(&sql).await?;
                    copy.send(bytes).await?;
                    copy.finish().await?;
                }
                Ok::<(), sqlx::Error>(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(())
    })
    .await
}

/// The best batch size of the multi-row statement, found by a short trial of each.
pub async fn best_batch(on: &PgPool, schema: &Schema, events: usize) -> Fallible<usize> {
    let mut best = (0.0, 1000);
    for batch in [200, 500, 1000, 2000, 5000] {
        multi_row(on, schema, Into::Bare, batch, crate::pg::ids(events)).await?;
        let reached = multi_row(on, schema, Into::Bare, batch, crate::pg::ids(events)).await?;
        if reached > best.0 {
            best = (reached, batch);
        }
    }
    Ok(best.1)
}
