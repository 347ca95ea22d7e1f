//! Keyed writes over HTTP: the layer against the same handler in a transaction of its own, and a
//! replay against a first write.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use hapax::Tenant;
use hapax::backend::postgres::{PgKeys, PgKeysSettings, Pooling};
use hapax::backend::sqlite::SqliteKeys;
use hapax::keyed::{Caller, IdempotencyKey, KeyedLayer, KeyedSqlite, KeyedTx};
use rusqlite::{Connection, TransactionBehavior};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::net::TcpListener;

use crate::harness::{Contestant, Fallible, Goal, Line, Options, Report, interleave, rate};
use crate::pg::{Schema, execute, number, pool, url};
use crate::wire::{Wire, expect};

/// Database connections of either side.
const POOL: u32 = 32;
const BODY: &str = r#"{"customer":"c-17","items":[{"sku":"book","count":1}],"amount":4200}"#;

type Answer = Result<(StatusCode, String), StatusCode>;

fn failed<E>(_: E) -> StatusCode {
    StatusCode::INTERNAL_SERVER_ERROR
}

fn insert(schema: &str) -> AssertSqlSafe<String> {
    AssertSqlSafe(format!("insert into {schema}.orders (body) values ($1) returning id"))
}

fn created(id: i64) -> (StatusCode, String) {
    (StatusCode::CREATED, format!("{{\"id\":{id}}}"))
}

/// The handler behind the layer.
async fn keyed(State(schema): State<String>, mut tx: KeyedTx, body: String) -> Answer {
    let id = sqlx::query_scalar(insert(&schema)).bind(body).fetch_one(&mut **tx).await;
    Ok(created(id.map_err(failed)?))
}

/// The same handler without the layer: its own transaction, as most people write it.
async fn plain(State((pool, schema)): State<(PgPool, String)>, body: String) -> Answer {
    let mut tx = pool.begin().await.map_err(failed)?;
    let id = sqlx::query_scalar(insert(&schema)).bind(body).fetch_one(&mut *tx).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(created(id))
}

async fn keyed_sqlite(mut tx: KeyedSqlite, body: String) -> Answer {
    let insert = tx.run(move |tx| {
        tx.execute("INSERT INTO orders (body) VALUES (?1)", [body]).map(|_| tx.last_insert_rowid())
    });
    Ok(created(insert.await.map_err(failed)?.map_err(failed)?))
}

type Writer = Arc<Mutex<Connection>>;

async fn plain_sqlite(State(writer): State<Writer>, body: String) -> Answer {
    let insert = tokio::task::spawn_blocking(move || {
        let mut conn = writer.lock().map_err(failed)?;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        tx.execute("INSERT INTO orders (body) VALUES (?1)", [body]).map_err(failed)?;
        let id = tx.last_insert_rowid();
        tx.commit().map_err(failed)?;
        Ok(created(id))
    });
    insert.await.map_err(failed)?
}

/// A service on a port of its own, as long as this lives.
struct Served(SocketAddr, tokio::task::JoinHandle<()>);

impl Served {
    async fn start(app: Router) -> Fallible<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            let listener = axum::serve::ListenerExt::tap_io(listener, |stream| {
                let _ = stream.set_nodelay(true); // only slower without
            });
            let _ = axum::serve(listener, app).await;
        });
        Ok(Served(address, serving))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.1.abort();
    }
}

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|_| IdempotencyKey::now_v7().as_str().to_owned()).collect()
}

