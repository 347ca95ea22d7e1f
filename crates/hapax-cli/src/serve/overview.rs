//! The path of an event in numbers, at once and live (server-sent events).

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use hapax::analytics::{STALE_AFTER, Uuid};
use hapax::bus::{Bus, Partition};
use hapax::keyed::ListKeys;
use hapax::ledger::{Prevented, Stat, State as Is, day_name, day_of};
use hapax::problem::Problem;
use hapax::records::tenant_id;
use hapax::{Scope, Topic};
use hyper::body::Frame;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared, stopped};
use super::auth::{Caller, Operator, Role, Shown};
use super::beside::Watched;
use super::counters;
use super::extract::{Json, Params, limit};
use super::listen::overloaded;
use super::recent::{Count, Latest, PERIOD, Recent};
use super::stats::{JournalStats, RelayStats};
use crate::stats::sums;

/// How long an answer waits for numbers that are being counted.
const PATIENCE: Duration = PERIOD;
/// For how many seconds one answer sends them. Who listens asks again.
const STREAM_S_MAX: usize = 60;
/// How many may listen at once.
const LISTENERS_MAX: usize = 32;
/// How many keys without an answer are counted.
const KEYS_MAX: usize = 1000;
/// How many days of prevented repeats are shown, today included.
const PREVENTED_DAYS: i32 = 7;
/// How many scopes the bus is asked about, and for how long.
const GROUPS_MAX: usize = 20;
const BUS: Duration = Duration::from_secs(2);

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(overview)).routes(routes!(live))
}

/// What all callers share. Counting the ledger may read every entry.
#[derive(Default)]
pub struct Counted {
    ledger: Recent<Stat>,
    around: Recent<Around>,
}

/// What is counted quickly.
struct Around {
    /// None if the ledger keeps no counts.
    prevented: Option<(i32, Vec<Prevented>)>,
    journal: hapax::journal::JournalStat,
    lag: Vec<LagAnswer>,
}

impl Counted {
    /// The ledger's numbers, as they were counted lately.
    async fn latest(&self, app: &Shared) -> Result<Latest<Stat>, Problem> {
        let count = || {
            let ledger = Arc::clone(&app.ledger);
            async move { ledger.stat().await }
        };
        let latest = self.ledger.get(PATIENCE, &app.stopping, count).await;
        latest.map_err(|error| Problem::of(&error))
    }

    /// The ledger's numbers; a problem while they are counted for the first time.
    pub async fn ledger(&self, app: &Shared) -> Result<Arc<Count<Stat>>, Problem> {
        match self.latest(app).await? {
            Latest::Counted(count) => Ok(count),
            Latest::Counting(time) => Err(counting(time)),
        }
    }

    async fn around(&self, app: &Shared, ledger: &Count<Stat>) -> Result<Latest<Around>, Problem> {
        let scopes: BTreeSet<_> = ledger.value.counts.iter().map(|(_, scope, ..)| scope.clone()).collect();
        let today = day_of(ledger.value.now.plus(ledger.age()));
        let count = || around(Arc::clone(app), scopes.clone(), today);
        self.around.get(PATIENCE, &app.stopping, count).await.map_err(|error| Problem::of(&error))
    }
}

async fn around(app: Shared, scopes: BTreeSet<Scope>, today: i32) -> hapax::Result<Around> {
    let journal = app.journal.stat().await?;
    let lag = tokio::time::timeout(BUS, lag(&app, scopes)).await.unwrap_or_default();
    let since = today - PREVENTED_DAYS + 1;
    let prevented = match app.ledger.prevented(since).await {
        Ok(days) => Some((since, days.prevented)),
        Err(hapax::Error::Unsupported(_)) => None,
        Err(error) => return Err(error),
    };
    Ok(Around { prevented, journal, lag })
}

/// The numbers are not there yet.
fn counting(time: Duration) -> Problem {
    let detail = format!(
        "the entries of the ledger are being counted for the first time since the server started, for {} s so far; ask \
         again",
        time.as_secs()
    );
    let title = "The numbers are being counted";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", title, detail).retry()
}

/// Who may listen.
pub struct Listeners(Arc<Semaphore>);

impl Default for Listeners {
    fn default() -> Self {
        Listeners(Arc::new(Semaphore::new(LISTENERS_MAX)))
    }
}

/// How many entries of a scope are in each state.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ScopeAnswer {
    /// Whose data.
    tenant: Option<String>,
    /// Whose effect.
    scope: String,
    /// How many entries, by state.
    states: BTreeMap<&'static str, u64>,
    /// How many the ledger holds with their bytes.
    held: u64,
}

