//! `hapax filter` against `awk '!seen[$0]++'` on the extracted ids.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use hapax::EventId;

use crate::harness::{Fallible, Goal, Line, Missing, Options, Report};

/// One in this many lines repeats an earlier one.
const REPEATS: usize = 5;

/// The `hapax` binary of the same build.
pub fn binary() -> Fallible<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("hapax");
    if path.exists() {
        return Ok(path);
    }
    Err(Missing(format!(
        "{} is not there: build it with `cargo build --release -p hapax-cli --features full`",
        path.display()
    ))
    .into())
}

/// Writes events as JSON Lines, and their ids alone.
fn generate(folder: &Path, lines: usize) -> Fallible<(PathBuf, PathBuf)> {
    let (events, ids) = (folder.join("events.jsonl"), folder.join("ids.txt"));
    let mut to_events = BufWriter::new(File::create(&events)?);
    let mut to_ids = BufWriter::new(File::create(&ids)?);
    let mut known: Vec<EventId> = Vec::new();
    for at in 0..lines {
        let id = if at % REPEATS == REPEATS - 1 {
            known[(at * 7919) % known.len()].clone()
        } else {
            EventId::now_v7()
        };
        writeln!(to_ids, "{id}")?;
        writeln!(
            to_events,
            r#"{{"event_id":"{id}","kind":"order.paid","order":{at},"amount":{},"currency":"EUR"}}"#,
            at % 1000
        )?;
        known.push(id);
    }
    to_events.flush()?;
    to_ids.flush()?;
    Ok((events, ids))
}

/// Lines per second; the output goes to a file, as in real use.
fn time(mut command: Command, input: &Path, lines: usize, expected: usize) -> Fallible<f64> {
    let output = input.with_extension("out");
    let start = Instant::now();
    let status =
        command.stdin(File::open(input)?).stdout(File::create(&output)?).stderr(Stdio::null()).status()?;
    let took = start.elapsed().as_secs_f64();
    if !status.success() {
        return Err(format!("{command:?} ended with {status}").into());
    }
    let written = std::fs::read(&output)?.split(|byte| *byte == b'\n').count() - 1; // counts line ends
    if written != expected {
        return Err(format!("{command:?} wrote {written} lines instead of {expected}").into());
    }
    Ok(lines as f64 / took)
}

/// Runs the bench.
pub fn run(options: &Options) -> Fallible<Report> {
    let hapax = binary()?;
    let folder = tempfile::tempdir_in(".")?;
    let lines = options.events(1_000_000);
    let (events, ids) = generate(folder.path(), lines)?;
    let expected = lines - lines / REPEATS;
    let mut samples = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..=options.rounds {
        let state = folder.path().join(format!("state-{round}.db"));
        let mut plain = Command::new(&hapax);
        plain.args(["filter", "--id", "/event_id"]);
        let mut stateful = Command::new(&hapax);
        stateful.args(["filter", "--id", "/event_id", "--state"]).arg(&state);
        let mut awk = Command::new("awk");
        awk.arg("!seen[$0]++");
        for (at, (command, input)) in
            [(plain, &events), (stateful, &events), (awk, &ids)].into_iter().enumerate()
        {
            let reached = time(command, input, lines, expected)?;
            if round > 0 {
                samples[at].push(reached);
            }
        }
        std::fs::remove_file(&state).ok();
    }
    let [plain, stateful, awk] = samples;
    let figures = vec![
        Line::new("hapax filter", plain),
        Line::new("hapax filter --state", stateful),
        Line::new("awk '!seen[$0]++' on the ids alone", awk),
    ];
    let over = |at: usize| figures[at].median() / figures[2].median();
    Ok(Report {
        title: "filter".into(),
        unit: "lines/s",
        goals: vec![
            Goal::at_least("no state / awk", over(0), 1.0),
            Goal::at_least("with state / awk", over(1), 0.3),
        ],
        lines: figures,
        notes: vec![format!(
            "{lines} lines, one in {REPEATS} a repeat; awk has no JSON to read and keeps nothing"
        )],
    })
}
