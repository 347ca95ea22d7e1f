//! What is special about OpenSearch: aliases, its own versions and deletions, and answers for each document.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::routing::{any, get};
use hapax::Consumer;
use hapax::backend::memory::MemoryLedger;
use hapax::backend::opensearch::{MissingAlias, SearchProjection};
use hapax::bus::{Bus, MemoryBus, Record, TopicSettings};
use hapax::ledger::{Filter, Level, Operations as _, State};
use hapax::projection::{Applied, Projection, Projector, rebuild, settings};
use hapax::testing::projection::{ProjectionHarness as _, apply, change, name, shows};
use hapax::{Error, Scope};
use serde_json::{Value, json};

use crate::support::wait::until;
use crate::world::{RecordSource, ask, opensearch, search, search_settings, topic};
use crate::{ENGINE, SearchHarness};

async fn refused(url: &str) -> Error {
    SearchProjection::connect(url, search_settings(), MissingAlias::Refuse).await.unwrap_err()
}

/// An engine with default settings makes an index for whatever is written to. Ours has the defaults, and makes none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t61_a_missing_alias_is_reported_and_makes_no_index() {
    let harness = SearchHarness::new().await;
    let alias = &harness.alias;
    let message = refused(&format!("{}/{alias}", opensearch())).await.to_string();
    assert!(
        message.contains(&format!("there is no alias {alias}")) && message.contains("project rebuild"),
        "{message}"
    );
    let projection = harness.open().await;
    apply(&projection, &[change(1, 1, Some("{}"))]).await;
    // Somebody removes the index while a consumer runs.
    let (_, aliases) = ask("GET", &format!("_alias/{alias}"), None).await;
    let index = aliases.as_object().unwrap().keys().next().unwrap().clone();
    assert_eq!(ask("DELETE", &index, None).await.0, 200);
    let applied = apply(&projection, &[change(1, 2, Some("{}"))]).await;
    assert!(
        matches!(&applied[0], Applied::Busy { reason } if reason.contains("is not an alias")),
        "{applied:?}"
    );
    assert_eq!(ask("GET", alias, None).await.0, 404, "nothing was made");
    // Without `require_alias` the engine would have made one.
    let (status, _) = ask("PUT", &format!("{alias}-x/_doc/1"), Some("{}")).await;
    assert_eq!(status, 201, "the engine of this test makes indices by itself");
}

/// Aliases that were made for something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_that_is_not_ours_is_refused() {
    let harness = SearchHarness::new().await;
    let alias = harness.alias.clone();
    let url = |name: &str| format!("{}/{name}", opensearch());
    let foreign = format!("{alias}-foreign");
    assert_eq!(ask("PUT", &foreign, Some("{}")).await.0, 200);
    let message = refused(&url(&foreign)).await.to_string();
    assert!(message.contains("is an index"), "{message}");
    let add = |index: &str| json!({"actions": [{"add": {"index": index, "alias": alias}}]}).to_string();
    ask("POST", "_aliases", Some(&add(&foreign))).await;
    let message = refused(&url(&alias)).await.to_string();
    assert!(message.contains("not an index of records"), "{message}");
    let second = format!("{alias}-second");
    ask("PUT", &second, Some("{}")).await;
    ask("POST", "_aliases", Some(&add(&second))).await;
    let message = refused(&url(&alias)).await.to_string();
    assert!(message.contains("2 indices"), "{message}");
    // One of ours whose filter was taken away would show what is deleted.
    let bare = format!("{alias}-bare");
    let body =
        json!({"mappings": {"_meta": {"hapax": {"format": 1}}}, "aliases": {format!("{alias}-alias"): {}}});
    ask("PUT", &bare, Some(&body.to_string())).await;
    let message = refused(&url(&format!("{alias}-alias"))).await.to_string();
    assert!(message.contains("filter"), "{message}");
}