/// How far a consumer group is behind.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct LagAnswer {
    /// The scope, after which its group is named unless configured otherwise.
    scope: String,
    /// The records of the relay's topic that the group has not committed.
    records: u64,
}

/// The keys of writes.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeysOverview {
    /// How many have no answer, up to 1000.
    open: usize,
    /// When they were last swept.
    swept_at: Option<String>,
}

/// The bus.
#[derive(Debug, Serialize, ToSchema)]
pub struct BusOverview {
    /// What it is.
    bus: &'static str,
    /// The topic to which the relay publishes.
    topic: String,
    /// The groups that have committed something there.
    lag: Vec<LagAnswer>,
}

/// The read model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReadModelOverview {
    /// What its feed does, if it runs here.
    feed: Option<&'static str>,
    /// Every write that was acknowledged before this time is in it.
    last_sync_at: Option<String>,
    /// Whether that is unknown, or more than five seconds ago.
    stale: bool,
    /// How many changes could not be read, up to 100. Only for those who see the whole server.
    rejected: Option<usize>,
}

/// Effects that were not done twice, of the last seven days.
#[derive(Debug, Serialize, ToSchema)]
pub struct PreventedOverview {
    /// The first of these days (UTC).
    since: String,
    /// How many.
    count: u64,
    /// How many, by layer: `keys`, `window` and `claims`.
    layers: BTreeMap<&'static str, u64>,
    /// How many had a value (`ledger.value`).
    valued: u64,
    /// The sum of their values, an exact decimal.
    value: String,
}

/// The path of an event in numbers.
#[derive(Debug, Serialize, ToSchema)]
pub struct OverviewAnswer {
    /// The ledger's clock when the ledger was counted.
    now: String,
    /// How long ago that was, in seconds. A ledger that takes long to count is counted less often.
    age_s: f64,
    /// How long counting took, in seconds.
    took_s: f64,
    /// Entries by scope.
    scopes: Vec<ScopeAnswer>,
    /// Keys of writes; none if they did not answer.
    keys: Option<KeysOverview>,
    /// The journal, of all tenants: only for those who see the whole server.
    journal: Option<JournalStats>,
    /// The relay, if it runs here: only for those who see the whole server.
    relay: Option<RelayStats>,
    /// What the relay does: `starting`, `leads`, `follows` or `failed`; none if it does not run here.
    relay_state: Option<&'static str>,
    /// The bus, if the relay runs here: only for those who see the whole server.
    bus: Option<BusOverview>,
    /// The read model, if there is one that answers.
    read_model: Option<ReadModelOverview>,
    /// What would have been done twice without hapax; none if the ledger does not count it.
    prevented: Option<PreventedOverview>,
    /// What this process has counted since its start, by metric and label: only for those who see the whole
    /// server.
    #[schema(value_type = Option<Object>)]
    counters: Option<BTreeMap<&'static str, BTreeMap<String, f64>>>,
}

/// The path of an event in numbers, for operators
#[utoipa::path(
    get, path = "/v1/overview", tag = "server",
    responses((status = 200, description = "The numbers", body = OverviewAnswer))
)]
async fn overview(
    Operator(caller): Operator,
    State(app): State<Shared>,
) -> Result<Json<OverviewAnswer>, Problem> {
    match look(&app, &caller).await? {
        Looked::Numbers(answer) => Ok(Json(*answer)),
        Looked::Counting(time) => Err(counting(time)),
    }
}

/// What there is to show.
enum Looked {
    Numbers(Box<OverviewAnswer>),
    /// Nothing yet: the first count is under way, for so long.
    Counting(Duration),
}

