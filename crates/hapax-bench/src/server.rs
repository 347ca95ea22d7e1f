//! `hapax serve` as a process: claims in batches against the library's, its memory over many
//! requests, and its start.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hapax::EventId;
use hapax::keyed::IdempotencyKey;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::claims::many;
use crate::filter::binary;
use crate::harness::{Contestant, Fallible, Goal, Line, Options, Report, interleave, rate};
use crate::pg::{Schema, ids, pool, url};
use crate::wire::{Wire, expect};

/// A server that runs until this is dropped.
struct Server {
    child: Child,
    address: SocketAddr,
    /// From the start of its process until it said that it is ready.
    took: Duration,
}

impl Server {
    async fn start(data: &Path, more: &[&str]) -> Fallible<Self> {
        let began = Instant::now();
        let mut child = Command::new(binary()?)
            .args(["serve", "--json", "--listen", "127.0.0.1:0", "--data"])
            .arg(data)
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let out = child.stdout.take().ok_or("no output")?;
        let line = BufReader::new(out).lines().next_line().await?.ok_or("the server did not start")?;
        let ready: Value = serde_json::from_str(&line)?;
        let address = ready["address"].as_str().ok_or("no address")?.parse()?;
        Ok(Server { child, address, took: began.elapsed() })
    }

    /// Its memory at the moment, in MiB.
    fn resident(&self) -> Fallible<f64> {
        let pid = self.child.id().ok_or("the server ended by itself")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS in /proc")?;
        let kib: f64 = line.split_whitespace().nth(1).ok_or("no VmRSS in /proc")?.parse()?;
        Ok(kib / 1024.0)
    }

    async fn end(mut self) -> Fallible<()> {
        Ok(self.child.kill().await?)
    }
}

/// Claims in one request, and in one call of the library.
const BATCH: usize = 1000;
/// Requests at once, and calls of the library.
const AT_ONCE: usize = 2;

/// Claims per second over HTTP. What is sent is made before the clock starts, like the ids of the
/// library's side.
async fn over_http(server: SocketAddr, ids: Vec<EventId>) -> Fallible<f64> {
    let claim = |id: &EventId| json!({"scope": "bench", "id": id.as_str(), "mode": "at_most_once"});
    let body = |ids: &[EventId]| json!({"claims": ids.iter().map(claim).collect::<Vec<_>>()}).to_string();
    let bodies: Arc<Vec<(usize, String)>> =
        Arc::new(ids.chunks(BATCH).map(|ids| (ids.len(), body(ids))).collect());
    let mut wires = Vec::new();
    for _ in 0..AT_ONCE {
        wires.push(Wire::open(server).await?);
    }
    rate(ids.len(), async {
        let mut running = tokio::task::JoinSet::new();
        for (at, mut wire) in wires.into_iter().enumerate() {
            let bodies = Arc::clone(&bodies);
            running.spawn(async move {
                for (count, body) in bodies.iter().skip(at).step_by(AT_ONCE) {
                    let answer = expect(200, wire.post("/v1/claims/batch", None, body).await?)?;
                    let claimed = std::str::from_utf8(answer)?.matches(r#""outcome":"claimed""#).count();
                    if claimed != *count {
                        return Err(format!("{claimed} of {count} new ids were claimed").into());
                    }
                }
                Fallible::Ok(())
            });
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
        Ok(())
    })
    .await
}

async fn claims(options: &Options) -> Fallible<Report> {
    let two = pool(2).await?;
    let (ours, theirs) = (Schema::fresh(&two).await?, Schema::fresh(&two).await?);
    let guard = ours.guard(4).await?;
    let dir = tempfile::tempdir_in(".")?;
    let (url, schema) = (url()?, format!("ledger.schema={}", theirs.name));
    let apart = ["--without", "relay", "--without", "analytics", "--without", "sweepers"];
    let more = [&["--ledger", &url, "--set", &schema], &apart[..]].concat();
    let server = Server::start(dir.path(), &more).await?;
    let events = options.events(100_000);
    let address = server.address;
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("POST /v1/claims/batch, {BATCH} a request, {AT_ONCE} at once"), || {
                over_http(address, ids(events))
            }),
            Contestant::new(format!("the library, {BATCH} a call, {AT_ONCE} at once"), || {
                many(&guard, ids(events))
            }),
        ],
    )
    .await?;
    server.end().await?;
    drop(guard);
    ours.drop().await?;
    theirs.drop().await?;
    let ratio = lines[0].median() / lines[1].median();
    Ok(Report {
        title: "serve: claims in batches on PostgreSQL".into(),
        unit: "claims/s",
        goals: vec![Goal::at_least("over HTTP / the library", ratio, 0.5)],
        lines,
        notes: vec!["the server is a process, the library runs in the bench; both share the machine".into()],
    })
}

