//! Rounds, medians and tables, shared by all benches.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io::{Seek, SeekFrom, Write};
use std::pin::Pin;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The result of a bench.
pub type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// A boxed measurement.
pub type Measuring<'a> = Pin<Box<dyn Future<Output = Fallible<f64>> + 'a>>;

/// A dependency of the bench is missing: exit code 3.
#[derive(Debug)]
pub struct Missing(pub String);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Missing {}

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Rounds per contestant.
    pub rounds: usize,
    /// Do a tenth of the work.
    pub quick: bool,
    /// Rows in the tables.
    pub rows: Option<u64>,
    /// Events per transaction.
    pub batch: usize,
    /// Concurrent transactions.
    pub concurrency: usize,
}

impl Options {
    /// This many events, or a tenth in a quick run.
    pub fn events(&self, full: usize) -> usize {
        if self.quick { full.div_ceil(10) } else { full }
    }

    /// Rows in the tables: as requested, or else this many, or a hundredth in a quick run.
    pub fn held(&self, full: u64) -> u64 {
        self.rows.unwrap_or(if self.quick { full / 100 } else { full })
    }
}

/// A contestant in a bench.
pub struct Contestant<'a> {
    name: String,
    run: Box<dyn FnMut() -> Measuring<'a> + 'a>,
}

impl<'a> Contestant<'a> {
    /// A contestant with its name and the work of one round.
    pub fn new<F>(name: impl Into<String>, mut run: impl FnMut() -> F + 'a) -> Self
    where
        F: Future<Output = Fallible<f64>> + 'a,
    {
        Contestant { name: name.into(), run: Box::new(move || Box::pin(run())) }
    }
}

/// Runs each contestant once unmeasured, then all of them for `rounds` rounds, each round beginning
/// with another one.
pub async fn interleave(rounds: usize, mut all: Vec<Contestant<'_>>) -> Fallible<Vec<Line>> {
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); all.len()];
    for one in &mut all {
        (one.run)().await?;
    }
    for round in 0..rounds {
        for step in 0..all.len() {
            let at = (round + step) % all.len();
            samples[at].push((all[at].run)().await?);
        }
    }
    Ok(all.into_iter().zip(samples).map(|(one, samples)| Line::new(one.name, samples)).collect())
}

/// Measures events per second.
pub async fn rate<T>(events: usize, work: impl Future<Output = Fallible<T>>) -> Fallible<f64> {
    let start = Instant::now();
    work.await?;
    Ok(events as f64 / start.elapsed().as_secs_f64())
}

