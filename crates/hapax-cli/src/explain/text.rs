//! The report for a terminal.

use super::life::{Life, Row, Step, pause, stamp};
use crate::failure::Failure;
use crate::print;

pub fn show(life: &Life) -> Result<(), Failure> {
    let (kind, name) = life.of.parts();
    print::line(&format!("{kind} {}", print::escaped(name)))?;
    if let Some(tenant) = &life.tenant {
        print::line(&format!("tenant {}", print::escaped(tenant)))?;
    }
    print::line("")?;
    if life.is_of_one() {
        let rows: Vec<_> = life.rows().iter().map(|row| cells(life, row).1).collect();
        print::table(["at", "where", "what"], &rows)?;
    } else {
        let rows: Vec<_> = life.rows().iter().map(|row| cells(life, row)).collect();
        let rows: Vec<_> = rows.into_iter().map(|(seq, [at, place, what])| [at, seq, place, what]).collect();
        print::table(["at", "seq", "where", "what"], &rows)?;
    }
    print::line("")?;
    for queue in &life.scopes {
        print::line(&format!("scope {}: {}", print::escaped(&queue.scope), queue.what))?;
    }
    for told in &life.stores {
        print::line(&format!("{}: {}", told.store, print::escaped(&told.message)))?;
    }
    print::line(&format!("asked at {}", stamp(life.asked_at)))?;
    print::line(&life.not_recorded)
}

/// A row: its seq, and its other cells.
fn cells(life: &Life, row: &Row<'_>) -> (String, [String; 3]) {
    let step = match row {
        Row::Gap(gap) => {
            return (String::new(), [String::new(), String::new(), format!("… {} …", pause(*gap))]);
        }
        Row::Step(step) => step,
    };
    let seq = step.seq.map_or_else(String::new, |seq| seq.to_string());
    let at = step.at.map_or_else(|| "-".to_owned(), stamp);
    (seq, [at, step.place(), what(life, step)])
}

fn what(life: &Life, step: &Step) -> String {
    let facts: Vec<_> = life.facts(step).into_iter().map(|(name, value)| format!("{name} {value}")).collect();
    if facts.is_empty() { step.what.clone() } else { format!("{} ({})", step.what, facts.join("; ")) }
}