/// Requests at once while the memory is measured.
const CLIENTS: usize = 16;
/// How long the memory is measured at most, unless somebody says how many requests it should be (`--rows`).
const AT_MOST: Duration = Duration::from_secs(420);
/// The requests of one turn of a client.
const TURN: u64 = 20;

/// A turn of a client: a record is created under a new key and created again; events are claimed, asked
/// about and done.
async fn turn(wire: &mut Wire) -> Fallible<()> {
    let key = IdempotencyKey::now_v7();
    let body = r#"{"payload":{"customer":"c-17","amount":4200}}"#;
    expect(201, wire.post("/v1/modules/orders/records", Some(key.as_str()), body).await?)?;
    expect(200, wire.post("/v1/modules/orders/records", Some(key.as_str()), body).await?)?;
    for _ in 0..6 {
        let id = EventId::now_v7();
        let claim = json!({"scope": "bench", "id": id.as_str(), "payload": {"n": 1}}).to_string();
        let claimed: Value =
            serde_json::from_slice(expect(200, wire.post("/v1/claims", None, &claim).await?)?)?;
        let of = format!("/v1/processed?scope=bench&id={}", id.as_str());
        expect(200, wire.get(&of).await?)?;
        let done = json!({"scope": "bench", "id": id.as_str(), "token": claimed["token"]}).to_string();
        expect(200, wire.post("/v1/claims/done", None, &done).await?)?;
    }
    Ok(())
}

