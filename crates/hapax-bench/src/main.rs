//! Compares hapax with what a user would write instead, side by side in one run: `cargo run
//! --release -p hapax-bench -- claims`.
//!
//! Rivals and hapax take turns. A figure is the median of the rounds, and the ratio is what counts.
//! The machine's fsync rate is printed too, because most of these figures depend on it.
//! `HAPAX_BENCH_POSTGRES_URL` (or else `HAPAX_TEST_POSTGRES_URL`) names the PostgreSQL server;
//! every bench works in its own schemas and drops them. `HAPAX_BENCH_KAFKA`,
//! `HAPAX_BENCH_VALKEY_URL`, `HAPAX_BENCH_CLICKHOUSE_URL` and `HAPAX_BENCH_OPENSEARCH_URL` (or else
//! `HAPAX_TEST_…`) name the other servers; every bench uses its own topics, keys, databases and
//! indices there.

mod analytics;
mod append;
mod claims;
mod filter;
mod harness;
mod http;
mod kafka;
mod keys;
mod lag;
mod lease;
mod lone;
mod member;
mod ops;
mod pg;
mod pipeline;
mod projection;
mod recovery;
mod relay;
mod rivals;
mod scale;
mod server;
mod size;
mod skips;
mod sqlite;
mod sweep;
mod window;
mod wire;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};

use harness::{Fallible, Machine, Options, Report};

/// Compare hapax side by side with what a user would write instead.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// What to measure.
    bench: Bench,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Rounds per contestant; the figure is their median.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Do a tenth of the work, to see that it runs. The figures mean little.
    #[arg(long)]
    quick: bool,
    /// Rows in the tables (scale, sweep, poll, a full week of lease), records in the topic
    /// (pipeline, lag), records (analytics), or requests (the memory of serve).
    #[arg(long)]
    rows: Option<u64>,
    /// Events per transaction (pipeline).
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    batch: u16,
    /// Concurrent transactions (pipeline).
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    concurrency: u16,
}

/// The benches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// Claims per second in PostgreSQL and SQLite.
    Claims,
    /// One claim at a time.
    Lone,
    /// Leases, settled as done.
    Lease,
    /// The operations of a check-then-insert library.
    Ops,
    /// Claims with many rows in the ledger.
    Scale,
    /// Dropping a week.
    Sweep,
    /// Bytes on disk, WAL, dead rows.
    Size,
    /// `hapax filter` against awk.
    Filter,
    /// Kafka to PostgreSQL rows, exactly once.
    Pipeline,
    /// Parallel keys within one partition.
    Keys,
    /// The window in Valkey.
    Window,
    /// Recovery after one of three processes is killed.
    Recovery,
    /// Memory far behind the end of a topic.
    Lag,
    /// Appends to a journal, alone and concurrently.
    Append,
    /// Polling for new events in a journal that has many.
    Poll,
    /// From a journal to Kafka.
    Relay,
    /// Keyed writes over HTTP, and replays; `hapax serve`: claims, memory, its start.
    Http,
    /// `hapax serve` alone: claims in batches, memory, its start.
    Serve,
    /// The read model in ClickHouse: rows in, from a commit to an answer, FINAL, verify.
    Analytics,
    /// Documents into OpenSearch, records into Valkey.
    Projection,
    /// What the log of skips costs.
    Skips,
    /// A consumer process, started by recovery and lag.
    #[value(hide = true)]
    Member,
    /// All of them.
    All,
}

impl Bench {
    const EACH: [Bench; 20] = [
        Bench::Claims,
        Bench::Lone,
        Bench::Lease,
        Bench::Ops,
        Bench::Scale,
        Bench::Sweep,
        Bench::Size,
        Bench::Filter,
        Bench::Pipeline,
        Bench::Keys,
        Bench::Window,
        Bench::Recovery,
        Bench::Lag,
        Bench::Append,
        Bench::Poll,
        Bench::Relay,
        Bench::Http,
        Bench::Analytics,
        Bench::Projection,
        Bench::Skips,
    ];

    async fn run(self, options: &Options) -> Fallible<Vec<Report>> {
        match self {
            Bench::Claims => Ok(vec![claims::run(options).await?, sqlite::run(options).await?]),
            Bench::Lone => Ok(vec![lone::run(options).await?]),
            Bench::Lease => lease::run(options).await,
            Bench::Ops => ops::run(options).await,
            Bench::Scale => Ok(vec![scale::run(options).await?]),
            Bench::Sweep => Ok(vec![sweep::run(options).await?]),
            Bench::Size => Ok(vec![size::run(options).await?]),
            Bench::Filter => Ok(vec![filter::run(options)?]),
            Bench::Pipeline => Ok(vec![pipeline::run(options).await?]),
            Bench::Keys => Ok(vec![keys::run(options).await?]),
            Bench::Window => window::run(options).await,
            Bench::Recovery => {
                Ok(vec![recovery::run(options).await?, recovery::run_catch_up(options).await?])
            }
            Bench::Lag => Ok(vec![lag::run(options).await?]),
            Bench::Append => append::run(options).await,
            Bench::Poll => Ok(vec![append::poll(options).await?]),
            Bench::Relay => relay::run(options).await,
            Bench::Http => {
                let mut reports = http::run(options).await?;
                reports.extend(server::run(options).await?);
                Ok(reports)
            }
            Bench::Analytics => analytics::run(options).await,
            Bench::Projection => projection::run(options).await,
            Bench::Skips => skips::run(options).await,
            Bench::Serve => server::run(options).await,
            Bench::Member => member::run().await.map(|()| Vec::new()),
            Bench::All => Ok(Vec::new()), // each by itself
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match measure(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprintln!("  because: {cause}");
                source = cause.source();
            }
            ExitCode::from(if error.is::<harness::Missing>() { 3 } else { 1 })
        }
    }
}

fn measure(cli: &Cli) -> Fallible<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let options = Options {
        rounds: cli.rounds.max(1),
        quick: cli.quick,
        rows: cli.rows,
        batch: usize::from(cli.batch),
        concurrency: usize::from(cli.concurrency),
    };
    if cli.bench == Bench::Member {
        return runtime.block_on(member::run());
    }
    let machine = Machine::look(&runtime)?;
    if !cli.json {
        println!("{machine}");
    }
    let benches = if cli.bench == Bench::All { &Bench::EACH[..] } else { std::slice::from_ref(&cli.bench) };
    let mut reports = Vec::new();
    for bench in benches {
        for report in runtime.block_on(bench.run(&options))? {
            if cli.json {
                reports.push(report.json());
            } else {
                println!("\n{report}"); // at once: all of them take long, and one may fail
            }
        }
    }
    if cli.json {
        println!("{}", serde_json::json!({ "machine": machine.json(), "reports": reports }));
    }
    Ok(())
}
