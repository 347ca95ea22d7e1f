//! `hapax consume`: runs a handler in any language for every event of a topic, each with effect
//! once.
//!
//! The library's consumer does the work. This module adds the handler (`exec`, `child`, or the
//! library's HTTP sink), signals, the progress line and the final counts.

mod child;
mod decode;
pub(crate) mod exec;
pub(crate) mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use hapax::bus::{Start, Subscription};
use hapax::config::Config;
use hapax::consumer::{
    AtMostOnceHandler, Consumer, ConsumerHandle, ConsumerSettings, Handled, LeasedHandler, Permits, Wants,
};
use hapax::guard::Run;
use hapax::ledger::{Baseline, OnDead, OrderPolicy};
use hapax::open::Pools;
use hapax::sink::{Effect, Sink};
use hapax::{Event, Kind, Ledger, Scope, Topic};
use serde_json::json;

use crate::cli::Global;
use crate::exporters::Metrics;
use crate::failure::Failure;
use crate::signal::Gate;
use crate::{open, print};
use exec::Pool;

/// Run a handler for every event of a topic: each takes effect once
///
/// A repeated delivery does not run again; what fails is retried with growing pauses and ends in
/// the dead letters (`hapax dead`).
///
/// Handlers speak JSON, version 1, over HTTP or on standard input and output: docs/handlers.md.
#[derive(Debug, Args)]
#[command(
    group(ArgGroup::new("handler").required(true).args(["http", "exec"])),
    override_usage = "hapax consume --topic <TOPIC> --exec <CMD> [OPTIONS]\n       \
                      hapax consume --topic <TOPIC> --http <URL> [OPTIONS]",
    after_help = "Examples:\n  \
        hapax consume --topic orders --scope mailer --exec 'python3 clients/python/handler.py'\n  \
        hapax consume --topic orders --scope search --http http://localhost:8080/events --bus kafka://localhost:9092\n  \
        hapax consume --topic orders --scope demo --exec ./handler --until-idle 2"
)]
pub struct ConsumeArgs {
    /// The topic; may be repeated
    #[arg(long, required = true)]
    topic: Vec<Topic>,
    /// The scope, which names the effect: consumers with the same scope share the work [default:
    /// dedup.default_scope_id]
    #[arg(long)]
    scope: Option<Scope>,
    /// POST each event to this URL
    #[arg(long, value_name = "URL")]
    http: Option<String>,
    /// Run this command in a shell and exchange JSON Lines with it
    #[arg(long, value_name = "CMD")]
    exec: Option<String>,
    /// The consumer group [default: the scope]
    #[arg(long)]
    group: Option<String>,
    /// Every process gets every event: each needs its own --scope, with a name that stays the same
    /// across restarts
    #[arg(long, conflicts_with = "group")]
    broadcast: bool,
    #[command(flatten)]
    places: decode::PlaceArgs,
    /// Only events of this kind; may be repeated
    #[arg(long)]
    kind: Vec<Kind>,
    /// How many events are claimed and handled at once (consumer.concurrency); a child of --exec
    /// gets one at a time, unless it announces more
    #[arg(long, value_name = "N")]
    concurrency: Option<String>,
    /// How many children --exec runs (consumer.workers)
    #[arg(long, value_name = "N", alias = "handlers", conflicts_with = "http")]
    workers: Option<String>,
    /// How long handling one event may take from when it is sent, such as 30s
    /// (consumer.handler_timeout_ms)
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    timeout: Option<Duration>,
    /// The order of events of one aggregate; needs --on-dead
    #[arg(long, value_enum)]
    order: Option<Order>,
    /// What becomes of later events of the aggregate when one is dead: they are parked behind it, or it is skipped
    #[arg(long, value_enum, requires = "order")]
    on_dead: Option<Dead>,
    /// The seq that strict order starts with [default: that of the first event]
    #[arg(long, value_name = "SEQ", requires = "order")]
    first_seq: Option<u64>,
    /// Never run an event twice: what fails is listed as lost, not retried
    #[arg(long)]
    at_most_once: bool,
    /// While the ledger is away: pause, fail_fast or dead_letter (consumer.outage). The ledger has
    /// no record of events that dead_letter copies to the dead-letter topic, so `hapax dead` cannot
    /// redrive them: publish them again yourself
    #[arg(long, value_name = "POLICY")]
    outage: Option<String>,
    /// A filter in front of the ledger, such as redis://localhost (window.url)
    #[arg(long, value_name = "URL")]
    window: Option<String>,
    /// Where a group without committed offsets starts to read
    #[arg(long, value_enum, default_value_t = From::Earliest)]
    from: From,
    /// Exit with code 0 once all partitions are read to their ends and nothing has arrived for this
    /// many seconds; events that wait in the ledger for a distant retry do not count
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    until_idle: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    /// Never go backwards: an event that arrives after a later one is stale
    Latest,
    /// After seq n comes n+1, and nothing else
    Strict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dead {
    /// Its successors wait until it is redriven or dropped
    Park,
    /// Its successors continue
    Skip,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum From {
    /// With the oldest record
    Earliest,
    /// With records that arrive from now on
    Latest,
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let text = if text.bytes().all(|b| b.is_ascii_digit()) { format!("{text}s") } else { text.to_owned() };
    crate::cli::duration(&text)
}

pub async fn run(
    global: &Global,
    args: &ConsumeArgs,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    let config = config(global, args)?;
    let settings = settings(&config, args)?;
    let http = args.http.as_deref().map(http_sink).transpose()?;
    settings.check()?;
    let bus = open::bus_of(global, &config, &args.topic).await?;
    let ledger = open::ledger(&config, &Pools::default()).await?;
    let mut builder = Consumer::builder(bus, ledger).settings(settings);
    if let Some(window) = config.window(config.window.epoch.as_str())? {
        builder = builder.window(window);
    }
    let consumer = builder.build()?;
    let signals = gate.take_signals(); // until now there was nothing to drain
    let pool = match &args.exec {
        Some(command) => {
            Some(Pool::start(command, config.consumer.workers, config.consumer.cancel_grace).await?)
        }
        None => None,
    };
    let sink: Arc<dyn Sink> = match (&pool, http) {
        (Some(pool), _) => Arc::<Pool>::clone(pool),
        (None, Some(http)) => http,
        (None, None) => return Err(Failure::config("give --http URL or --exec CMD")),
    };
    let handle = consumer.handle();
    let running = tokio::spawn(consume(consumer, sink, pool.clone(), args.at_most_once));
    let watched = watch::Watch::new(global, handle, args.until_idle, pool.clone(), metrics);
    let (ended, code) = watched.until_ended(running, signals).await;
    if let Some(pool) = &pool {
        pool.close().await;
    }
    report(global, &ended?, pool.as_deref())?;
    Ok(code)
}

#[cfg(feature = "http")]
fn http_sink(url: &str) -> Result<Arc<dyn Sink>, Failure> {
    Ok(Arc::new(hapax::sink::HttpSink::new(url)?))
}

#[cfg(not(feature = "http"))]
fn http_sink(_: &str) -> Result<Arc<dyn Sink>, Failure> {
    Err(Failure::not_built_in("HTTP", "http"))
}

/// Treats flags as settings, with the same checks and messages.
fn config(global: &Global, args: &ConsumeArgs) -> Result<Config, Failure> {
    let timeout = args.timeout.map(|timeout| timeout.as_millis().to_string());
    global.load_with(&[
        ("consumer.concurrency", "--concurrency", args.concurrency.clone()),
        ("consumer.workers", "--workers", args.workers.clone()),
        ("consumer.handler_timeout_ms", "--timeout", timeout),
        ("consumer.outage", "--outage", args.outage.clone()),
        ("window.url", "--window", args.window.clone()),
    ])
}

fn settings(config: &Config, args: &ConsumeArgs) -> Result<ConsumerSettings, Failure> {
    if args.broadcast && args.scope.is_none() {
        return Err(Failure::config(
            "--broadcast needs a --scope of its own for each process, with a name that stays the same over restarts: \
             processes with one scope would share the events instead of each getting all",
        ));
    }
    let scope = args.scope.clone().or_else(|| config.dedup.default_scope.clone()).ok_or_else(|| {
        Failure::config("--scope is missing: name whose effect it is (or set dedup.default_scope_id)")
    })?;
    let mut settings = config.consumer_settings(scope, args.topic.clone())?;
    settings.group = args.group.as_deref().map(Into::into);
    Subscription::new(settings.group(), settings.topics.iter().cloned())
        .map_err(|e| Failure::config(format!("--group: {e}")))?;
    settings.start = match args.from {
        From::Earliest => Start::Earliest,
        From::Latest => Start::Latest,
    };
    args.places.apply(&mut settings.decoder)?;
    if !args.kind.is_empty() {
        settings.wants = Wants::Kinds(args.kind.clone());
    }
    let on_dead = match args.on_dead {
        Some(Dead::Park) => Some(OnDead::Park),
        Some(Dead::Skip) => Some(OnDead::Skip),
        None => None,
    };
    settings.order = match (args.order, on_dead) {
        (None, _) => None,
        (Some(_), None) => {
            return Err(Failure::config(
                "--order needs --on-dead: say whether a dead event parks its aggregate's successors or is skipped",
            ));
        }
        (Some(Order::Latest), Some(_)) if args.first_seq.is_some() => {
            return Err(Failure::config(
                "--first-seq is for --order strict; latest begins with whatever comes",
            ));
        }
        (Some(Order::Latest), Some(on_dead)) => Some((OrderPolicy::Latest, on_dead)),
        (Some(Order::Strict), Some(on_dead)) => {
            let baseline = args.first_seq.map_or(Baseline::FirstSeen, Baseline::From);
            Some((OrderPolicy::Strict { baseline, gap_timeout: config.consumer.gap_timeout }, on_dead))
        }
    };
    Ok(settings)
}

pub(crate) type Ended = hapax::Result<hapax::consumer::Counts>;

/// Applies events to a sink, as many at once as the pool has room for.
struct Apply {
    sink: Arc<dyn Sink>,
    pool: Option<Arc<Pool>>,
    scope: Scope,
    timeout: Duration,
}

impl LeasedHandler for Apply {
    async fn handle(&self, event: &Event, run: &Run) -> Handled {
        self.sink.apply(Effect::leased(event.clone(), run, self.timeout)).await
    }

    fn permits(&self) -> Option<&dyn Permits> {
        Some(&**self.pool.as_ref()?)
    }
}

impl AtMostOnceHandler for Apply {
    async fn handle(&self, event: &Event) -> Handled {
        self.sink.apply(Effect::at_most_once(self.scope.clone(), event.clone(), self.timeout)).await
    }

    fn permits(&self) -> Option<&dyn Permits> {
        LeasedHandler::<()>::permits(self)
    }
}

async fn consume(
    consumer: Consumer<Arc<dyn Ledger>>,
    sink: Arc<dyn Sink>,
    pool: Option<Arc<Pool>>,
    once: bool,
) -> Ended {
    let settings = consumer.settings();
    let handler = Apply { sink, pool, scope: settings.scope.clone(), timeout: settings.handler_timeout };
    if once { consumer.at_most_once(handler).await } else { consumer.leased(handler).await }
}

/// Reports the counts: for people on standard error, for tools on standard output.
pub(crate) fn report(
    global: &Global,
    counts: &hapax::consumer::Counts,
    pool: Option<&Pool>,
) -> Result<(), Failure> {
    let (restarts, ignored) = pool.map_or((0, 0), Pool::counts);
    let counts: BTreeMap<_, _> = counts.iter().map(|(how, count)| (how.label(), *count)).collect();
    if global.json {
        return print::json(&json!({
            "deliveries": counts, "handler_restarts": restarts, "replies_ignored": ignored,
        }));
    }
    let mut words: Vec<_> = counts.iter().map(|(word, count)| format!("{word} {count}")).collect();
    if words.is_empty() {
        words.push("no delivery was finished".to_owned());
    }
    if restarts > 0 {
        words.push(format!("handler restarts {restarts}"));
    }
    if ignored > 0 {
        words.push(format!("replies ignored {ignored}"));
    }
    eprintln!("{}", words.join(", "));
    Ok(())
}
