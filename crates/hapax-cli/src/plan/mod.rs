//! `hapax plan`: how large a ledger gets, and what share of the measured rates a load takes.

mod layout;

use std::fmt::Write as _;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;

use crate::cli::{Global, NoPlaces, between, duration};
use crate::failure::Failure;
use crate::print::{self, grouped};
use layout::Shape;

const WEEK: Duration = Duration::from_secs(7 * 86_400);
const DAY_S: f64 = 86_400.0;

/// Plan a ledger in PostgreSQL: rows, bytes, partitions, connections, and its share of the measured rates
///
/// A repeated delivery adds no row. The ledger drops whole weeks once all of a week is older than the
/// retention, so it keeps up to a week more than the retention. Entries whose id is not a UUIDv7 are deleted
/// one by one.
///
/// Bytes are computed from PostgreSQL's row layout; rates and how full pages get were measured
/// (docs/benchmarks.md).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax plan --rate 5000 --retention 7d --duplicates 3%
  hapax plan --rate 800 --retention 30d --mode leased --scopes 3 --id-bytes 40")]
pub struct PlanArgs {
    /// Deliveries per second to each scope, averaged over a week
    #[arg(long, value_name = "N", value_parser = between::<u64>(1, 10_000_000))]
    rate: u64,
    /// How long entries are kept after they are settled (ledger.retention_days)
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = duration)]
    retention: Duration,
    /// The share of deliveries that repeat an event
    #[arg(long, value_name = "PERCENT", default_value = "0%", value_parser = percent)]
    duplicates: f64,
    /// Which promise is kept for the effects
    #[arg(long, value_enum, default_value = "transactional")]
    mode: Mode,
    /// How many scopes handle each event
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = between::<u64>(1, 10_000))]
    scopes: u64,
    /// The length of ids in bytes, if they are not UUIDv7
    #[arg(long, value_name = "N", value_parser = between::<u64>(1, 1020))]
    id_bytes: Option<u64>,
    /// The length of an aggregate's id, if events are ordered
    #[arg(long, value_name = "N", value_parser = between::<u64>(1, 1020))]
    aggregate_bytes: Option<u64>,
    /// Claims come from a guard, over HTTP or SQL, instead of from a consumer of a bus
    #[arg(long)]
    guard: bool,
    /// The busiest second, as a multiple of the average
    #[arg(long, value_name = "TIMES", default_value_t = 3, value_parser = between::<u64>(1, 1000))]
    peak: u64,
    #[command(flatten)]
    no_places: NoPlaces,
}

/// How effects are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// The claim commits with the effect: one version of a row
    Transactional,
    /// A lease, then done: two versions of a row
    Leased,
    /// A claim, then the effect: one version of a row
    AtMostOnce,
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').ok_or("write it with a %, for example 3%")?;
    let value: f64 = number.trim().parse().map_err(|_| format!("{number:?} is not a number"))?;
    if (0.0..100.0).contains(&value) {
        Ok(value / 100.0)
    } else {
        Err("it must be at least 0% and less than 100%".to_owned())
    }
}

/// A rate that was measured: what, how many a second, bytes of WAL for each, if that was measured too, and where.
#[derive(Debug)]
struct Measured {
    what: &'static str,
    per_s: f64,
    wal_bytes: Option<f64>,
    machine: &'static str,
}

impl Measured {
    /// Consumers are measured on a machine that does nothing else.
    const fn consumer(what: &'static str, per_s: f64) -> Self {
        Measured { what, per_s, wal_bytes: None, machine: QUIET }
    }
}

const QUIET: &str =
    "docs/benchmarks.md: 2 cores, 24 GiB, PostgreSQL 18.6 and Kafka on the same machine, a quiet machine";
const BUSY: &str =
    "docs/benchmarks.md: 2 cores, 24 GiB, PostgreSQL 18.6 on the same machine, busy with other work";

