//! One of three processes is killed: how long until its events are done?

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use hapax::EventId;
use hapax::bus::kafka::KafkaBus;
use hapax::bus::{Bus as _, Record};
use sqlx::PgPool;

use crate::harness::{Fallible, Goal, Line, Options, Report};
use crate::kafka::{Filled, bus, fresh};
use crate::member::Member;
use crate::pg::{Schema, execute, number, pool};

const PARTITIONS: i32 = 6;
/// Lease and session timeout: the shortest that a broker allows by default.
const LEASE_S: u64 = 6;
const LIMIT: Duration = Duration::from_secs(60);
/// How many events each process must have done before one is killed.
const EACH_MIN: i64 = 30;

/// Publishes some events every 20 ms until aborted. Counts the acknowledged ones.
fn steady(bus: Arc<KafkaBus>, topic: hapax::Topic, published: Arc<AtomicI64>) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let mut every = tokio::time::interval(Duration::from_millis(20));
        let mut n = 0;
        loop {
            every.tick().await;
            let records: Vec<Record> = (n..n + 6)
                .map(|n: i64| {
                    let payload = serde_json::json!({ "event_id": EventId::now_v7().to_string(), "n": n });
                    Record {
                        key: Some(format!("key-{}", n % 97).into()),
                        payload: Some(payload.to_string().into()),
                        ..Record::default()
                    }
                })
                .collect();
            if bus.publish(&topic, &records).await.is_err() {
                return; // the caller that waits for these will time out
            }
            n += 6;
            published.store(n, Ordering::SeqCst);
        }
    })
}

async fn wait_for(on: &PgPool, sql: String, reached: impl Fn(i64) -> bool) -> Fallible<()> {
    wait_at_most(LIMIT, on, sql, reached).await
}

