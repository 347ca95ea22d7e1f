//! `hapax produce`: publishes JSON Lines to a topic, each line with an id that stays the same
//! however often it is sent.

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use hapax::bus::{Bus, Record};
use hapax::id::{IdChain, IdSource};
use hapax::words::counted;
use hapax::{Error, EventId, Headers, Origin, Topic};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::cli::Global;
use crate::failure::Failure;
use crate::lines::{self, Line};
use crate::{open, print};

/// The maximum number of lines published together.
const BATCH: usize = 500;
/// A line of at least this many bytes is the last of its batch: if the bus refuses it, no later
/// line was sent.
const LARGE_BYTES: usize = 256 * 1024;
/// The pause before resending unacknowledged lines; it doubles.
const PAUSE_BASE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Publish events from JSON Lines to a topic
///
/// The id of a line is found as a consumer finds it (`/eventId`, then `/event_id`), or generated
/// once (UUIDv7, in the header `eventId`) and kept over retries.
#[derive(Debug, Args)]
#[command(after_help = "Example: hapax produce --topic orders --create 4 --key /order_id events.jsonl")]
pub struct ProduceArgs {
    /// A file of JSON Lines; `-` or none for standard input
    file: Option<PathBuf>,
    /// The topic
    #[arg(long)]
    topic: Topic,
    /// Create the topic with this many partitions if it does not exist
    #[arg(long, value_name = "PARTITIONS", value_parser = crate::cli::partitions)]
    create: Option<i32>,
    /// Where the record's key is (a JSON pointer): lines with the same key stay in order
    #[arg(long, value_name = "POINTER")]
    key: Option<String>,
    /// Where the id is (a JSON pointer); copied to the header `eventId`. A line without it is
    /// broken
    #[arg(long, value_name = "POINTER")]
    id: Option<String>,
    /// A header for every record; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    header: Vec<String>,
    /// How long to keep trying while the bus is away
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = crate::cli::duration)]
    patience: Duration,
    /// The longest line in bytes; a longer one is broken
    #[arg(long, value_name = "BYTES", default_value_t = 1024 * 1024)]
    line_bytes_max: usize,
}

/// Lines to be published, in order.
#[derive(Debug, Default)]
struct Batch {
    numbers: Vec<u64>,
    records: Vec<Record>,
}

impl Batch {
    fn is_full(&self) -> bool {
        let bytes = |record: &Record| record.payload.as_ref().map_or(0, Bytes::len);
        self.records.len() >= BATCH || self.records.last().is_some_and(|last| bytes(last) >= LARGE_BYTES)
    }

    fn pass(&mut self, count: usize) {
        self.numbers.drain(..count.min(self.numbers.len()));
        self.records.drain(..count.min(self.records.len()));
    }

    /// The line at an index, to begin an error message.
    fn line(&self, place: usize) -> String {
        self.numbers.get(place).map_or_else(String::new, |number| format!("line {number}"))
    }
}

#[derive(Debug, Default)]
struct Counts {
    published: u64,
    made_ids: u64,
    resent: u64,
}

pub async fn run(global: &Global, args: &ProduceArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    let maker = Maker::new(args)?;
    let bus = open::bus_with(&config, &args.topic, args.create).await?;
    let mut lines = lines::read(args.file.as_deref(), args.line_bytes_max)?;
    let mut counts = Counts::default();
    let line = std::io::stderr().is_terminal() && !global.json;
    let ended = produce(args, &maker, &bus, &mut lines, &mut counts, line).await;
    if line {
        eprint!("\r\x1b[K");
    }
    if global.json {
        print::json(&json!({
            "topic": args.topic.as_str(), "published": counts.published,
            "ids_made": counts.made_ids, "resent": counts.resent,
        }))?;
    } else {
        let (topic, made) = (print::escaped(args.topic.as_str()), counted(counts.made_ids, "id", "ids"));
        eprintln!("{} published to {topic}, {made} made", counted(counts.published, "line", "lines"));
    }
    ended.map(|()| 0)
}

async fn produce(
    args: &ProduceArgs,
    maker: &Maker,
    bus: &Arc<dyn Bus>,
    lines: &mut mpsc::Receiver<Line>,
    counts: &mut Counts,
    shown: bool,
) -> Result<(), Failure> {
    let mut batch = Batch::default();
    let mut ended = None;
    while ended.is_none() {
        // Send available lines at once, rather than wait for a full batch.
        match lines.recv().await {
            Some(line) => take(maker, line, &mut batch, counts, &mut ended),
            None => break,
        }
        while !batch.is_full() && ended.is_none() {
            match lines.try_recv() {
                Ok(line) => take(maker, line, &mut batch, counts, &mut ended),
                Err(_) => break,
            }
        }
        publish(args, &**bus, &mut batch, counts).await?;
        if shown {
            eprint!("\r{} published ", counts.published);
            let _ = std::io::stderr().flush(); // nothing is lost if nobody sees the line
        }
    }
    ended.map_or(Ok(()), Err)
}