async fn look(app: &Shared, caller: &Caller) -> Result<Looked, Problem> {
    let whole = caller.needs_all_tenants().is_ok();
    let ledger = match app.counted.latest(app).await? {
        Latest::Counted(count) => count,
        Latest::Counting(time) => return Ok(Looked::Counting(time)),
    };
    let around = match app.counted.around(app, &ledger).await? {
        Latest::Counted(count) => count,
        Latest::Counting(time) => return Ok(Looked::Counting(time)),
    };
    let (stat, seen) = (&ledger.value, &around.value);
    let (keys, read_model) = tokio::join!(keys(app, caller, whole), read_model(app, caller, whole));
    let bus = app.looked_at().filter(|_| whole).map(|watched| BusOverview {
        bus: watched.bus.capabilities().bus,
        topic: watched.topics.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        lag: seen.lag.clone(),
    });
    Ok(Looked::Numbers(Box::new(OverviewAnswer {
        now: stat.now.to_string(),
        age_s: ledger.age().as_secs_f64(),
        took_s: ledger.took.as_secs_f64(),
        scopes: scopes(stat, caller, whole),
        keys,
        journal: whole.then(|| JournalStats::of(&seen.journal)),
        relay: app.relay.progress().filter(|_| whole).as_ref().map(RelayStats::of),
        relay_state: app.bus.as_ref().map(|_| app.relay.state().word()),
        bus,
        read_model,
        prevented: seen.prevented.as_ref().map(|(since, rows)| prevented(*since, rows, caller, whole)),
        counters: whole.then(|| counters::sums(&app.metrics.render(), &app.config.telemetry_prefix)),
    })))
}

fn scopes(stat: &Stat, caller: &Caller, whole: bool) -> Vec<ScopeAnswer> {
    let mut found = BTreeMap::new();
    for (tenant, scope, state, count) in &stat.counts {
        if !caller.sees(scope) || !(whole || caller.owns(tenant.as_ref())) {
            continue;
        }
        let held = stat.held_by.iter().find(|(of, name, _)| of == tenant && name == scope);
        let key = (tenant.clone(), scope.clone());
        let entry = found.entry(key).or_insert_with(|| ScopeAnswer {
            tenant: tenant.as_ref().map(ToString::to_string),
            scope: scope.to_string(),
            states: BTreeMap::new(),
            held: held.map_or(0, |(.., count)| *count),
        });
        *entry.states.entry(state.name()).or_default() += count;
    }
    found.into_values().collect()
}

fn prevented(since: i32, rows: &[Prevented], caller: &Caller, whole: bool) -> PreventedOverview {
    let is_seen = |row: &&Prevented| match &row.of {
        Some((tenant, scope)) => caller.sees(scope) && (whole || caller.owns(tenant.as_ref())),
        None => whole,
    };
    let seen: Vec<_> = rows.iter().filter(is_seen).cloned().collect();
    let (sum, layers) = sums(&seen);
    PreventedOverview {
        since: day_name(since),
        count: sum.count,
        layers: layers.into_iter().map(|(layer, amount)| (layer, amount.count)).collect(),
        valued: sum.valued,
        value: sum.value.to_string(),
    }
}

async fn keys(app: &App, caller: &Caller, whole: bool) -> Option<KeysOverview> {
    let which = ListKeys {
        tenant: (!whole).then(|| caller.tenant.clone()),
        open_only: true,
        limit: KEYS_MAX,
        ..ListKeys::default()
    };
    let asked = async { tokio::try_join!(app.kept_keys.list(&which), app.kept_keys.info()) };
    match asked.await {
        Ok((open, info)) => {
            Some(KeysOverview { open: open.len(), swept_at: info.swept_at.map(|at| at.to_string()) })
        }
        Err(error) => {
            tracing::warn!(target: "hapax", error = %error.chain(), "keys could not be counted");
            None
        }
    }
}

async fn read_model(app: &App, caller: &Caller, whole: bool) -> Option<ReadModelOverview> {
    let model = app.reads.as_ref()?;
    // Records have tenants that are UUIDs; other tenants have no records.
    let of = if whole { Uuid::nil() } else { tenant_id(caller.tenant.as_ref()).ok()? };
    let asked = async {
        let (now, at) = tokio::try_join!(model.now(), model.last_sync_at(of))?;
        let rejected = if whole { Some(model.rejected(100).await?.len()) } else { None };
        Ok::<_, hapax::Error>((now, at, rejected))
    };
    match asked.await {
        Ok((now, at, rejected)) => Some(ReadModelOverview {
            feed: app.feed.state().map(super::feeding::FeedState::word),
            last_sync_at: at.map(|at| at.to_string()),
            stale: at.is_none_or(|at| now.since(at) > STALE_AFTER),
            rejected,
        }),
        Err(error) => {
            tracing::warn!(target: "hapax", error = %error.chain(), "the read model did not answer");
            None
        }
    }
}