async fn wait_at_most(
    limit: Duration,
    on: &PgPool,
    sql: String,
    reached: impl Fn(i64) -> bool,
) -> Fallible<()> {
    let end = Instant::now() + limit;
    while !reached(number(on, sql.clone()).await?) {
        if Instant::now() > end {
            return Err(format!("not within {limit:?}: {sql}").into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Seconds from the kill until everything published before it is done, and how many events ran
/// twice.
async fn once(bus: &Arc<KafkaBus>) -> Fallible<(f64, i64)> {
    let on = pool(2).await?;
    let schema = Schema::fresh(&on).await?;
    let s = &schema.name;
    execute(
        &on,
        format!(
            "create table {s}.effect (n bigint not null, pid int not null, at timestamptz default clock_timestamp())"
        ),
    )
    .await?;
    drop(schema.leasing_guard(1).await?);
    let topic = Filled::empty(bus, "recovery", PARTITIONS).await?;
    let member = Member {
        topic: topic.topic.as_str().to_owned(),
        group: fresh("recovery"),
        wait_ms: 20,
        concurrency: 32,
        lease_s: LEASE_S,
        schema: Some(s.clone()),
        batch: 0,
        warm_after: 1,
    };
    let published = Arc::new(AtomicI64::new(0));
    let steadily = steady(bus.clone(), topic.topic.clone(), Arc::clone(&published));
    let mut members = vec![member.start()?, member.start()?, member.start()?];
    let busy = format!(
        "select count(*) from (select pid from {s}.effect group by pid having count(*) >= {EACH_MIN}) p"
    );
    wait_for(&on, busy, |members| members >= 3).await?;
    let mut victim = members.swap_remove(0);
    let pid = i64::from(victim.id().ok_or("a member ended by itself")?);
    // It must be working at this moment: partitions move for a while after the third process has
    // joined.
    let before = number(&on, format!("select count(*) from {s}.effect where pid = {pid}")).await?;
    wait_for(&on, format!("select count(*) from {s}.effect where pid = {pid}"), |done| done > before).await?;
    victim.start_kill()?; // SIGKILL
    let (killed, all) = (Instant::now(), published.load(Ordering::SeqCst));
    wait_for(&on, format!("select count(distinct n) from {s}.effect where n < {all}"), |done| done >= all)
        .await?;
    let took = killed.elapsed().as_secs_f64();
    steadily.abort();
    for mut member in members {
        member.kill().await?;
    }
    victim.wait().await?;
    let twice = number(&on, format!("select count(*) - count(distinct n) from {s}.effect")).await?;
    schema.drop().await?;
    topic.delete().await?;
    Ok((took, twice))
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let bus = bus().await?;
    let (mut samples, mut twice) = (Vec::new(), 0);
    for _ in 0..options.rounds {
        let (took, again) = once(&bus).await?;
        samples.push(took);
        twice += again;
    }
    let line = Line::new(format!("kill -9 of one of three, lease and session {LEASE_S} s"), samples);
    let bound = LEASE_S as f64 + 1.0;
    Ok(Report {
        title: "recovery: until everything published before the kill is done".into(),
        unit: "s",
        goals: vec![
            Goal::at_most("median / (lease + 1 s)", line.median() / bound, 1.0),
            Goal::at_most(
                "slowest / (lease + 1 s)",
                crate::harness::quantile(&line.samples, 1.0) / bound,
                1.0,
            ),
        ],
        lines: vec![line],
        notes: vec![format!(
            "{twice} effects ran again in {} kills (leased, a sink that does not dedup)",
            options.rounds
        )],
    })
}

/// The number of records to catch up with, and batches and keys of several sizes.
const BACKLOG: i64 = 40_000;
const SIZES: [(usize, i64); 5] = [(200, 1000), (200, BACKLOG), (20, 1000), (2000, 100), (1, 1000)];

/// How long the speed is measured at a time, and how often in a row it must be reached: one fast
/// window can be a burst of what was already in memory.
const WINDOW: Duration = Duration::from_millis(500);
const WINDOWS: u32 = 4;

/// When the full speed was reached for good: the beginning of the first of [`WINDOWS`] fast windows
/// in a row.
#[derive(Default)]
struct Speed {
    since: Option<Duration>,
    windows: u32,
}

impl Speed {
    /// Notes a window that began at `from`. Returns the beginning of the first one if there are
    /// enough.
    fn window(&mut self, from: Duration, is_fast: bool) -> Option<Duration> {
        if !is_fast {
            *self = Speed::default();
            return None;
        }
        let since = *self.since.get_or_insert(from);
        self.windows += 1;
        (self.windows >= WINDOWS).then_some(since)
    }
}

/// Seconds from a kill during catch-up until the next process is as fast as the killed one was, and
/// stays so, or has done everything. In the end each record must have one effect.
async fn catch_up(bus: &Arc<KafkaBus>, backlog: i64, batch: usize, keys: i64) -> Fallible<f64> {
    let on = pool(2).await?;
    let schema = Schema::fresh(&on).await?;
    let s = &schema.name;
    execute(
        &on,
        format!("create table {s}.effect (n bigint not null, pid int not null, at timestamptz default clock_timestamp())"),
    )
    .await?;
    drop(schema.leasing_guard(1).await?);
    let mut topic = Filled::empty(bus, "catch-up", PARTITIONS).await?;
    let record = |n: i64| Record {
        key: Some(format!("key-{}", n % keys).into()),
        payload: Some(
            serde_json::json!({ "event_id": EventId::now_v7().to_string(), "n": n }).to_string().into(),
        ),
        ..Record::default()
    };
    topic.publish(bus, &(0..backlog).map(record).collect::<Vec<_>>()).await?;
    let member = Member {
        topic: topic.topic.as_str().to_owned(),
        group: fresh("catch-up"),
        wait_ms: 0,
        concurrency: 8,
        lease_s: LEASE_S,
        schema: Some(s.clone()),
        batch,
        warm_after: 1,
    };
    let done = || number(&on, format!("select count(*) from {s}.effect"));
    let mut victim = member.start()?;
    wait_for(&on, format!("select count(*) from {s}.effect"), |done| done > 0).await?;
    let (began, first) = (Instant::now(), done().await?);
    wait_for(&on, format!("select count(*) from {s}.effect"), |done| done >= backlog / 4).await?;
    let rate = (done().await? - first) as f64 / began.elapsed().as_secs_f64();
    victim.start_kill()?; // SIGKILL
    let killed = Instant::now();
    let mut next = member.start()?;
    let mut speed = Speed::default();
    let took = loop {
        let (before, from) = (done().await?, Instant::now());
        tokio::time::sleep(WINDOW).await;
        let after = done().await?;
        let now = (after - before) as f64 / from.elapsed().as_secs_f64();
        if after >= backlog {
            // There was not enough left for all the windows: the fast ones before the end count.
            break speed.since.unwrap_or_else(|| killed.elapsed());
        }
        if let Some(since) = speed.window(from - killed, now >= 0.8 * rate) {
            break since;
        }
        if killed.elapsed() > LIMIT {
            return Err(format!("{now:.0} events/s {LIMIT:?} after the kill, {rate:.0} before").into());
        }
    };
    // What is left takes as long as its speed says; a batch of one is slow.
    let left = Duration::from_secs_f64(backlog as f64 / rate.max(1.0));
    let count = format!("select count(*) from {s}.effect");
    wait_at_most(LIMIT + left * 2, &on, count, |done| done >= backlog).await?;
    next.kill().await?;
    victim.wait().await?;
    let records = number(&on, format!("select count(distinct n) from {s}.effect")).await?;
    let effects = done().await?;
    if (records, effects) != (backlog, backlog) {
        return Err(format!("{effects} effects of {records} records, of {backlog}").into());
    }
    schema.drop().await?;
    topic.delete().await?;
    Ok(took.as_secs_f64())
}

/// Runs the kill during catch-up for batches and keys of several sizes; in short, of two.
pub async fn run_catch_up(options: &Options) -> Fallible<Report> {
    let bus = bus().await?;
    let bound = LEASE_S as f64 + 5.0;
    let (mut lines, mut goals) = (Vec::new(), Vec::new());
    let sizes = if options.quick { &SIZES[..2] } else { &SIZES[..] };
    let backlog = if options.quick { BACKLOG / 4 } else { BACKLOG };
    for &(batch, keys) in sizes {
        let mut samples = Vec::new();
        for _ in 0..options.rounds {
            samples.push(catch_up(&bus, backlog, batch, keys).await?);
        }
        let line = Line::new(format!("batches of {batch}, {keys} keys"), samples);
        let slowest = crate::harness::quantile(&line.samples, 1.0);
        let name = format!("{}: slowest / (lease + 5 s)", line.name);
        goals.push(Goal::at_most(name, slowest / bound, 1.0));
        lines.push(line);
    }
    Ok(Report {
        title: "catch-up: from a kill -9 until the next process is as fast as the killed one was".into(),
        unit: "s",
        goals,
        lines,
        notes: vec![format!(
            "transactional, 8 batches at once, {backlog} records, session {LEASE_S} s; each record has one effect"
        )],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_not_the_full_speed() {
        let mut speed = Speed::default();
        let mut at = |n: u32, is_fast| speed.window(WINDOW * n, is_fast);
        for n in 0..3 {
            assert_eq!(at(n, true), None);
        }
        assert_eq!(at(3, false), None, "it was a burst");
        for n in 4..7 {
            assert_eq!(at(n, true), None);
        }
        assert_eq!(at(7, true), Some(WINDOW * 4), "from the first one on");
    }
}
