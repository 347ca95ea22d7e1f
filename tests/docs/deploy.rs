//! What `deploy/` names is there: metrics, their labels and values, runbooks, settings.
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hapax::config::SETTINGS;

fn read(page: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page))
        .unwrap_or_else(|e| panic!("{page}: {e}"))
}

/// What PromQL has besides metrics and labels, as far as the files use it.
const PROMQL: &[&str] =
    &["and", "by", "deriv", "increase", "label_values", "max", "or", "rate", "sum", "up", "job"];

/// The cells of the rows of all Markdown tables, without backquotes.
fn rows(text: &str) -> impl Iterator<Item = Vec<String>> {
    text.lines().filter(|line| line.starts_with("| `")).map(|line| {
        line.trim_matches('|').split('|').map(|cell| cell.replace('`', " ").trim().to_owned()).collect()
    })
}

fn words(cell: &str) -> impl Iterator<Item = String> {
    cell.split_whitespace().map(str::to_owned)
}

/// Labels by metric, and values by metric and label, as the documents list them.
struct Metrics {
    labels: BTreeMap<String, BTreeSet<String>>,
    values: BTreeMap<(String, String), BTreeSet<String>>,
}

impl Metrics {
    fn documented() -> Self {
        let mut of = Metrics { labels: BTreeMap::new(), values: BTreeMap::new() };
        for page in ["docs/telemetry.md", "docs/server.md"] {
            for row in rows(&read(page)) {
                if let [name, kind, labels, _] = row.as_slice()
                    && ["counter", "gauge", "histogram"].contains(&kind.as_str())
                {
                    let mut labels: BTreeSet<_> = words(labels).collect();
                    if kind == "histogram" {
                        labels.insert("quantile".to_owned()); // it is shown as a summary
                    }
                    of.labels.insert(name.clone(), labels);
                }
                if let [name, label, values] = row.as_slice() {
                    of.values.insert((name.clone(), label.clone()), words(values).collect());
                }
            }
        }
        of
    }

    /// What is wrong with an expression.
    fn faults(&self, expression: &str) -> Vec<String> {
        let mut faults = Vec::new();
        let (mut metric, mut rest) = (None::<String>, expression);
        let mut labels_of_expression = BTreeSet::new();
        let mut named = Vec::new();
        while let Some(at) = rest.find(|c: char| c.is_ascii_lowercase() || c == '"' || c == '$') {
            rest = &rest[at..];
            if let Some(text) = rest.strip_prefix('"') {
                rest = text.split_once('"').map_or("", |(_, after)| after);
                continue;
            }
            let end = rest[1..]
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .map_or(rest.len(), |end| end + 1);
            let (word, after) = rest.split_at(end);
            rest = after;
            if word.starts_with('$') || PROMQL.contains(&word) || word.len() == 1 {
                continue; // a variable, a function, or the unit of a duration
            }
            if let Some(labels) = self.labels.get(word) {
                labels_of_expression.extend(labels.iter().cloned());
                metric = Some(word.to_owned());
            } else if let Some(matcher) = rest.strip_prefix("=~").or_else(|| rest.strip_prefix('=')) {
                let metric = metric.clone().unwrap_or_default();
                if !self.labels.get(&metric).is_some_and(|labels| labels.contains(word)) {
                    faults.push(format!("{metric} has no label {word}"));
                }
                let value = matcher
                    .strip_prefix('"')
                    .and_then(|text| text.split_once('"'))
                    .map_or("", |(value, _)| value);
                if let Some(known) = self.values.get(&(metric.clone(), word.to_owned())) {
                    let unknown = value.split('|').filter(|value| !known.contains(*value));
                    faults.extend(unknown.map(|value| format!("{word} of {metric} is never {value}")));
                }
            } else {
                named.push(word.to_owned()); // the labels of `by`, which come before their metric
            }
        }
        let unknown = named.into_iter().filter(|word| !labels_of_expression.contains(word));
        faults.extend(unknown.map(|word| format!("{word} is no metric, and no label of one")));
        faults
    }
}