// Every figure is one of docs/benchmarks.md, under the same words: a test compares them.
const CONSUMER: Measured = Measured::consumer("Kafka to PostgreSQL rows, exactly once, unordered", 20_642.0);
const ORDERED: Measured = Measured::consumer(
    "Kafka to PostgreSQL rows, exactly once, ordered by aggregate and seq (`latest`)",
    21_113.0,
);
/// It stands for consumers that run at most once, too, which write each row once instead of twice.
const LEASED_CONSUMER: Measured = Measured::consumer(
    "a handler that waits 5 ms, 1,000 keys in one partition, leased on PostgreSQL, 512 at once",
    18_368.0,
);
const LEASED: Measured = Measured {
    what: "lease + done, a week of 1,000,000 rows",
    per_s: 34_129.0,
    wal_bytes: Some(374.0),
    machine: BUSY,
};
const CLAIMED: Measured = Measured {
    what: "PostgreSQL claims, per event, 2,000 tasks",
    per_s: 135_797.0,
    wal_bytes: Some(238.0),
    machine: BUSY,
};

/// Database load by rate, as the document that this part of hapax follows puts it.
const TIERS: [(u64, &str, &str); 4] = [
    (1_000, "below 1,000/s", "no issues (less than 10 % of the database's CPU)"),
    (10_000, "1,000 to 10,000/s", "medium load (10 to 30 % of the database's CPU)"),
    (100_000, "10,000 to 100,000/s", "high load (30 to 70 % of the database's CPU): consider sharding"),
    (
        u64::MAX,
        "above 100,000/s",
        "not recommended: use consumers without state, or a window in Valkey in front",
    ),
];

/// What a load needs.
struct Plan<'a> {
    args: &'a PlanArgs,
    new_per_s: f64,
    rows_max: f64,
    rows_mean: f64,
    row_bytes: f64,
    weeks: u64,
    measured: &'static Measured,
}

impl<'a> Plan<'a> {
    fn of(args: &'a PlanArgs) -> Self {
        let new_per_s = args.rate as f64 * (1.0 - args.duplicates) * args.scopes as f64;
        let kept = args.retention.as_secs_f64();
        // Weeks go as a whole; what is in no week goes one by one.
        let (most, mean) = match args.id_bytes {
            None => (kept + WEEK.as_secs_f64(), kept + WEEK.as_secs_f64() / 2.0),
            Some(_) => (kept, kept),
        };
        let shape = Shape {
            id_bytes: args.id_bytes.map(|bytes| bytes as usize),
            consumed: !args.guard,
            topic_bytes: 12,
            aggregate_bytes: args.aggregate_bytes.map(|bytes| bytes as usize),
            leased: args.mode == Mode::Leased,
        };
        // Those that are kept, the one that is filled, the next one, which is made ahead; and the timeless one.
        let kept_weeks = (kept / WEEK.as_secs_f64()).ceil() as u64;
        let weeks = if args.id_bytes.is_none() { kept_weeks + 1 + 1 + 1 } else { 1 + 2 };
        let measured = match (args.guard, args.mode, args.aggregate_bytes) {
            (true, Mode::Leased, _) => &LEASED,
            (true, ..) => &CLAIMED,
            (false, Mode::Transactional, Some(_)) => &ORDERED,
            (false, Mode::Transactional, None) => &CONSUMER,
            (false, ..) => &LEASED_CONSUMER,
        };
        Plan {
            args,
            new_per_s,
            rows_max: new_per_s * most,
            rows_mean: new_per_s * mean,
            row_bytes: shape.bytes(),
            weeks,
            measured,
        }
    }

    fn deliveries_per_s(&self) -> u64 {
        self.args.rate * self.args.scopes
    }

    fn bytes_max(&self) -> f64 {
        self.rows_max * self.row_bytes
    }

    /// The part of the measured rate that the average load takes, and the busiest second.
    fn load(&self) -> (f64, f64) {
        let mean = self.deliveries_per_s() as f64 / self.measured.per_s;
        (mean, mean * self.args.peak as f64)
    }

    /// Processes that share the busiest second; each has partitions of its own.
    fn processes(&self) -> u64 {
        (self.load().1.ceil() as u64).max(2) // one may die
    }