fn take(maker: &Maker, line: Line, batch: &mut Batch, counts: &mut Counts, ended: &mut Option<Failure>) {
    let made = line.and_then(|(number, line)| {
        let made = maker.record(line).map_err(|error| Failure::input(format!("line {number}: {error}")));
        made.map(|(record, id_made)| (number, record, id_made))
    });
    match made {
        Ok((number, record, id_made)) => {
            counts.made_ids += u64::from(id_made);
            batch.numbers.push(number);
            batch.records.push(record);
        }
        Err(failure) => *ended = Some(failure),
    }
}

/// Publishes until all lines are acknowledged. Resends everything from the first unacknowledged
/// line on, so that keys stay in order; the ids are the same, so consumers recognise repeats. A
/// line that the bus refuses ends the run.
async fn publish(
    args: &ProduceArgs,
    bus: &dyn Bus,
    batch: &mut Batch,
    counts: &mut Counts,
) -> Result<(), Failure> {
    let mut pause = PAUSE_BASE;
    let until = Instant::now() + args.patience;
    while !batch.records.is_empty() {
        let (accepted, error) = match bus.publish(&args.topic, &batch.records).await {
            Ok(answers) => {
                if let Some(place) = answers.iter().position(is_refused) {
                    return Err(refused(batch, place, answers, counts));
                }
                // Resend in order, from the first line that was not acknowledged.
                let accepted = answers.iter().take_while(|answer| answer.is_ok()).count();
                (accepted, answers.into_iter().find_map(Result::err))
            }
            Err(error) => (0, Some(error)),
        };
        counts.published += accepted as u64;
        batch.pass(accepted);
        let Some(error) = error else {
            if accepted == 0 {
                return Err(Error::Corrupt("the bus answered nothing".into()).into());
            }
            pause = PAUSE_BASE;
            continue;
        };
        if !error.is_retryable() || Instant::now() + pause > until {
            return Err(Failure::from(error).about(&format!("{}, and what follows it", batch.line(0))));
        }
        counts.resent += batch.records.len() as u64;
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    Ok(())
}

fn is_refused(answer: &hapax::Result<Origin>) -> bool {
    answer.as_ref().is_err_and(|error| !error.is_retryable())
}

/// A line that the bus will never accept: which one, why, and what happened to the lines sent with
/// it.
fn refused(batch: &Batch, place: usize, answers: Vec<hapax::Result<Origin>>, counts: &mut Counts) -> Failure {
    let taken =
        |answers: &[hapax::Result<Origin>]| answers.iter().filter(|answer| answer.is_ok()).count() as u64;
    let behind = taken(&answers[place..]);
    counts.published += taken(&answers);
    let reason = answers.into_iter().nth(place).and_then(Result::err);
    let failure = reason.map_or_else(|| Failure::input("the bus refuses it"), Failure::from);
    if behind == 0 {
        return failure.about(&batch.line(place));
    }
    let were = if behind == 1 { "was" } else { "were" };
    let behind = counted(behind, "line behind it", "lines behind it");
    failure.about(&format!("{} ({behind} {were} sent with it and {were} published)", batch.line(place)))
}

/// Turns lines into records.
struct Maker {
    key: Option<String>,
    id: Option<IdChain>,
    chain: IdChain,
    headers: Headers,
}

impl Maker {
    fn new(args: &ProduceArgs) -> Result<Self, Failure> {
        if let Some(key) = args.key.as_deref().filter(|key| !key.is_empty() && !key.starts_with('/')) {
            return Err(Failure::config(format!(
                "--key {key:?} is not a JSON pointer: it does not start with '/'"
            )));
        }
        let id = args.id.clone().map(|pointer| IdChain::new([IdSource::Pointer(pointer)])).transpose();
        let id = id.map_err(|e| Failure::config(format!("--id: {e}")))?;
        let mut headers = Vec::new();
        for pair in &args.header {
            let (name, value) = pair
                .split_once('=')
                .filter(|(name, _)| !name.is_empty())
                .ok_or_else(|| Failure::config(format!("--header {pair:?} is not NAME=VALUE")))?;
            headers.push((name.to_owned(), value.to_owned()));
        }
        Ok(Maker {
            key: args.key.clone(),
            id,
            chain: IdChain::default(),
            headers: headers.into_iter().collect(),
        })
    }

    /// The record of a line, and whether its id was generated.
    fn record(&self, line: Vec<u8>) -> Result<(Record, bool), String> {
        let value: Value = serde_json::from_slice(&line).map_err(|e| format!("it is not JSON ({e})"))?;
        let payload = Bytes::from(line);
        let key = match &self.key {
            None => None,
            Some(pointer) => Some(key_of(&value, pointer)?),
        };
        let (id, made) = match &self.id {
            Some(chain) => {
                let found = chain.find(&Headers::default(), &payload, None);
                (Some(found.map_err(|e| e.to_string())?), false)
            }
            None => match self.chain.find(&self.headers, &payload, None) {
                Ok(_) => (None, false),
                // An invalid id is a mistake in the line, not a reason to generate one.
                Err(error) if has_id(&value) => return Err(error.to_string()),
                Err(_) => (Some(EventId::now_v7()), true),
            },
        };
        let mut headers = self.headers.clone();
        if let Some(id) = id {
            let owned = self.headers.iter().map(|(n, v)| (n.to_owned(), Bytes::copy_from_slice(v)));
            headers = owned.chain([("eventId".to_owned(), Bytes::from(id.as_str().into_owned()))]).collect();
        }
        Ok((Record { key, payload: Some(payload), headers, timestamp: None }, made))
    }
}

pub(crate) fn has_id(value: &Value) -> bool {
    ["/eventId", "/event_id"].iter().any(|path| value.pointer(path).is_some_and(|id| !id.is_null()))
}

fn key_of(value: &Value, pointer: &str) -> Result<Bytes, String> {
    match value.pointer(pointer) {
        Some(Value::String(text)) => Ok(Bytes::from(text.clone())),
        Some(Value::Number(number)) => Ok(Bytes::from(number.to_string())),
        Some(_) => Err(format!("its {pointer} is neither a text nor a number, so it is not a key")),
        None => Err(format!("it has no {pointer}, so it has no key")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use clap::Parser;
    use hapax::Result;
    use hapax::bus::{
        Capabilities, MemoryBus, Partition, Subscriber, Subscription, TopicInfo, TopicSettings,
    };

    use super::*;
    use crate::cli::{Cli, Command};

    /// Loses the acknowledgement of the second record of the first batch, and everything of the
    /// second batch.
    struct Forgetful {
        bus: MemoryBus,
        sent: Mutex<Vec<Vec<Record>>>,
    }

    #[async_trait]
    impl Bus for Forgetful {
        async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
            let call = {
                let mut sent = self.sent.lock().unwrap();
                sent.push(records.to_vec());
                sent.len()
            };
            let lost = || Error::unavailable("an acknowledgement", "lost");
            let mut answers = self.bus.publish(topic, records).await?;
            match call {
                1 => answers[1] = Err(lost()),
                2 => return Err(lost()),
                _ => {}
            }
            Ok(answers)
        }
        async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
            self.bus.publish_to(partition, records).await
        }
        async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
            self.bus.subscribe(subscription).await
        }
        async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
            self.bus.create_topic(topic, settings).await
        }
        async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
            self.bus.topic(topic).await
        }
        async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
            self.bus.range(partition).await
        }
        async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
            self.bus.committed(group, partition).await
        }
        fn capabilities(&self) -> Capabilities {
            self.bus.capabilities()
        }
    }

    #[tokio::test]
    async fn ids_that_were_made_are_kept_over_retries() {
        let cli = Cli::parse_from(["hapax", "produce", "--topic", "orders"]);
        let Command::Produce(args) = cli.command else { panic!("it is produce") };
        let bus = Forgetful { bus: MemoryBus::default(), sent: Mutex::default() };
        bus.create_topic(&args.topic, TopicSettings::new(1)).await.unwrap();
        let maker = Maker::new(&args).unwrap();
        let all: Vec<_> =
            (0..3).map(|n| maker.record(format!("{{\"n\":{n}}}").into_bytes()).unwrap().0).collect();
        let mut batch = Batch { numbers: vec![1, 2, 3], records: all.clone() };
        let mut counts = Counts::default();
        publish(&args, &bus, &mut batch, &mut counts).await.unwrap();
        // From the first unacknowledged one on, the same records again: same ids, same order.
        let sent = bus.sent.lock().unwrap();
        assert_eq!(*sent, [all.clone(), all[1..].to_vec(), all[1..].to_vec()]);
        assert!(all.iter().all(|record| record.headers.get("eventId").is_some()));
        assert_eq!((counts.published, counts.resent), (3, 4));
    }
}
