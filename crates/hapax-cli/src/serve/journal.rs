//! The journal over HTTP: append, and read.

use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hapax::event::Headers;
use hapax::journal::{Append, Expected, Placing, Position, Stored};
use hapax::problem::Problem;
use hapax::records::{module_of, not_yours};
use hapax::{Aggregate, Error, Event, EventId, Kind, Time, TraceContext};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{Shared, stopped};
use super::auth::{Reader, Writer};
use super::claims::{check_batch, present};
use super::cursor;
use super::extract::{Json, Named, PAGE_MAX, Params, limit};

/// How many events a page has unless asked otherwise.
const PAGE: usize = 100;
/// The longest time to wait for events.
const WAIT_MS_MAX: u64 = 30_000;

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(append)).routes(routes!(events)).routes(routes!(aggregate))
}

/// What an append expects of its aggregate's last seq.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected must be a whole number from 0 on, \"new\" or \"any\"")]
pub enum ExpectedBody {
    /// This seq is the last one; 0: there is none.
    Seq(u64),
    /// In a word.
    Word(ExpectedWord),
}

/// What an append expects, in a word.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExpectedWord {
    /// The aggregate has no events yet.
    New,
    /// Anything.
    Any,
}

/// A header of an event.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HeaderBody {
    /// Its name.
    #[schema(min_length = 1)]
    name: String,
    /// Its value, if it is text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    /// Its value in base64, if it is not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
}

/// An event to append.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EventBody {
    /// Its id. The same event sent again is stored once.
    #[schema(min_length = 1, max_length = 255, example = "order-17-paid")]
    id: String,
    /// What kind of fact it is. Kinds that begin with `record.` are reserved for writes of records.
    #[schema(min_length = 1, max_length = 255, example = "order.paid")]
    kind: Option<String>,
    /// When it happened (RFC 3339).
    #[schema(format = DateTime)]
    time: Option<String>,
    /// Its content: any JSON, also `null`. An update or delete command (`metadata.kind` is `command`) must
    /// say which seq it expects.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Value>)]
    payload: Option<Box<RawValue>>,
    /// Its content in base64, if it is not JSON.
    payload_base64: Option<String>,
    /// Its headers, in order.
    #[serde(default)]
    headers: Vec<HeaderBody>,
}

/// Events to append to one aggregate: all of them, or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AppendBody {
    /// The aggregate.
    #[schema(min_length = 1, max_length = 255, example = "order-17")]
    aggregate: String,
    /// What its last seq must be; unset: any.
    expected: Option<ExpectedBody>,
    /// The events, in the order in which they are numbered.
    events: Vec<EventBody>,
}

/// Where an event is stored.
#[derive(Debug, Serialize, ToSchema)]
pub struct PlacedAnswer {
    /// The event.
    id: String,
    /// Its number within the aggregate.
    seq: u64,
    /// Its place in the journal's order.
    position: String,
    /// `new`: stored now; `repeat`: it was there already; `kept`: another event is there under its id, and
    /// this one was not stored.
    placing: &'static str,
    /// The event that was kept instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    original: Option<EventAnswer>,
}

