//! The overview as texts: what `/v1/overview` says, and how fast it grows.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::print::escaped;

/// Rates are those of this many samples at most.
const SAMPLES: usize = 11;
/// Rates over less time than this say nothing.
const SPAN_MIN: Duration = Duration::from_millis(500);

/// How it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// As it should be.
    Fine,
    /// Somebody should look.
    Look,
    /// Somebody must act.
    Act,
    /// Not known here.
    None,
}

impl Level {
    /// In a word, for those who see no colours.
    pub fn word(self) -> &'static str {
        match self {
            Level::Fine => "ok",
            Level::Look => "look",
            Level::Act => "act",
            Level::None => "-",
        }
    }
}

/// One step on the path of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub name: &'static str,
    pub level: Level,
    pub figure: String,
    pub unit: &'static str,
    pub rows: Vec<(String, String)>,
}

/// The columns of a scope's states.
pub const COLUMNS: [(&str, &[&str]); 7] = [
    ("dead", &["dead"]),
    ("parked", &["parked"]),
    ("retry", &["retry"]),
    ("leased", &["leased", "claimed"]),
    ("done", &["done", "finished"]),
    ("lost", &["lost"]),
    ("stale", &["stale"]),
];

/// A scope, and its entries by state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeRow {
    pub name: String,
    pub counts: Vec<u64>,
    pub done_per_s: String,
}

/// Everything that is shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Figures {
    /// The ledger's clock when it was counted.
    pub at: String,
    /// How many seconds before the answer that was.
    pub age_s: u64,
    pub stages: Vec<Stage>,
    pub scopes: Vec<ScopeRow>,
}

/// An answer.
#[derive(Debug)]
struct Sample {
    at: Instant,
    /// When the server counted the ledger for it. Answers share a count that takes long.
    counted_at: Instant,
    data: Value,
}

/// The last answers, and the last of them with counts of their own.
#[derive(Debug, Default)]
pub struct Samples {
    all: VecDeque<Sample>,
    counts: VecDeque<Sample>,
}

impl Samples {
    pub fn add(&mut self, at: Instant, data: Value) {
        let age =
            Duration::try_from_secs_f64(number(&data, "/age_s").unwrap_or_default()).unwrap_or_default();
        let counted_at = at.checked_sub(age).unwrap_or(at);
        let sample = |data| Sample { at, counted_at, data };
        if self.counts.back().is_none_or(|last| last.data["now"] != data["now"]) {
            keep(&mut self.counts, sample(data.clone()));
        }
        keep(&mut self.all, sample(data));
    }

    pub fn last(&self) -> Option<&Value> {
        self.all.back().map(|sample| &sample.data)
    }

    /// How fast a number grows, per second; `None` if that cannot be known yet.
    fn growth(&self, pick: impl Fn(&Value) -> Option<f64>) -> Option<f64> {
        growth(&self.all, |sample| sample.at, pick)
    }

    /// The same for what the ledger counts.
    fn growth_of_count(&self, pick: impl Fn(&Value) -> f64) -> Option<f64> {
        growth(&self.counts, |sample| sample.counted_at, |data| Some(pick(data)))
    }

    /// The rates, for tools.
    pub fn rates(&self) -> Value {
        json!({
            "writes_per_s": self.growth(|data| counted(data, "writes")),
            "appended_per_s": self.growth(|data| number(data, "/journal/events")),
            "published_per_s": self.growth(|data| number(data, "/relay/published")),
            "claims_per_s": self.growth(|data| counted(data, "claims")),
            "done_per_s": self.growth_of_count(|data| in_states(data, &["done", "finished"])),
            "applied_per_s": self.growth(|data| counted(data, "applied")),
        })
    }

    /// The texts of the last answer.
    pub fn figures(&self) -> Figures {
        let Some(data) = self.last() else { return Figures::default() };
        let stages = vec![
            self.keyed_writes(data),
            self.journal(data),
            self.relay(data),
            bus(data),
            self.ledger(data),
            self.effects(data),
            self.read_model(data),
        ];
        let at = clock(text(data, "/now").unwrap_or_default());
        let age_s = number(data, "/age_s").unwrap_or_default() as u64;
        Figures { at, age_s, stages, scopes: self.scopes(data) }
    }

    fn keyed_writes(&self, data: &Value) -> Stage {
        let open = number(data, "/keys/open");
        let mut rows = self.outcomes(data, "writes", "answered ");
        rows.push(("without an answer".into(), count(open)));
        Stage {
            name: "Keyed write",
            level: if open.is_some() { Level::Fine } else { Level::Act },
            figure: rate(self.growth(|data| counted(data, "writes"))),
            unit: "writes/s",
            rows,
        }
    }

