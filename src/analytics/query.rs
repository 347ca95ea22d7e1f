//! Questions to a read model, and answers that say how current they are.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use uuid::Uuid;

use super::{Decimal, Field, Version};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Visible;
use crate::records::{LIST_DEFAULT, LIST_MAX, ModuleSlug, Record};

/// How many groups an answer has at most.
pub const GROUPS_MAX: usize = 1000;
/// How many measures a question has at most.
pub const MEASURES_MAX: usize = 16;
/// An answer that is older than this is called stale.
pub const STALE_AFTER: Duration = Duration::from_secs(5);

/// Which records a query is about. Every query has a tenant: no tenant counts as one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Selection {
    /// Whose records; the nil UUID means no tenant.
    pub tenant: Uuid,
    /// The module.
    pub module: ModuleSlug,
    /// Only records that were written at this time or later.
    pub since: Option<Time>,
    /// Whether replaced and deleted versions may be counted, which is faster on some read models.
    pub approximate: bool,
}

/// A page of records, in the order of their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListPage {
    /// Only records with a greater id.
    pub after: Option<Uuid>,
    /// How many at most: 1 to [`LIST_MAX`].
    pub limit: usize,
}

impl Default for ListPage {
    fn default() -> Self {
        ListPage { after: None, limit: LIST_DEFAULT }
    }
}

impl ListPage {
    /// Up to so many records with a greater id.
    pub fn new(after: Option<Uuid>, limit: usize) -> Result<Self> {
        if (1..=LIST_MAX).contains(&limit) {
            return Ok(ListPage { after, limit });
        }
        Err(Error::invalid("limit", format!("it is {limit}; a list has 1 to {LIST_MAX} records")))
    }
}

/// What is computed from a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Measure {
    /// The sum of its numbers.
    Sum(Field),
    /// Its least number.
    Min(Field),
    /// Its greatest number.
    Max(Field),
}

impl Measure {
    /// The field.
    pub fn field(&self) -> &Field {
        match self {
            Measure::Sum(field) | Measure::Min(field) | Measure::Max(field) => field,
        }
    }

    /// `sum`, `min` or `max`.
    pub fn name(&self) -> &'static str {
        match self {
            Measure::Sum(_) => "sum",
            Measure::Min(_) => "min",
            Measure::Max(_) => "max",
        }
    }
}

/// What to compute. The number of records is always included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Tally {
    /// What is computed besides the number of records.
    pub measures: Vec<Measure>,
    /// For each value of this field apart.
    pub group_by: Option<Field>,
}

impl Tally {
    /// Refuses more measures than an answer may have.
    pub fn check(&self) -> Result<()> {
        if self.measures.len() <= MEASURES_MAX {
            return Ok(());
        }
        let count = self.measures.len();
        Err(Error::invalid("question", format!("it has {count} measures; the limit is {MEASURES_MAX}")))
    }
}

/// The value of a measure for one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Measured {
    /// The number; `None` if no record has one.
    pub value: Option<Decimal>,
    /// How many records have the field, but no number there that fits a [`Decimal`]. They are not in the
    /// value.
    pub left_out: u64,
}

/// The records that share a value of the grouping field.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// That value, as JSON text; `None` if the field is missing, or if nothing groups.
    pub key: Option<String>,
    /// How many records there are.
    pub count: u64,
    /// The measures, in the order of the question.
    pub measures: Vec<Measured>,
}

/// The answer to a [`Tally`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Groups {
    /// The groups, by the text of their keys; records without the field come first. Without a
    /// grouping field there is one group, even if there are no records.
    pub groups: Vec<Group>,
    /// Whether there are more than [`GROUPS_MAX`], of which these are the first.
    pub more: bool,
}

impl Groups {
    pub(crate) fn new(groups: Vec<Group>, more: bool) -> Self {
        Groups { groups, more }
    }
}

/// How current an answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Meta {
    /// Every write that was acknowledged before this time is in the answer; later ones may be. `None`:
    /// nothing is known yet.
    pub last_sync_at: Option<Time>,
    /// Whether that is unknown, or longer ago than [`STALE_AFTER`].
    pub stale: bool,
    /// What the answer may count wrong, if it is approximate.
    pub approximate: Option<&'static str>,
}

impl Meta {
    /// `last_sync_at` in RFC 3339, UTC, with milliseconds, rounded down.
    pub fn last_sync_text(&self) -> Option<String> {
        self.last_sync_at.map(|at| {
            let micros = at.as_micros().div_euclid(1000) * 1000;
            match jiff::Timestamp::from_microsecond(micros) {
                Ok(at) => format!("{at:.3}"),
                Err(_) => Time::from_micros(micros).to_string(),
            }
        })
    }
}

/// An answer, and how current it is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer<T> {
    /// What was found.
    pub value: T,
    /// How current it is.
    pub meta: Meta,
}

impl<T> Answer<T> {
    pub(crate) fn new(value: T, meta: Meta) -> Self {
        Answer { value, meta }
    }
}

/// Names a write, so that a reader can wait until it is visible: `orders/ID@SEQ`.
///
/// ```
/// use hapax::analytics::ReadToken;
/// let text = "orders/0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10@7";
/// let token: ReadToken = text.parse()?;
/// assert_eq!((token.seq, token.to_string().as_str()), (7, text));
/// assert!("orders@7".parse::<ReadToken>().is_err());
/// # Ok::<(), hapax::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadToken {
    /// The record's module.
    pub module: ModuleSlug,
    /// The record.
    pub id: Uuid,
    /// The seq that the write gave it.
    pub seq: u64,
}

impl ReadToken {
    /// The token of a write.
    pub fn of(record: &Record) -> Self {
        ReadToken { module: record.module.clone(), id: record.id, seq: record.seq }
    }

    /// Whether a read model that has this version of the record shows the write.
    pub(crate) fn is_shown_by(&self, version: Option<Version>) -> bool {
        version.is_some_and(|version| version.seq() >= self.seq)
    }
}

impl fmt::Display for ReadToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.module, self.id, self.seq)
    }
}

impl FromStr for ReadToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            let message = format!(
                "it is \"{}\"; a write's token is MODULE/ID@SEQ, as its answer has it",
                Visible(text)
            );
            Error::invalid("token", message)
        };
        let (name, seq) = text.split_once('@').ok_or_else(bad)?;
        let (module, id) = name.split_once('/').ok_or_else(bad)?;
        Ok(ReadToken {
            module: ModuleSlug::new(module).map_err(|_| bad())?,
            id: Uuid::try_parse(id).map_err(|_| bad())?,
            seq: seq.parse().map_err(|_| bad())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_sync_at_is_rounded_down_and_has_milliseconds() {
        let text = |micros| {
            let last_sync_at = Some(Time::from_micros(micros));
            Meta { last_sync_at, stale: false, approximate: None }.last_sync_text().unwrap()
        };
        assert_eq!(text(1_000_000), "1970-01-01T00:00:01.000Z");
        assert_eq!(text(1_000_999_999), "1970-01-01T00:16:40.999Z");
        assert_eq!(text(-1), "1969-12-31T23:59:59.999Z");
    }
}
