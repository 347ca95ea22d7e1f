//! `hapax filter`: passes first occurrences and drops repeats.
//!
//! A thread reads and extracts ids (`input`, `scan`). The main thread looks up which were seen
//! before (`seen`), writes the first occurrences (`output`) and only then records them: a line that
//! was not written is never recorded, so a broken pipe, a crash or a kill loses none (and may
//! repeat some).

mod input;
mod output;
mod scan;
mod seen;

use std::fs::File;
use std::io::{IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use hapax::open;
use hapax::words::counted;
use hapax::{EventId, Scope, Time};
use serde_json::json;

use crate::cli::{Global, NoPlaces};
use crate::failure::{self, Failure};
use crate::signal::Gate;
use input::{Block, What};
use output::Output;
use scan::Scan;
use seen::{All, InLedger, LastCount, LastTime, Seen};

/// The maximum number of lines recorded in one transaction (give or take a block). Each random id
/// touches its own page of the state, so a batch costs nearly the same whatever its size, until it
/// touches most of the pages.
const BATCH_LINES: usize = 65_536;
const BATCH_BYTES: usize = 16 * 1024 * 1024;
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// Let only first occurrences of events through (JSON Lines in, JSON Lines out)
///
/// Reads JSON Lines and writes those whose id was not seen before, unchanged and in order.
///
/// The id is a string or a 64-bit whole number; 17 and "17" are the same id. Ids are compared as
/// whole texts, never by a hash. Blank lines are dropped. A line is written before its id is
/// recorded: however the filter ends, a second run loses nothing and may repeat the last lines.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  hapax filter --id /event_id events.jsonl\n  \
    kcat -C -t orders | hapax filter --id /id --state seen.db > new.jsonl\n  \
    hapax filter --window 24h --time /time --show duplicates events.jsonl")]
pub struct FilterArgs {
    /// Files of JSON Lines; `-` or none for standard input
    files: Vec<PathBuf>,
    /// Where the id is: a JSON pointer, or `sha256` for the hash of the line. Repeat to try several
    /// in order [default: /eventId, then /event_id]
    #[arg(long, value_name = "POINTER")]
    id: Vec<String>,
    /// Remember ids in this SQLite file for the next run. Two filters may share it at the same
    /// time: if both read the same line at the same moment, both may write it, never neither.
    /// `hapax ledger --ledger sqlite:FILE` inspects the file, and its `sweep` trims it
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// The scope within the state: scopes do not see each other's ids
    #[arg(long, value_name = "NAME", default_value = "filter")]
    scope: Scope,
    /// Look back only this far, in bounded memory. A number N: the last N distinct ids (a repeat
    /// does not refresh one). A time such as 90s, 15m, 24h or 7d, with --time: ids whose first
    /// occurrence is at most that much older than the newest event so far; an event that is itself
    /// older passes, and is counted as late. Not with --state
    #[arg(long, value_name = "N|TIME", conflicts_with = "state", value_parser = window)]
    window: Option<Window>,
    /// Where the event's time is, for --window: RFC 3339 text, or milliseconds since 1970
    #[arg(long, value_name = "POINTER", requires = "window")]
    time: Option<String>,
    /// What to write; `duplicates` records nothing
    #[arg(long, value_enum, default_value_t = Show::First)]
    show: Show,
    /// What to do with a line that is not JSON, is too long or has no usable id
    #[arg(long, value_enum, default_value_t = Broken::Stop)]
    broken: Broken,
    /// Append broken lines unchanged to this file, and continue
    #[arg(long, value_name = "FILE", conflicts_with = "broken")]
    broken_to: Option<PathBuf>,
    /// The longest line in bytes; a longer one is broken
    #[arg(long, value_name = "BYTES", default_value_t = 16 * 1024 * 1024)]
    line_bytes_max: usize,
    #[command(flatten)]
    no_places: NoPlaces,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Show {
    /// First occurrences
    First,
    /// Repeats
    Duplicates,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Broken {
    /// Report it and exit with code 4; earlier lines are written
    Stop,
    /// Report it and continue
    Skip,
}

#[derive(Debug, Clone, Copy)]
enum Window {
    Count(usize),
    Time(Duration),
}

fn window(text: &str) -> Result<Window, String> {
    if let Ok(count) = text.parse::<usize>() {
        return if count > 0 { Ok(Window::Count(count)) } else { Err("it must be at least 1".into()) };
    }
    crate::cli::duration(text).map(Window::Time)
}

/// The counts reported at the end.
#[derive(Debug, Default)]
struct Counts {
    read: u64,
    written: u64,
    first: u64,
    duplicates: u64,
    broken: u64,
    blank: u64,
    late: u64,
    recorded: u64,
    raced: u64,
    refused: u64,
    refused_reason: String,
}

struct Filter<'a> {
    args: &'a FilterArgs,
    seen: Box<dyn Seen + 'a>,
    output: Output,
    broken_to: Option<File>,
    counts: Counts,
    progress: Option<Instant>,
}

/// How a batch ended.
enum Ended {
    GoOn,
    ReaderLeft,
    Stopped(Failure),
}

pub fn run(
    global: &Global,
    args: &FilterArgs,
    runtime: &tokio::runtime::Runtime,
    gate: &Gate,
) -> Result<u8, Failure> {
    if matches!(args.window, Some(Window::Time(_))) != args.time.is_some() {
        return Err(Failure::config("a --window of time needs --time, and only such a window does"));
    }
    if let Some(flag) = args.no_places.given() {
        return Err(Failure::config(format!(
            "a filter does not use {flag}; --state FILE names the SQLite file in which it remembers"
        )));
    }
    let config = global.load()?;
    let scan = Scan::new(&args.id, args.time.as_deref())?;
    let mut files = args.files.clone();
    if files.is_empty() {
        files.push("-".into());
    }
    let seen: Box<dyn Seen + '_> = match (&args.state, args.window) {
        (Some(path), _) => {
            let mut settings = config.open_settings();
            settings.ledger.identity = hapax::ledger::IdentityRule::Id;
            settings.migrate = hapax::config::Migrate::Auto;
            must_be_a_database(path)?;
            let ledger =
                runtime.block_on(open::ledger_with(&format!("sqlite:{}", path.display()), &settings))?;
            Box::new(InLedger::new(runtime, ledger, args.scope.clone(), args.show == Show::Duplicates)?)
        }
        (None, Some(Window::Count(max))) => Box::new(LastCount::new(max)),
        (None, Some(Window::Time(window))) => Box::new(LastTime::new(window)),
        (None, None) => Box::new(All::default()),
    };
    let mut filter = Filter {
        args,
        seen,
        output: Output::new(gate)?,
        broken_to: args.broken_to.as_ref().map(open_broken).transpose()?,
        counts: Counts::default(),
        progress: std::io::stderr().is_terminal().then(Instant::now),
    };
    let ended = filter.run(&input::start(files, scan, args.line_bytes_max)?);
    filter.counts.late = filter.seen.late();
    // There is nothing to report about an input that could not be opened.
    if ended.is_ok() || filter.counts.read > 0 || filter.counts.blank > 0 {
        filter.report(global.json);
    }
    ended?;
    Ok(if filter.counts.refused > 0 { failure::BROKEN_PROMISE } else { 0 })
}

/// A file that is not a database is a mistake in the name, not a damaged state.
fn must_be_a_database(path: &Path) -> Result<(), Failure> {
    const MAGIC: &[u8] = b"SQLite format 3\0";
    if !path.is_file() {
        return Ok(()); // the ledger creates it or reports the problem
    }
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAGIC.len() as u64).read_to_end(&mut head));
    // The ledger also reports a file that cannot be read, and initialises an empty one.
    if read.is_err() || head.is_empty() || head == MAGIC {
        return Ok(());
    }
    Err(Failure::config(format!("--state {} is not an SQLite database; it was not touched", path.display())))
}