    fn tier(&self) -> &'static (u64, &'static str, &'static str) {
        TIERS.iter().find(|(below, ..)| self.deliveries_per_s() < *below).unwrap_or(&TIERS[3])
    }

    fn wal_bytes_per_s(&self) -> Option<f64> {
        self.measured.wal_bytes.map(|bytes| bytes * self.new_per_s)
    }

    /// What else must be said.
    fn notes(&self, pool: u32) -> Vec<String> {
        let mut notes = vec![
            "Not included: held events (dead letters and retries, with their bytes), a row for each ordered aggregate, your \
             own rows, and the journal."
                .to_owned(),
            format!("Names of topics and scopes are assumed to have 12 characters. Each process may open up to {pool} connections (ledger.pool_max)."),
        ];
        if self.load().1 > 1.0 {
            notes.push(
                "The busiest second exceeds what one process did on two cores when measured: run more processes, and \
                 measure on your machine."
                    .to_owned(),
            );
        }
        if self.args.mode == Mode::AtMostOnce && !self.args.guard {
            notes.push(
                "Consumers that run at most once were not measured. The rate is that of leased ones, which write each \
                 row twice: expect more."
                    .to_owned(),
            );
        }
        if let (None, Some(claim), Some(lease)) =
            (self.measured.wal_bytes, CLAIMED.wal_bytes, LEASED.wal_bytes)
        {
            notes.push(format!(
                "WAL was not measured for consumers; a bare claim writes {claim:.0} bytes, lease and done {lease:.0}."
            ));
        }
        notes
    }
}

fn bytes(value: f64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let (size, unit) = units.into_iter().find(|(size, _)| value >= *size).unwrap_or((1.0, "bytes"));
    let scaled = value / size;
    if scaled < 10.0 { format!("{scaled:.1} {unit}") } else { format!("{scaled:.0} {unit}") }
}

fn share(value: f64) -> String {
    if value < 0.1 { format!("{:.1} %", value * 100.0) } else { format!("{:.0} %", value * 100.0) }
}

