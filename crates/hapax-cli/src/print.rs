//! Prints results: tables for people, JSON for tools. A reader that leaves early is not an error.

use std::io::{IsTerminal as _, Write as _};

use serde_json::Value;

use crate::cli::Global;
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
    line(&visible_json(&value.to_string()))
}

/// JSON in which everything can be seen. In JSON on one line, what cannot be stands in strings only, where an escape is
/// the same character.
pub fn visible_json(json: &str) -> String {
    use std::fmt::Write as _;
    let mut visible = String::with_capacity(json.len());
    for c in json.chars() {
        let is_plain = (' '..='~').contains(&c)
            || hapax::id::Visible(c.encode_utf8(&mut [0; 4])).to_string().starts_with(c);
        if is_plain {
            visible.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(visible, "\\u{unit:04x}"); // writing to a String cannot fail
            }
        }
    }
    visible
}

/// Prints a text of many lines, made for a file or another program; with `--json` as a field of an object.
pub fn text(global: &Global, name: &str, text: &str) -> Result<(), Failure> {
    if global.json { json(&serde_json::json!({ name: text })) } else { line(text) }
}

/// A longer cell does not widen its column; it only shifts its own row.
const CELL_MAX: usize = 44;
/// The same on a narrow terminal: the length of a UUID.
const CELL_MAX_NARROW: usize = 36;
/// The last cell of a row moves to the next line if it has less room than this.
const LAST_MIN: usize = 20;
/// The indent of continuation lines.
const INDENT: usize = 4;

/// Prints rows in columns under headings. A row stays one line if it fits the terminal.
pub fn table<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> Result<(), Failure> {
    line(&table_rows(heads, rows).join("\n"))
}

/// Prints an object: as JSON, or as a table of the fields that it has.
pub fn fields(as_json: bool, object: &serde_json::Value) -> Result<(), Failure> {
    if as_json {
        return json(object);
    }
    let there = object.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let text = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), escaped);
    let rows: Vec<[String; 2]> = there.map(|(name, value)| [name.clone(), text(value)]).collect();
    table(["field", "value"], &rows)
}

/// The heading and the rows of a table as texts, for callers that print something between them.
pub fn table_rows<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> Vec<String> {
    table_text(heads, rows, width())
}

/// The number of columns of the terminal, or of `COLUMNS`. `None` if the output is not a terminal;
/// each row is then one line.
fn width() -> Option<usize> {
    let said =
        std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).filter(|columns| *columns > 0);
    said.or_else(|| {
        let (width, _) = terminal_size::terminal_size_of(std::io::stdout())?;
        Some(usize::from(width.0))
    })
}

fn table_text<const N: usize>(heads: [&str; N], rows: &[[String; N]], width: Option<usize>) -> Vec<String> {
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
    let width = width.unwrap_or(usize::MAX);
    // Columns that do not fit beside the others in most rows go below them in all rows.
    let beside = (1..=N).rev().find(|count| span(&widths[..*count]) <= width).unwrap_or(1);
    rows.iter()
        .map(|row| {
            let mut text = row_text(&row[..beside], &widths, width);
            if beside < N {
                let below = wrapped(&row[beside..].join("  "), width.saturating_sub(INDENT), INDENT);
                text.extend(["\n", &" ".repeat(INDENT), &below]);
            }
            text
        })
        .collect()
}

/// The width of columns including the gaps.
fn span(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1)
}

/// A row in its columns. If a cell is too long for its column, the next cell goes on the line
/// below, in its own column; without a terminal, the following cells shift instead. The last cell
/// wraps.
fn row_text(row: &[String], widths: &[usize], width: usize) -> String {
    let Some((last, others)) = row.split_last() else { return String::new() };
    let (mut text, mut start) = (String::new(), 0);
    for (cell, column) in others.iter().zip(widths) {
        let length = cell.chars().count();
        if length <= *column || width == usize::MAX {
            text.push_str(cell);
            text.extend(std::iter::repeat_n(' ', column.saturating_sub(length) + 2));
            start += length.max(*column) + 2;
            continue;
        }
        put(&mut text, cell, start, width);
        start += column + 2;
        text.extend(["\n", &" ".repeat(start)]);
    }
    put(&mut text, last, start, width);
    text.trim_end().to_owned()
}

