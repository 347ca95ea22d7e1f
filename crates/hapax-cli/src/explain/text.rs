//! The report for a terminal.

use super::explanation::{Explanation, Row, Step, pause, stamp};
use crate::failure::Failure;
use crate::print;

pub fn show(explanation: &Explanation) -> Result<(), Failure> {
    let (kind, name) = explanation.of.parts();
    print::line(&format!("{kind} {}", print::escaped(name)))?;
    if let Some(tenant) = &explanation.tenant {
        print::line(&format!("tenant {}", print::escaped(tenant)))?;
    }
    print::line("")?;
    if explanation.is_of_one() {
        let rows: Vec<_> = explanation.rows().iter().map(|row| cells(explanation, row).1).collect();
        print::table(["at", "where", "what"], &rows)?;
    } else {
        let rows: Vec<_> = explanation.rows().iter().map(|row| cells(explanation, row)).collect();
        let rows: Vec<_> = rows.into_iter().map(|(seq, [at, place, what])| [at, seq, place, what]).collect();
        print::table(["at", "seq", "where", "what"], &rows)?;
    }
    print::line("")?;
    for queue in &explanation.scopes {
        print::line(&format!("scope {}: {}", print::escaped(&queue.scope), queue.what))?;
    }
    for answer in &explanation.stores {
        print::line(&format!("{}: {}", answer.store, print::escaped(&answer.message)))?;
    }
    print::line(&format!("asked at {}", stamp(explanation.asked_at)))?;
    print::line(&explanation.not_recorded)
}

/// A row: its seq, and its other cells.
fn cells(explanation: &Explanation, row: &Row<'_>) -> (String, [String; 3]) {
    let step = match row {
        Row::Gap(gap) => {
            return (String::new(), [String::new(), String::new(), format!("… {} …", pause(*gap))]);
        }
        Row::Step(step) => step,
    };
    let seq = step.seq.map_or_else(String::new, |seq| seq.to_string());
    let at = step.at.map_or_else(|| "-".to_owned(), stamp);
    (seq, [at, step.place(), what(explanation, step)])
}

fn what(explanation: &Explanation, step: &Step) -> String {
    let facts: Vec<_> =
        explanation.facts(step).into_iter().map(|(name, value)| format!("{name} {value}")).collect();
    if facts.is_empty() { step.what.clone() } else { format!("{} ({})", step.what, facts.join("; ")) }
}
