//! Records behind the layer: key, answer, record and event commit as one.

use std::path::Path;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use hapax::backend::postgres::PgRecords;
use hapax::backend::sqlite::{SqliteKeys, SqliteRecords};
use hapax::journal::Journal;
use hapax::keyed::{KeyedLayer, KeyedSqlite, KeyedTx};
use hapax::records::{Create, Delete, List, ModuleSlug, Modules as _, Payload, Records, Update};

use super::{PgRecordsHarness, pg_keys, pg_records, pool_of, prepare_server, sqlite_records};
use crate::keyed_layer::{Got, PATIENCE, send};
use crate::support::postgres::{child, role};

type Slug = Extension<ModuleSlug>;

fn answered(done: hapax::Result<hapax::records::Record>) -> Response {
    match done {
        Ok(record) => {
            (StatusCode::CREATED, format!("{} {} {}", record.id, record.seq, record.payload.as_str()))
                .into_response()
        }
        Err(error) if error.code() == "conflict" => StatusCode::CONFLICT.into_response(),
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// What a request does, as its body says: `create`, `update ID` or `delete ID`, of a record with seq 1.
enum Write {
    Create(Create),
    Update(Update),
    Delete(Delete),
}

impl Write {
    fn of(slug: ModuleSlug, body: &str) -> Self {
        let payload = |n: u32| Payload::new(format!(r#"{{"n":{n}}}"#)).unwrap();
        let id = |id: &str| id.parse().unwrap();
        match body.split_once(' ') {
            None => Write::Create(Create::new(slug, payload(1))),
            Some(("update", of)) => Write::Update(Update::new(slug, id(of), 1, payload(2))),
            Some((_, of)) => Write::Delete(Delete::new(slug, id(of), 1)),
        }
    }
}

async fn write_pg(
    State(records): State<PgRecords>,
    Extension(slug): Slug,
    mut tx: KeyedTx,
    body: String,
) -> Response {
    answered(match Write::of(slug, &body) {
        Write::Create(create) => records.create_in(&mut tx, &create).await,
        Write::Update(update) => records.update_in(&mut tx, &update).await,
        Write::Delete(delete) => records.delete_in(&mut tx, &delete).await,
    })
}

async fn write_sqlite(
    State(records): State<SqliteRecords>,
    Extension(slug): Slug,
    mut tx: KeyedSqlite,
    body: String,
) -> Response {
    let done = tx.run(move |tx| match Write::of(slug, &body) {
        Write::Create(create) => records.create_in(tx, &create),
        Write::Update(update) => records.update_in(tx, &update),
        Write::Delete(delete) => records.delete_in(tx, &delete),
    });
    answered(done.await.and_then(|done| done))
}

async fn pg_app(pool: &sqlx::PgPool, schema: &str, slug: &ModuleSlug) -> (Router, PgRecords) {
    let records = pg_records(pool, schema).await;
    let layer = KeyedLayer::new(pg_keys(pool, schema).await).transactional().required().wait(PATIENCE);
    let app = Router::new().route("/orders", post(write_pg)).layer(layer.replay_status(StatusCode::OK));
    (app.layer(Extension(slug.clone())).with_state(records.clone()), records)
}

/// One file with keys, journal and records.
async fn sqlite_app(file: &Path, slug: &ModuleSlug) -> (Router, SqliteRecords) {
    let keys = SqliteKeys::open(file).unwrap();
    let records = sqlite_records(file);
    records.create_module(slug).await.unwrap();
    let layer = KeyedLayer::new(keys).transactional().required().wait(PATIENCE);
    let app = Router::new().route("/orders", post(write_sqlite)).layer(layer.replay_status(StatusCode::OK));
    (app.layer(Extension(slug.clone())).with_state(records.clone()), records)
}

fn order(key: &str, body: &str) -> Request<Body> {
    Request::post("/orders").header("Idempotency-Key", key).body(Body::from(body.to_owned())).unwrap()
}

/// Posts until there is an answer that lasts.
async fn posted(app: &Router, key: &str, body: &str) -> Got {
    let started = std::time::Instant::now();
    loop {
        let got = send(app, order(key, body)).await;
        if got.status < 300 {
            return got;
        }
        assert!(matches!(got.status, 409 | 503) && started.elapsed() < PATIENCE, "{got:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

async fn a_hundred(app: &Router) -> String {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let app = app.clone();
        tasks.spawn(async move { posted(&app, "one-key", "create").await });
    }
    let got = tasks.join_all().await;
    assert_eq!(got.iter().filter(|got| got.status == 201).count(), 1, "one is the first");
    assert!(got.iter().all(|one| one.body == got[0].body), "all have its answer");
    got[0].body.clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t149_a_hundred_posts_with_one_key_make_one_record() {
    let dir = tempfile::tempdir().unwrap();
    let slug = ModuleSlug::new("orders").unwrap();
    let (app, records) = sqlite_app(&dir.path().join("all.db"), &slug).await;
    let body = a_hundred(&app).await;
    let list = records.list(&List::new(slug)).await.unwrap().records;
    assert!(list.len() == 1 && body.starts_with(&list[0].id.to_string()), "{list:?}");
    assert_eq!(records.journal().stat().await.unwrap().events, 1);

    let harness = PgRecordsHarness::new().await;
    let (app, records) = pg_app(&harness.app, &harness.schema, &harness.slug).await;
    let body = a_hundred(&app).await;
    let list = records.list(&List::new(harness.slug.clone())).await.unwrap().records;
    assert!(list.len() == 1 && body.starts_with(&list[0].id.to_string()), "{list:?}");
    assert_eq!(records.journal().stat().await.unwrap().events, 1);
}

/// What a store holds of a module after the write.
async fn written_once(records: &impl Records, journal: &dyn Journal, slug: &ModuleSlug, wanted: &Wanted<'_>) {
    let list = records.list(&List::new(slug.clone())).await.unwrap().records;
    let left: Vec<_> = list.iter().map(|record| (record.seq, record.payload.as_str())).collect();
    assert_eq!(left, wanted.left, "{}", wanted.case);
    if let Some(record) = list.first() {
        assert!(wanted.body.starts_with(&record.id.to_string()), "{}", wanted.case);
    }
    assert_eq!(journal.stat().await.unwrap().events, wanted.events, "{}", wanted.case);
}

struct Wanted<'w> {
    left: &'w [(u64, &'w str)],
    events: u64,
    body: &'w str,
    case: &'w str,
}

/// A record as it is left: its seq and its payload.
type Left = (u64, &'static str);

/// kill -9 at every step of a keyed write, then the client retries: one write, one event, one answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t150_a_keyed_write_killed_anywhere_is_written_once() {
    const TEST: &str = "t150_a_keyed_write_killed_anywhere_is_written_once";
    if let Some((store, place)) = role() {
        let mut place = place.splitn(3, ' ');
        let (place, slug, body) = (place.next().unwrap(), place.next().unwrap(), place.next().unwrap());
        let slug = ModuleSlug::new(slug).unwrap();
        let app = if store == "postgres" {
            pg_app(&pool_of(super::APP, 4).await, place, &slug).await.0
        } else {
            sqlite_app(place.as_ref(), &slug).await.0
        };
        println!("survived: {:?}", send(&app, order("key", body)).await);
        return;
    }
    prepare_server().await;
    let points = [
        ("records.appended", false),
        ("records.stored", false),
        ("keyed.commit.before", false),
        ("keyed.commit.after", true),
    ];
    let writes: [(&str, &[Left], u64); 3] =
        [("create", &[(1, r#"{"n":1}"#)], 1), ("update", &[(2, r#"{"n":2}"#)], 2), ("delete", &[], 2)];
    for (write, left, events) in writes {
        for (point, done) in points {
            let case = format!("{write} at {point}");
            let check = |got: &Got| {
                assert_eq!(
                    (got.status, got.replayed()),
                    (if done { 200 } else { 201 }, done),
                    "{case}: {got:?}"
                );
            };
            let dir = tempfile::tempdir().unwrap();
            let (file, slug) = (dir.path().join("all.db"), ModuleSlug::new("orders").unwrap());
            let (_, records) = sqlite_app(&file, &slug).await;
            let body = body_of(write, &records, &slug).await;
            drop(records);
            die_at(point, TEST, "sqlite", &format!("{} {slug} {body}", file.display())).await;
            let (app, records) = sqlite_app(&file, &slug).await;
            let got = posted(&app, "key", &body).await;
            check(&got);
            let wanted = Wanted { left, events, body: &got.body, case: &case };
            written_once(&records, records.journal(), &slug, &wanted).await;

            let harness = PgRecordsHarness::new().await;
            let (app, records) = pg_app(&harness.app, &harness.schema, &harness.slug).await;
            let body = body_of(write, &records, &harness.slug).await;
            die_at(point, TEST, "postgres", &format!("{} {} {body}", harness.schema, harness.slug)).await;
            let got = posted(&app, "key", &body).await;
            check(&got);
            let wanted = Wanted { left, events, body: &got.body, case: &case };
            written_once(&records, records.journal(), &harness.slug, &wanted).await;
        }
    }
}

/// The body of the request; what is updated or deleted is there first.
async fn body_of(write: &str, records: &impl Records, slug: &ModuleSlug) -> String {
    if write == "create" {
        return write.to_owned();
    }
    let first = Create::new(slug.clone(), Payload::new(r#"{"n":1}"#).unwrap());
    format!("{write} {}", records.create(&first).await.unwrap().id)
}

async fn die_at(point: &str, test: &str, store: &str, place: &str) {
    let mut command = child(test, store, place);
    command.env(hapax::testing::crash::VARIABLE, format!("{point}:1"));
    let output = command.output().await.unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert_eq!(signal, Some(9), "{}", String::from_utf8_lossy(&output.stderr));
}
