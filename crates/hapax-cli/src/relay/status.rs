//! `hapax relay status`: how far each relay has got, who leads, and which aggregates are stuck.

use std::time::Duration;

use hapax::journal::{Position, RelayState};
use hapax::{Journal, Time};
use serde_json::{Value, json};

use super::{COUNT_MAX, behind_json, leader, named};
use crate::cli::Global;
use crate::failure::Failure;
use crate::print;

/// How long a hole must last to be reported: under a heavy write load there is always one.
const HOLE: Duration = Duration::from_millis(500);

/// The status of a relay.
struct Row {
    state: RelayState,
    left: u64,
    at_hole: bool,
}

impl Row {
    fn position(&self) -> Position {
        self.state.checkpoint.as_ref().map(|checkpoint| checkpoint.position.clone()).unwrap_or_default()
    }
}

pub async fn status(global: &Global, journal: &dyn Journal) -> Result<u8, Failure> {
    let (relays, now) = (journal.relays().await?, journal.now().await?);
    let mut rows = Vec::new();
    for state in relays {
        let mut row = Row { state, left: 0, at_hole: false };
        row.left = journal.count_after(&row.position(), COUNT_MAX).await?;
        row.at_hole = row.left > 0 && is_at_hole(journal, &row.position()).await?;
        rows.push(row);
    }
    if global.json {
        let relays: Vec<_> = rows.iter().map(|row| row_json(row, now)).collect();
        print::json(&json!({"journal": journal.id(), "relays": relays}))?;
        return Ok(0);
    }
    if rows.is_empty() {
        print::line("no relay has followed this journal yet")?;
        return Ok(0);
    }
    let cells: Vec<_> = rows.iter().map(|row| cells(row, now)).collect();
    print::table(["relay", "led by", "position", "saved at", "left", "behind", "parked"], &cells)?;
    for row in &rows {
        let relay = &row.state.relay;
        if row.at_hole {
            let position = row.position();
            print::line(&format!(
                "{relay}: waits at position {position} for a writer whose transaction is open"
            ))?;
        }
        for behind in row.state.checkpoint.iter().flat_map(|checkpoint| &checkpoint.behind) {
            let what = if behind.poison { "parked" } else { "behind" };
            let aggregate = named(behind);
            let reason = print::escaped(&behind.reason);
            print::line(&format!("{relay}: {aggregate} is {what} at seq {}: {reason}", behind.next))?;
        }
    }
    Ok(0)
}

/// Whether reading after a position stays blocked by an open writer for as long as we look.
async fn is_at_hole(journal: &dyn Journal, position: &Position) -> Result<bool, Failure> {
    let is = async || journal.read(position, 1).await.map(|read| read.at_hole && read.events.is_empty());
    if !is().await? {
        return Ok(false);
    }
    journal.wait(position, HOLE).await?;
    Ok(is().await?)
}

fn cells(row: &Row, now: Time) -> [String; 7] {
    let checkpoint = row.state.checkpoint.as_ref();
    let count = |poison: bool| {
        let behind = checkpoint.map(|checkpoint| &checkpoint.behind[..]).unwrap_or_default();
        behind.iter().filter(|behind| behind.poison == poison).count()
    };
    [
        row.state.relay.to_string(),
        leader(&row.state, now).unwrap_or_else(|| "nobody".to_owned()),
        checkpoint.map_or_else(|| "-".to_owned(), |checkpoint| checkpoint.position.to_string()),
        row.state.saved_at.map_or_else(|| "-".to_owned(), |at| at.to_string()),
        row.left.to_string(),
        count(false).to_string(),
        count(true).to_string(),
    ]
}

fn row_json(row: &Row, now: Time) -> Value {
    let (state, checkpoint) = (&row.state, row.state.checkpoint.as_ref());
    let behind: Vec<_> =
        checkpoint.iter().flat_map(|checkpoint| &checkpoint.behind).map(behind_json).collect();
    json!({
        "relay": state.relay.as_str(), "led_by": leader(state, now), "token": state.token.0,
        "position": checkpoint.map(|checkpoint| checkpoint.position.to_string()),
        "saved_at": state.saved_at.map(|at| at.to_string()), "left": row.left, "at_hole": row.at_hole,
        "behind": behind,
    })
}