    fn journal(&self, data: &Value) -> Stage {
        let events = number(data, "/journal/events");
        Stage {
            name: "Journal",
            level: if events.is_some() { Level::Fine } else { Level::None },
            figure: count(events),
            unit: "events",
            rows: vec![
                ("appended".into(), per_s(self.growth(|data| number(data, "/journal/events")))),
                ("aggregates".into(), count(number(data, "/journal/aggregates"))),
            ],
        }
    }

    fn relay(&self, data: &Value) -> Stage {
        let (state, lag) = (text(data, "/relay_state"), number(data, "/relay/lag_s"));
        let (behind, parked) = (number(data, "/relay/behind"), number(data, "/relay/parked"));
        let level = match (state, lag) {
            (None, _) => Level::None,
            (Some("failed"), _) => Level::Act,
            _ if parked.is_some_and(|parked| parked > 0.0) => Level::Act,
            _ if behind.is_some_and(|behind| behind > 0.0) || lag.is_some_and(|lag| lag > 10.0) => {
                Level::Look
            }
            _ => Level::Fine,
        };
        Stage {
            name: "Relay",
            level,
            figure: lag.map_or_else(|| "–".to_owned(), |lag| format!("{lag:.1}")),
            unit: "s lag",
            rows: vec![
                ("role".into(), escaped(state.unwrap_or("runs elsewhere"))),
                ("published".into(), per_s(self.growth(|data| number(data, "/relay/published")))),
                ("behind".into(), count(behind)),
                ("parked".into(), count(parked)),
            ],
        }
    }

    fn ledger(&self, data: &Value) -> Stage {
        let mut rows = self.outcomes(data, "claims", "");
        rows.push(("leased".into(), count(Some(in_states(data, &["leased"])))));
        let held = scopes_of(data).filter_map(|scope| scope["held"].as_f64()).sum();
        rows.push(("held with bytes".into(), count(Some(held))));
        if let Some(window) = data.pointer("/counters/window").and_then(Value::as_object) {
            let all = window.values().filter_map(Value::as_f64).sum();
            let hits = window.get("hit").and_then(Value::as_f64);
            rows.push((
                "window hits".into(),
                format!("{} of {}", count(hits.or(Some(0.0))), count(Some(all))),
            ));
        }
        Stage {
            name: "Ledger",
            level: Level::Fine,
            figure: rate(self.growth(|data| counted(data, "claims"))),
            unit: "claims/s",
            rows,
        }
    }

    fn effects(&self, data: &Value) -> Stage {
        let of = |states: &[&str]| in_states(data, states);
        let level = match (of(&["dead"]), of(&["lost", "parked"])) {
            (dead, _) if dead > 0.0 => Level::Act,
            (_, waiting) if waiting > 0.0 => Level::Look,
            _ => Level::Fine,
        };
        // What matters most comes first: a narrow terminal shows no more.
        let now = per_s(self.growth_of_count(|data| in_states(data, &["done", "finished"])));
        let mut rows = vec![("dead letters".to_owned(), count(Some(of(&["dead"])))), ("now".to_owned(), now)];
        for (name, states) in [("parked", "parked"), ("retrying", "retry"), ("lost", "lost")] {
            rows.push((name.to_owned(), count(Some(of(&[states])))));
        }
        Stage { name: "Effects", level, figure: count(Some(of(&["done", "finished"]))), unit: "done", rows }
    }

    fn read_model(&self, data: &Value) -> Stage {
        let stale = data.pointer("/read_model/stale").and_then(Value::as_bool);
        let rejected = number(data, "/read_model/rejected");
        let level = match stale {
            None => Level::None,
            _ if rejected.is_some_and(|rejected| rejected > 0.0) => Level::Act,
            Some(true) => Level::Look,
            Some(false) => Level::Fine,
        };
        let synced = text(data, "/read_model/last_sync_at").map_or_else(|| "–".to_owned(), clock);
        Stage {
            name: "Read model",
            level,
            figure: synced,
            unit: "last sync",
            rows: vec![
                ("feed".into(), escaped(text(data, "/read_model/feed").unwrap_or("runs elsewhere"))),
                ("applied".into(), per_s(self.growth(|data| counted(data, "applied")))),
                ("rejected".into(), count(rejected)),
            ],
        }
    }