/// What was appended.
#[derive(Debug, Serialize, ToSchema)]
pub struct AppendAnswer {
    /// The aggregate.
    aggregate: String,
    /// The highest of the seqs.
    last_seq: u64,
    /// The place of each event, in their order.
    events: Vec<PlacedAnswer>,
    /// Set if an id was used before for other content, which was kept (`journal.mismatch = warn`).
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

/// An event of the journal.
#[derive(Debug, Serialize, ToSchema)]
pub struct EventAnswer {
    /// Its place in the journal's order.
    position: String,
    /// Whose data it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    /// Its aggregate.
    aggregate: Option<String>,
    /// Its number within the aggregate.
    seq: u64,
    /// Its id.
    id: String,
    /// What kind of fact it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    /// When it happened.
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    /// When it was appended, by the journal's clock.
    at: String,
    /// The fingerprint of its content.
    fingerprint: String,
    /// Its content, if it is JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    payload: Option<Box<RawValue>>,
    /// Its content in base64, if it is not JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
    /// Its headers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<HeaderBody>,
}

impl EventAnswer {
    fn of(stored: &Stored) -> Self {
        let event = &stored.event;
        let text = std::str::from_utf8(&event.payload).ok();
        let payload = text.and_then(|text| serde_json::from_str::<Box<RawValue>>(text).ok());
        let header = |(name, value): (&str, &[u8])| {
            let text = std::str::from_utf8(value).ok().map(str::to_owned);
            let value_base64 = text.is_none().then(|| STANDARD.encode(value));
            HeaderBody { name: name.to_owned(), value: text, value_base64 }
        };
        let is_empty = event.payload.is_empty();
        EventAnswer {
            position: stored.position.to_string(),
            tenant: event.tenant.as_ref().map(ToString::to_string),
            aggregate: event.aggregate.as_ref().map(ToString::to_string),
            seq: stored.seq,
            id: event.id.to_string(),
            kind: event.kind.as_ref().map(ToString::to_string),
            time: event.time.map(|time| time.to_string()),
            at: stored.at.to_string(),
            fingerprint: stored.fingerprint.to_string(),
            payload_base64: (payload.is_none() && !is_empty).then(|| STANDARD.encode(&event.payload)),
            payload,
            headers: event.headers.iter().map(header).collect(),
        }
    }
}

fn decoded(what: &'static str, text: &str) -> Result<Bytes, Problem> {
    let bytes =
        STANDARD.decode(text).map_err(|error| Error::invalid(what, format!("it is not base64 ({error})")))?;
    Ok(bytes.into())
}

fn event(body: EventBody, trace: Option<TraceContext>) -> Result<Event, Problem> {
    let mut event = Event::new(EventId::new(&body.id)?);
    event.kind = body.kind.as_deref().map(Kind::new).transpose()?;
    event.time = body.time.as_deref().map(Time::parse).transpose()?;
    event.trace = trace;
    event.payload = match (body.payload, body.payload_base64) {
        (Some(_), Some(_)) => {
            let message = format!("{} has both a payload and a payload_base64; send one of them", event.id);
            return Err(Error::invalid("event", message).into());
        }
        (Some(json), None) => json.get().to_owned().into(),
        (None, Some(text)) => decoded("payload_base64", &text)?,
        (None, None) => Bytes::new(),
    };
    let mut headers = Vec::with_capacity(body.headers.len());
    for header in body.headers {
        let value = match (header.value, header.value_base64) {
            (Some(text), None) => text.into(),
            (None, Some(text)) => decoded("value_base64", &text)?,
            _ => {
                let message = format!("{:?} must have a value or a value_base64, and not both", header.name);
                return Err(Error::invalid("header", message).into());
            }
        };
        headers.push((header.name, value));
    }
    event.headers = headers.into_iter().collect::<Headers>();
    hapax::records::check_event(&event)?;
    Ok(event)
}

/// Appends events to an aggregate
///
/// May be sent again as it is: events that are there already get their original seq and position.
#[utoipa::path(
    post, path = "/v1/journal/append", tag = "journal", request_body = AppendBody,
    responses(
        (status = 200, description = "They are stored", body = AppendAnswer),
        (status = 409, description = "The aggregate has another seq: `conflict`, with `expected` and `actual`"),
        (status = 422, description = "An id was used before for other content: `mismatch`"),
    )
)]
async fn append(
    Writer(caller): Writer,
    State(app): State<Shared>,
    headers: HeaderMap,
    Json(body): Json<AppendBody>,
) -> Result<Json<AppendAnswer>, Problem> {
    if !body.events.is_empty() {
        check_batch(&app, "events", body.events.len())?; // an append of none has a sentence of its own
    }
    let expected = match body.expected {
        None | Some(ExpectedBody::Word(ExpectedWord::Any)) => Expected::Any,
        Some(ExpectedBody::Word(ExpectedWord::New)) => Expected::New,
        Some(ExpectedBody::Seq(seq)) => Expected::Exact(seq),
    };
    let trace = headers.get("traceparent").and_then(|value| TraceContext::parse(value.as_bytes()).ok());
    let events = body.events.into_iter().map(|body| event(body, trace)).collect::<Result<Vec<_>, _>>()?;
    let ids: Vec<EventId> = events.iter().map(|event| event.id.clone()).collect();
    let mut append = Append::to(&body.aggregate, expected, events)?;
    append.tenant.clone_from(&caller.tenant);
    if let Some(module) = module_of(&append.aggregate)
        && app.records.has_module(&app, &module).await?
    {
        return Err(not_yours(&append.aggregate).into());
    }
    let appended = app.appender.append(append).await?;

    let mut answer = AppendAnswer {
        aggregate: body.aggregate,
        last_seq: appended.last_seq(),
        events: Vec::with_capacity(ids.len()),
        warning: None,
    };
    let mut kept = Vec::new();
    for (id, placed) in ids.iter().zip(&appended.placed) {
        let placing = match placed.placing {
            Placing::New => "new",
            Placing::Repeat => "repeat",
            Placing::Kept => "kept",
        };
        let mut original = None;
        if placed.placing == Placing::Kept {
            kept.push(id.to_string());
            original = app.journal.find(caller.tenant.as_ref(), id).await?.as_ref().map(EventAnswer::of);
        }
        let (seq, position) = (placed.seq, placed.position.to_string());
        answer.events.push(PlacedAnswer { id: id.to_string(), seq, position, placing, original });
    }
    if !kept.is_empty() {
        answer.warning = Some(format!(
            "{} had been used before for other content, which was kept; what was sent now was not stored",
            kept.join(", ")
        ));
    }
    Ok(Json(answer))
}

