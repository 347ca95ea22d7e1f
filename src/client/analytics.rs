//! Questions to the read model of a module: each record once, and up to when the answer is complete.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::Client;
use super::data::{Page, PageBody, Record, check_limit, parse};
use super::error::{Error, Result};
use super::exchange::{Call, Reply};
use super::prepared::check_module;
use crate::analytics::{Decimal, Field, Measure, ReadToken};
use crate::clock::Time;

/// How long the server waits for a write by default.
const WAIT_DEFAULT: Duration = Duration::from_secs(5);
/// The longest that it waits.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// The longest time that [`Analytics::since`] takes: 36500 days, as the server does.
const SINCE_MAX: Duration = Duration::from_hours(36_500 * 24);

/// How current an answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Meta {
    /// Every write that was acknowledged before this time is in the answer; later ones may be. `None`:
    /// nothing is known yet. The server's `lastSyncAt`, in milliseconds.
    pub last_sync_at: Option<Time>,
    /// Whether that is unknown, or more than five seconds ago.
    pub stale: bool,
    /// What the answer may count wrongly, if it is approximate.
    pub approximate: Option<String>,
}

/// An answer of the read model, and how current it is.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Answer<T> {
    /// What was found.
    pub value: T,
    /// How current it is.
    pub meta: Meta,
}

/// One number of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Measured {
    /// What was computed, of which field.
    pub measure: Measure,
    /// The number, exactly; `None` if no record has one.
    pub value: Option<Decimal>,
    /// How many records have something else in the field than a number that fits. They are not in the
    /// value.
    pub left_out: u64,
}

/// Records that share a value of the grouping field.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Group {
    /// That value; null if the field is missing, or if nothing groups.
    pub key: Value,
    /// How many records there are.
    pub count: u64,
    /// The measures: sums, then least, then greatest numbers, each in the order of the question.
    pub measures: Vec<Measured>,
}

impl Group {
    /// The sum of a field that the question names.
    pub fn sum(&self, field: &str) -> Option<Decimal> {
        self.value("sum", field)
    }

    /// The least number of a field that the question names.
    pub fn min(&self, field: &str) -> Option<Decimal> {
        self.value("min", field)
    }

    /// The greatest number of a field that the question names.
    pub fn max(&self, field: &str) -> Option<Decimal> {
        self.value("max", field)
    }

    fn value(&self, name: &str, field: &str) -> Option<Decimal> {
        let is = |found: &&Measured| found.measure.name() == name && found.measure.field().as_str() == field;
        self.measures.iter().find(is).and_then(|found| found.value)
    }
}

/// Numbers about records.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Tally {
    /// The groups, by the text of their values. Without a grouping field there is one group, even if
    /// no record matches.
    pub groups: Vec<Group>,
    /// Whether there are more groups than these.
    pub more: bool,
}

/// A question about the records of a module, as the server's read model has them. See
/// [`Data::analytics`](super::Data::analytics).
///
/// Fields are JSON pointers: `/amount`, `/customer/city`. What is wrong with one is reported when the question
/// is asked. Without [`after`](Analytics::after) an answer may lack the latest writes; its
/// [`Meta::last_sync_at`] says up to when it has all of them.
///
/// ```no_run
/// use std::time::Duration;
/// # async fn run(client: hapax::client::Client) -> hapax::client::Result<()> {
/// let week = client.data("orders").analytics().since(Duration::from_secs(7 * 86_400));
/// println!("{} orders", week.count().await?.value);
/// let answer = week.sum("/amount").max("/amount").tally().await?;
/// let all = &answer.value.groups[0];
/// println!("{:?}, the greatest {:?}", all.sum("/amount"), all.max("/amount"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a question is asked by `list`, `count` or `tally`"]
pub struct Analytics {
    client: Client,
    module: String,
    since: Option<Duration>,
    approximate: bool,
    after: Option<String>,
    wait: Duration,
    sum: Vec<String>,
    min: Vec<String>,
    max: Vec<String>,
    group_by: Option<String>,
}

impl Analytics {
    pub(super) fn new(client: Client, module: String) -> Self {
        Analytics {
            client,
            module,
            since: None,
            approximate: false,
            after: None,
            wait: WAIT_DEFAULT,
            sum: Vec::new(),
            min: Vec::new(),
            max: Vec::new(),
            group_by: None,
        }
    }