/// A search through the alias finds what is there, by its fields, and nothing that is deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t61_deleted_documents_are_hidden_and_types_do_not_collide() {
    let harness = SearchHarness::new().await;
    let projection = harness.open().await;
    let long = format!(r#"{{"color":"red","text":"{}"}}"#, "x".repeat(40_000));
    let changes = [
        change(1, 1, Some(r#"{"color":"red","when":"2026-01-01"}"#)),
        change(2, 1, Some(r#"{"color":"red","when":{"year":2026}}"#)),
        change(3, 1, Some(r#"{"color":{"name":"red"},"when":17}"#)),
        change(4, 1, Some(&long)),
    ];
    let applied = apply(&projection, &changes).await;
    assert!(applied.iter().all(|one| *one == Applied::Newer), "{applied:?}");
    apply(&projection, &[change(2, 2, None)]).await;
    projection.refresh().await.unwrap();
    let found = async |query: Value| {
        let body = json!({"query": query, "sort": ["id"], "_source": ["id"]}).to_string();
        let (_, answer) = ask("POST", &format!("{}/_search", harness.alias), Some(&body)).await;
        let hits = answer["hits"]["hits"].as_array().unwrap().clone();
        hits.iter().map(|hit| hit["_id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(found(json!({"term": {"payload.color": "red"}})).await, [name(1).to_string()], "2 is deleted");
    assert_eq!(found(json!({"term": {"payload.color.name": "red"}})).await, [name(3).to_string()]);
    // A text that is too long to be indexed: the record is found by its names, and whole.
    let all = [1, 3, 4].map(|id| name(id).to_string());
    assert_eq!(found(json!({"term": {"module": "orders"}})).await, all);
    shows(&projection, &changes[3]).await;
}

/// One document that the engine refuses is dead, and its neighbours are written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t322_a_document_that_is_refused_fails_alone() {
    let harness = SearchHarness::new().await;
    let alias = &harness.alias;
    // An index whose owner has narrowed a field.
    let body = json!({
        "mappings": {"_meta": {"hapax": {"format": 1}}, "properties": {"payload": {"properties": {"when": {"type": "date"}}}}},
        "aliases": {
            alias.as_str(): {"filter": {"term": {"deleted": false}}}, format!("{alias}.write"): {"is_write_index": true},
        },
    });
    assert_eq!(ask("PUT", &format!("{alias}-own"), Some(&body.to_string())).await.0, 200);
    let projection = harness.open().await;
    let changes = [
        change(1, 1, Some("{}")),
        change(2, 1, Some(r#"{"when":"never"}"#)),
        change(3, 1, Some(r#"{"when":"2026-01-01"}"#)),
    ];
    let applied = apply(&projection, &changes).await;
    assert_eq!((&applied[0], &applied[2]), (&Applied::Newer, &Applied::Newer));
    assert!(matches!(&applied[1], Applied::Rejected { reason } if reason.contains("when")), "{applied:?}");
}

/// The engine is killed after a deletion, and forgets its own deletions; ours is a document. Late updates come afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t61_a_deletion_survives_a_restart_of_the_engine() {
    let _alone = ENGINE.write().await;
    let alias = crate::support::valkey::fresh_name();
    let projection = search(&alias).await;
    let (gone, kept) = (change(1, 3, None), change(2, 2, Some(r#"{"kept":true}"#)));
    apply(&projection, &[change(1, 1, Some("{}")), kept.clone()]).await;
    apply(&projection, std::slice::from_ref(&gone)).await;
    let services = |command: &'static str| async move {
        let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/services");
        let status =
            tokio::process::Command::new(script).args([command, "opensearch"]).status().await.unwrap();
        assert!(status.success(), "services {command} opensearch");
    };
    services("kill").await;
    let away = projection.apply(&[change(1, 2, Some("{}"))]).await.unwrap_err();
    assert!(away.is_retryable(), "{away}");
    services("up").await;
    // What was acknowledged is there, and decides.
    assert_eq!(
        apply(&projection, &[change(1, 2, Some("{}")), change(2, 1, Some("{}"))]).await,
        [Applied::Stale, Applied::Stale]
    );
    shows(&projection, &gone).await;
    shows(&projection, &kept).await;
    crate::world::remove_indices(&alias);
}

/// A server with prepared answers.
async fn pretender(version: Value, alias: &'static str, bulk: Vec<Value>) -> String {
    let answers = Arc::new(Mutex::new(VecDeque::from(bulk)));
    let about = json!({"index-1": {
        "aliases": {alias: {"filter": {"term": {"deleted": false}}}, format!("{alias}.write"): {}},
        "mappings": {"_meta": {"hapax": {"format": 1}}},
    }});
    let bulk = move || async move {
        let next = answers.lock().unwrap().pop_front();
        next.unwrap_or_else(|| json!({"items": [{"index": {"status": 201}}]})).to_string()
    };
    let router = Router::new()
        .route("/", get(move || async move { json!({ "version": version }).to_string() }))
        .route(&format!("/{alias},{alias}.write"), get(move || async move { about.to_string() }))
        .route(&format!("/{alias}.write/_bulk"), any(bulk));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/{alias}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// Another engine, or one that is too old: a sentence, before anything is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t325_another_engine_is_refused() {
    for (version, expected_text) in [
        (json!({"number": "8.15.0"}), "not OpenSearch"),
        (json!({"number": "2.6.0", "distribution": "opensearch"}), "version 2.6.0"),
        (json!({}), "version unknown"),
    ] {
        let url = pretender(version, "records", Vec::new()).await;
        let error = refused(&url).await;
        let text = error.to_string();
        assert!(
            matches!(error, Error::Unsupported(_))
                && text.contains(expected_text)
                && text.contains("2.7 or later"),
            "{text}"
        );
    }
    let nobody = refused("http://127.0.0.1:1/records").await;
    assert!(nobody.is_retryable() && nobody.to_string().contains("127.0.0.1:1"), "{nobody}");
}

/// Through a consumer: a full engine (429) costs no attempt, a conflict (409) is done, a refusal (400) is dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t322_a_full_engine_costs_no_attempt_and_a_refusal_is_dead() {
    let item = |status: u16| json!({"items": [{"index": {"status": status, "error": {"reason": "as expected_text"}}}]});
    let bulk = vec![item(429), item(429), item(429), item(409), item(400), item(500)];
    let url = pretender(json!({"number": "2.19.6", "distribution": "opensearch"}), "records", bulk).await;
    let projection = SearchProjection::connect(&url, search_settings(), MissingAlias::Refuse).await.unwrap();
    let world = RecordSource::new().await;
    world.write(1).await; // a creation and an update of one record: one after the other
    world.write(1).await;
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    let records: Vec<Record> = published(&world).await;
    for answer in bus.publish(&topic(), &records).await.unwrap() {
        answer.unwrap();
    }
    let ledger = Arc::new(MemoryLedger::default());
    let mut settings = settings(Scope::new("search").unwrap(), topic());
    settings.attempts_max = 2; // fewer than the engine is full
    (settings.concurrency, settings.batch_max) = (1, 1); // one answer for one event
    settings.backoff_base = Duration::from_millis(10);
    settings.backoff_max = Duration::from_millis(20);
    let consumer = Consumer::builder(bus, Arc::clone(&ledger)).settings(settings).build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased_batch(Projector::new(projection, 1).unwrap()));
    until("all is through", async || handle.progress().passed.values().sum::<u64>() == 4).await;
    handle.stop();
    let counts = running.await.unwrap().unwrap();
    assert_eq!((counts["done"], counts["dead"]), (3, 1), "{counts:?}");
    let dead = Filter { states: vec![State::Dead], ..Filter::default() };
    let dead = ledger.list(&dead, None, 10).await.unwrap().entries;
    let reason = dead[0].reason.clone().unwrap();
    assert!(reason.contains("400") && reason.contains("as expected_text"), "{reason}");
    let done = Filter { states: vec![State::Done], ..Filter::default() };
    let attempts: u32 =
        ledger.list(&done, None, 10).await.unwrap().entries.iter().map(|entry| entry.attempts).sum();
    assert_eq!(
        attempts, 4,
        "three that were done at their first attempt, one of them after a 500: 429 counts nothing"
    );
}

/// The records that a relay publishes.
async fn published(world: &RecordSource) -> Vec<Record> {
    use hapax::bus::{BusEvent, Subscription};
    world.relay("main").await;
    let subscription = Subscription::new("look", [topic()]).unwrap();
    let mut subscriber = world.bus.subscribe(subscription).await.unwrap();
    let mut records = Vec::new();
    while records.len() < 4 {
        if let BusEvent::Records(received) = subscriber.next().await.unwrap() {
            records.extend(received.into_iter().map(|received| received.record));
        }
    }
    records
}

/// A rebuild while a consumer writes: what it wrote to the old index while the new one was filled is in the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rebuild_under_writes_loses_nothing() {
    let harness = SearchHarness::new().await;
    let world = Arc::new(RecordSource::new().await);
    world.write(40).await;
    world.relay("main").await;
    let settings = settings(Scope::new("search").unwrap(), topic());
    let consumer = Consumer::builder(Arc::clone(&world.bus) as Arc<dyn Bus>, MemoryLedger::default())
        .settings(settings)
        .build()
        .unwrap();
    let handle = consumer.handle();
    let projector = Projector::new(harness.open().await, 1).unwrap();
    let running = tokio::spawn(consumer.leased_batch(projector));
    let writer = tokio::spawn({
        let world = Arc::clone(&world);
        async move {
            for _ in 0..4 {
                world.write(10).await;
                world.relay("main").await;
            }
        }
    });
    for _ in 0..2 {
        let mut history = world.history().await;
        let rebuilt = rebuild(&harness.open().await, &mut history).await.unwrap();
        assert_eq!(rebuilt.rejected, 0, "{rebuilt:?}");
    }
    writer.await.unwrap();
    let projection = harness.open().await;
    until("the projection is what the records are", async || {
        world.verify(&projection).await.differences.is_empty()
    })
    .await;
    handle.stop();
    running.await.unwrap().unwrap();
    let (_, aliases) = ask("GET", &format!("{}-*/_alias", harness.alias), None).await;
    assert_eq!(aliases.as_object().unwrap().len(), 1, "no old index is left: {aliases}");
}

/// The index behind an alias.
async fn index_of(alias: &str) -> String {
    let (_, answer) = ask("GET", &format!("_alias/{alias}"), None).await;
    answer.as_object().unwrap().keys().next().unwrap().clone()
}

/// The first of two rebuilds switches just before the second one gives its index up: the second one leaves it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t355_a_rebuild_never_removes_an_index_that_was_switched_to() {
    let harness = SearchHarness::new().await;
    let projection = harness.open().await;
    let kept = change(1, 1, Some("{}"));
    // Many tries, since the second one must list before the first one switches, and remove afterwards.
    for _ in 0..12 {
        let first = projection.begin_rebuild().await.unwrap();
        first.apply(std::slice::from_ref(&kept)).await.unwrap();
        let (switched, second) = tokio::join!(first.switch(), projection.begin_rebuild());
        second.unwrap();
        match switched {
            // Whichever came first: the alias stands for an index, and it has the record or never got it.
            Ok(()) => shows(&projection, &kept).await,
            Err(error) => assert!(matches!(error, Error::Fenced { .. }), "{error}"),
        }
        assert_eq!(ask("GET", &harness.alias, None).await.0, 200, "the alias stands for an index");
    }
    // A rebuild that was given up says so and changes nothing.
    let first = projection.begin_rebuild().await.unwrap();
    let _second = projection.begin_rebuild().await.unwrap();
    let before = index_of(&harness.alias).await;
    assert!(matches!(first.switch().await.unwrap_err(), Error::Fenced { .. }));
    assert!(matches!(first.apply(&[kept]).await.unwrap_err(), Error::Fenced { .. }));
    assert_eq!(index_of(&harness.alias).await, before);
}

/// Every field that a search can name is compared, and one damaged document does not hide the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t353_each_changed_field_of_a_document_is_named() {
    let harness = SearchHarness::new().await;
    let world = RecordSource::new().await;
    world.write(12).await;
    let projection = harness.open().await;
    apply(&projection, &world.changes().await).await;
    assert!(world.verify(&projection).await.is_equal());
    let index = index_of(&harness.alias).await;
    let live: Vec<_> = world.changes().await.into_iter().filter(|one| one.version.seq() == 2).collect();
    let fields = [
        ("tenant", json!("00000000-0000-0000-0000-000000000009"), "tenant"),
        ("module", json!("others"), "module"),
        ("id", json!("00000000-0000-0000-0000-000000000009"), "id"),
        ("seq", json!(7), "seq is 7"),
        ("created_at", json!("2001-01-01"), "created_at"),
        ("updated_at", json!("2001-01-01T00:00:00Z"), "different content"),
        ("payload", Value::Null, "no payload"),
        ("large_payload", json!({"n": 1}), "both"),
    ];
    let live: Vec<_> = live.into_iter().filter(|one| !matches!(one.version.seq(), 3..)).collect();
    let documents: Vec<_> = live.iter().map(hapax::projection::Name::of).collect();
    let mut expected = Vec::new();
    let mut records = documents.iter();
    for (field, value, expected_text) in fields {
        let name = loop {
            // Those that were deleted later have another version.
            let name = records.next().expect("enough records");
            let (_, found) = ask("GET", &format!("{index}/_doc/{name}"), None).await;
            if found["_version"] == json!((1_u64 << 48) + 2) {
                break name;
            }
        };
        let (_, found) = ask("GET", &format!("{index}/_doc/{name}"), None).await;
        let mut source = found["_source"].clone();
        source[field] = value;
        let path = format!("{index}/_doc/{name}?version={}&version_type=external_gte", found["_version"]);
        assert_eq!(ask("PUT", &path, Some(&source.to_string())).await.0, 200);
        expected.push((name.clone(), expected_text));
    }
    let foreign = json!({"seq": 1, "deleted": false}).to_string();
    assert_eq!(ask("PUT", &format!("{index}/_doc/foo"), Some(&foreign)).await.0, 201);
    let verified = world.verify(&projection).await;
    assert_eq!(verified.differences.len(), expected.len(), "{verified:?}");
    for (name, expected_text) in expected {
        let difference = verified.differences[&name].to_string();
        assert!(difference.contains(expected_text), "{expected_text}: {difference}");
    }
    assert_eq!(verified.foreign.keys().collect::<Vec<_>>(), ["foo"]);
}

/// The engine's versions have 63 bits. What it cannot hold is told before anything is consumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t358_a_generation_that_does_not_fit_is_refused_at_the_start() {
    let harness = SearchHarness::new().await;
    let message = Projector::new(harness.open().await, 40_000).unwrap_err().to_string();
    assert!(message.contains("40000") && message.contains("32767"), "{message}");
    assert!(Projector::new(harness.open().await, 32_767).is_ok());
}

/// A template of the operator must not make the engine acknowledge what is not on disk: nobody would write it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t522_an_index_is_on_disk_when_it_answers_whatever_a_template_says() {
    let harness = SearchHarness::new().await;
    let alias = &harness.alias;
    let template = json!({
        "index_patterns": [format!("{alias}-*")],
        "template": {"settings": {"index.translog.durability": "async"}},
    });
    let path = format!("_index_template/{alias}");
    assert_eq!(ask("PUT", &path, Some(&template.to_string())).await.0, 200);
    let projection = harness.open().await;
    let (_, settings) = ask("GET", &format!("{alias}/_settings"), None).await;
    let (index, of) = settings.as_object().unwrap().iter().next().unwrap();
    assert_eq!(of["settings"]["index"]["translog"]["durability"], "request", "{of}");
    let warned = async || {
        let found =
            projection.check().await.unwrap().into_iter().filter(|finding| finding.level > Level::Fine);
        found.map(|finding| (finding.check, finding.level, finding.message)).collect::<Vec<_>>()
    };
    assert_eq!(warned().await, []);
    // One that was made by somebody else, or changed.
    let changed = json!({"index": {"translog": {"durability": "async"}}}).to_string();
    assert_eq!(ask("PUT", &format!("{index}/_settings"), Some(&changed)).await.0, 200);
    let found = warned().await;
    assert!(
        matches!(&found[..], [("opensearch.durability", Level::Warning, message)]
            if message.contains(index) && message.contains("async") && message.contains("request")),
        "{found:?}"
    );
    assert_eq!(ask("DELETE", &path, None).await.0, 200);
}
