//! A service of the test's own that speaks the contract of records, with the library's layer, on SQLite.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path as InPath, RawQuery, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax::backend::sqlite::{SqliteKeys, SqliteTransaction};
use hapax::keyed::{KeyedLayer, KeyedSqlite};
use rusqlite::{Connection, OptionalExtension as _};
use serde_json::{Value, json};
use uuid::Uuid;

/// An answer that does not come from the service.
#[derive(Debug, Clone)]
pub struct Foreign {
    pub status: u16,
    pub kind: &'static str,
    pub body: String,
    pub retry_after: Option<&'static str>,
}

impl Foreign {
    pub fn problem(status: u16, code: &str) -> Self {
        let body = json!({"status": status, "code": code, "detail": "a sentence of the test"}).to_string();
        Foreign { status, kind: "application/problem+json", body, retry_after: None }
    }

    pub fn html(status: u16) -> Self {
        let body = "<html><h1>a proxy speaks</h1></html>".to_owned();
        Foreign { status, kind: "text/html", body, retry_after: None }
    }

    pub fn after(mut self, seconds: &'static str) -> Self {
        self.retry_after = Some(seconds);
        self
    }
}

/// When requests came, and with which keys.
type Asked = Vec<(Instant, Option<String>)>;

/// What stands in front of the service, as a proxy does: it answers by itself while it has something to say.
#[derive(Clone, Default)]
pub struct Front {
    says: Arc<Mutex<VecDeque<Foreign>>>,
    asked: Arc<Mutex<Asked>>,
}

impl Front {
    pub fn say(&self, answers: impl IntoIterator<Item = Foreign>) {
        self.says.lock().unwrap().extend(answers);
    }

    /// When requests came, and with which keys; forgets them.
    pub fn asked(&self) -> Vec<(Instant, Option<String>)> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    pub fn left(&self) -> usize {
        self.says.lock().unwrap().len()
    }
}

async fn front(State(front): State<Front>, request: Request, next: Next) -> Response {
    let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
    front.asked.lock().unwrap().push((Instant::now(), key));
    let says = front.says.lock().unwrap().pop_front();
    let Some(foreign) = says else { return next.run(request).await };
    let mut response = Response::new(Body::from(foreign.body));
    *response.status_mut() = StatusCode::from_u16(foreign.status).unwrap();
    response.headers_mut().insert("content-type", foreign.kind.parse().unwrap());
    if let Some(after) = foreign.retry_after {
        response.headers_mut().insert("retry-after", after.parse().unwrap());
    }
    response
}

#[allow(clippy::needless_pass_by_value)] // it is written where it is passed
fn problem(status: u16, code: &str, more: Value) -> Response {
    let mut body =
        json!({"status": status, "code": code, "detail": "it cannot be done, as the test wants it"});
    body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    let status = StatusCode::from_u16(status).unwrap();
    (status, [("content-type", "application/problem+json")], body.to_string()).into_response()
}

fn record(module: &str, id: &str, seq: i64, payload: &str) -> Value {
    let payload: Value = serde_json::from_str(payload).unwrap();
    let at = "2026-01-02T03:04:05Z";
    json!({"id": id, "module": module, "seq": seq, "payload": payload, "created_at": at, "updated_at": at})
}

async fn create(InPath(module): InPath<String>, mut tx: KeyedSqlite, Json(body): Json<Value>) -> Response {
    let id = body["id"].as_str().map_or_else(|| Uuid::now_v7().to_string(), str::to_owned);
    let (row, text) = (id.clone(), body["payload"].to_string());
    let insert = move |tx: &SqliteTransaction| {
        tx.execute("INSERT INTO records (id, seq, payload) VALUES (?1, 1, ?2)", [&row, &text]).map(|_| text)
    };
    let text = tx.run(insert).await.unwrap().unwrap();
    (StatusCode::CREATED, [("etag", "\"1\"")], Json(record(&module, &id, 1, &text))).into_response()
}

fn find(conn: &Connection, id: &str) -> Option<(i64, String)> {
    let row = conn.query_row("SELECT seq, payload FROM records WHERE id = ?1", [id], |row| {
        Ok((row.get(0)?, row.get(1)?))
    });
    row.optional().unwrap()
}