/// Requests per second over so many connections, each with one request at a time.
async fn posts(to: SocketAddr, connections: usize, keys: &[String]) -> Fallible<f64> {
    let mut wires = Vec::new();
    for _ in 0..connections {
        wires.push(Wire::open(to).await?);
    }
    let shares: Vec<Vec<String>> =
        (0..connections).map(|at| keys.iter().skip(at).step_by(connections).cloned().collect()).collect();
    rate(keys.len(), async {
        let mut running = tokio::task::JoinSet::new();
        for (mut wire, share) in wires.into_iter().zip(shares) {
            running.spawn(async move {
                for key in &share {
                    expect(201, wire.post("/orders", Some(key), BODY).await?)?;
                }
                Fallible::Ok(())
            });
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
        Ok(())
    })
    .await
}

/// The services of one database: behind the layer, and without it.
struct Pair {
    name: &'static str,
    keyed: Served,
    plain: Served,
    /// Behind the layer, where each request belongs to a tenant.
    of_a_tenant: Option<Served>,
}

async fn postgres(schema: &Schema) -> Fallible<Pair> {
    let table = format!("create table {}.orders (id bigserial primary key, body text not null)", schema.name);
    let own = pool(POOL).await?;
    execute(&own, table).await?;
    let mut settings = PgKeysSettings::default();
    settings.schema.clone_from(&schema.name);
    settings.pooling = Pooling::Session;
    settings.pool_max = POOL;
    // Its own pool, as a service has it that opens the keys by a URL.
    let keys = PgKeys::connect(&url()?, settings).await?;
    let tenant = Tenant::new("acme")?;
    let layer = KeyedLayer::new(keys).transactional().required();
    #[allow(clippy::result_large_err)] // axum rejects with responses
    let with_tenant = layer
        .clone()
        .caller(move |_| Ok(Caller { tenant: Some(tenant.clone()), principal: Some("bench".to_owned()) }));
    let behind =
        |layer| Router::new().route("/orders", post(keyed)).layer(layer).with_state(schema.name.clone());
    let (behind, of_a_tenant) = (behind(layer), behind(with_tenant));
    let without = Router::new().route("/orders", post(plain)).with_state((own, schema.name.clone()));
    Ok(Pair {
        name: "PostgreSQL",
        keyed: Served::start(behind).await?,
        plain: Served::start(without).await?,
        of_a_tenant: Some(Served::start(of_a_tenant).await?),
    })
}

async fn sqlite(dir: &std::path::Path) -> Fallible<Pair> {
    let open = |file: &str| -> Fallible<Connection> {
        let conn = Connection::open(dir.join(file))?;
        conn.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; \
             CREATE TABLE orders (id INTEGER PRIMARY KEY, body TEXT NOT NULL)",
        )?;
        Ok(conn)
    };
    let keys = SqliteKeys::open(dir.join("keyed.db"))?;
    open("keyed.db")?;
    let layer = KeyedLayer::new(keys).transactional().required();
    let behind = Router::new().route("/orders", post(keyed_sqlite)).layer(layer);
    let writer: Writer = Arc::new(Mutex::new(open("plain.db")?));
    let without = Router::new().route("/orders", post(plain_sqlite)).with_state(writer);
    Ok(Pair {
        name: "SQLite",
        keyed: Served::start(behind).await?,
        plain: Served::start(without).await?,
        of_a_tenant: None,
    })
}

/// The contestants: a first write, the same handler without a key, a replay, and a first write of a tenant.
fn contestants(pair: &Pair, connections: usize, count: usize) -> Vec<Contestant<'_>> {
    let name = pair.name;
    let mut all = vec![
        Contestant::new(format!("{name}: keyed, first write"), move || async move {
            posts(pair.keyed.0, connections, &keys(count)).await
        }),
        Contestant::new(
            format!("{name}: the same handler, its own transaction, no key"),
            move || async move { posts(pair.plain.0, connections, &keys(count)).await },
        ),
        Contestant::new(format!("{name}: keyed, replay"), move || async move {
            let keys = keys(count);
            posts(pair.keyed.0, connections.max(8), &keys).await?;
            posts(pair.keyed.0, connections, &keys).await
        }),
    ];
    if let Some(served) = &pair.of_a_tenant {
        all.push(Contestant::new(format!("{name}: keyed, first write of a tenant"), move || async move {
            posts(served.0, connections, &keys(count)).await
        }));
    }
    all
}

fn goals(name: &str, lines: &[Line]) -> [Goal; 2] {
    let [first, plain, replay] = [&lines[0], &lines[1], &lines[2]].map(|line| 1.0 / line.median());
    [
        Goal::at_most(format!("{name}: time of a keyed write / without a key"), first / plain, 1.3),
        Goal::at_most(format!("{name}: time of a replay / a first write"), replay / first, 0.7),
    ]
}

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Vec<Report>> {
    let mut reports = Vec::new();
    for (connections, count) in [(1, 400), (32, 6400)] {
        let on = pool(1).await?;
        let schema = Schema::fresh(&on).await?;
        let dir = tempfile::tempdir_in(".")?;
        let pairs = [postgres(&schema).await?, sqlite(dir.path()).await?];
        let count = options.events(count);
        let mut all = contestants(&pairs[0], connections, count);
        let on_postgres = all.len();
        // A commit of SQLite is one fsync at a time, however many ask.
        all.extend(contestants(&pairs[1], connections, count.min(1600)));
        let lines = interleave(options.rounds, all).await?;
        let rows = number(&on, format!("select count(*) from {}.orders", schema.name)).await?;
        let expected = on_postgres * count * (options.rounds + 1);
        drop(pairs);
        schema.drop().await?;
        if rows != expected as i64 {
            return Err(format!("{rows} rows of {expected} requests: a write was lost or doubled").into());
        }
        let mut goals_of_both = goals("PostgreSQL", &lines[..on_postgres]).to_vec();
        goals_of_both.extend(goals("SQLite", &lines[on_postgres..]));
        let plural = if connections == 1 { "" } else { "s" };
        reports.push(Report {
            title: format!("http: one insert per request, {connections} connection{plural}"),
            unit: "requests/s",
            goals: goals_of_both,
            lines,
            notes: Vec::new(),
        });
    }
    Ok(reports)
}