fn open_broken(path: &PathBuf) -> Result<File, Failure> {
    File::options()
        .append(true)
        .create(true)
        .open(path)
        .map_err(|e| Failure::config(format!("--broken-to {} cannot be opened: {e}", path.display())))
}

impl Filter<'_> {
    fn run(&mut self, blocks: &Receiver<Result<Block, Failure>>) -> Result<(), Failure> {
        // Reading continues while a batch is processed, so batches grow with the load.
        while let Ok(block) = blocks.recv() {
            let mut batch = vec![block?];
            let mut after = Ok(());
            let (mut lines, mut bytes) = (batch[0].lines.len(), batch[0].len());
            let mut more = true;
            while lines < BATCH_LINES && bytes < BATCH_BYTES {
                match blocks.try_recv() {
                    Ok(Ok(block)) => {
                        lines += block.lines.len();
                        bytes += block.len();
                        batch.push(block);
                    }
                    Ok(Err(failure)) => {
                        after = Err(failure);
                        break;
                    }
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                        more = false;
                        break;
                    }
                }
            }
            match self.batch(&batch, !more)? {
                Ended::GoOn => {}
                Ended::ReaderLeft => return Ok(()),
                Ended::Stopped(failure) => return Err(failure),
            }
            after?;
            self.show_progress();
        }
        match self.output.flush() {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::output(&e)),
            _ => Ok(()),
        }
    }

    /// Admits, writes and records, in this order.
    fn batch(&mut self, blocks: &[Block], flush: bool) -> Result<Ended, Failure> {
        let (lines, events, stop) = self.events(blocks)?;
        let firsts = self.seen.admit(&events)?;
        let wanted = self.args.show == Show::First;
        let first = firsts.iter().filter(|first| **first).count() as u64;
        self.counts.first += first;
        self.counts.duplicates += firsts.len() as u64 - first;
        let mut written = || {
            for (line, first) in lines.iter().zip(&firsts) {
                if *first == wanted {
                    self.output.line(line)?;
                    self.counts.written += 1;
                }
            }
            match () {
                () if self.args.state.is_some() => self.output.settle(),
                () if flush || stop.is_some() => self.output.flush(),
                () => Ok(()),
            }
        };
        match written() {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(Ended::ReaderLeft),
            Err(e) => return Err(Failure::output(&e)),
        }
        let recorded = self.seen.record()?;
        self.counts.recorded += recorded.ids;
        self.counts.raced += recorded.raced;
        if let Some((count, reason)) = recorded.refused {
            self.counts.refused += count;
            self.counts.refused_reason = reason;
        }
        Ok(stop.map_or(Ended::GoOn, Ended::Stopped))
    }

    /// The events of a batch, up to a broken line that ends the run.
    #[expect(clippy::type_complexity, reason = "three lists for one caller")]
    fn events<'b>(
        &mut self,
        blocks: &'b [Block],
    ) -> Result<(Vec<&'b [u8]>, Vec<(&'b EventId, Option<Time>)>, Option<Failure>), Failure> {
        let count = blocks.iter().map(|block| block.lines.len()).sum();
        let (mut lines, mut events) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for block in blocks {
            for line in &block.lines {
                let problem = match &line.what {
                    What::Event(id, time) => match self.seen.check(id) {
                        Ok(()) => {
                            self.counts.read += 1;
                            lines.push(block.bytes(line));
                            events.push((id, *time));
                            continue;
                        }
                        Err(error) => error.to_string(),
                    },
                    What::Broken(problem) => problem.clone(),
                    What::Rest => {
                        self.keep_broken(block.bytes(line), line.ends)?;
                        continue;
                    }
                    What::Blank => {
                        self.counts.blank += 1;
                        continue;
                    }
                };
                self.counts.read += 1;
                self.counts.broken += 1;
                let message = format!("{} line {}: {problem}", block.name, line.number);
                if self.args.broken_to.is_none() && self.args.broken == Broken::Stop {
                    return Ok((lines, events, Some(Failure::input(message))));
                }
                eprintln!("hapax: {message}");
                self.keep_broken(block.bytes(line), line.ends)?;
            }
        }
        Ok((lines, events, None))
    }

    /// Appends to `--broken-to`; joins the pieces of an overlong line.
    fn keep_broken(&mut self, bytes: &[u8], ends: bool) -> Result<(), Failure> {
        let Some(file) = &mut self.broken_to else { return Ok(()) };
        file.write_all(bytes)
            .and_then(|()| file.write_all(if ends { b"\n" } else { b"" }))
            .map_err(|e| Failure::dependency("output", format!("--broken-to cannot be written: {e}")))
    }

    fn show_progress(&mut self) {
        if self.progress.is_some_and(|shown| shown.elapsed() >= PROGRESS_EVERY) {
            self.progress = Some(Instant::now());
            let duplicates = counted(self.counts.duplicates, "duplicate", "duplicates");
            eprint!("\r{}, {duplicates} ", counted(self.counts.read, "line", "lines"));
        }
    }

    fn report(&self, json: bool) {
        let c = &self.counts;
        if self.progress.is_some() {
            eprint!("\r\x1b[K");
        }
        if c.refused > 0 {
            eprintln!(
                "hapax: {} could not be recorded and will be written again: {}",
                counted(c.refused, "written line", "written lines"),
                c.refused_reason
            );
        }
        if json {
            let counts = json!({
                "read": c.read, "first": c.first, "duplicates": c.duplicates, "written": c.written,
                "broken": c.broken, "blank": c.blank, "late": c.late, "recorded": c.recorded,
                "raced": c.raced, "unrecorded": c.refused,
            });
            eprintln!("{counts}");
            return;
        }
        let (lines, duplicates) =
            (counted(c.read, "line", "lines"), counted(c.duplicates, "duplicate", "duplicates"));
        let mut text = format!("{lines}: {} first, {duplicates}", c.first);
        for (count, what) in [
            (c.broken, "broken"),
            (c.late, "late (older than the window)"),
            (c.raced, "also written by another filter"),
        ] {
            if count > 0 {
                text.extend([", ", &count.to_string(), " ", what]);
            }
        }
        eprintln!("{text}");
    }
}
