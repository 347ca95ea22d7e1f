//! `client.data("orders").analytics()` against the real server: typed answers, its own writes, errors by code.

#![allow(missing_docs, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use hapax::Tenant;
use hapax::analytics::Decimal;
use hapax::client::{Client, ClientSettings, Data, Error, Record, Uuid};
use serde_json::json;
use serde_json::value::RawValue;

use crate::common::run;
use crate::common::serve::{PATIENCE, Server};

/// The longest that the server waits for a write.
const WAIT: Duration = Duration::from_secs(30);

fn client_of(server: &Server) -> Client {
    let mut settings = ClientSettings::default();
    settings.deadline = PATIENCE;
    Client::with_settings(&format!("http://{}", server.address), settings).unwrap()
}

fn number(text: &str) -> Option<Decimal> {
    let number = Decimal::parse(text);
    assert!(number.is_some(), "{text}");
    number
}

async fn create(orders: &Data, payload: &str) -> Record {
    let payload = RawValue::from_string(payload.to_owned()).unwrap();
    orders.create(payload).await.unwrap().record
}

/// From a write to lists, counts, sums and groups, each record once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_asks_the_read_model_for_what_it_wrote() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir.path(), &[]);
    let orders = client_of(&server).data("orders");
    let before = orders.analytics().count().await.unwrap();
    assert_eq!(before.value, 0);

    let first = create(&orders, r#"{"amount":12345678901234567890.123,"status":"paid"}"#).await;
    create(&orders, r#"{"amount":0.2,"status":"open"}"#).await;
    let last = create(&orders, r#"{"amount":0.1,"status":"paid"}"#).await;
    let odd = create(&orders, r#"{"amount":"much"}"#).await;
    // Each is awaited: they may be in different partitions.
    for written in [&first, &last, &odd] {
        orders.analytics().after(written).wait(WAIT).count().await.unwrap();
    }
    let all = orders.analytics().since(Duration::from_hours(1));
    assert_eq!(all.count().await.unwrap().value, 4);
    let answer = all.clone().sum("/amount").min("/amount").max("/amount").tally().await.unwrap();
    assert!(!answer.value.more && answer.meta.approximate.is_none(), "{answer:?}");
    let [group] = &answer.value.groups[..] else { panic!("{answer:?}") };
    assert_eq!((&group.key, group.count, group.measures[0].left_out), (&json!(null), 4, 1));
    assert_eq!(group.sum("/amount"), number("12345678901234567890.423"));
    assert_eq!((group.min("/amount"), group.max("/tax")), (number("0.1"), None));
    let answer = all.clone().max("/amount").group_by("/status").approximate().tally().await.unwrap();
    let groups: Vec<_> = answer.value.groups.iter().map(|group| (&group.key, group.count)).collect();
    assert_eq!(groups, [(&json!(null), 1), (&json!("open"), 1), (&json!("paid"), 2)]);
    assert_eq!(answer.value.groups[1].max("/amount"), number("0.2"));

    // What is changed and deleted counts as it is now.
    let changed = orders.update(last.id, 1, json!({"amount": 7})).await.unwrap().record;
    let gone = orders.delete(odd.id, 1).await.unwrap().record;
    orders.analytics().after(&gone).wait(WAIT).count().await.unwrap();
    let answer = orders.analytics().after_token(changed.read_token()).wait(WAIT).list(None, 2).await.unwrap();
    let page = answer.value;
    assert_eq!(page.records.len(), 2, "{page:?}");
    let rest = orders.analytics().list(page.next, 1000).await.unwrap().value;
    assert_eq!((&rest.records[..], rest.next), (&[changed][..], None));
    assert_eq!(page.records[0], first);

    // It becomes known how current an answer is, and that it is later than the last write.
    let end = Instant::now() + PATIENCE;
    loop {
        let meta = orders.analytics().count().await.unwrap().meta;
        if meta.last_sync_at.is_some_and(|at| at > gone.updated_at.unwrap()) {
            break;
        }
        assert!(Instant::now() < end, "{meta:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What cannot be asked is a sentence, and what the server refuses has its code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_that_cannot_be_answered_is_an_error_by_its_code() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir.path(), &[]);
    let client = client_of(&server);
    let orders = client.data("orders");
    let written = create(&orders, "{}").await;

    // Not visible within the time: a conflict that says how far the model is.
    let later = format!("orders/{}@99", written.id);
    let question = orders.analytics().after_token(&later).wait(Duration::ZERO);
    let error = question.count().await.unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }) && error.code() == "conflict", "{error}");
    assert!(error.to_string().contains(&later) && !error.in_doubt(), "{error}");
    // Another tenant waits for it in vain, and counts nothing.
    let other = client.clone().tenant(Tenant::new(Uuid::now_v7().to_string()).unwrap()).unwrap();
    let theirs = other.data("orders").analytics();
    assert_eq!(theirs.count().await.unwrap().value, 0);
    let error = theirs.after(&written).wait(Duration::ZERO).count().await.unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }), "{error}");
    // A tenant that owns no records, since it is not a UUID.
    let named = client.clone().tenant(Tenant::new("acme").unwrap()).unwrap();
    let error = named.data("orders").analytics().count().await.unwrap_err();
    assert!(matches!(error, Error::Refused(_)) && error.code() == "invalid", "{error}");

    let ask = || orders.analytics();
    for (question, says) in [
        (ask().sum("amount"), "begins with a slash"),
        (ask().sum("/a,/b"), "has a comma"),
        (ask().group_by("/~"), "after ~ comes 0 or 1"),
        (ask().since(Duration::ZERO), "more than 0"),
        (ask().since(Duration::from_secs(u64::MAX)), "36500 days"),
        (ask().after_token("orders@7"), "MODULE/ID@SEQ"),
        (ask().after_token(format!("bills/{}@1", written.id)), "names a write of bills"),
        (ask().after(&written).wait(Duration::from_secs(31)), "up to 30s"),
        (client.data("No Slug").analytics(), "beginning with a letter"),
    ] {
        let error = question.tally().await.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(says), "{error}");
    }
    let error = ask().list(None, 1001).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    // More measures than the server computes at once.
    let error = (0..17).fold(ask(), |ask, n| ask.sum(format!("/{n}"))).tally().await.unwrap_err();
    assert!(matches!(error, Error::Refused(_)) && error.to_string().contains("limit is 16"), "{error}");

    // A server without a read model says so.
    drop(server);
    std::fs::create_dir(dir.path().join("j")).unwrap();
    let server = Server::start(dir.path(), &["--journal", "dir:j"]);
    let error = client_of(&server).data("orders").analytics().count().await.unwrap_err();
    assert!(matches!(error, Error::Refused(_)) && error.code() == "unsupported", "{error}");
}