    /// Only records whose current version was written within this time, up to 36500 days.
    pub fn since(mut self, time: Duration) -> Self {
        self.since = Some(time);
        self
    }

    /// Accepts an answer that may count replaced and deleted versions, which is faster on some read
    /// models. Gives up: that each record counts once. [`Meta::approximate`] says what may be wrong.
    pub fn approximate(mut self) -> Self {
        self.approximate = true;
        self
    }

    /// Waits until a write is visible, at most [`wait`](Analytics::wait). If it is not by then, the
    /// answer is a [`Conflict`](Error::Conflict) that says how far the read model is; ask again.
    pub fn after(self, written: &Record) -> Self {
        self.after_token(written.read_token())
    }

    /// The same by the write's [token](Record::read_token), `MODULE/ID@SEQ`.
    pub fn after_token(mut self, token: impl Into<String>) -> Self {
        self.after = Some(token.into());
        self
    }

    /// How long to wait for a write: 5 s by default, 30 s at most. The time comes on top of
    /// [`attempt_timeout`](super::ClientSettings::attempt_timeout) and of the deadline.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Also computes the exact sum of a field.
    pub fn sum(mut self, field: impl Into<String>) -> Self {
        self.sum.push(field.into());
        self
    }

    /// Also computes the least number of a field.
    pub fn min(mut self, field: impl Into<String>) -> Self {
        self.min.push(field.into());
        self
    }

    /// Also computes the greatest number of a field.
    pub fn max(mut self, field: impl Into<String>) -> Self {
        self.max.push(field.into());
        self
    }

    /// Counts and computes for each value of a field apart.
    pub fn group_by(mut self, field: impl Into<String>) -> Self {
        self.group_by = Some(field.into());
        self
    }

    /// Up to `limit` records (1 to 1000) in the order of their ids, from behind `after` on: `next` of the
    /// page before. Measures and grouping do not count here.
    pub async fn list(&self, after: Option<Uuid>, limit: u32) -> Result<Answer<Page>> {
        check_limit(limit)?;
        let mut query = vec![("limit", limit.to_string())];
        query.extend(after.map(|after| ("after", after.to_string())));
        let call = self.call(format!("asking for records of {}", self.module), "records", query)?;
        let read = |reply: &Reply| {
            let (page, meta) = (parse::<PageBody>(reply)?, parse::<OnlyMeta>(reply)?.meta);
            Ok(Answer { value: page.page(&self.module, after)?, meta: meta.meta()? })
        };
        self.client.call(&call, read).await
    }

    /// How many records there are. Measures and grouping do not count here.
    pub async fn count(&self) -> Result<Answer<u64>> {
        let Answer { value, meta } = self.ask(&[], None).await?;
        Ok(Answer { value: value.groups.first().map_or(0, |group| group.count), meta })
    }

    /// How many records there are, and the measures, for each group.
    pub async fn tally(&self) -> Result<Answer<Tally>> {
        let fields = |list: &[String], measure: fn(Field) -> Measure| -> Result<Vec<Measure>> {
            list.iter().map(|field| checked(field).map(measure)).collect()
        };
        let mut measures = fields(&self.sum, Measure::Sum)?;
        measures.extend(fields(&self.min, Measure::Min)?);
        measures.extend(fields(&self.max, Measure::Max)?);
        let group_by = self.group_by.as_ref().map(Field::new).transpose()?;
        self.ask(&measures, group_by.as_ref()).await
    }

    async fn ask(&self, measures: &[Measure], group_by: Option<&Field>) -> Result<Answer<Tally>> {
        let mut query = Vec::new();
        for name in ["sum", "min", "max"] {
            let of: Vec<_> = measures.iter().filter(|measure| measure.name() == name).collect();
            if !of.is_empty() {
                let fields: Vec<_> = of.iter().map(|measure| measure.field().as_str()).collect();
                query.push((name, fields.join(",")));
            }
        }
        query.extend(group_by.map(|field| ("group_by", field.to_string())));
        let call = self.call(format!("counting records of {}", self.module), "tally", query)?;
        let read = |reply: &Reply| {
            let TallyBody { groups, more, meta } = parse(reply)?;
            if group_by.is_none() && groups.len() != 1 {
                return Err(format!("the answer has {} groups, and nothing groups", groups.len()));
            }
            let groups = groups.into_iter().map(|group| group.group(measures)).collect::<Result<_, _>>()?;
            Ok(Answer { value: Tally { groups, more }, meta: meta.meta()? })
        };
        self.client.call(&call, read).await
    }

