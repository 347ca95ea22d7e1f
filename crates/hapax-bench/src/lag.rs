//! Memory of a consumer process far behind the end of its topic, against one that is not far
//! behind.

use std::time::Duration;

use hapax::EventId;
use rdkafka::ClientConfig;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::harness::{Contestant, Fallible, Goal, Options, Report, interleave};
use crate::kafka::{Filled, brokers, bus, fresh};
use crate::member::Member;

const FEW: u64 = 10_000;
const PARTITIONS: i32 = 4;
/// The number of handled events after which a process is warm: a fifth of the shorter lag.
const WARM_AFTER: usize = 2000;
const WAIT_MS: u64 = 20;

/// Publishes as fast as librdkafka can.
fn publish(topic: &str, events: u64) -> Fallible<()> {
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", brokers()?)
        .set("linger.ms", "20")
        .set("acks", "1")
        .set("queue.buffering.max.messages", "1000000")
        .create()?;
    for n in 0..events {
        let payload = format!(r#"{{"event_id":"{}","n":{n}}}"#, EventId::now_v7());
        let key = format!("key-{}", n % 5000);
        loop {
            match producer.send(BaseRecord::to(topic).key(&key).payload(&payload)) {
                Ok(()) => break,
                Err((
                    rdkafka::error::KafkaError::MessageProduction(
                        rdkafka::types::RDKafkaErrorCode::QueueFull,
                    ),
                    _,
                )) => {
                    producer.poll(Duration::from_millis(10));
                }
                Err((error, _)) => return Err(error.into()),
            }
        }
        if n % 10_000 == 0 {
            producer.poll(Duration::ZERO);
        }
    }
    Ok(producer.flush(Duration::from_secs(120))?)
}

/// The peak memory of a process, in MiB, once it is warm.
async fn peak(topic: &Filled) -> Fallible<f64> {
    let member = Member {
        batch: 0,
        topic: topic.topic.as_str().to_owned(),
        group: fresh("lag"),
        wait_ms: WAIT_MS,
        concurrency: 16,
        lease_s: 30,
        schema: None,
        warm_after: WARM_AFTER,
    };
    let mut child = member.start()?;
    let out = child.stdout.take().ok_or("no output")?;
    let mut lines = BufReader::new(out).lines();
    tokio::time::timeout(Duration::from_secs(60), lines.next_line())
        .await??
        .ok_or("a member ended by itself")?;
    let pid = child.id().ok_or("a member ended by itself")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    child.kill().await?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).ok_or("no VmHWM in /proc")?;
    let kib: f64 = line.split_whitespace().nth(1).ok_or("no VmHWM in /proc")?.parse()?;
    Ok(kib / 1024.0)
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let many = options.held(10_000_000);
    let bus = bus().await?;
    let (mut near, mut far) =
        (Filled::empty(&bus, "near", PARTITIONS).await?, Filled::empty(&bus, "far", PARTITIONS).await?);
    for (topic, events) in [(&mut near, FEW), (&mut far, many)] {
        let name = topic.topic.as_str().to_owned();
        tokio::task::spawn_blocking(move || publish(&name, events)).await??;
        topic.records = events as usize;
    }
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new(format!("a lag of {many} events"), || peak(&far)),
            Contestant::new(format!("a lag of {FEW} events"), || peak(&near)),
        ],
    )
    .await?;
    near.delete().await?;
    far.delete().await?;
    Ok(Report {
        title: "lag: most memory of a warm consumer process".into(),
        unit: "MiB resident",
        goals: vec![Goal::at_most("far / near", lines[0].median() / lines[1].median(), 1.1)],
        lines,
        notes: vec!["leased, ledger in memory, 16 handlers at once; everything else as it comes".into()],
    })
}
