//! What the client knows about a write that may have been done, and what belongs to which question.

use std::net::SocketAddr;
use std::time::Duration;

use hapax::client::{ClaimOutcome, ClaimRequest, Client, ClientSettings, Error, PreparedWrite, Uuid};
use hapax::journal::Expected;
use hapax::keyed::IdempotencyKey;
use hapax::testing::proxy::{Cut, Proxy};
use hapax::{Aggregate, Event, Tenant};
use serde_json::json;
use serde_json::value::RawValue;

use super::service::{Foreign, Service};
use super::{client_of, settings};

/// Every call has one attempt: the pause after it would outlast the deadline.
fn once() -> ClientSettings {
    let mut settings = settings();
    (settings.backoff_base, settings.backoff_max) = (Duration::from_hours(9999), Duration::from_hours(9999));
    settings
}

fn closed_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1))
}

fn answer(body: impl Into<String>) -> Foreign {
    Foreign { status: 200, kind: "application/json", body: body.into(), retry_after: None }
}

/// The write was done and its answer is lost. Whoever called `create` has nothing but the error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t280_a_write_in_doubt_comes_back_with_its_key() {
    let service = Service::start().await;
    let proxy = Proxy::start(service.address).await.unwrap();
    let client = client_of(proxy.address(), once());
    proxy.arm("idempotency-key", Cut::Answer);
    let error = client.data("orders").create(json!({"amount": 7})).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { attempts: 1, .. }) && error.in_doubt(), "{error}");
    assert_eq!(service.rows(), 1);
    let written = client.send(error.prepared().expect("the write, with its key")).await.unwrap();
    assert!(written.replayed, "{written:?}");
    assert_eq!(service.rows(), 1);
    // A refusal has it too; what was never sent has none.
    service.front.say([Foreign::problem(401, "unauthenticated")]);
    let write = client.data("orders").prepare_delete(written.record.id, 1).unwrap();
    let error = client.send(&write).await.unwrap_err();
    assert_eq!(error.prepared(), Some(&write));
    let error = client.data("Orders").create(json!({})).await.unwrap_err();
    assert!(error.prepared().is_none(), "{error}");
}

/// A port where nobody listens carries nothing; but an attempt before may have got through.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t281_a_doubt_outlives_the_call_and_the_process() {
    let nobody = client_of(closed_port(), once());
    let orders = nobody.data("orders");
    let write = orders.prepare_create(json!({})).unwrap();
    for _ in 0..2 {
        let error = nobody.send(&write).await.unwrap_err();
        assert!(error.is_retryable() && !error.in_doubt(), "nobody has seen it: {error}");
    }
    // What a process finds in its store may have been sent by the one before.
    let stored: PreparedWrite = serde_json::from_str(&serde_json::to_string(&write).unwrap()).unwrap();
    assert!(nobody.send(&stored).await.unwrap_err().in_doubt());
    // So may a key that was derived from the cause of the write.
    let derived = write.clone().with_key(IdempotencyKey::new("form-17").unwrap());
    assert!(nobody.send(&derived).await.unwrap_err().in_doubt());
    assert!(!nobody.send(&write).await.unwrap_err().in_doubt(), "another key, another write");

    let service = Service::start().await;
    let client = client_of(service.address, settings());
    let refused = || Foreign::problem(401, "unauthenticated");
    for (first, in_doubt) in
        [(Some(Foreign::html(504)), true), (Some(Foreign::problem(409, "contended")), false), (None, false)]
    {
        let write = client.data("orders").prepare_create(json!({})).unwrap();
        service.front.say(first.into_iter().chain([refused(), refused()]));
        for call in ["the first", "the second"] {
            let error = client.send(&write).await.unwrap_err();
            assert!(matches!(error, Error::Denied(_)), "{error}");
            assert_eq!(error.in_doubt(), in_doubt, "{call} call: {error}");
        }
        assert_eq!(service.front.left(), 0);
    }
    // A caller that gives up leaves a doubt, whatever came of its request.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = client_of(silent.local_addr().unwrap(), once());
    let write = client.data("orders").prepare_create(json!({})).unwrap();
    tokio::select! {
        biased;
        answered = client.send(&write) => panic!("{answered:?}"),
        accepted = silent.accept() => drop(accepted.unwrap()),
    }
    assert!(nobody.send_anywhere(&write).await.unwrap_err().in_doubt());
}

