//! Commands in a journal: an update or a delete must say which state it expects.

use serde::Deserialize;

use super::{Append, Expected};
use crate::error::{Error, Result};
use crate::event::Event;

/// The part of an envelope that decides whether it is a command.
#[derive(Deserialize)]
struct Envelope {
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct Metadata {
    kind: Option<String>,
}

/// Whether an event is a command: `metadata.kind` of its JSON payload is `command`.
fn is_command(event: &Event) -> bool {
    let envelope = serde_json::from_slice::<Envelope>(&event.payload).ok();
    envelope.and_then(|envelope| envelope.metadata?.kind).is_some_and(|kind| kind == "command")
}

/// Whether a kind names a change to existing state: one of its words is `update` or `delete`. Words
/// end at any non-letter, and where an upper-case letter follows a lower-case one.
fn changes(kind: &str) -> bool {
    let mut word = String::new();
    let mut small = false;
    let is_change = |word: &str| word.eq_ignore_ascii_case("update") || word.eq_ignore_ascii_case("delete");
    for c in kind.chars() {
        let ends = !c.is_alphabetic() || (small && c.is_uppercase());
        if ends && is_change(&word) {
            return true;
        }
        if ends {
            word.clear();
        }
        if c.is_alphabetic() {
            word.push(c);
        }
        small = c.is_lowercase();
    }
    is_change(&word)
}

/// Refuses an append of update or delete commands that does not say which seq it expects.
///
/// ```
/// use hapax::journal::{Append, Expected, expects};
/// use hapax::{Aggregate, Event, EventId, id::Kind};
/// let command = Event::new(EventId::new("c-1").unwrap())
///     .kind(Kind::new("UPDATE_ORDER").unwrap())
///     .payload(r#"{"metadata": {"kind": "command"}}"#);
/// let append = |expected| Append::new(Aggregate::new("order-17").unwrap(), expected, [command.clone()]);
/// assert!(expects(&append(Expected::Any)).is_err());
/// assert!(expects(&append(Expected::Exact(3))).is_ok());
/// ```
pub fn expects(append: &Append) -> Result<()> {
    if append.expected != Expected::Any {
        return Ok(());
    }
    let change =
        |event: &&Event| event.kind.as_ref().is_some_and(|kind| changes(kind.as_str())) && is_command(event);
    match append.events.iter().find(change) {
        Some(event) => Err(Error::invalid(
            "expected",
            format!(
                "{} is an update or delete command and must say which seq of {} it expects",
                event.id, append.aggregate
            ),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_known_by_its_words() {
        for kind in ["update", "Order.Update", "UPDATE_ORDER", "orderUpdate", "deleteOrder", "order-delete"] {
            assert!(changes(kind), "{kind}");
        }
        for kind in ["updated", "order.created", "candidate", "undelete", "CREATE_ORDER", ""] {
            assert!(!changes(kind), "{kind}");
        }
    }
}