    /// The rate of each value of a metric's label.
    fn outcomes(&self, data: &Value, metric: &str, prefix: &str) -> Vec<(String, String)> {
        let values = data.pointer(&format!("/counters/{metric}")).and_then(Value::as_object);
        let names = values.into_iter().flat_map(|values| values.keys());
        names
            .map(|name| {
                let growth = self.growth(|data| data["counters"][metric].get(name).and_then(Value::as_f64));
                (format!("{prefix}{}", escaped(&name.replace('_', " "))), per_s(growth))
            })
            .collect()
    }

    fn scopes(&self, data: &Value) -> Vec<ScopeRow> {
        scopes_of(data)
            .map(|scope| {
                let name = scope["scope"].as_str().unwrap_or_default();
                let tenant = scope["tenant"].as_str();
                let counts = COLUMNS.map(|(_, states)| states_of(scope, states) as u64);
                let growth = self.growth_of_count(|data| {
                    let same = |other: &&Value| {
                        other["scope"] == scope["scope"] && other["tenant"] == scope["tenant"]
                    };
                    scopes_of(data).find(same).map_or(0.0, |scope| states_of(scope, &["done", "finished"]))
                });
                ScopeRow {
                    name: tenant.map_or_else(|| escaped(name), |tenant| escaped(&format!("{tenant}/{name}"))),
                    counts: counts.into(),
                    done_per_s: rate(growth),
                }
            })
            .collect()
    }
}

fn keep(samples: &mut VecDeque<Sample>, sample: Sample) {
    samples.push_back(sample);
    if samples.len() > SAMPLES {
        samples.pop_front();
    }
}

/// How fast a number grows over samples. A server that was started again counts from 0.
fn growth(
    samples: &VecDeque<Sample>,
    at: impl Fn(&Sample) -> Instant,
    pick: impl Fn(&Value) -> Option<f64>,
) -> Option<f64> {
    let last = samples.back()?;
    let last_value = pick(&last.data)?;
    let (mut first, mut before) = (None, f64::INFINITY);
    for sample in samples.iter().rev() {
        match pick(&sample.data) {
            Some(value) if value <= before => {
                before = value;
                first = Some((at(sample), value));
            }
            _ => break,
        }
    }
    let (began, value) = first?;
    let span = at(last).saturating_duration_since(began);
    (span >= SPAN_MIN).then(|| (last_value - value) / span.as_secs_f64())
}

fn bus(data: &Value) -> Stage {
    let lags = data.pointer("/bus/lag").and_then(Value::as_array);
    let mut groups: Vec<(f64, String)> = lags
        .into_iter()
        .flatten()
        .map(|group| {
            (group["records"].as_f64().unwrap_or(0.0), escaped(group["scope"].as_str().unwrap_or_default()))
        })
        .collect();
    groups.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let worst = groups.first().map(|(records, _)| *records);
    let level = match (data.pointer("/bus/bus"), worst) {
        (None, _) => Level::None,
        (_, Some(worst)) if worst > 10_000.0 => Level::Look,
        _ => Level::Fine,
    };
    let mut rows = vec![("topic".to_owned(), escaped(text(data, "/bus/topic").unwrap_or("–")))];
    rows.extend(
        groups.into_iter().take(3).map(|(records, scope)| (format!("lag of {scope}"), count(Some(records)))),
    );
    Stage { name: "Bus", level, figure: count(worst), unit: "records lag", rows }
}

fn scopes_of(data: &Value) -> impl Iterator<Item = &Value> {
    data["scopes"].as_array().into_iter().flatten()
}

fn states_of(scope: &Value, states: &[&str]) -> f64 {
    states.iter().filter_map(|state| scope["states"].get(state).and_then(Value::as_f64)).sum()
}

fn in_states(data: &Value, states: &[&str]) -> f64 {
    scopes_of(data).map(|scope| states_of(scope, states)).sum()
}

fn number(data: &Value, pointer: &str) -> Option<f64> {
    data.pointer(pointer).and_then(Value::as_f64)
}

fn text<'d>(data: &'d Value, pointer: &str) -> Option<&'d str> {
    data.pointer(pointer).and_then(Value::as_str)
}

/// The sum of a counter over its labels; 0 if nothing was counted yet.
fn counted(data: &Value, metric: &str) -> Option<f64> {
    let counters = data["counters"].as_object()?;
    let values = counters.get(metric).and_then(Value::as_object);
    Some(values.into_iter().flat_map(|values| values.values()).filter_map(Value::as_f64).sum())
}

/// The time of day in `2026-11-18T05:20:14.123Z`.
fn clock(time: &str) -> String {
    escaped(time.get(11..19).unwrap_or(time))
}

fn count(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| crate::print::grouped(value.max(0.0) as u64))
}

fn rate(value: Option<f64>) -> String {
    match value {
        None => "–".to_owned(),
        Some(value) if value > 0.0 && value < 10.0 => format!("{value:.1}"),
        value => count(value.map(f64::round)),
    }
}

