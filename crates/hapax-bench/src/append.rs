//! Appends to a journal in PostgreSQL against a bare INSERT of the same row, and the cost of
//! polling for new events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax::backend::postgres::{PgJournal, PgJournalSettings, Pooling};
use hapax::id::Kind;
use hapax::journal::{Append, Appender, Expected, Journal, Position};
use hapax::{Aggregate, Event, EventId};
use sqlx::{AssertSqlSafe, PgPool};

use crate::harness::{Contestant, Fallible, Goal, Line, Options, Report, by_tasks, interleave, quantile};
use crate::pg::{Schema, execute, number, pool};

/// Concurrent writers.
const WRITERS: usize = 64;
/// Aggregates that they write to.
const AGGREGATES: usize = 1000;
/// Events inserted into a journal at a time.
const PART: u64 = 1_000_000;
/// Events requested per poll.
const PAGE: usize = 200;

async fn journal(schema: &Schema, connections: u32) -> Fallible<PgJournal> {
    let mut settings = PgJournalSettings::default();
    settings.schema.clone_from(&schema.name);
    settings.pooling = Pooling::Session;
    Ok(PgJournal::with_pool(pool(connections).await?, settings).await?)
}

fn append(n: usize) -> hapax::Result<Append> {
    let event = Event::new(EventId::now_v7())
        .kind(Kind::new("order.paid")?)
        .payload(format!("{{\"order\": {n}, \"amount\": 700, \"note\": \"{}\"}}", "x".repeat(150)));
    Ok(Append::new(Aggregate::new(format!("order-{}", n % AGGREGATES))?, Expected::Any, [event]))
}

/// Creates a table like the journal's, with its indexes and its own sequence. Returns the statement
/// that fills it.
async fn bare_table(on: &PgPool, ours: &Schema, theirs: &Schema) -> Fallible<Arc<str>> {
    let (j, s) = (&ours.name, &theirs.name);
    execute(on, format!("create sequence {s}.position")).await?;
    execute(on, format!("create table {s}.bare (like {j}.journal including indexes)")).await?;
    execute(on, format!("alter table {s}.bare alter position set default nextval('{s}.position')")).await?;
    let sql = format!(
        "insert into {s}.bare (seq, at, tenant, aggregate, id, fingerprint, kind, payload) \
         values ($1, clock_timestamp(), '', $2, $3, $4, $5, $6)"
    );
    Ok(sql.into())
}

async fn bare(pool: &PgPool, sql: &Arc<str>, seq: i64, append: &Append) -> hapax::Result<()> {
    let event = &append.events[0];
    let query = sqlx::query(AssertSqlSafe(Arc::clone(sql)))
        .bind(seq)
        .bind(append.aggregate.as_str())
        .bind(&*event.id.key())
        .bind(&event.fingerprint().0[..])
        .bind(event.kind.as_ref().map(Kind::as_str))
        .bind(&event.payload[..]);
    query.execute(pool).await.map(drop).map_err(|e| hapax::Error::unavailable("a bare INSERT", e))
}

/// Runs both benches.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    // In a task, as handlers run: on the runtime's main thread every answer would cost a thread
    // switch.
    let options = *options;
    let alone = tokio::spawn(async move { alone(&options).await }).await??;
    Ok(vec![alone, together(&options).await?])
}