async fn change(
    module: String,
    id: String,
    expected: i64,
    payload: Option<String>,
    mut tx: KeyedSqlite,
) -> Response {
    let row = id.clone();
    let write = move |tx: &SqliteTransaction| -> rusqlite::Result<Result<(i64, String), (u16, Value)>> {
        let Some((seq, old)) = find(tx, &row) else { return Ok(Err((404, json!({})))) };
        if seq != expected {
            return Ok(Err((409, json!({"expected": expected, "actual": seq}))));
        }
        match &payload {
            Some(new) => {
                tx.execute("UPDATE records SET seq = seq + 1, payload = ?2 WHERE id = ?1", [&row, new])?
            }
            None => tx.execute("DELETE FROM records WHERE id = ?1", [&row])?,
        };
        Ok(Ok((seq + 1, payload.unwrap_or(old))))
    };
    match tx.run(write).await.unwrap().unwrap() {
        Ok((seq, text)) => Json(record(&module, &id, seq, &text)).into_response(),
        Err((404, more)) => problem(404, "not-found", more),
        Err((status, more)) => problem(status, "conflict", more),
    }
}

type Of = InPath<(String, String)>;

async fn update(InPath((module, id)): Of, tx: KeyedSqlite, Json(body): Json<Value>) -> Response {
    change(module, id, body["expected_seq"].as_i64().unwrap(), Some(body["payload"].to_string()), tx).await
}

async fn delete(InPath((module, id)): Of, RawQuery(query): RawQuery, tx: KeyedSqlite) -> Response {
    let expected = argument(query.as_deref(), "expected_seq").unwrap().parse().unwrap();
    change(module, id, expected, None, tx).await
}

fn argument<'q>(query: Option<&'q str>, name: &str) -> Option<&'q str> {
    query?.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

async fn get(State(file): State<PathBuf>, InPath((module, id)): Of) -> Response {
    match find(&Connection::open(file).unwrap(), &id) {
        Some((seq, text)) => Json(record(&module, &id, seq, &text)).into_response(),
        None => problem(404, "not-found", json!({})),
    }
}

async fn list(
    State(file): State<PathBuf>,
    InPath(module): InPath<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let after = argument(query.as_deref(), "after").unwrap_or_default();
    let limit: usize = argument(query.as_deref(), "limit").unwrap().parse().unwrap();
    let conn = Connection::open(file).unwrap();
    let mut rows = conn
        .prepare("SELECT id, seq, payload FROM records WHERE id > ?1 ORDER BY id LIMIT ?2")
        .unwrap()
        .query_map((after, limit as i64 + 1), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .unwrap()
        .collect::<Result<Vec<(String, i64, String)>, _>>()
        .unwrap();
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|row| row.0.clone());
    let records: Vec<_> = rows.iter().map(|(id, seq, text)| record(&module, id, *seq, text)).collect();
    Json(json!({"records": records, "next": next})).into_response()
}

/// The service, over keys and records in one file.
pub fn app(file: &Path, before: Front) -> Router {
    let keys = SqliteKeys::open(file).unwrap();
    let conn = Connection::open(file).unwrap();
    conn.busy_timeout(Duration::from_secs(120)).unwrap();
    let table = "CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, seq INTEGER NOT NULL, payload TEXT NOT NULL)";
    conn.execute_batch(table).unwrap();
    let layer = KeyedLayer::new(keys).transactional().required().replay_status(StatusCode::OK).tell_fields();
    Router::new()
        .route("/v1/modules/{slug}/records", post(create).get(list))
        .route("/v1/modules/{slug}/records/{id}", axum::routing::put(update).delete(delete).get(get))
        .layer(layer)
        .layer(axum::middleware::from_fn_with_state(before, front))
        .with_state(file.to_owned())
}

/// A service that listens.
pub struct Service {
    pub address: SocketAddr,
    pub front: Front,
    file: PathBuf,
    _dir: tempfile::TempDir,
    serving: tokio::task::JoinHandle<()>,
}

impl Service {
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (file, front) = (dir.path().join("shop.db"), Front::default());
        let app = app(&file, front.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Service { address, front, file, _dir: dir, serving }
    }

    pub fn rows(&self) -> i64 {
        rows(&self.file)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

pub fn rows(file: &Path) -> i64 {
    let conn = Connection::open(file).unwrap();
    conn.query_row("SELECT count(*) FROM records", [], |row| row.get(0)).unwrap()
}