#[test]
fn a_wrong_expression_is_told() {
    let metrics = Metrics::documented();
    let faults = |expression: &str| metrics.faults(expression).join("; ");
    assert_eq!(faults("sum by (relay) (rate(relay_published_total[5m])) > 0.1"), "");
    assert_eq!(faults("rate(relay_sent_total[5m])"), "relay_sent_total is no metric, and no label of one");
    assert_eq!(faults("sum by (topic) (relay_position)"), "topic is no metric, and no label of one");
    assert_eq!(faults(r#"relay_leads_total{why="fenced"}"#), "relay_leads_total has no label why");
    assert_eq!(
        faults(r#"relay_leads_total{change=~"fenced|gone"}"#),
        "change of relay_leads_total is never gone"
    );
}

#[test]
fn every_alert_names_metrics_that_are_there_and_has_a_runbook() {
    let (metrics, alerts, runbooks) =
        (Metrics::documented(), read("deploy/prometheus/alerts.yaml"), read("docs/operations.md"));
    let section = runbooks
        .split("\n## Alerts\n")
        .nth(1)
        .and_then(|rest| rest.split("\n## ").next())
        .expect("a section on alerts");
    let headings: BTreeSet<_> = section.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let mut named = BTreeSet::new();
    for rule in alerts.split("- alert: ").skip(1) {
        let name = rule.lines().next().unwrap_or_default();
        let line = |key: &str| {
            rule.lines()
                .find_map(|line| line.trim().strip_prefix(key))
                .unwrap_or_else(|| panic!("{name} has no {key}"))
        };
        let expression = line("expr: ").trim_matches('\'');
        assert_eq!(metrics.faults(expression), Vec::<String>::new(), "{name}: {expression}");
        assert!(
            line("runbook_url: ").ends_with(&format!("docs/operations.md#{}", name.to_lowercase())),
            "the runbook of {name}"
        );
        assert!(
            ["info", "warning", "critical"].iter().any(|severity| line("labels: ").contains(severity)),
            "the severity of {name}"
        );
        assert!(line("summary: ").len() > 10, "the summary of {name}");
        named.insert(name);
    }
    assert!(named.len() > 10, "{named:?}");
    assert_eq!(named, headings, "alerts, and the headings of their runbooks");
}

#[test]
fn the_dashboard_names_metrics_that_are_there() {
    let metrics = Metrics::documented();
    let dashboard: serde_json::Value =
        serde_json::from_str(&read("deploy/grafana/hapax.json")).expect("JSON");
    let (mut ids, mut expressions) = (BTreeSet::new(), 0);
    for panel in dashboard["panels"].as_array().expect("panels") {
        assert!(ids.insert(panel["id"].as_u64()), "an id that is there twice: {}", panel["id"]);
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().expect("an expression");
            assert_eq!(metrics.faults(expression), Vec::<String>::new(), "{}: {expression}", panel["title"]);
            expressions += 1;
        }
    }
    assert!(expressions > 10, "{expressions} expressions");
    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        if variable["type"] == "query" {
            let query = variable["query"].as_str().expect("a query");
            assert_eq!(metrics.faults(query), Vec::<String>::new(), "{query}");
        }
    }
}

/// No container engine and no systemd run here, so only what the files name can be compared.
#[test]
fn what_containers_and_units_name_is_there() {
    let settings: BTreeSet<String> = SETTINGS
        .iter()
        .flat_map(|of| std::iter::once(of.env()).chain(of.older_env.iter().map(|&name| name.to_owned())))
        .collect();
    for file in
        ["deploy/Dockerfile", "deploy/compose/compose.yaml", "deploy/hapax.service", "deploy/README.md"]
    {
        let text = read(file);
        for word in text
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| word.starts_with("HAPAX_"))
        {
            let variable = word.strip_suffix("_FILE").unwrap_or(word);
            assert!(settings.contains(variable), "{file} names {word}, which no setting has");
        }
    }
    let version = read("Cargo.toml");
    let rust = version
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "))
        .expect("rust-version")
        .trim_matches('"');
    assert!(
        read("deploy/Dockerfile").contains(&format!("FROM rust:{rust}-")),
        "the Dockerfile builds with another Rust than {rust}"
    );
    let compose = read("deploy/compose/compose.yaml");
    let (_, secrets) = compose.split_once("\nsecrets:\n").expect("secrets");
    let made = read("deploy/compose/make-secrets");
    for secret in secrets.lines().filter_map(|line| line.trim().split_once(':')).map(|(name, _)| name) {
        assert!(made.contains(secret), "make-secrets does not make {secret}");
    }
}