/// Adds a cell that starts at a column and wraps; starts a new line if there is too little room.
fn put(text: &mut String, cell: &str, mut start: usize, width: usize) {
    if start > 0 && width.saturating_sub(start) < cell.chars().count().min(LAST_MIN) {
        text.truncate(text.trim_end().len());
        text.extend(["\n", &" ".repeat(INDENT)]);
        start = INDENT;
    }
    text.push_str(&wrapped(cell, width.saturating_sub(start), start));
}

/// Wraps a text at spaces to lines of a width; breaks longer words. Indents all lines but the
/// first.
fn wrapped(text: &str, width: usize, indent: usize) -> String {
    let (mut out, mut used, width) = (String::new(), 0, width.max(1));
    let new_line = |out: &mut String| {
        out.truncate(out.trim_end().len());
        out.extend(["\n", &" ".repeat(indent)]);
    };
    for word in text.split(' ') {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > width {
            new_line(&mut out);
            used = 0;
        } else if used > 0 {
            out.push(' ');
            used += 1;
        }
        for c in word.chars() {
            if used == width {
                new_line(&mut out);
                used = 0;
            }
            out.push(c);
            used += 1;
        }
    }
    out
}

/// A number with commas: `10,000`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Makes text from outside safe for a terminal.
pub fn escaped(text: &str) -> String {
    hapax::id::Visible(text).to_string()
}

/// Fails if there is no terminal to ask on. `reason` says what the question is about.
pub fn can_ask(reason: &str) -> Result<(), Failure> {
    if std::io::stdin().is_terminal() {
        return Ok(());
    }
    Err(Failure::config(format!("{reason}: give --yes (there is no terminal to ask on)")))
}

/// Asks for confirmation. Anything but a clear yes is no.
pub fn asked(question: &str) -> Result<bool, Failure> {
    eprint!("{question} [y/N] ");
    let _ = std::io::stderr().flush(); // if the question cannot be shown, no answer follows
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
        let text = table_text(["name", "n", "w"], &rows, None).join("\n");
        assert_eq!(text, format!("name  n  w\na     1  x\n{long}  2  y\nabc   3  z"));
    }

    #[test]
    fn e_what_does_not_fit_goes_on_below() {
        let few =
            rows(&[["ledger.url", "sqlite:ledger.db", "default"], ["a", "b", "one two three four five six"]]);
        let text = table_text(["setting", "value", "from"], &few, Some(30)).join("\n");
        let wanted = "setting     value\n    from\n\
                      ledger.url  sqlite:ledger.db\n    default\n\
                      a           b\n    one two three four five\n    six";
        assert_eq!(text, wanted);
        let text = table_text(
            ["level", "check", "finding"],
            &rows(&[["fine", "clock", "one two three four five six seven eight"]]),
            Some(40),
        )
        .join("\n");
        assert_eq!(
            text,
            "level  check  finding\nfine   clock  one two three four five\n              six seven eight"
        );
    }

    #[test]
    fn t98_a_long_cell_in_the_middle_is_broken_and_the_columns_stay() {
        let (uuid, long) = ("0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10", "x".repeat(70));
        let rows = rows(&[["mailer", uuid, "done"], ["mailer", &long, "dead"]]);
        let text = table_text(["scope", "id", "state"], &rows, Some(60)).join("\n");
        let (gap, state) = (" ".repeat(8), " ".repeat(46));
        let (first, rest) = ("x".repeat(52), "x".repeat(18));
        let wanted = format!(
            "scope   id{}  state\nmailer  {uuid}  done\nmailer  {first}\n{gap}{rest}\n{state}dead",
            " ".repeat(34),
        );
        assert_eq!(text, wanted);
    }

    #[test]
    fn what_cannot_be_seen_is_escaped() {
        let text = table_text(["a", "b", "c"], &rows(&[["x\u{1b}[2J", "DOM\\user", "\n"]]), None).join("\n");
        assert!(text.ends_with("x\\u{1b}[2J  DOM\\user  \\n"), "{text}");
    }

    #[test]
    fn numbers_have_commas() {
        assert_eq!(
            [0, 999, 1000, 10_000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "10,000", "1,234,567"]
        );
    }
}
