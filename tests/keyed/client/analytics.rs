//! Answers of a read model that the client must not take for its own, and what it keeps of those it does.

use std::time::{Duration, Instant};

use hapax::client::{Error, Uuid};
use serde_json::json;

use super::service::{Foreign, Service};
use super::{client_of, settings};

fn answer(body: impl Into<String>) -> Foreign {
    Foreign { status: 200, kind: "application/json", body: body.into(), retry_after: None }
}

const META: &str =
    r#""meta":{"lastSyncAt":"2026-01-02T03:04:05.678Z","stale":true,"approximate":"replaced versions"}"#;

fn tally(measure: &str, field: &str, value: &str) -> Foreign {
    let measured = format!(r#"{{"measure":"{measure}","field":"{field}","value":{value},"left_out":2}}"#);
    answer(format!(r#"{{"groups":[{{"key":null,"count":3,"measures":[{measured}]}}],"more":true,{META}}}"#))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_to_another_question_is_asked_for_again() {
    let service = Service::start().await;
    let orders = client_of(service.address, settings()).data("orders");
    let sum = "99999999999999999999999999999.5"; // a sum may be greater than what is added
    service.front.say([
        answer("{}"),
        answer(format!(r#"{{"groups":[],"more":false,{META}}}"#)),
        tally("max", "/amount", "1"),
        tally("sum", "/tax", "1"),
        tally("sum", "/amount", "\"1\""),
        Foreign::problem(503, "not-ready"),
        tally("sum", "/amount", sum),
    ]);
    let found = orders.analytics().sum("/amount").tally().await.unwrap();
    assert_eq!(service.front.left(), 0);
    let group = &found.value.groups[0];
    assert_eq!(group.sum("/amount").unwrap().to_string(), sum);
    assert_eq!((group.count, group.measures[0].left_out, found.value.more), (3, 2, true));
    assert_eq!(found.meta.last_sync_at.unwrap().to_string(), "2026-01-02T03:04:05.678Z");
    assert!(found.meta.stale && found.meta.approximate.as_deref() == Some("replaced versions"));

    let id = Uuid::now_v7();
    let page = |module: &str, next: Option<Uuid>| {
        let record = format!(r#"{{"id":"{id}","module":"{module}","seq":4,"payload":{{"n":1.50}}}}"#);
        answer(format!(r#"{{"records":[{record}],"next":{},{META}}}"#, json!(next)))
    };
    service.front.say([page("bills", None), page("orders", Some(id)), page("orders", None)]);
    let found = orders.analytics().list(Some(id), 10).await.unwrap();
    assert_eq!(service.front.left(), 0);
    let [record] = &found.value.records[..] else { panic!("{found:?}") };
    assert_eq!((record.payload.as_str(), record.read_token()), (r#"{"n":1.50}"#, format!("orders/{id}@4")));

    service.front.say([Foreign::problem(403, "forbidden")]);
    let error = orders.analytics().count().await.unwrap_err();
    assert!(matches!(error, Error::Denied(_)), "{error}");
}

/// The server may take the whole of `wait` before it answers: an attempt lasts that much longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wait_for_a_write_comes_on_top_of_an_attempt() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut settings = settings();
    settings.attempt_timeout = Duration::from_millis(50);
    (settings.deadline, settings.backoff_base) = (Duration::from_millis(100), Duration::from_hours(1));
    let orders = client_of(silent.local_addr().unwrap(), settings).data("orders");
    let began = Instant::now();
    orders.analytics().count().await.unwrap_err();
    let without = began.elapsed();
    let began = Instant::now();
    let token = format!("orders/{}@1", Uuid::now_v7());
    let question = orders.analytics().after_token(token).wait(Duration::from_secs(2));
    let error = question.count().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { attempts: 1, in_doubt: false, .. }), "{error}");
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}, {without:?} without", began.elapsed());
}
