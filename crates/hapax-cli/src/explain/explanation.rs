//! The history of an event: steps in order, what waits, and what the stores could not say.

use std::time::Duration;

use hapax::{EventId, Time};
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::mask::masked;

/// The fact that comes from outside.
const REASON: &str = "reason";
/// A pause between two steps that is worth a line.
const GAP_MIN: Duration = Duration::from_secs(60);

/// What is explained.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Subject {
    Event(String),
    Key(String),
    Aggregate(String),
}

impl Subject {
    /// The kind and the name.
    pub fn parts(&self) -> (&'static str, &str) {
        match self {
            Subject::Event(name) => ("event", name),
            Subject::Key(name) => ("key", name),
            Subject::Aggregate(name) => ("aggregate", name),
        }
    }
}

/// Where a step happened, in the order of the path of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    Key,
    Journal,
    Relay,
    Ledger,
    Record,
    ReadModel,
    Projection,
}

impl Layer {
    #[cfg(test)]
    pub const ALL: [Layer; 7] = [
        Layer::Key,
        Layer::Journal,
        Layer::Relay,
        Layer::Ledger,
        Layer::Record,
        Layer::ReadModel,
        Layer::Projection,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Layer::Key => "key",
            Layer::Journal => "journal",
            Layer::Relay => "relay",
            Layer::Ledger => "ledger",
            Layer::Record => "record",
            Layer::ReadModel => "read model",
            Layer::Projection => "projection",
        }
    }
}

/// One thing that happened, or how something stands now. `what` has words and numbers of hapax only; whatever
/// comes from outside is a fact, so that each format can set it apart.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// When. None if it is not recorded, or if the step says how something stands now.
    #[serde(serialize_with = "as_text")]
    pub at: Option<Time>,
    pub layer: Layer,
    /// The scope or the relay.
    pub name: Option<String>,
    pub event: Option<String>,
    pub seq: Option<u64>,
    pub what: String,
    #[serde(serialize_with = "as_map")]
    pub facts: Vec<(&'static str, Value)>,
}

impl Step {
    pub fn new(layer: Layer, what: impl Into<String>) -> Self {
        Step { at: None, layer, name: None, event: None, seq: None, what: what.into(), facts: Vec::new() }
    }

    #[must_use]
    pub fn at(self, at: Time) -> Self {
        Step { at: Some(at), ..self }
    }

    #[must_use]
    pub fn named(self, name: &(impl ToString + ?Sized)) -> Self {
        Step { name: Some(name.to_string()), ..self }
    }

    #[must_use]
    pub fn of(self, id: &EventId, seq: Option<u64>) -> Self {
        Step { event: Some(id.to_string()), seq, ..self }
    }

    /// Adds a fact, if there is one. A reason is what a handler or an operator wrote: secrets in it are masked, for
    /// everybody who is shown it.
    #[must_use]
    pub fn fact(mut self, name: &'static str, value: Option<impl Into<Value>>) -> Self {
        let value = value.map(|value| match (name, value.into()) {
            (REASON, Value::String(text)) => Value::String(masked(&text)),
            (_, value) => value,
        });
        self.facts.extend(value.map(|value| (name, value)));
        self
    }

    /// Where it happened, in words.
    pub fn place(&self) -> String {
        match &self.name {
            Some(name) => format!("{} {name}", self.layer.name()),
            None => self.layer.name().to_owned(),
        }
    }
}

/// How a scope stands with an aggregate.
#[derive(Debug, Clone, Serialize)]
pub struct Queue {
    pub scope: String,
    /// The highest seq that took effect.
    pub done_up_to: Option<u64>,
    /// The lowest seq that is not settled.
    pub head: Option<u64>,
    /// The state of the head.
    pub head_state: Option<&'static str>,
    /// The seqs that are parked.
    pub waiting: Vec<u64>,
    /// All of that in words.
    pub what: String,
}

/// What a store said, if it is not a step.
#[derive(Debug, Clone, Serialize)]
pub struct StoreAnswer {
    pub store: &'static str,
    /// Whether it is configured and did not answer.
    pub unreachable: bool,
    pub message: String,
}

/// All of it.
#[derive(Debug, Serialize)]
pub struct Explanation {
    pub of: Subject,
    pub tenant: Option<String>,
    #[serde(serialize_with = "as_stamp")]
    pub asked_at: Time,
    pub steps: Vec<Step>,
    /// By scope, if it is about an aggregate.
    pub scopes: Vec<Queue>,
    pub stores: Vec<StoreAnswer>,
    /// One sentence.
    pub not_recorded: String,
}

/// A row of a report.
pub enum Row<'l> {
    /// Nothing happened for so long.
    Gap(Duration),
    Step(&'l Step),
}

