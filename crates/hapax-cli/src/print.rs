//! Printing results: tables for people, JSON for tools, and no complaint when the reader has left.

use std::io::{IsTerminal as _, Write as _};

use serde_json::Value;

use crate::failure::Failure;

/// Prints text and a newline to standard output.
pub fn line(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.write_all(b"\n"))
        .and_then(|()| out.flush())
        .map_err(|e| Failure::output(&e))
}

/// Prints one JSON value on one line.
pub fn json(value: &Value) -> Result<(), Failure> {
    line(&value.to_string())
}

/// A longer cell does not widen its column: only its own row moves aside.
const CELL_MAX: usize = 44;
/// The same where there is little room.
const CELL_MAX_NARROW: usize = 28;
/// How far what goes on in the next line is moved in.
const INDENT: usize = 4;

/// Prints rows under their heads, in columns. A row stays one line, unless it does not fit the terminal.
pub fn table<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> Result<(), Failure> {
    line(&table_text(heads, rows, width()))
}

/// How many columns the terminal has, or `COLUMNS` says; none: nobody looks at it, and a row is a line.
fn width() -> Option<usize> {
    let said =
        std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
    said.or_else(|| {
        let (width, _) = terminal_size::terminal_size_of(std::io::stdout())?;
        Some(usize::from(width.0))
    })
}

fn table_text<const N: usize>(heads: [&str; N], rows: &[[String; N]], width: Option<usize>) -> String {
    let cell_max = if width.is_some_and(|width| width < 80) { CELL_MAX_NARROW } else { CELL_MAX };
    let cells = |row: &[String; N]| row.each_ref().map(|cell| escaped(cell));
    let rows: Vec<_> = std::iter::once(heads.map(str::to_owned)).chain(rows.iter().map(cells)).collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            let length = cell.chars().count();
            *width = if length <= cell_max { length.max(*width) } else { *width };
        }
    }
    let lines: Vec<_> = rows.iter().map(|row| row_text(row, &widths, width.unwrap_or(usize::MAX))).collect();
    lines.join("\n")
}

/// A row in its columns; closer together, if it does not fit otherwise; in several lines, if it does not fit at all.
fn row_text(row: &[String], widths: &[usize], width: usize) -> String {
    let length = |cell: &String| cell.chars().count();
    let closest = row.iter().map(length).sum::<usize>() + 2 * (row.len() - 1);
    if closest > width {
        return several_lines(row, width);
    }
    let mut slack = width - closest;
    let mut text = String::new();
    for (cell, width) in row.iter().zip(widths) {
        let pad = width.saturating_sub(length(cell)).min(slack);
        slack -= pad;
        text.push_str(cell);
        text.extend(std::iter::repeat_n(' ', pad + 2));
    }
    text.trim_end().to_owned()
}

fn several_lines(row: &[String], width: usize) -> String {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for cell in row {
        for (at, word) in cell.split(' ').filter(|word| !word.is_empty()).enumerate() {
            let space = match (used, at) {
                (0, _) => 0,
                (_, 0) => 2,
                _ => 1,
            };
            let length = word.chars().count();
            if used > 0 && used + space + length > width {
                lines.push(" ".repeat(INDENT));
                used = INDENT;
            } else {
                lines
                    .iter_mut()
                    .last()
                    .into_iter()
                    .for_each(|line| line.extend(std::iter::repeat_n(' ', space)));
                used += space;
            }
            lines.iter_mut().last().into_iter().for_each(|line| line.push_str(word));
            used += length;
        }
    }
    lines.join("\n")
}

/// Text from outside, safe for a terminal.
pub fn escaped(text: &str) -> String {
    hapax::id::Visible(text).to_string()
}

/// Refuses to go on where nobody can be asked. `why` says what there is to ask about.
pub fn can_ask(why: &str) -> Result<(), Failure> {
    if std::io::stdin().is_terminal() {
        return Ok(());
    }
    Err(Failure::config(format!("{why}: give --yes (there is no terminal to ask on)")))
}

/// Asks a person. Anything but a clear yes is no.
pub fn asked(question: &str) -> Result<bool, Failure> {
    eprint!("{question} [y/N] ");
    let _ = std::io::stderr().flush(); // a question that cannot be seen will be answered by nothing
    let mut answer = String::new();
    std::io::stdin()
        .read_line(&mut answer)
        .map_err(|e| Failure::dependency("input", format!("the answer cannot be read: {e}")))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use super::*;

    fn rows(cells: &[[&str; 3]]) -> Vec<[String; 3]> {
        cells.iter().map(|row| row.map(str::to_owned)).collect()
    }

    #[test]
    fn e_one_long_name_widens_no_other_row() {
        let long = "x".repeat(100);
        let rows = rows(&[["a", "1", "x"], [&long, "2", "y"], ["abc", "3", "z"]]);
        let text = table_text(["name", "n", "w"], &rows, None);
        assert_eq!(text, format!("name  n  w\na     1  x\n{long}  2  y\nabc   3  z"));
    }

    #[test]
    fn e_what_does_not_fit_goes_on_in_the_next_line() {
        let rows =
            rows(&[["ledger.url", "sqlite:ledger.db", "default"], ["a", "b", "one two three four five six"]]);
        let text = table_text(["setting", "value", "from"], &rows, Some(30));
        assert_eq!(
            text,
            "setting     value       from\nledger.url  sqlite:ledger.db\n    default\na  b  one two three four five\n    six"
        );
        assert!(text.lines().all(|line| line.len() <= 30), "{text}");
    }

    #[test]
    fn what_cannot_be_seen_is_escaped() {
        let text = table_text(["a", "b", "c"], &rows(&[["x\u{1b}[2J", "DOM\\user", "\n"]]), None);
        assert!(text.ends_with("x\\u{1b}[2J  DOM\\user  \\n"), "{text}");
    }
}