pub fn run(global: &Global, args: &PlanArgs) -> Result<u8, Failure> {
    if let Some(flag) = args.no_places.given() {
        return Err(Failure::config(format!("a plan is made without {flag}: it looks at no ledger")));
    }
    let pool = global.load()?.ledger.pool_max;
    let plan = Plan::of(args);
    let (mean, peak) = plan.load();
    let (_, tier, said) = plan.tier();
    let processes = plan.processes();
    if global.json {
        print::json(&json!({
            "rate_per_s": args.rate, "scopes": args.scopes, "duplicates": args.duplicates,
            "retention_s": args.retention.as_secs(), "new_rows_per_s": plan.new_per_s,
            "rows_max": plan.rows_max.round(), "rows_mean": plan.rows_mean.round(),
            "bytes_per_row": (plan.row_bytes * 10.0).round() / 10.0,
            "bytes_max": plan.bytes_max().round(), "wal_bytes_per_s": plan.wal_bytes_per_s().map(f64::round),
            "weeks": plan.weeks, "processes": processes, "topic_partitions_min": processes,
            "connections_max": processes * u64::from(pool),
            "measured": {"what": plan.measured.what, "per_s": plan.measured.per_s, "source": plan.measured.machine},
            "load_mean": mean, "load_peak": peak, "peak": args.peak,
            "tier": {"rate": tier, "load": said},
        }))?;
        return Ok(0);
    }
    let day = plan.new_per_s * DAY_S;
    let rows = [
        (
            "deliveries",
            format!(
                "{}/s in {}, {}/s at the busiest",
                grouped(plan.deliveries_per_s()),
                if args.scopes == 1 { "one scope".to_owned() } else { format!("{} scopes", args.scopes) },
                grouped(plan.deliveries_per_s() * args.peak)
            ),
        ),
        (
            "new rows",
            format!("{}/s, {} a day", grouped(plan.new_per_s.round() as u64), grouped(day.round() as u64)),
        ),
        (
            "rows kept",
            format!(
                "{} on average, {} at most",
                grouped(plan.rows_mean.round() as u64),
                grouped(plan.rows_max.round() as u64)
            ),
        ),
        ("bytes a row", format!("{:.0}, with its index", plan.row_bytes)),
        ("ledger on disk", format!("{} at most", bytes(plan.bytes_max()))),
        (
            "WAL",
            plan.wal_bytes_per_s().map_or_else(
                || "not measured".to_owned(),
                |wal| format!("{}/s, {} a day", bytes(wal), bytes(wal * DAY_S)),
            ),
        ),
        ("ledger partitions", format!("{} (weeks, and the one for ids without a time)", plan.weeks)),
        ("processes", format!("{processes} at least, and as many partitions of the topic")),
        ("connections", format!("{} at most", grouped(processes * u64::from(pool)))),
        ("load", format!("{} of the measured rate on average, {} at the busiest", share(mean), share(peak))),
        (
            "measured",
            format!("{}: {}/s by one process", plan.measured.what, grouped(plan.measured.per_s as u64)),
        ),
        ("from", plan.measured.machine.to_owned()),
        ("tier", format!("{tier}: {said}")),
    ];
    print::table(["what", "plan"], &rows.map(|(name, value)| [name.to_owned(), value]))?;
    let mut text = String::new();
    for note in plan.notes(pool) {
        let _ = write!(text, "\n{note}"); // writing to a String cannot fail
    }
    print::line(&text)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: PlanArgs,
    }

    fn args(line: &str) -> PlanArgs {
        Line::try_parse_from(std::iter::once("plan").chain(line.split(' '))).unwrap().args
    }

    #[test]
    fn rows_are_those_of_the_retention_and_a_week() {
        let args = args("--rate 5000 --retention 7d --duplicates 3%");
        let plan = Plan::of(&args);
        assert!((plan.new_per_s - 4850.0).abs() < 1e-6);
        assert!((plan.rows_max - 4850.0 * 14.0 * DAY_S).abs() < 1.0, "{}", plan.rows_max);
        assert_eq!((plan.weeks, plan.processes(), plan.tier().1), (4, 2, "1,000 to 10,000/s"));
        assert!((plan.load().0 - 5000.0 / CONSUMER.per_s).abs() < 1e-9);
    }

    #[test]
    fn t532_every_figure_is_that_of_the_benchmarks() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks.md");
        let page = std::fs::read_to_string(page).unwrap();
        for measured in [&CONSUMER, &ORDERED, &LEASED_CONSUMER, &LEASED, &CLAIMED] {
            let row = format!("\n| {}: {}/s |", measured.what, grouped(measured.per_s as u64));
            let (before, _) =
                page.split_once(&row).unwrap_or_else(|| panic!("docs/benchmarks.md has no {row:?}"));
            // The machine is that of its section.
            let section = before.rsplit("\n## ").next().unwrap().replace('*', "").replace('\n', " ");
            let words = measured.machine.rsplit(", ").next().unwrap();
            assert!(section.contains(words), "{}: {words:?} is not in {section:?}", measured.what);
        }
        let wal = [&CLAIMED, &LEASED].map(|measured| measured.wal_bytes.unwrap().to_string()).join(" / ");
        let row = format!("\n| WAL bytes per claim / per lease + done: {wal} |");
        assert!(page.contains(&row), "docs/benchmarks.md has no {row:?}");
    }

    #[test]
    fn t532_each_mode_has_the_rate_of_who_claims() {
        for (line, measured) in [
            ("", &CONSUMER),
            (" --aggregate-bytes 20", &ORDERED),
            (" --mode leased", &LEASED_CONSUMER),
            (" --mode at-most-once", &LEASED_CONSUMER),
            (" --guard", &CLAIMED),
            (" --guard --mode leased", &LEASED),
            (" --guard --mode at-most-once", &CLAIMED),
        ] {
            let args = args(&format!("--rate 10{line}"));
            assert_eq!(Plan::of(&args).measured.what, measured.what, "{line}");
        }
    }

    #[test]
    fn ids_without_a_time_go_one_by_one() {
        let args = args("--rate 10 --retention 30d --id-bytes 40 --scopes 2");
        let plan = Plan::of(&args);
        assert!((plan.rows_max - 20.0 * 30.0 * DAY_S).abs() < 1.0);
        assert!((plan.rows_max - plan.rows_mean).abs() < 1.0);
    }

    #[test]
    fn percents_are_between_nothing_and_everything() {
        for (text, value) in [("0%", 0.0), ("3%", 0.03), ("99.5%", 0.995)] {
            assert!((percent(text).unwrap() - value).abs() < 1e-9);
        }
        for text in ["", "3", "%", "x%", "100%", "-1%", "nan%", "inf%"] {
            assert!(percent(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tiers_are_those_of_the_rates() {
        for (rate, tier) in [(999, 0), (1_000, 1), (10_000, 2), (100_000, 3), (500_000, 3)] {
            let args = args(&format!("--rate {rate}"));
            assert_eq!(Plan::of(&args).tier().1, TIERS[tier].1, "{rate}");
        }
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(
            [12.0, 1_500.0, 25e6, 3.4e9, 2e12].map(bytes),
            ["12 bytes", "1.5 kB", "25 MB", "3.4 GB", "2.0 TB"]
        );
    }
}