/// Items per second, spread over tasks that each process one after the other.
pub async fn by_tasks<T, F, R>(tasks: usize, items: Vec<T>, work: F) -> Fallible<f64>
where
    T: Clone + Send + Sync + 'static,
    F: Fn(T) -> R + Clone + Send + 'static,
    R: Future<Output = hapax::Result<()>> + Send,
{
    let items = std::sync::Arc::new(items);
    rate(items.len(), async {
        let mut running = tokio::task::JoinSet::new();
        for task in 0..tasks {
            let (items, work) = (std::sync::Arc::clone(&items), work.clone());
            running.spawn(async move {
                for item in items.iter().skip(task).step_by(tasks) {
                    work(item.clone()).await?;
                }
                Ok::<_, hapax::Error>(())
            });
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
        Ok(())
    })
    .await
}

/// Fails the bench if a new id was already known.
pub fn is_new(new: bool) -> hapax::Result<()> {
    if new { Ok(()) } else { Err(hapax::Error::Corrupt("a new id was known".into())) }
}

/// The value at a share of the sorted samples; 0.5 is the median.
pub fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (share * (sorted.len().saturating_sub(1)) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// The result of one contestant.
#[derive(Debug, Clone)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// The figure of each round.
    pub samples: Vec<f64>,
}

impl Line {
    /// A contestant's figures.
    pub fn new(name: impl Into<String>, samples: Vec<f64>) -> Self {
        Line { name: name.into(), samples }
    }

    /// The figure to compare.
    pub fn median(&self) -> f64 {
        quantile(&self.samples, 0.5)
    }
}

/// A target for a ratio.
#[derive(Debug, Clone)]
pub struct Goal {
    /// The two sides of the ratio.
    pub what: String,
    /// The measured ratio.
    pub reached: f64,
    /// The target.
    pub bound: f64,
    /// Whether the ratio should be at least the target, rather than at most.
    pub at_least: bool,
}

impl Goal {
    /// The ratio should be at least `bound`.
    pub fn at_least(what: impl Into<String>, reached: f64, bound: f64) -> Self {
        Goal { what: what.into(), reached, bound, at_least: true }
    }

    /// The ratio should be at most `bound`.
    pub fn at_most(what: impl Into<String>, reached: f64, bound: f64) -> Self {
        Goal { what: what.into(), reached, bound, at_least: false }
    }

    fn is_met(&self) -> bool {
        if self.at_least { self.reached >= self.bound } else { self.reached <= self.bound }
    }
}

/// The results of a bench.
#[derive(Debug)]
pub struct Report {
    /// Its title.
    pub title: String,
    /// The unit of its figures.
    pub unit: &'static str,
    /// The contestants' results.
    pub lines: Vec<Line>,
    /// The ratios and their targets.
    pub goals: Vec<Goal>,
    /// Remarks.
    pub notes: Vec<String>,
}

impl Report {
    /// As JSON, for programs.
    pub fn json(&self) -> Value {
        let lines: Vec<_> = self
            .lines
            .iter()
            .map(|line| json!({ "name": line.name, "median": line.median(), "rounds": line.samples }))
            .collect();
        let goals: Vec<_> = self
            .goals
            .iter()
            .map(|goal| {
                json!({ "what": goal.what, "reached": goal.reached, "goal": goal.bound,
                        "at_least": goal.at_least, "met": goal.is_met() })
            })
            .collect();
        json!({ "bench": self.title, "unit": self.unit, "lines": lines, "goals": goals, "notes": self.notes })
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({})", self.title, self.unit)?;
        for line in &self.lines {
            let (low, high) = (quantile(&line.samples, 0.0), quantile(&line.samples, 1.0));
            let spread = format!("{} … {}", number(low), number(high));
            writeln!(f, "  {:<62} {:>10}   {spread}", line.name, number(line.median()))?;
        }
        for goal in &self.goals {
            let sign = if goal.at_least { '≥' } else { '≤' };
            let met = if goal.is_met() { "met" } else { "MISSED" };
            writeln!(f, "  {:<62} {:>9.2}×   goal {sign} {}×  {met}", goal.what, goal.reached, goal.bound)?;
        }
        for note in &self.notes {
            writeln!(f, "  {note}")?;
        }
        Ok(())
    }
}

/// The machine that the figures come from.
#[derive(Debug)]
pub struct Machine {
    cores: usize,
    fsyncs: f64,
    postgres: Option<String>,
}

impl Machine {
    /// Inspects the machine, and measures how many pages it can flush to disk per second.
    pub fn look(runtime: &tokio::runtime::Runtime) -> Fallible<Self> {
        Ok(Machine {
            cores: std::thread::available_parallelism()?.get(),
            fsyncs: fsync_rate()?,
            postgres: runtime.block_on(crate::pg::version()),
        })
    }

    /// As JSON, for programs.
    pub fn json(&self) -> Value {
        json!({ "cores": self.cores, "fsyncs_per_second": self.fsyncs, "postgres": self.postgres })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let postgres = self.postgres.as_deref().unwrap_or("not there");
        write!(f, "{} cores, {:.0} fsyncs/s, PostgreSQL {postgres}", self.cores, self.fsyncs)
    }
}

/// Overwrites and flushes a page of 8 KiB for one second.
fn fsync_rate() -> Fallible<f64> {
    let mut file: File = tempfile::tempfile_in(".")?;
    let page = [7_u8; 8192];
    file.write_all(&page)?;
    file.sync_all()?;
    let (start, mut count) = (Instant::now(), 0_u32);
    while start.elapsed() < Duration::from_secs(1) {
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&page)?;
        file.sync_data()?;
        count += 1;
    }
    Ok(f64::from(count) / start.elapsed().as_secs_f64())
}
