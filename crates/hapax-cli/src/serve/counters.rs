//! What this process has counted, for the page: a few metrics, summed by one label.

use std::collections::BTreeMap;

/// What is shown: its name there, the metric, and the label by which it is split.
const SHOWN: [(&str, &str, Option<&str>); 9] = [
    ("claims", "dedup_claims_total", Some("outcome")),
    ("settles", "dedup_settles_total", Some("verdict")),
    ("leases_lost", "dedup_leases_lost_total", Some("cause")),
    ("window", "dedup_window_checks_total", Some("result")),
    ("swept", "dedup_swept_entries_total", None),
    ("published", "relay_published_total", None),
    ("applied", "analytics_changes_total", None),
    ("writes", "http_requests_total", Some("status")),
    ("requests", "http_requests_total", None),
];

/// Only these requests are keyed writes.
const WRITES: [&str; 3] = ["method=\"POST\"", "method=\"PUT\"", "method=\"DELETE\""];

/// The sums in a text of Prometheus.
pub fn sums(text: &str, prefix: &str) -> BTreeMap<&'static str, BTreeMap<String, f64>> {
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}_") };
    let mut sums: BTreeMap<&'static str, BTreeMap<String, f64>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        // The value is the last word; labels may have spaces.
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let Ok(value) = value.parse::<f64>() else { continue };
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let Some(name) = name.strip_prefix(&*prefix) else { continue };
        for (shown, metric, by) in SHOWN {
            if metric != name || (shown == "writes" && !is_write(labels)) {
                continue;
            }
            let key = match by {
                Some(by) => label(labels, by).unwrap_or_default(),
                None => "all".to_owned(),
            };
            *sums.entry(shown).or_default().entry(key).or_default() += value;
        }
    }
    sums
}

/// Whether a series counts requests that write records.
fn is_write(labels: &str) -> bool {
    labels.contains("route=\"/v1/modules/") && WRITES.iter().any(|method| labels.contains(method))
}

/// The value of a label. None of those that are shown has a quote in it.
fn label(labels: &str, name: &str) -> Option<String> {
    let start = labels.find(&format!("{name}=\""))? + name.len() + 2;
    let rest = &labels[start..];
    Some(rest[..rest.find('"')?].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_by_their_label() {
        let text = "# TYPE x counter\nhapax_dedup_claims_total{consumer_scope_id=\"a b\",outcome=\"claimed\"} 3\n\
                    hapax_dedup_claims_total{consumer_scope_id=\"c\",outcome=\"claimed\"} 4\n\
                    hapax_dedup_claims_total{consumer_scope_id=\"c\",outcome=\"duplicate\"} 1\n\
                    hapax_http_requests_total{method=\"POST\",route=\"/v1/modules/{slug}/records\",status=\"201\"} 5\n\
                    hapax_http_requests_total{method=\"GET\",route=\"/v1/modules/{slug}/records\",status=\"200\"} 9\n\
                    other_relay_published_total 7\nbroken\n";
        let sums = sums(text, "hapax");
        let expected = serde_json::json!({
            "claims": {"claimed": 7.0, "duplicate": 1.0}, "writes": {"201": 5.0}, "requests": {"all": 14.0},
        });
        assert_eq!(serde_json::to_value(&sums).unwrap(), expected);
    }
}
