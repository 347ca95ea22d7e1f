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

/// Prints rows under their heads, columns as wide as their widest cell.
pub fn table<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> Result<(), Failure> {
    let mut widths = heads.map(|head| head.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let heads = heads.map(str::to_owned);
    for row in std::iter::once(&heads).chain(rows) {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width + 2 - cell.chars().count()));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    line(text.trim_end_matches('\n'))
}

/// Text from outside, safe for a terminal.
pub fn escaped(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c == '\'' || c == '"' { vec![c] } else { c.escape_debug().collect() })
        .collect()
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