/// Where to read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventsParams {
    /// Events after this position; unset: from the start.
    after: Option<String>,
    /// At most this many positions are read (100 unless set).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// If there are none, wait for them for so long, or for half of `serve.request_timeout_ms` if that is
    /// less.
    #[param(maximum = 30000)]
    wait_ms: Option<u64>,
    /// Those of all tenants, for operators.
    #[serde(default)]
    all_tenants: bool,
}

/// Events in the journal's order.
#[derive(Debug, Serialize, ToSchema)]
pub struct EventsAnswer {
    /// The events. There may be none although there are more: those of other tenants are left out.
    events: Vec<EventAnswer>,
    /// Where to read on: the `after` of the next request. To a reader of one tenant it says nothing about
    /// the events of others but how far the journal is.
    next: String,
    /// Whether more may follow at once.
    more: bool,
    /// Whether reading ends before an event whose writer has not committed yet.
    at_hole: bool,
}

/// Reads events in the journal's order
#[utoipa::path(
    get, path = "/v1/journal/events", tag = "journal", params(EventsParams),
    responses((status = 200, description = "The events", body = EventsAnswer))
)]
async fn events(
    Reader(caller): Reader,
    State(app): State<Shared>,
    Params(params): Params<EventsParams>,
) -> Result<Json<EventsAnswer>, Problem> {
    if params.all_tenants {
        caller.needs_all_tenants()?;
    }
    let secret = app.keys.secret();
    let after = params.after.as_deref().map_or(Ok(Position::START), |text| cursor::open(secret, text))?;
    let limit = limit(params.limit, PAGE, PAGE_MAX)?;
    if let Some(wait_ms) = params.wait_ms.filter(|wait_ms| *wait_ms > WAIT_MS_MAX) {
        return Err(
            Error::invalid("wait_ms", format!("it is {wait_ms}; it must be 0 to {WAIT_MS_MAX}")).into()
        );
    }
    // A request that waits must still be answered in time.
    let wait = Duration::from_millis(params.wait_ms.unwrap_or(0)).min(app.config.serve.request_timeout / 2);
    let mut batch = app.journal.read(&after, limit).await?;
    if batch.events.is_empty() && !batch.more && !wait.is_zero() {
        let mut stopping = app.stopping.clone();
        tokio::select! {
            waited = app.journal.wait(&batch.next, wait) => waited?,
            () = stopped(&mut stopping) => {}
        }
        batch = app.journal.read(&after, limit).await?;
    }
    let seen =
        batch.events.iter().filter(|stored| params.all_tenants || caller.owns(stored.event.tenant.as_ref()));
    Ok(Json(EventsAnswer {
        events: seen.map(EventAnswer::of).collect(),
        next: if params.all_tenants { batch.next.to_string() } else { cursor::seal(secret, &batch.next) },
        more: batch.more,
        at_hole: batch.at_hole,
    }))
}

/// From where to read an aggregate.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AggregateParams {
    /// Events from this seq on; unset: from 1.
    #[param(minimum = 1)]
    from: Option<u64>,
    /// At most this many (100 unless set).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
}

/// The events of an aggregate.
#[derive(Debug, Serialize, ToSchema)]
pub struct AggregateAnswer {
    /// The aggregate.
    aggregate: String,
    /// The seq of its last event; 0: it has none.
    last_seq: u64,
    /// The events, in order.
    events: Vec<EventAnswer>,
    /// Whether more follow: read on from the seq after the last one.
    more: bool,
}

/// Reads the events of an aggregate
///
/// An aggregate that nobody has appended to has none.
#[utoipa::path(
    get, path = "/v1/journal/aggregates/{aggregate}", tag = "journal",
    params(("aggregate" = String, Path, description = "Its name, percent-encoded", min_length = 1, max_length = 255), AggregateParams),
    responses((status = 200, description = "The events", body = AggregateAnswer))
)]
async fn aggregate(
    Reader(caller): Reader,
    State(app): State<Shared>,
    Named(name): Named,
    Params(params): Params<AggregateParams>,
) -> Result<Json<AggregateAnswer>, Problem> {
    let aggregate = Aggregate::new(&name)?;
    let limit = limit(params.limit, PAGE, PAGE_MAX)?;
    let from = from_seq(params.from)?;
    let (tenant, of) = (caller.tenant.as_ref(), &aggregate);
    // Read the head last: then the events that follow it are not missed.
    let page = app.journal.read_aggregate(tenant, of, from, limit).await?;
    let last_seq = app.journal.head(tenant, of).await?;
    let events = page.events.iter().map(EventAnswer::of).collect();
    Ok(Json(AggregateAnswer { aggregate: name, last_seq, events, more: page.more }))
}

fn from_seq(from: Option<u64>) -> Result<u64, Problem> {
    match from {
        Some(from) if from == 0 || i64::try_from(from).is_err() => {
            Err(Error::invalid("from", format!("it is {from}; seqs are 1 to {}", i64::MAX)).into())
        }
        from => Ok(from.unwrap_or(1)),
    }
}
