//! The report in Markdown, for an issue or a chat.

use std::fmt::Write as _;

use super::explanation::{Explanation, Row, pause, stamp};
use crate::print;

pub fn page(explanation: &Explanation) -> String {
    let (kind, name) = explanation.of.parts();
    let mut page = format!("# {kind} {}\n\n", plain(name));
    if let Some(tenant) = &explanation.tenant {
        let _ = write!(page, "Tenant {}. ", plain(tenant)); // writing to a String cannot fail
    }
    let _ = writeln!(page, "Asked at {}.\n", stamp(explanation.asked_at));
    page.push_str("| at | seq | where | what |\n|---|---|---|---|\n");
    for row in explanation.rows() {
        let _ = match row {
            Row::Gap(gap) => writeln!(page, "| | | | … {} … |", pause(gap)),
            Row::Step(step) => {
                let facts = explanation.facts(step).into_iter();
                let facts: Vec<_> = facts.map(|(name, value)| format!("{name} {}", plain(&value))).collect();
                let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join("; ")) };
                writeln!(
                    page,
                    "| {} | {} | {} | {}{facts} |",
                    step.at.map_or_else(String::new, stamp),
                    step.seq.map_or_else(String::new, |seq| seq.to_string()),
                    plain(&step.place()),
                    plain(&step.what),
                )
            }
        };
    }
    page.push('\n');
    for queue in &explanation.scopes {
        let _ = writeln!(page, "- scope {}: {}", plain(&queue.scope), queue.what);
    }
    for answer in &explanation.stores {
        let _ = writeln!(page, "- {}: {}", answer.store, plain(&answer.message));
    }
    if !explanation.scopes.is_empty() || !explanation.stores.is_empty() {
        page.push('\n');
    }
    page.push_str(&explanation.not_recorded);
    page.push('\n');
    page
}

/// Text that is nothing but text in Markdown: no markup, no HTML, no link, no cell of its own.
fn plain(text: &str) -> String {
    let text = print::escaped(text);
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let is_markup = matches!(c, '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '#' | '|' | '~' | '&' | '!' | '$')
            // An address becomes a link by itself.
            || (c == ':' && chars.peek() == Some(&'/'))
            || (c == '.' && plain.to_ascii_lowercase().ends_with("www"))
            || c == '@';
        if is_markup {
            plain.push('\\');
        }
        plain.push(c);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn text_stays_text() {
        assert_eq!(plain("order-17 (paid)"), "order-17 (paid)");
        assert_eq!(plain("a|b\n<b>"), "a\\|b\\\\n\\<b\\>");
        assert_eq!(plain("[x](https://e.example)"), "\\[x\\](https\\://e.example)");
        assert_eq!(plain("WWW.e.example"), "WWW\\.e.example");
        assert_eq!(plain("\u{202e}x"), "\\\\u{202e}x");
    }
}
