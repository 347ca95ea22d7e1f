//! What `deploy/` names is there: metrics, their labels and values, runbooks, settings.
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hapax::config::SETTINGS;
use serde_json::Value;

use crate::yaml;

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
        faults.extend(unknown.map(|word| format!("{word} is neither a metric nor a label of one")));
        faults
    }
}

#[test]
fn a_wrong_expression_is_reported() {
    let metrics = Metrics::documented();
    let faults = |expression: &str| metrics.faults(expression).join("; ");
    assert_eq!(faults("sum by (relay) (rate(relay_published_total[5m])) > 0.1"), "");
    assert_eq!(
        faults("rate(relay_sent_total[5m])"),
        "relay_sent_total is neither a metric nor a label of one"
    );
    assert_eq!(faults("sum by (topic) (relay_position)"), "topic is neither a metric nor a label of one");
    assert_eq!(faults(r#"relay_leads_total{why="fenced"}"#), "relay_leads_total has no label why");
    assert_eq!(
        faults(r#"relay_leads_total{change=~"fenced|gone"}"#),
        "change of relay_leads_total is never gone"
    );
}

/// A text of an alert that people read.
fn text<'r>(rule: &'r Value, name: &str, at: &str) -> &'r str {
    let text = rule.pointer(at).and_then(Value::as_str).unwrap_or_default();
    assert!(!text.is_empty(), "{name} has no {at}");
    text
}

#[test]
fn every_alert_names_metrics_that_are_there_and_has_a_runbook() {
    let (metrics, runbooks) = (Metrics::documented(), read("docs/operations.md"));
    let alerts = yaml::parse(&read("deploy/prometheus/alerts.yaml"));
    let section = runbooks
        .split("\n## Alerts\n")
        .nth(1)
        .and_then(|rest| rest.split("\n## ").next())
        .expect("a section on alerts");
    let headings: BTreeSet<_> = section.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let mut named = BTreeSet::new();
    let rules = alerts["groups"].as_array().expect("groups").iter();
    for rule in rules.flat_map(|group| group["rules"].as_array().expect("rules")) {
        let name = rule["alert"].as_str().expect("the name of a rule");
        let fields: BTreeSet<_> = rule.as_object().expect("a rule").keys().map(String::as_str).collect();
        assert_eq!(fields, ["alert", "annotations", "expr", "for", "labels"].into(), "the fields of {name}");
        let expression = text(rule, name, "/expr");
        assert_eq!(metrics.faults(expression), Vec::<String>::new(), "{name}: {expression}");
        let time = text(rule, name, "/for").strip_suffix('m').map(str::parse::<u32>);
        assert!(matches!(time, Some(Ok(_))), "how long {name} waits: {time:?}");
        assert!(
            text(rule, name, "/annotations/runbook_url")
                .ends_with(&format!("docs/operations.md#{}", name.to_lowercase())),
            "the runbook of {name}"
        );
        let severity = text(rule, name, "/labels/severity");
        assert!(["info", "warning", "critical"].contains(&severity), "the severity of {name}: {severity}");
        assert!(text(rule, name, "/annotations/summary").len() > 10, "the summary of {name}");
        assert!(named.insert(name), "{name} is there twice");
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
    let text = dashboard["panels"].to_string();
    for metric in
        ["analytics_lag_seconds", "analytics_rejected_total", "dedup_prevented_total", "relay_lag_seconds"]
    {
        assert!(text.contains(metric), "no panel shows {metric}");
    }
    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        if variable["type"] == "query" {
            let query = variable["query"].as_str().expect("a query");
            assert_eq!(metrics.faults(query), Vec::<String>::new(), "{query}");
        }
    }
}

/// The words of a file that name variables of ours.
fn variables(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| word.starts_with("HAPAX_"))
}