impl Explanation {
    /// The steps, with a row for each long pause.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let (mut rows, mut last) = (Vec::new(), None);
        for step in &self.steps {
            if let (Some(before), Some(at)) = (last, step.at) {
                let gap = at.since(before);
                rows.extend((gap >= GAP_MIN).then_some(Row::Gap(gap)));
            }
            last = step.at.or(last);
            rows.push(Row::Step(step));
        }
        rows
    }

    /// The facts of a step for people: name and value. They begin with the event, unless all steps are of one.
    pub fn facts(&self, step: &Step) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let event = step.event.as_ref().filter(|_| !self.is_of_one());
        let event = event.map(|id| ("event".to_owned(), id.clone())).into_iter();
        event.chain(step.facts.iter().map(|(name, value)| (name.replace('_', " "), text(value)))).collect()
    }

    /// Leaves out the reasons, which come from outside.
    pub fn leave_out_reasons(&mut self) {
        for step in &mut self.steps {
            step.facts.retain(|(name, _)| *name != REASON);
        }
    }

    /// Whether its steps are of one event: then each need not name it.
    pub fn is_of_one(&self) -> bool {
        matches!(self.of, Subject::Event(_))
    }
}

/// Puts steps in order: by time; those without one follow what comes before them on their thread, or else all
/// earlier threads. A thread is what happened in one place; threads and their steps come in the order of the path.
pub fn in_order(threads: Vec<Vec<Step>>) -> Vec<Step> {
    let mut all: Vec<(Option<Time>, Step)> = Vec::new();
    let mut latest_of_all = None;
    for thread in threads {
        let mut latest = None;
        for step in thread {
            latest = latest.max(step.at);
            all.push((step.at.or(latest).or(latest_of_all), step));
        }
        latest_of_all = latest_of_all.max(latest);
    }
    all.sort_by_key(|(at, _)| *at); // stable: what is equal stays in the order of the path
    all.into_iter().map(|(_, step)| step).collect()
}

/// A time in UTC with milliseconds (RFC 3339).
pub fn stamp(at: Time) -> String {
    let micros = at.as_micros();
    let second = Time::from_micros(micros.div_euclid(1_000_000) * 1_000_000).to_string();
    let millis = micros.rem_euclid(1_000_000) / 1000;
    match second.strip_suffix('Z') {
        Some(second) => format!("{second}.{millis:03}Z"),
        None => at.to_string(), // beyond the calendar
    }
}

/// A pause in its two largest units: `3 h 12 min`.
pub fn pause(gap: Duration) -> String {
    let seconds = gap.as_secs();
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let at = units.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(units.len() - 1);
    let (unit, name) = units[at];
    let first = format!("{} {name}", seconds / unit);
    match units.get(at + 1).map(|(next, name)| (seconds % unit / next, name)) {
        Some((rest, name)) if rest > 0 => format!("{first} {rest} {name}"),
        _ => first,
    }
}

#[allow(clippy::ref_option)] // as serde hands it over
fn as_text<S: Serializer>(at: &Option<Time>, to: S) -> Result<S::Ok, S::Error> {
    at.map(stamp).serialize(to)
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde hands it over
fn as_stamp<S: Serializer>(at: &Time, to: S) -> Result<S::Ok, S::Error> {
    stamp(*at).serialize(to)
}

fn as_map<S: Serializer>(facts: &[(&'static str, Value)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(facts.iter().map(|(name, value)| (name, value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(what: &str, at_s: Option<i64>) -> Step {
        Step { at: at_s.map(|s| Time::from_millis(s * 1000)), ..Step::new(Layer::Ledger, what) }
    }

    #[test]
    fn times_have_milliseconds_and_pauses_two_units() {
        assert_eq!(stamp(Time::from_micros(0)), "1970-01-01T00:00:00.000Z");
        assert_eq!(stamp(Time::from_micros(1_999_999)), "1970-01-01T00:00:01.999Z");
        assert_eq!(stamp(Time::from_micros(-1)), "1969-12-31T23:59:59.999Z");
        for (seconds, wanted) in [
            (0, "0 s"),
            (61, "1 min 1 s"),
            (60, "1 min"),
            (11_520, "3 h 12 min"),
            (90_000, "1 d 1 h"),
            (86_460, "1 d"),
        ] {
            assert_eq!(pause(Duration::from_secs(seconds)), wanted);
        }
    }

    #[test]
    fn a_reason_has_no_secret_from_the_start() {
        let step = Step::new(Layer::Ledger, "died").fact("reason", Some("x-api-key: s3cret"));
        assert_eq!(step.facts, [("reason", Value::from("x-api-key: ***"))]);
    }

    #[test]
    fn steps_without_a_time_stay_on_their_thread() {
        let threads = vec![
            vec![step("appended", Some(1)), step("published", None)],
            vec![step("first seen", Some(2)), step("redriven", Some(9)), step("waits", None)],
            vec![step("other scope", Some(5))],
            vec![step("read model", None)],
        ];
        let order: Vec<_> = in_order(threads).into_iter().map(|step| step.what).collect();
        assert_eq!(
            order,
            ["appended", "published", "first seen", "other scope", "redriven", "waits", "read model"]
        );
    }

    #[test]
    fn long_pauses_have_a_row() {
        let explanation = Explanation {
            of: Subject::Event("e".into()),
            tenant: None,
            asked_at: Time::default(),
            steps: vec![step("a", Some(0)), step("b", None), step("c", Some(59)), step("d", Some(119))],
            scopes: Vec::new(),
            stores: Vec::new(),
            not_recorded: String::new(),
        };
        let rows: Vec<_> = explanation
            .rows()
            .iter()
            .map(|row| match row {
                Row::Gap(gap) => pause(*gap),
                Row::Step(step) => step.what.clone(),
            })
            .collect();
        assert_eq!(rows, ["a", "b", "c", "1 min", "d"]);
    }
}