/// Another serialiser, another order of fields. "Make a new key" would write twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t282_the_same_fields_in_other_bytes_are_in_doubt() {
    let service = Service::start().await; // it compares bytes
    let client = client_of(service.address, settings());
    let key = IdempotencyKey::new("form-17").unwrap();
    let prepare = |json: &str| {
        let payload = RawValue::from_string(json.to_owned()).unwrap();
        client.data("orders").prepare_create(payload).unwrap().with_key(key.clone())
    };
    client.send(&prepare(r#"{"a":1,"b":2}"#)).await.unwrap();
    let error = client.send(&prepare(r#"{"b": 2, "a": 1}"#)).await.unwrap_err();
    let Error::KeyMismatch(problem) = &error else { panic!("{error}") };
    assert!(problem.fields.is_empty() && error.in_doubt(), "{error}");
    assert!(problem.detail.contains("send exactly the bytes of the first attempt"), "{error}");
    assert!(!problem.detail.contains("new key"), "{error}");
    let error = client.send(&prepare(r#"{"b": 2, "a": 7}"#)).await.unwrap_err();
    let Error::KeyMismatch(problem) = &error else { panic!("{error}") };
    assert!(problem.detail.contains("make a new key"), "{error}");
    assert_eq!(service.rows(), 1);
}

/// The first attempt settled the run and its answer was lost; somebody else has the event by now.
#[tokio::test]
async fn t288_fenced_after_a_lost_answer_is_in_doubt() {
    let service = Service::start().await;
    let client = client_of(service.address, settings());
    let claimed = r#"{"outcome":"claimed","id":"e","token":7,"attempt":1,"until":"2026-01-02T03:04:05Z"}"#;
    service.front.say([answer(claimed)]);
    let outcome = client.claim(ClaimRequest::new("mailer", "e").unwrap()).await.unwrap();
    let ClaimOutcome::Claimed(claim) = outcome else { panic!("{outcome:?}") };
    for (before, in_doubt) in [(Some(Foreign::html(504)), true), (None, false)] {
        service.front.say(before.into_iter().chain([Foreign::problem(409, "fenced")]));
        let error = claim.fail("no stock").await.unwrap_err();
        assert!(matches!(error, Error::Fenced(_)), "{error}");
        assert_eq!(error.in_doubt(), in_doubt, "{error}");
    }
}

/// A proxy with a mixed-up cache: an answer of the right form to another question.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t289_an_answer_about_something_else_is_no_answer() {
    let service = Service::start().await;
    let client = client_of(service.address, settings());
    let orders = client.data("orders");
    let record = |module: &str, id: Uuid| {
        answer(json!({"id": id, "module": module, "seq": 1, "payload": {"of": "another"}}).to_string())
    };
    service.front.say([record("invoices", Uuid::now_v7())]);
    let created = orders.create(json!({"amount": 7})).await.unwrap();
    assert_eq!((created.record.module.as_str(), service.rows()), ("orders", 1));
    let id = Uuid::now_v7();
    service.front.say([record("orders", Uuid::now_v7())]);
    assert_eq!(orders.create_as(id, json!({})).await.unwrap().record.id, id);
    service.front.say([record("orders", Uuid::now_v7()), record("invoices", id)]);
    assert_eq!(orders.get(id).await.unwrap().payload, json!({}));
    service.front.say([record("orders", Uuid::now_v7())]);
    assert_eq!(orders.update(id, 1, json!({"n": 1})).await.unwrap().record.id, id);

    // A page of another module, and one that leads back to itself.
    let page = |module: &str, next: Option<Uuid>| {
        let records = [json!({"id": id, "module": module, "seq": 2, "payload": {}})];
        answer(json!({"records": records, "next": next}).to_string())
    };
    service.front.say([page("invoices", None), page("orders", Some(created.record.id))]);
    let page = orders.list(Some(created.record.id), 10).await.unwrap();
    assert_eq!((page.records.len(), page.next), (1, None));
    assert_eq!(service.front.left(), 0);

    let outcome = |id: &str| answer(json!({"outcome": "duplicate", "id": id}).to_string());
    service.front.say([outcome("another"), outcome("e")]);
    let got = client.claim(ClaimRequest::new("mailer", "e").unwrap()).await.unwrap();
    assert!(matches!(got, ClaimOutcome::Duplicate));
    let placed = |id: &str| {
        let event = json!({"id": id, "seq": 1, "position": "1", "placing": "new"});
        answer(json!({"last_seq": 1, "events": [event]}).to_string())
    };
    service.front.say([placed("another"), placed("e")]);
    client.append("order-1", Expected::New, &[Event::of("e").unwrap()]).await.unwrap();
    assert_eq!(service.front.left(), 0, "each wrong answer was passed over");
}

/// Whoever has not seen the key would run the write again.
#[tokio::test]
async fn t290_a_write_is_not_sent_to_another_server_by_mistake() {
    let (one, other) = (Service::start().await, Service::start().await);
    let write = client_of(one.address, settings()).data("orders").prepare_create(json!({})).unwrap();
    let stored: PreparedWrite = serde_json::from_str(&serde_json::to_string(&write).unwrap()).unwrap();
    let elsewhere = client_of(other.address, settings());
    let error = elsewhere.send(&stored).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("send_anywhere"), "{error}");
    assert_eq!(other.front.asked().len(), 0, "nothing was sent");
    elsewhere.send_anywhere(&stored).await.unwrap();
    // A slash at its end is the same server.
    let same = Client::with_settings(&format!("http://{}/", one.address), settings()).unwrap();
    same.send(&stored).await.unwrap();
    assert_eq!((one.rows(), other.rows()), (1, 1));
}

/// The request has no field for these, so they would be dropped in silence.
#[tokio::test]
async fn t291_an_append_refuses_what_it_cannot_carry() {
    let service = Service::start().await;
    let client = client_of(service.address, settings());
    let event = || Event::of("e").unwrap();
    let mut of_another = event();
    of_another.aggregate = Some(Aggregate::new("order-2").unwrap());
    let mut of_a_tenant = event();
    of_a_tenant.tenant = Some(Tenant::new("acme").unwrap());
    let mut numbered = event();
    numbered.seq = Some(3);
    for (event, says) in [(of_another, "aggregate"), (of_a_tenant, "tenant"), (numbered, "seq")] {
        let error = client.append("order-1", Expected::Any, &[event]).await.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(says), "{error}");
    }
    assert_eq!(service.front.asked().len(), 0);
}

/// It is as large the next time; and an attempt without time could only leave a doubt.
#[tokio::test]
async fn what_cannot_succeed_is_not_tried_again() {
    let service = Service::start().await;
    let mut small = settings();
    small.answer_bytes_max = 10;
    service.front.say([answer("x".repeat(11))]);
    let error = client_of(service.address, small).data("orders").get(Uuid::nil()).await.unwrap_err();
    assert!(!error.is_retryable(), "{error}");
    let mut short = settings();
    short.deadline = Duration::from_millis(40);
    service.front.say(std::iter::repeat_n(Foreign::html(503), 2));
    let error = client_of(service.address, short).data("orders").create(json!({})).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { attempts: 1, .. }), "{error}");
}
