//! The whole path of an event with one step done wrong on purpose. Each mutant is caught by a scenario that holds without
//! it, and for the reason that its row gives: a scenario that fails for another reason has caught nothing.

mod around;
mod consuming;
mod on_postgres;
mod storing;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::support::this;

/// The variable that names the step to be done wrong.
const VARIABLE: &str = "HAPAX_MUTANT";

/// A mutant that is caught in this program.
struct Caught {
    mutant: &'static str,
    /// The test of this program that fails with it.
    by: &'static str,
    /// What that test says then.
    says: &'static str,
}

const CAUGHT: [Caught; 15] = [
    Caught {
        mutant: "commit before settle",
        by: "a_process_that_dies_loses_nothing_unfinished",
        says: "lost: {\"e-0\"}",
    },
    Caught {
        mutant: "commit point past an unfinished event",
        by: "a_process_that_dies_loses_nothing_unfinished",
        says: "lost: {\"e-0\"}",
    },
    Caught { mutant: "window before done", by: "a_window_hides_nothing_unfinished", says: "lost: {\"e-0\"}" },
    Caught {
        mutant: "settle without token",
        by: "a_run_that_was_taken_over_settles_nothing",
        says: "lost: {\"e-0\"}",
    },
    Caught {
        mutant: "dead letter marked before published",
        by: "every_dead_letter_reaches_its_topic",
        says: "a dead letter that is nowhere",
    },
    Caught {
        mutant: "publish before mark",
        by: "only_what_is_dead_is_a_dead_letter",
        says: "a copy of what is not dead",
    },
    Caught {
        mutant: "claim without dropped weeks",
        by: "an_id_of_a_dropped_week_is_too_old",
        says: "TooOld",
    },
    Caught {
        mutant: "lease judged by the client's clock",
        by: "one_live_lease_whatever_a_client_s_clock_says",
        says: "First(Grant",
    },
    Caught {
        mutant: "settle by owner instead of token",
        by: "a_stale_token_settles_nothing",
        says: "Fenced",
    },
    Caught {
        mutant: "claim looks first and writes later",
        by: "concurrent_claims_have_one_winner",
        says: "round",
    },
    Caught {
        mutant: "a lost answer is asked for anew",
        by: "the_same_claim_again_is_first_again",
        says: "Busy {",
    },
    Caught {
        mutant: "checkpoint before ack",
        by: "a_relay_that_dies_leaves_nothing_unpublished",
        says: "not published: 20 of 20",
    },
    Caught {
        mutant: "answer before key",
        by: "an_answer_is_kept_before_it_is_sent",
        says: "the answer was sent, and its key is running",
    },
    Caught {
        mutant: "version by wall time",
        by: "the_later_write_counts_whatever_clocks_say",
        says: "the read model shows an outdated row",
    },
    Caught {
        mutant: "sweep looks once",
        by: "an_end_that_commits_late_outlives_its_week",
        says: "a drop of what came late",
    },
];

/// Mutants that are caught where the scenario is at home: the file has a test that runs it with this name.
const CAUGHT_ELSEWHERE: [(&str, &str); 12] = [
    ("claim before order", "tests/consumer/mutants.rs"),
    ("copy what is under way", "tests/consumer/mutants.rs"),
    ("journal_skips_holes", "tests/postgres/journal.rs"),
    ("journal_orders_by_xid", "tests/postgres/journal.rs"),
    ("sweep does not wait", "tests/postgres/sweep_race.rs"),
    ("skip a hole at once", "tests/relay/publishing.rs"),
    ("publish out of order", "tests/relay/publishing.rs"),
    ("pulse before ack", "tests/relay/pulses.rs"),
    ("pulse past a hole", "tests/relay/pulses.rs"),
    ("pulse despite what is behind", "tests/relay/pulses.rs"),
    ("state before rows", "tests/analytics/on_clickhouse.rs"),
    ("commit before settle", "tests/consumer/mutants.rs"),
];

/// Whether this process has the mutant.
fn is_mutant(name: &str) -> bool {
    std::env::var(VARIABLE).is_ok_and(|mutant| mutant == name)
}

/// Runs a scenario with its mutant as another process. The error says why the mutant is not caught.
fn catches(row: &Caught) -> Result<(), String> {
    let began = Instant::now();
    let output = this::test(row.by).env(VARIABLE, row.mutant).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    println!("{}: {}, {:.1?}", row.mutant, row.by, began.elapsed());
    if output.status.success() {
        return Err(format!("`{}` passes with the mutant `{}`", row.by, row.mutant));
    }
    if !said.contains(row.says) {
        return Err(format!(
            "`{}` fails with the mutant `{}` for another reason than {:?}:\n{said}",
            row.by, row.mutant, row.says
        ));
    }
    Ok(())
}

/// Without a mutant each scenario passes: it is a test of this program.
#[test]
fn every_mutant_is_caught_by_name() {
    let (next, missed) = (AtomicUsize::new(0), std::sync::Mutex::new(Vec::new()));
    std::thread::scope(|threads| {
        for _ in 0..3 {
            threads.spawn(|| {
                while let Some(row) = CAUGHT.get(next.fetch_add(1, Ordering::SeqCst)) {
                    if let Err(problem) = catches(row) {
                        missed.lock().unwrap().push(problem);
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "{}", missed.join("\n\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: PathBuf, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(std::fs::read_to_string(path).unwrap());
        }
    }
}

/// A step that can be done wrong and that no test names would show nothing; a name that no step has would too.
#[test]
fn every_mutant_of_the_sources_has_its_row() {
    let mut files = Vec::new();
    sources(root().join("src"), &mut files);
    let names = files.iter().flat_map(|text| text.split("mutant!(\"").skip(1));
    let points: BTreeSet<&str> = names.map(|rest| rest.split('"').next().unwrap()).collect();
    let rows = CAUGHT.iter().map(|row| row.mutant).chain(CAUGHT_ELSEWHERE.map(|(mutant, _)| mutant));
    let rows: BTreeSet<&str> = rows.collect();
    let without: Vec<_> = points.difference(&rows).collect();
    assert!(without.is_empty(), "no row in tests/proof/mutants.rs: {without:?}");
    for (mutant, file) in CAUGHT_ELSEWHERE {
        assert!(points.contains(mutant), "{mutant} is no step of the sources");
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        assert!(text.contains(&format!("\"{mutant}\"")), "{file} does not name {mutant}");
    }
    let mut files = Vec::new();
    sources(root().join("tests/proof/mutants"), &mut files);
    for row in &CAUGHT {
        let is_there = points.contains(row.mutant) || files.iter().any(|text| text.contains(row.mutant));
        assert!(is_there, "{} is no step of the sources, and no ledger of this program", row.mutant);
    }
}

/// The page that says what is proven names each mutant and what catches it.
#[test]
fn the_page_of_proofs_names_every_mutant() {
    let page = std::fs::read_to_string(root().join("docs/proof.md")).unwrap();
    for row in &CAUGHT {
        let line = format!("| `{}` | `{}` |", row.mutant, row.by);
        assert!(page.contains(&line), "docs/proof.md lacks the row {line}");
    }
    for (mutant, file) in CAUGHT_ELSEWHERE {
        let line = format!("| `{mutant}` | `{file}` |");
        assert!(page.contains(&line), "docs/proof.md lacks the row {line}");
    }
}