async fn memory(options: &Options) -> Fallible<Report> {
    let dir = tempfile::tempdir_in(".")?;
    let data = dir.path().join("data");
    let made = Command::new(binary()?)
        .args(["modules", "create", "orders", "--data"])
        .arg(&data)
        .stdout(Stdio::null())
        .status()
        .await?;
    if !made.success() {
        return Err("the module could not be made".into());
    }
    let server = Server::start(&data, &[]).await?;
    let limit = if options.rows.is_some() { Duration::MAX } else { AT_MOST };
    let requests = options.rows.unwrap_or(if options.quick { 20_000 } else { 1_000_000 });
    let (taken, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (began, mut running) = (Instant::now(), tokio::task::JoinSet::new());
    for _ in 0..CLIENTS {
        let (mut wire, taken, done) =
            (Wire::open(server.address).await?, Arc::clone(&taken), Arc::clone(&done));
        running.spawn(async move {
            while began.elapsed() < limit && taken.fetch_add(TURN, Ordering::Relaxed) + TURN <= requests {
                turn(&mut wire).await?;
                done.fetch_add(TURN, Ordering::Relaxed);
            }
            Fallible::Ok(())
        });
    }
    // The first twentieth warms it up: caches, connections, threads.
    let (warm, step) = (requests / 20, requests / 20);
    let (mut samples, mut next) = (Vec::new(), warm);
    let mut every = tokio::time::interval(Duration::from_millis(50));
    loop {
        tokio::select! {
            _ = every.tick() => {
                if done.load(Ordering::Relaxed) >= next {
                    samples.push(server.resident()?);
                    next += step;
                }
            }
            ended = running.join_next() => match ended {
                Some(ended) => ended??,
                None => break,
            }
        }
    }
    let took = began.elapsed().as_secs_f64();
    let sent = done.load(Ordering::Relaxed);
    // Without the first twentieth there is nothing to compare with: the same number twice would be a ratio of 1.
    if samples.is_empty() {
        let asked = if options.rows.is_some() { "" } else { ", the time that they have without --rows" };
        return Err(format!(
            "{sent} of {requests} requests were answered in {took:.0} s{asked}; the memory is measured from {warm} on"
        )
        .into());
    }
    let growth = growth(&samples[samples.len() / 2..], step).map_or_else(
        || "too few samples for a slope".to_owned(),
        |slope| format!("slope of the second half of the samples: {slope:.1} bytes per request"),
    );
    samples.push(server.resident()?);
    server.end().await?;
    let (first, last) = (samples[0], samples[samples.len() - 1]);
    Ok(Report {
        title: format!("serve: memory over {sent} requests, embedded"),
        unit: "MiB resident",
        goals: vec![Goal::at_most(format!("at the end / after {warm} requests"), last / first, 1.1)],
        lines: vec![
            Line::new(format!("after {warm} requests"), vec![first]),
            Line::new("at the end", vec![last]),
            Line::new(format!("every {step} requests"), samples),
        ],
        notes: vec![
            growth,
            format!(
                "{sent} of {requests} requests; {CLIENTS} connections, {:.0} requests/s in {took:.0} s; of {TURN}: a keyed create and its replay, 6 claims, 6 looks, 6 dones",
                sent as f64 / took
            ),
        ],
    })
}

/// How many bytes a request leaves behind, by least squares over samples in MiB that are `step` requests apart. What
/// only warms up comes to rest; what grows with every request does not.
fn growth(samples: &[f64], step: u64) -> Option<f64> {
    let middle = samples.len().checked_sub(1)? as f64 / 2.0;
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    let (mut with, mut of) = (0.0, 0.0);
    for (at, sample) in samples.iter().enumerate() {
        let distance = at as f64 - middle;
        with += distance * (sample - mean);
        of += distance * distance;
    }
    (of > 0.0).then(|| with / of * 1024.0 * 1024.0 / step as f64)
}

/// Milliseconds from the start of the process until it says that it is ready, and until `/readyz` agrees.
async fn start(data: &Path) -> Fallible<(f64, f64)> {
    let began = Instant::now();
    let server = Server::start(data, &[]).await?;
    let mut wire = Wire::open(server.address).await?;
    while wire.get("/readyz").await?.0 != 200 {
        if began.elapsed() > Duration::from_secs(60) {
            return Err("the server is never ready".into());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let ready = began.elapsed();
    let took = server.took;
    server.end().await?;
    Ok((took.as_secs_f64() * 1000.0, ready.as_secs_f64() * 1000.0))
}

async fn starts(options: &Options) -> Fallible<Report> {
    let mut samples = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
    for round in 0..=options.rounds {
        let dir = tempfile::tempdir_in(".")?;
        let data = dir.path().join("data");
        // Fresh, then with the files of the first, which was killed.
        let (first, second) = (start(&data).await?, start(&data).await?);
        if round > 0 {
            for (samples, took) in samples.iter_mut().zip([first.0, first.1, second.0, second.1]) {
                samples.push(took);
            }
        }
    }
    let [fresh, fresh_ready, again, again_ready] = samples;
    let lines = vec![
        Line::new("no files yet: until it answers", fresh),
        Line::new("no files yet: until /readyz says so", fresh_ready),
        Line::new("after a kill -9: until it answers", again),
        Line::new("after a kill -9: until /readyz says so", again_ready),
    ];
    Ok(Report {
        title: "serve: from the start of the process, embedded".into(),
        unit: "ms",
        goals: lines[..3]
            .iter()
            .map(|of| Goal::at_most(format!("{} / 300 ms", of.name), of.median() / 300.0, 1.0))
            .collect(),
        lines,
        notes: vec!["after a kill the relay's leadership has to lapse before /readyz agrees".into()],
    })
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    Ok(vec![starts(options).await?, claims(options).await?, memory(options).await?])
}

#[cfg(test)]
mod tests {
    use super::growth;

    #[test]
    fn growth_is_told_from_warming_up() {
        let mib = |requests: u64| 50.0 + requests as f64 * 100.0 / (1024.0 * 1024.0);
        let leaks: Vec<f64> = (10..20).map(|n| mib(n * 50_000)).collect();
        let slope = growth(&leaks, 50_000).unwrap();
        assert!((slope - 100.0).abs() < 0.001, "{slope}");
        assert!(growth(&[60.0; 10], 50_000).unwrap().abs() < 0.001, "warm");
        assert_eq!((growth(&[60.0], 50_000), growth(&[], 50_000)), (None, None));
    }
}