/// No container engine runs here, so only what the files name can be compared.
#[test]
fn what_containers_and_units_name_is_there() {
    let of = |secrets_only: bool| -> BTreeSet<String> {
        let settings = SETTINGS.iter().filter(|of| of.secret || !secrets_only);
        settings
            .flat_map(|of| std::iter::once(of.env()).chain(of.older_env.iter().map(|&name| name.to_owned())))
            .collect()
    };
    let (settings, secrets) = (of(false), of(true));
    for file in
        ["deploy/Dockerfile", "deploy/compose/compose.yaml", "deploy/hapax.service", "deploy/README.md"]
    {
        for word in variables(&read(file)) {
            let is_there = settings.contains(word)
                || word.strip_suffix("_FILE").is_some_and(|variable| secrets.contains(variable));
            assert!(is_there, "{file} names {word}, which no setting has");
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
}

/// The names in a list, or the names of a mapping.
fn names(of: &Value) -> BTreeSet<&str> {
    match of {
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        Value::Object(fields) => fields.keys().map(String::as_str).collect(),
        _ => BTreeSet::new(),
    }
}

/// The parts of the compose file name each other rightly, and each service says whether it is healthy.
#[test]
fn the_parts_of_the_compose_file_fit_together() {
    let file = read("deploy/compose/compose.yaml");
    let compose = yaml::parse(&file);
    let (services, secrets, volumes) =
        (&compose["services"], names(&compose["secrets"]), names(&compose["volumes"]));
    let known = names(services);
    for service in ["hapax", "postgres", "kafka", "valkey", "clickhouse"] {
        assert!(known.contains(service), "the compose file has no {service}");
    }
    let (mut used, mut mounted, mut silent) = (BTreeSet::new(), BTreeSet::new(), 0);
    for (name, service) in services.as_object().expect("services") {
        assert!(service["image"].is_string(), "{name} has no image");
        used.extend(names(&service["secrets"]));
        for secret in service["environment"].as_object().into_iter().flat_map(|of| of.values()) {
            if let Some(secret) = secret.as_str().and_then(|path| path.strip_prefix("/run/secrets/")) {
                assert!(names(&service["secrets"]).contains(secret), "{name} does not get {secret}");
            }
        }
        for volume in names(&service["volumes"]) {
            let (volume, path) = volume.split_once(':').expect("a volume and where it is");
            if let Some(file) = volume.strip_prefix("./") {
                read(&format!("deploy/compose/{file}")); // it is there
            } else {
                mounted.insert(volume);
            }
            assert!(path.starts_with('/'), "{name} mounts {volume} at {path}");
        }
        for (on, how) in service["depends_on"].as_object().into_iter().flatten() {
            assert!(known.contains(on.as_str()), "{name} waits for {on}, which is not there");
            let condition = how["condition"].as_str().unwrap_or_default();
            let is_checked = services[on]["healthcheck"]["disable"] != true;
            assert!(condition != "service_healthy" || is_checked, "{name} waits for the health of {on}");
        }
        // The image of hapax has a check of its own; one that is switched off says why.
        let health = &service["healthcheck"];
        silent += usize::from(health["disable"] == true);
        let is_ours = service["image"] == "hapax" && read("deploy/Dockerfile").contains("\nHEALTHCHECK ");
        assert!(health["test"].is_array() || health["disable"] == true || is_ours, "the health of {name}");
    }
    let reasons = file.lines().filter(|line| line.contains("healthcheck: { disable: true } # ")).count();
    assert_eq!(silent, reasons, "services without a check of their health, and reasons");
    assert_eq!(used, secrets, "secrets that services get, and those that are there");
    assert_eq!(mounted, volumes, "volumes that services mount, and those that are there");
    let made = read("deploy/compose/make-secrets");
    for secret in secrets {
        let file = compose["secrets"][secret]["file"].as_str().expect("a file");
        assert_eq!(file, format!("./secrets/{secret}"));
        assert!(made.contains(secret), "make-secrets does not make {secret}");
    }
}

/// What `make-secrets` makes is complete, can be read by hapax, and stays when it is run again.
#[test]
fn secrets_are_made_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let script = dir.path().join("make-secrets");
    std::fs::write(&script, read("deploy/compose/make-secrets")).expect("a copy");
    let run = || {
        let mut sh = std::process::Command::new("sh");
        sh.arg(&script).env("HAPAX", "echo").stdout(std::process::Stdio::null());
        assert!(sh.status().expect("sh").success(), "make-secrets fails");
        let secret = |name: &str| {
            std::fs::read_to_string(dir.path().join("secrets").join(name))
                .unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        let compose = yaml::parse(&read("deploy/compose/compose.yaml"));
        let all: BTreeMap<String, String> =
            names(&compose["secrets"]).into_iter().map(|name| (name.to_owned(), secret(name))).collect();
        all
    };
    let made = run();
    for (url, password) in [
        ("database_url", "database_password"),
        ("window_url", "window_password"),
        ("analytics_url", "analytics_password"),
    ] {
        assert!(made[password].len() >= 32, "{password} is short");
        assert!(made[url].contains(&format!(":{}@", made[password])), "{url} has another password");
    }
    assert_eq!(run(), made, "the second run changes something");
}

/// By systemd's own check, where it is installed. It ends well whatever it finds, so it must say nothing.
#[test]
fn systemd_takes_the_unit() {
    let dir = tempfile::tempdir().expect("a folder");
    let verify = |unit: &str| {
        let file = dir.path().join("hapax.service");
        // The binary is not installed here.
        std::fs::write(&file, unit.replace("/usr/local/bin/hapax", "/bin/sh")).expect("a unit");
        let verify =
            std::process::Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file).output();
        verify.ok().map(|verified| {
            let said = String::from_utf8_lossy(&verified.stderr).into_owned();
            // It says things about other units of the machine too.
            said.lines().filter(|line| line.contains("hapax.service")).map(str::to_owned).collect::<Vec<_>>()
        })
    };
    let unit = read("deploy/hapax.service");
    let Some(said) = verify(&unit) else {
        eprintln!("systemd-analyze is not installed here: the unit is checked by its text only");
        return;
    };
    assert_eq!(said, Vec::<String>::new());
    let broken = verify(&unit.replace("DynamicUser=", "DynamicUsr=")).unwrap_or_default();
    assert!(broken.iter().any(|line| line.contains("DynamicUsr")), "it finds nothing: {broken:?}");
}
