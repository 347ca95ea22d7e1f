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
    let limit = Instant::now() + LIMIT;
    while !reached(number(on, sql.clone()).await?) {
        if Instant::now() > limit {
            return Err(format!("not within {LIMIT:?}: {sql}").into());
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

/// The number of records to catch up with.
const BACKLOG: i64 = 40_000;

/// Seconds from a kill during catch-up until the next process is as fast as the killed one was, or
/// has done everything.
async fn catch_up(bus: &Arc<KafkaBus>, batch: usize, keys: i64) -> Fallible<f64> {
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
    topic.publish(bus, &(0..BACKLOG).map(record).collect::<Vec<_>>()).await?;
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
    let began = Instant::now();
    wait_for(&on, format!("select count(*) from {s}.effect"), |done| done >= BACKLOG / 4).await?;
    let rate = done().await? as f64 / began.elapsed().as_secs_f64();
    victim.start_kill()?; // SIGKILL
    let killed = Instant::now();
    let mut next = member.start()?;
    loop {
        let (before, from) = (done().await?, Instant::now());
        tokio::time::sleep(Duration::from_millis(500)).await;
        let after = done().await?;
        let now = (after - before) as f64 / from.elapsed().as_secs_f64();
        if now >= 0.8 * rate || after >= BACKLOG {
            break;
        }
        if killed.elapsed() > LIMIT {
            return Err(format!("{now:.0} events/s {LIMIT:?} after the kill, {rate:.0} before").into());
        }
    }
    let took = killed.elapsed().as_secs_f64();
    next.kill().await?;
    victim.wait().await?;
    schema.drop().await?;
    topic.delete().await?;
    Ok(took)
}

/// Runs the kill during catch-up for batches and keys of several sizes.
pub async fn run_catch_up(options: &Options) -> Fallible<Report> {
    let bus = bus().await?;
    let bound = LEASE_S as f64 + 5.0;
    let (mut lines, mut goals) = (Vec::new(), Vec::new());
    for (batch, keys) in [(200, 1000), (200, BACKLOG), (20, 1000), (2000, 100), (1, 1000)] {
        let mut samples = Vec::new();
        for _ in 0..options.rounds {
            samples.push(catch_up(&bus, batch, keys).await?);
        }
        let line = Line::new(format!("batches of {batch}, {keys} keys"), samples);
        let slowest = crate::harness::quantile(&line.samples, 1.0);
        goals.push(Goal::at_most("slowest / (lease + 5 s)", slowest / bound, 1.0));
        lines.push(line);
    }
    Ok(Report {
        title: "catch-up: from a kill -9 until the next process is as fast as the killed one was".into(),
        unit: "s",
        goals,
        lines,
        notes: vec![format!("transactional, 8 batches at once, {BACKLOG} records, session {LEASE_S} s")],
    })
}