/// How far the groups of the scopes are behind on the relay's topic; those that never committed are left out.
async fn lag(app: &App, scopes: BTreeSet<Scope>) -> Vec<LagAnswer> {
    let Some(Watched { bus, topics }) = app.looked_at() else { return Vec::new() };
    let scopes: Vec<Scope> = scopes.into_iter().take(GROUPS_MAX).collect();
    let mut found = Vec::new();
    for topic in topics {
        let Ok(Some(info)) = bus.topic(&topic).await else { continue };
        for scope in &scopes {
            match group_lag(&*bus, &topic, info.partitions, scope).await {
                Ok(Some(records)) => found.push(LagAnswer { scope: scope.to_string(), records }),
                Ok(None) => {}
                Err(_) => return found,
            }
        }
    }
    found
}

/// The records of a topic that a group has not committed; none if it never committed any.
async fn group_lag(
    bus: &dyn Bus,
    topic: &Topic,
    partitions: i32,
    scope: &Scope,
) -> hapax::Result<Option<u64>> {
    let (mut records, mut committed_any) = (0, false);
    for number in 0..partitions {
        let partition = Partition { topic: topic.clone(), number };
        let ((first, end), committed) =
            tokio::try_join!(bus.range(&partition), bus.committed(scope.as_str(), &partition))?;
        committed_any |= committed.is_some();
        records += u64::try_from(end - committed.unwrap_or(first).max(first)).unwrap_or(0);
    }
    Ok(committed_any.then_some(records))
}

/// For how long.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LiveParams {
    /// How many seconds the answer goes on (60 unless set).
    #[param(minimum = 1, maximum = 60)]
    seconds: Option<u64>,
}

/// The same every two seconds, as server-sent events
///
/// Each event is named `overview` and has the answer of `GET /v1/overview`, or it is named `problem` and has a
/// problem. While the ledger is counted for the first time they are named `counting` and say for how many seconds
/// (`for_s`). The answer ends after a minute, or when the caller's token is revoked or expires: ask again.
#[utoipa::path(
    get, path = "/v1/overview/live", tag = "server", params(LiveParams),
    responses((status = 200, description = "The numbers, again and again", body = String, content_type = "text/event-stream"))
)]
async fn live(
    Operator(_): Operator,
    shown: Shown,
    State(app): State<Shared>,
    Params(params): Params<LiveParams>,
) -> Result<Response, Problem> {
    let seconds = limit(params.seconds, STREAM_S_MAX, STREAM_S_MAX)?;
    let Ok(place) = Arc::clone(&app.listeners.0).try_acquire_owned() else {
        return Ok(overloaded("as many pages as the server takes are open (32)"));
    };
    let (send, receive) = mpsc::channel(1);
    tokio::spawn(feed(app, shown, send, place, Duration::from_secs(seconds as u64)));
    let mut response = Response::new(Body::new(Events(receive)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Sends the numbers until nobody listens, the caller is not an operator any more (its token was revoked, or it
/// expired, or nobody can tell), the time is over or the server stops.
async fn feed(
    app: Shared,
    shown: Shown,
    send: mpsc::Sender<Bytes>,
    place: OwnedSemaphorePermit,
    time: Duration,
) {
    let _place = place;
    let (until, mut stopping) = (Instant::now() + time, app.stopping.clone());
    let sending = async {
        while Instant::now() < until {
            let Some(caller) = shown.still(Role::Admin).await else { return };
            // A comment now and then: who listens knows that the server is there, however long a store takes.
            let mut looking = std::pin::pin!(look(&app, &caller));
            let looked = loop {
                match tokio::time::timeout(2 * PERIOD, &mut looking).await {
                    Ok(looked) => break looked,
                    Err(_) if send.send(Bytes::from_static(b": wait\n\n")).await.is_err() => return,
                    Err(_) => {}
                }
            };
            let (name, json) = match looked {
                Ok(Looked::Numbers(answer)) => {
                    ("overview", serde_json::to_string(&answer).unwrap_or_default())
                }
                Ok(Looked::Counting(time)) => ("counting", json!({"for_s": time.as_secs()}).to_string()),
                Err(problem) => ("problem", problem.json().to_string()),
            };
            let event = format!("event: {name}\ndata: {json}\n\n");
            if send.send(event.into()).await.is_err() {
                return;
            }
            tokio::time::sleep(PERIOD).await;
        }
    };
    tokio::select! {
        () = sending => {}
        () = stopped(&mut stopping) => {}
        () = send.closed() => {}
    }
}

/// A body made of events.
struct Events(mpsc::Receiver<Bytes>);

impl HttpBody for Events {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.0.poll_recv(context).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

/// The states of entries that are not settled for good: what an operator may have to look at.
pub const OPEN_STATES: [Is; 4] = [Is::Leased, Is::Retry, Is::Parked, Is::Dead];