fn per_s(value: Option<f64>) -> String {
    format!("{}/s", rate(value))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An answer in which every name from outside is hostile.
    pub fn answer(done: u64, scope: &str) -> Value {
        json!({
            "now": format!("2026-11-18T05:20:14.{done:06}Z"),
            "age_s": 0.01,
            "scopes": [
                {"tenant": null, "scope": scope, "states": {"done": done, "dead": 2, "leased": 1}, "held": 3},
                {"tenant": "acme", "scope": "billing", "states": {"done": 5}, "held": 0},
            ],
            "keys": {"open": 1, "swept_at": null},
            "journal": {"events": 10 * done, "aggregates": 7, "exact": true, "last": "9"},
            "relay": {"leads": true, "published": 5, "position": "9", "behind": 0, "parked": 0, "lag_s": 0.04},
            "relay_state": "leads",
            "bus": {"bus": "embedded", "topic": scope, "lag": [{"scope": scope, "records": 12_345}]},
            "read_model": {"feed": "runs", "last_sync_at": "2026-11-18T05:20:13.9Z", "stale": false, "rejected": 0},
            "counters": {"claims": {"claimed": done}, "writes": {}},
        })
    }

    #[test]
    fn figures_say_what_the_server_counted_and_how_fast_it_grows() {
        let (mut samples, began) = (Samples::default(), Instant::now());
        assert_eq!(samples.figures(), Figures::default());
        samples.add(began, answer(1_000, "mailer"));
        let first = samples.figures();
        assert_eq!((first.at.as_str(), first.stages[5].figure.as_str()), ("05:20:14", "1,005"));
        assert_eq!(first.stages[4].figure, "–", "one sample makes no rate");
        samples.add(began + Duration::from_secs(2), answer(1_100, "mailer"));
        let figures = samples.figures();
        let stage = |name: &str| figures.stages.iter().find(|stage| stage.name == name).unwrap().clone();
        assert_eq!(stage("Ledger").figure, "50");
        assert!(stage("Journal").rows.contains(&("appended".into(), "500/s".into())));
        assert_eq!((stage("Effects").level, stage("Bus").level), (Level::Act, Level::Look));
        assert_eq!(
            (stage("Relay").figure.as_str(), stage("Read model").figure.as_str()),
            ("0.0", "05:20:13")
        );
        assert_eq!(figures.scopes[0].counts, [2, 0, 0, 1, 1_100, 0, 0]);
        assert_eq!(
            (figures.scopes[0].done_per_s.as_str(), figures.scopes[1].name.as_str()),
            ("50", "acme/billing")
        );
        assert_eq!(samples.rates()["done_per_s"], 50.0);
        // A server that was started again counts from 0.
        samples.add(began + Duration::from_secs(4), answer(10, "mailer"));
        assert_eq!(samples.figures().stages[4].figure, "–");
    }

    /// T421: a ledger that takes long to count has one count in many answers. Its rates are those between counts.
    #[test]
    fn t421_rates_are_of_counts_and_not_of_answers() {
        let (mut samples, began) = (Samples::default(), Instant::now());
        let counts = [(1_000_u64, 1_000_u64), (2_000, 1_500)];
        for (number, (second, done)) in counts.into_iter().enumerate() {
            for more in 0..30 {
                let mut data = answer(done, "mailer");
                data["age_s"] = json!(2 * more + 100);
                data["counters"]["claims"]["claimed"] = json!(1_000 * number + 4 * more);
                samples.add(began + Duration::from_secs(second + 2 * more as u64 + 100), data);
            }
        }
        assert_eq!(samples.rates()["done_per_s"], 0.5);
        assert_eq!(samples.rates()["claims_per_s"], 2.0, "what the server counts by itself is as of now");
        assert_eq!(samples.figures().age_s, 158);
    }

    /// What a caller of one tenant gets has holes.
    #[test]
    fn what_is_not_there_is_a_dash() {
        let mut samples = Samples::default();
        samples.add(
            Instant::now(),
            json!({"now": "x", "scopes": [], "keys": null, "journal": null, "relay": null,
            "relay_state": null, "bus": null, "read_model": null, "counters": null}),
        );
        let figures = samples.figures();
        assert_eq!(figures.stages.len(), 7);
        assert_eq!((figures.stages[1].figure.as_str(), figures.stages[1].level), ("–", Level::None));
        // An answer of a server that is none of ours.
        samples.add(Instant::now(), json!(7));
        assert_eq!(samples.figures().stages.len(), 7);
    }
}