    /// The call of a question; refuses what the server would refuse.
    fn call(&self, what: String, end: &str, mut query: Vec<(&str, String)>) -> Result<Call<'static>> {
        check_module(&self.module)?;
        if let Some(since) = self.since {
            if since.is_zero() || since > SINCE_MAX {
                let message = format!("it is {since:?}; it must be more than 0 and at most 36500 days");
                return Err(Error::invalid("since", message));
            }
            // A part of a millisecond is a whole one: rather a record too many than one that is left out.
            query.push(("since", format!("{}ms", since.as_nanos().div_ceil(1_000_000))));
        }
        if self.approximate {
            query.push(("approximate", "true".to_owned()));
        }
        let mut wait = Duration::ZERO;
        if let Some(token) = &self.after {
            let token: ReadToken = token.parse()?;
            if token.module.as_str() != self.module {
                let message = format!(
                    "it names a write of {}, and the question is about {}",
                    token.module, self.module
                );
                return Err(Error::invalid("the token", message));
            }
            if self.wait > WAIT_MAX {
                let message = format!("it is {:?}; it may be up to {WAIT_MAX:?}", self.wait);
                return Err(Error::invalid("the wait", message));
            }
            wait = self.wait;
            query.extend([("after_write", token.to_string()), ("wait_ms", wait.as_millis().to_string())]);
        }
        let mut url = self.client.url(&["v1", "analytics", "modules", &self.module, end], None);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        Ok(Call { wait, ..Call::question(what, url) })
    }
}

/// A field that can stand in a list.
fn checked(field: &str) -> Result<Field> {
    if field.contains(',') {
        let message = format!("{field:?} has a comma, which separates fields in the request");
        return Err(Error::invalid("the field", message));
    }
    Ok(Field::new(field)?)
}

#[derive(Deserialize)]
struct MetaBody {
    #[serde(rename = "lastSyncAt")]
    last_sync_at: Option<String>,
    stale: bool,
    approximate: Option<String>,
}

impl MetaBody {
    fn meta(self) -> std::result::Result<Meta, String> {
        let at = self.last_sync_at.map(|text| Time::parse(&text)).transpose();
        let last_sync_at = at.map_err(|error| error.to_string())?;
        Ok(Meta { last_sync_at, stale: self.stale, approximate: self.approximate })
    }
}

/// What a page of the read model has besides what every page has. Read apart: a flattened struct keeps no
/// number's digits.
#[derive(Deserialize)]
struct OnlyMeta {
    meta: MetaBody,
}

#[derive(Deserialize)]
struct TallyBody {
    groups: Vec<GroupBody>,
    more: bool,
    meta: MetaBody,
}

#[derive(Deserialize)]
struct GroupBody {
    key: Value,
    count: u64,
    measures: Vec<MeasureBody>,
}

#[derive(Deserialize)]
struct MeasureBody {
    measure: String,
    field: String,
    value: Option<Box<RawValue>>,
    left_out: u64,
}

impl GroupBody {
    /// The group, if its numbers are those that were asked for.
    fn group(self, asked: &[Measure]) -> std::result::Result<Group, String> {
        let is = |(found, asked): (&MeasureBody, &Measure)| {
            found.measure == asked.name() && found.field == asked.field().as_str()
        };
        if self.measures.len() != asked.len() || !self.measures.iter().zip(asked).all(is) {
            return Err("the answer has other numbers than were asked for".to_owned());
        }
        let number_of = |(found, asked): (MeasureBody, &Measure)| {
            let number = |text: Box<RawValue>| {
                Decimal::parse_sum(text.get())
                    .ok_or_else(|| format!("{:?} is not a number that a sum can be", text.get()))
            };
            let value = found.value.map(number).transpose()?;
            Ok::<_, String>(Measured { measure: asked.clone(), value, left_out: found.left_out })
        };
        let measures = self.measures.into_iter().zip(asked).map(number_of).collect::<Result<_, _>>()?;
        Ok(Group { key: self.key, count: self.count, measures })
    }
}
