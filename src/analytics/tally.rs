//! Computes a [`Tally`] over payloads, for read models that have no engine of their own for it.

use std::collections::BTreeMap;

use super::{Decimal, Field, GROUPS_MAX, Group, Groups, Measure, Measured, Tally};
use crate::error::{Error, Result};

/// The longest value that groups, in bytes.
pub(crate) const KEY_BYTES_MAX: usize = 256;

/// A tally being computed.
pub(crate) struct Tallying<'q> {
    what: &'q Tally,
    groups: BTreeMap<Option<String>, (u64, Vec<Measured>)>,
}

impl<'q> Tallying<'q> {
    pub(crate) fn new(what: &'q Tally) -> Self {
        let mut groups = BTreeMap::new();
        if what.group_by.is_none() {
            groups.insert(None, (0, vec![Measured::default(); what.measures.len()]));
        }
        Tallying { what, groups }
    }

    /// Adds one record.
    pub(crate) fn add(&mut self, payload: &str) -> Result<()> {
        let key = self.what.group_by.as_ref().and_then(|field| group_key(field, payload));
        let fresh = || (0, vec![Measured::default(); self.what.measures.len()]);
        let (count, measured) = self.groups.entry(key).or_insert_with(fresh);
        *count += 1;
        for (measure, measured) in self.what.measures.iter().zip(measured) {
            add(measure, measured, payload)?;
        }
        // A group that was dropped is dropped again: the lesser keys stay.
        if self.groups.len() > GROUPS_MAX + 1 {
            self.groups.pop_last();
        }
        Ok(())
    }

    /// The answer if only the number of records was asked for, and the read model knows it.
    #[cfg(feature = "sqlite")]
    pub(crate) fn counted(mut self, count: u64) -> Groups {
        self.groups.insert(None, (count, Vec::new()));
        self.done()
    }

    pub(crate) fn done(self) -> Groups {
        let more = self.groups.len() > GROUPS_MAX;
        let groups = self.groups.into_iter().take(GROUPS_MAX);
        Groups::new(groups.map(|(key, (count, measures))| Group { key, count, measures }).collect(), more)
    }
}

/// The value that groups a record, as JSON text in one way of writing it. A record whose field is
/// missing, null, an object, an array or longer than [`KEY_BYTES_MAX`] has none.
fn group_key(field: &Field, payload: &str) -> Option<String> {
    group_text(field.find(payload)?.get())
}

/// The same of the value itself.
pub(crate) fn group_text(value: &str) -> Option<String> {
    if value == "null" || value.starts_with(['{', '[']) || value.len() > KEY_BYTES_MAX {
        return None;
    }
    String::from_utf8(crate::event::canonical(value.as_bytes())?).ok()
}

fn add(measure: &Measure, measured: &mut Measured, payload: &str) -> Result<()> {
    let Some(value) = measure.field().find(payload).map(serde_json::value::RawValue::get) else {
        return Ok(());
    };
    if value == "null" {
        return Ok(());
    }
    let number = value.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    let Some(number) = number.then(|| Decimal::parse(value)).flatten() else {
        measured.left_out += 1;
        return Ok(());
    };
    measured.value = Some(match (measured.value, measure) {
        (None, _) => number,
        (Some(sum), Measure::Sum(field)) => sum.plus(number).ok_or_else(|| {
            Error::invalid("question", format!("the sum of {field} has more digits than an answer can have"))
        })?,
        (Some(least), Measure::Min(_)) => least.min(number),
        (Some(greatest), Measure::Max(_)) => greatest.max(number),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(pointer: &str) -> Field {
        Field::new(pointer).unwrap()
    }

    #[test]
    fn groups_and_measures() {
        let measures = vec![Measure::Sum(field("/n")), Measure::Min(field("/n")), Measure::Max(field("/n"))];
        let what = Tally { measures, group_by: Some(field("/g")) };
        let mut tally = Tallying::new(&what);
        for payload in [
            r#"{"g":"a","n":0.1}"#,
            r#"{"g":"\u0061","n":0.2}"#,
            r#"{"g":"b","n":"7"}"#,
            r#"{"g":"b","n":1e-30}"#,
            r#"{"g":null,"n":5}"#,
            r#"{"g":{"x":1},"n":-5}"#,
            r#"{"n":null}"#,
        ] {
            tally.add(payload).unwrap();
        }
        let seen: Vec<_> = tally
            .done()
            .groups
            .into_iter()
            .map(|group| {
                let measures: Vec<_> =
                    group.measures.iter().map(|m| (m.value.map(|v| v.to_string()), m.left_out)).collect();
                (group.key, group.count, measures)
            })
            .collect();
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(
            seen,
            [
                (None, 3, vec![(text("0"), 0), (text("-5"), 0), (text("5"), 0)]),
                (text("\"a\""), 2, vec![(text("0.3"), 0), (text("0.1"), 0), (text("0.2"), 0)]),
                (text("\"b\""), 2, vec![(None, 2), (None, 2), (None, 2)]),
            ]
        );
    }

    #[test]
    fn the_first_groups_are_complete_however_many_there_are() {
        let what = Tally { measures: Vec::new(), group_by: Some(field("/g")) };
        let mut tally = Tallying::new(&what);
        for round in 0..3 {
            for group in 0..2 * GROUPS_MAX {
                let group = if round == 1 { 2 * GROUPS_MAX - 1 - group } else { group };
                tally.add(&format!(r#"{{"g":"{group:05}"}}"#)).unwrap();
            }
        }
        let groups = tally.done();
        assert!(groups.more && groups.groups.len() == GROUPS_MAX);
        for (number, group) in groups.groups.iter().enumerate() {
            assert_eq!((group.key.as_deref(), group.count), (Some(format!("\"{number:05}\"").as_str()), 3));
        }
    }

    #[test]
    fn nothing_is_one_group_if_nothing_groups() {
        let groups = Tallying::new(&Tally::default()).done();
        assert_eq!((groups.groups.len(), groups.groups[0].count), (1, 0));
        let by = Tally { group_by: Some(field("/g")), ..Tally::default() };
        assert_eq!(Tallying::new(&by).done().groups.len(), 0);
    }
}