/// One writer: the two alternate event by event, so that both see the same disk.
async fn alone(options: &Options) -> Fallible<Report> {
    let one = pool(1).await?;
    let (ours, theirs) = (Schema::fresh(&one).await?, Schema::fresh(&one).await?);
    let journal = journal(&ours, 2).await?; // the second is for wake-ups, which run in the background
    let sql = bare_table(&one, &ours, &theirs).await?;
    let mut medians = [Vec::new(), Vec::new()];
    let mut n = 0;
    for round in 0..=options.rounds {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..options.events(1000) {
            n += 1;
            let (a, b) = (append(n)?, append(n)?);
            let start = Instant::now();
            let appended = journal.append(&a).await?;
            times[0].push(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            bare(&one, &sql, n as i64, &b).await?;
            times[1].push(start.elapsed().as_secs_f64() * 1e6);
            if appended.is_repeat() {
                return Err("a new id was known".into());
            }
        }
        if round > 0 {
            for (medians, times) in medians.iter_mut().zip(&times) {
                medians.push(quantile(times, 0.5));
            }
        }
    }
    drop(journal);
    ours.drop().await?;
    theirs.drop().await?;
    let [subject, rival] = medians;
    let lines = vec![Line::new("hapax, append", subject), Line::new("bare INSERT of the same row", rival)];
    let ratio = lines[1].median() / lines[0].median();
    Ok(Report {
        title: "one writer appends to a journal in PostgreSQL".into(),
        unit: "µs an event, median of each round",
        goals: vec![Goal::at_least("speed of an append / of a bare INSERT", ratio, 0.8)],
        lines,
        notes: vec![format!(
            "{AGGREGATES} aggregates; the table of the bare INSERT has the journal's indexes"
        )],
    })
}

/// Many writers, each appending one event after the other.
async fn together(options: &Options) -> Fallible<Report> {
    let few = pool(1).await?;
    let (ours, theirs) = (Schema::fresh(&few).await?, Schema::fresh(&few).await?);
    let gathered = journal(&ours, 4).await?;
    let appender = Appender::new(Arc::new(gathered.clone()));
    let each = journal(&ours, WRITERS as u32 / 2).await?;
    let sql = bare_table(&few, &ours, &theirs).await?;
    let wide = pool(WRITERS as u32 / 2).await?;
    let events = options.events(20_000);
    let seqs = Arc::new(std::sync::atomic::AtomicI64::new(1));
    let numbers = || (0..events).collect::<Vec<_>>();
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("hapax, Appender, {WRITERS} writers"), || {
                let appender = appender.clone();
                by_tasks(WRITERS, numbers(), move |n| {
                    let appender = appender.clone();
                    async move { appender.append(append(n)?).await.map(drop) }
                })
            }),
            Contestant::new(format!("hapax, a commit per event, {WRITERS} writers"), || {
                let each = each.clone();
                by_tasks(WRITERS, numbers(), move |n| {
                    let each = each.clone();
                    async move { each.append(&append(n)?).await.map(drop) }
                })
            }),
            Contestant::new(format!("bare INSERT per event, {WRITERS} writers"), || {
                let (wide, sql, seqs) = (wide.clone(), Arc::clone(&sql), Arc::clone(&seqs));
                by_tasks(WRITERS, numbers(), move |n| {
                    let (wide, sql) = (wide.clone(), Arc::clone(&sql));
                    let seq = seqs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    async move { bare(&wide, &sql, seq, &append(n)?).await }
                })
            }),
        ],
    )
    .await?;
    drop((gathered, appender, each, wide));
    ours.drop().await?;
    theirs.drop().await?;
    let over = |rival: usize| lines[0].median() / lines[rival].median();
    Ok(Report {
        title: format!("{WRITERS} writers append to a journal in PostgreSQL"),
        unit: "events/s",
        goals: vec![
            Goal::at_least("gathered / a commit per event", over(1), 6.0),
            Goal::at_least("gathered / bare INSERT per event", over(2), 4.0),
        ],
        lines,
        notes: vec![format!("{} connections for those who commit per event", WRITERS / 2)],
    })
}

