//! Projections: documents per second into OpenSearch, and records per second into the cache, against bare clients that
//! write the same.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax::backend::opensearch::{MissingAlias, SearchProjection, SearchSettings};
use hapax::backend::redis::{CacheProjection, CacheSettings};
use hapax::projection::{Applied, Change, Name, Projection};
use hapax::records::{ModuleSlug, OfTenant, Payload, Record};
use hapax::{Origin, Time, Topic};
use uuid::Uuid;

use crate::harness::{Contestant, Fallible, Goal, Missing, Options, Report, interleave, rate};

/// How many changes are applied at once, as a consumer's batch has them.
const BATCH: usize = 500;
const AT: i64 = 1_700_000_000_000_000;

fn variable(names: [&str; 2], what: &str) -> Fallible<String> {
    let found = names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    found.ok_or_else(|| Missing(format!("no {what}: set {}", names[0])).into())
}

/// So many changes of records that nobody had before.
fn changes(next: &AtomicU64, count: usize) -> hapax::Result<Vec<Change>> {
    let from = next.fetch_add(count as u64, Ordering::Relaxed);
    let (module, at, topic) = (ModuleSlug::new("orders")?, Time::from_micros(AT), Topic::new("bench")?);
    let change = |n: u64| {
        let payload = Payload::new(format!(r#"{{"amount":{n},"status":"s{}","note":"{n:0>80}"}}"#, n % 10))?;
        let record = Record::new(module.clone(), Uuid::from_u128(u128::from(n + 1)), 1, payload, (at, at));
        let of = OfTenant { tenant: Uuid::nil(), record };
        Change::of_record(of, 1, Origin::new(topic.clone(), 0, -1))
    };
    (from..from + count as u64).map(change).collect()
}

async fn apply(projection: &dyn Projection, all: &[Change]) -> Fallible<()> {
    for some in all.chunks(BATCH) {
        for applied in projection.apply(some).await? {
            if applied != Applied::Newer {
                return Err(format!("a new record is {applied:?}").into());
            }
        }
    }
    Ok(())
}

/// The lines of a bulk request, as somebody would write them who has the same mapping.
fn lines(some: &[Change]) -> Fallible<String> {
    let mut body = String::new();
    for change in some {
        let payload = change.payload.as_ref().map(Payload::as_str).unwrap_or_default();
        let (at, updated) = (change.created_at, change.updated_at);
        writeln!(
            body,
            r#"{{"index":{{"_id":"{}","version":{},"version_type":"external"}}}}"#,
            Name::of(change),
            change.version.as_u64()
        )?;
        writeln!(
            body,
            r#"{{"tenant":"{}","module":"{}","id":"{}","seq":1,"created_at":"{at}","updated_at":"{updated}","deleted":false,"payload":{payload}}}"#,
            change.tenant, change.module, change.id
        )?;
    }
    Ok(body)
}

async fn search(options: &Options) -> Fallible<Report> {
    let engine = variable(["HAPAX_BENCH_OPENSEARCH_URL", "HAPAX_TEST_OPENSEARCH_URL"], "OpenSearch")?;
    let (count, next) = (options.events(50_000), &AtomicU64::new(0));
    let mut settings = SearchSettings::default();
    (settings.replicas, settings.timeout) = (0, Duration::from_secs(60));
    let alias = |what: &str| format!("bench_{what}_{}", Uuid::new_v4().simple());
    let (ours, theirs) = (alias("hapax"), alias("bare"));
    let open = async |alias: &str| -> Fallible<SearchProjection> {
        let url = format!("{engine}/{alias}");
        let opened = SearchProjection::connect(&url, settings.clone(), MissingAlias::Create).await;
        Ok(opened.map_err(|error| Missing(error.chain()))?)
    };
    // Both have an index of the same mapping.
    let (projection, _same) = (&open(&ours).await?, open(&theirs).await?);
    let (http, url) = (&reqwest::Client::new(), &format!("{engine}/{theirs}.write/_bulk"));
    let result = interleave(
        options.rounds,
        vec![
            Contestant::new("hapax: changes applied to the projection", || async move {
                let all = changes(next, count)?;
                rate(count, apply(projection, &all)).await
            }),
            Contestant::new("a bare client: the same documents in bulk", || async move {
                let all = changes(next, count)?;
                rate(count, async {
                    for some in all.chunks(BATCH) {
                        let request = http.post(url).header("content-type", "application/x-ndjson");
                        let answer = request.body(lines(some)?).send().await?.error_for_status()?;
                        let answer: serde_json::Value = serde_json::from_slice(&answer.bytes().await?)?;
                        if answer["errors"] != false {
                            return Err(
                                format!("the engine refused documents: {}", answer["items"][0]).into()
                            );
                        }
                    }
                    Ok(())
                })
                .await
            }),
        ],
    )
    .await;
    for alias in [&ours, &theirs] {
        let found: serde_json::Value = serde_json::from_slice(
            &http.get(format!("{engine}/_alias/{alias}")).send().await?.bytes().await?,
        )?;
        for index in found.as_object().into_iter().flat_map(|found| found.keys()) {
            http.delete(format!("{engine}/{index}")).send().await?.error_for_status()?;
        }
    }
    let lines = result?;
    let ratio = lines[0].median() / lines[1].median();
    Ok(Report {
        title: format!("projection: documents into OpenSearch, {BATCH} at once"),
        unit: "documents/s",
        goals: vec![Goal::at_least("hapax / bare bulk", ratio, 0.8)],
        lines,
        notes: vec!["without the consumer and its ledger".into()],
    })
}

async fn cache(options: &Options) -> Fallible<Report> {
    let url = variable(["HAPAX_BENCH_VALKEY_URL", "HAPAX_TEST_VALKEY_URL"], "Valkey")?;
    let (count, next) = (options.events(50_000), &AtomicU64::new(0));
    let prefix = format!("bench:{}", Uuid::new_v4().simple());
    let mut settings = CacheSettings::default();
    settings.prefix.clone_from(&prefix);
    let opened = CacheProjection::connect(&url, settings, Duration::from_hours(24)).await;
    let projection = &opened.map_err(|error| Missing(error.chain()))?;
    let connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
    let (bare, prefix) = (&connection, &prefix);
    let lines = interleave(
        options.rounds,
        vec![
            Contestant::new("hapax: set if newer", || async move {
                let all = changes(next, count)?;
                rate(count, apply(projection, &all)).await
            }),
            Contestant::new("a bare client: SET with an expiry, in pipelines", || async move {
                let all = changes(next, count)?;
                rate(count, async {
                    for some in all.chunks(BATCH) {
                        let mut pipe = redis::pipe();
                        for change in some {
                            let key = format!("{prefix}:bare:{}", Name::of(change));
                            let value = change.payload.as_ref().map(Payload::as_str).unwrap_or_default();
                            pipe.set_ex(key, value, 86_400).ignore();
                        }
                        pipe.query_async::<()>(&mut bare.clone()).await?;
                    }
                    Ok(())
                })
                .await
            }),
        ],
    )
    .await?;
    let mut connection = connection.clone();
    let mut cursor = "0".to_owned();
    loop {
        let (next, keys): (String, Vec<String>) = redis::cmd("SCAN")
            .arg(&cursor)
            .arg("MATCH")
            .arg(format!("{prefix}*"))
            .arg("COUNT")
            .arg(1000)
            .query_async(&mut connection)
            .await?;
        if !keys.is_empty() {
            redis::cmd("UNLINK").arg(keys).query_async::<()>(&mut connection).await?;
        }
        cursor = next;
        if cursor == "0" {
            break;
        }
    }
    Ok(Report {
        title: format!("projection: records into Valkey, {BATCH} at once"),
        unit: "records/s",
        goals: Vec::new(),
        lines,
        notes: vec!["the bare client keeps no version, so a late change would replace a newer one".into()],
    })
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    Ok(vec![search(options).await?, cache(options).await?])
}