/// Creates a journal with this many events, all published long ago. Returns it and how long filling
/// took. Inserts the rows first, then builds each index with one sort: the index used for reading
/// is packed as if its events had been appended one by one.
async fn filled(schema: &Schema, rows: u64) -> Fallible<(PgJournal, Duration)> {
    let began = Instant::now();
    let journal = journal(schema, 1).await?; // one connection, so that session settings stay in effect
    let (s, on) = (&schema.name, journal.pool());
    let keys = |what: &str| {
        format!(
            "select string_agg({what}, ', ' order by conname) from pg_constraint \
             where conrelid = '{s}.journal'::regclass and contype in ('p', 'u')"
        )
    };
    let drop = text(on, keys("format('drop constraint %I', conname)")).await?;
    let add = text(on, keys("format('add constraint %I %s', conname, pg_get_constraintdef(oid))")).await?;
    execute(on, "set synchronous_commit = off").await?;
    execute(on, "set maintenance_work_mem = '512MB'").await?;
    execute(on, format!("alter table {s}.journal set (autovacuum_enabled = off)")).await?;
    execute(on, format!("alter table {s}.journal {drop}")).await?;
    for part in 0..rows.div_ceil(PART) {
        let (from, to) = (part * PART + 1, ((part + 1) * PART).min(rows));
        let insert = format!(
            "insert into {s}.journal (position, seq, at, tenant, aggregate, id, fingerprint, kind, payload) \
             select i, (i - 1) / {AGGREGATES} + 1, now(), '', 'order-' || (i - 1) % {AGGREGATES}, int8send(0) || int8send(i), \
             int8send(i) || int8send(i), 'order.paid', convert_to(repeat('x', 40), 'UTF8') \
             from generate_series({from}::bigint, {to}::bigint) i"
        );
        execute(on, insert).await?;
        if rows > PART {
            eprintln!("{to} of {rows} events after {:.0?}", began.elapsed());
        }
    }
    execute(on, format!("alter table {s}.journal {add}")).await?;
    let heads = format!(
        "insert into {s}.journal_head (tenant, aggregate, last) \
         select '', 'order-' || a, ({rows} - a - 1) / {AGGREGATES} + 1 \
         from generate_series(0::bigint, least({AGGREGATES}, {rows}::bigint) - 1) a"
    );
    execute(on, heads).await?;
    execute(on, format!("select setval('{s}.journal_position', {rows})")).await?;
    execute(on, format!("analyze {s}.journal")).await?;
    execute(on, "checkpoint").await?;
    Ok((journal, began.elapsed()))
}

async fn text(on: &PgPool, sql: String) -> Fallible<String> {
    Ok(sqlx::query_scalar(AssertSqlSafe(sql)).persistent(false).fetch_one(on).await?)
}

/// Polls at the end of a journal with many published events, and of one with few.
pub async fn poll(options: &Options) -> Fallible<Report> {
    let on = pool(1).await?;
    let (few, many) = (10_000, options.held(100_000_000).max(20_000));
    let (small, large) = (Schema::fresh(&on).await?, Schema::fresh(&on).await?);
    let ((big, took), (little, _)) = (filled(&large, many).await?, filled(&small, few).await?);
    let journals = [big, little];
    let bytes = number(&on, format!("select pg_total_relation_size('{}.journal')", large.name)).await?;
    let mut lasts = Vec::new();
    for schema in [&large, &small] {
        lasts.push(number(&on, format!("select max(position) from {}.journal", schema.name)).await? as u64);
    }
    // Nothing new, and the last page.
    let mut medians = vec![Vec::new(); 4];
    for round in 0..=options.rounds {
        let mut times = vec![Vec::new(); 4];
        for _ in 0..options.events(1000) {
            for (at, (journal, last)) in journals.iter().zip(&lasts).enumerate() {
                for (what, back) in [0, PAGE as u64].into_iter().enumerate() {
                    let start = Instant::now();
                    let batch = journal.read(&Position::of(last - back), PAGE).await?;
                    times[at + 2 * what].push(start.elapsed().as_secs_f64() * 1e6);
                    if batch.events.len() as u64 != back {
                        return Err("a look found another number of events".into());
                    }
                }
            }
        }
        if round > 0 {
            for (medians, times) in medians.iter_mut().zip(&times) {
                medians.push(quantile(times, 0.5));
            }
        }
    }
    drop(journals);
    small.drop().await?;
    large.drop().await?;
    let name = |what: &str, rows| format!("{what}, {rows} published events");
    let names = [
        name("nothing new", many),
        name("nothing new", few),
        name("a page of 200", many),
        name("a page of 200", few),
    ];
    let lines: Vec<_> =
        names.into_iter().zip(medians).map(|(name, medians)| Line::new(name, medians)).collect();
    let over = |at: usize| lines[at].median() / lines[at + 1].median();
    Ok(Report {
        title: "a look for new events, PostgreSQL".into(),
        unit: "µs, median of each round",
        goals: vec![
            Goal::at_most(format!("nothing new: {many} / {few} events"), over(0), 1.2),
            Goal::at_most(format!("a page: {many} / {few} events"), over(2), 1.2),
        ],
        lines,
        notes: vec![format!(
            "{many} events were put there in {took:.0?}, {} MB with their indexes",
            bytes / 1_000_000
        )],
    })
}
