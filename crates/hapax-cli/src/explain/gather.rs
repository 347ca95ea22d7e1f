//! Asks the stores, and makes the history of an event of what they answer.

use hapax::analytics::Uuid;
use hapax::clock::{Clock as _, SystemClock};
use hapax::journal::{Checkpoint, Position, RelayState, Stored};
use hapax::keyed::{Answer, IdempotencyKey, KeyEntry, KeyStatus, Keys};
use hapax::ledger::Filter;
use hapax::projection::{Content, Document};
use hapax::records::{KIND_PREFIX, Name, module_of, tenant_id};
use hapax::{Aggregate, Error, EventId, Journal, Kind, Tenant, Time};
use serde::Deserialize;

use super::entries::{self, Found};
use super::explanation::{Explanation, Layer, Queue, Step, Subject, in_order, stamp};
use super::stores::{Stores, Visibility};
use crate::failure::Failure;
use crate::keys::look::why_missing;
use crate::print;

/// How many events of an aggregate are shown, the latest ones.
const EVENTS_MAX: u64 = 500;
const PAGE: usize = 500;

/// What is not recorded, as far as it concerns what is shown.
#[derive(Default)]
struct Unrecorded(Vec<&'static str>, Option<String>);

impl Unrecorded {
    fn sentence(self) -> String {
        // Without a ledger that answered, nothing is known of skips.
        let skips = self.1.unwrap_or_else(|| "deliveries that were skipped".to_owned());
        let all: Vec<_> = std::iter::once(skips.as_str()).chain(self.0).collect();
        format!("Not recorded, and so not shown: {}.", all.join("; "))
    }
}

/// The history of one event.
pub async fn event(
    stores: &mut Stores<'_>,
    tenant: Option<&Tenant>,
    id: &EventId,
) -> Result<Explanation, Failure> {
    let (mut threads, mut unrecorded) = (Vec::new(), Unrecorded::default());
    let mut aggregate = None;
    if let Some(journal) = stores.journal().await? {
        let found = find(&*journal, tenant, id).await;
        if let Some((stored, relays)) = stores.answer("journal", found)? {
            if let Some(stored) = &stored {
                aggregate = of_record(stored);
                unrecorded.0.push("when the relay published the event");
                threads.push(journaled(stored, &relays, &stores.visibility));
            } else {
                stores
                    .say("journal", "it has no event with this id (it was not appended there, or was swept)");
            }
        }
    }
    let mut others = Vec::new();
    if let Some(ledger) = stores.ledger().await? {
        let filter = Filter { id: Some(id.clone()), ..Filter::default() };
        let known = std::slice::from_ref(id);
        let found = entries::look(&*ledger, tenant, filter, known, &stores.visibility).await;
        if let Some(found) = stores.answer("ledger", found)? {
            others.clone_from(&found.others);
            note_entries(stores, &found, &mut unrecorded);
            let of_entries = found.threads();
            if of_entries.is_empty() {
                stores.say("ledger", "no scope has an entry of it");
            }
            threads.extend(found.forgotten());
            threads.extend(of_entries);
            threads.extend(found.skipped());
        }
    }
    if threads.is_empty() {
        return Err(missing(stores, &format!("event {}", print::escaped(&id.as_str())), &others));
    }
    if let Some(aggregate) = &aggregate {
        unrecorded.0.push("which key wrote the event");
        threads.extend(record(stores, tenant, aggregate).await?);
    }
    Ok(explanation(stores, Subject::Event(id.to_string()), tenant, threads, Vec::new(), unrecorded))
}

/// The history of an aggregate's events.
pub async fn aggregate(
    stores: &mut Stores<'_>,
    tenant: Option<&Tenant>,
    aggregate: &Aggregate,
) -> Result<Explanation, Failure> {
    let mut unrecorded = Unrecorded::default();
    let events = events_of(stores, tenant, aggregate, &mut unrecorded).await?;
    if events.threads.is_empty() {
        let what = format!("aggregate {}", print::escaped(aggregate.as_str()));
        return Err(missing(stores, &what, &events.others));
    }
    let of = Subject::Aggregate(aggregate.to_string());
    Ok(explanation(stores, of, tenant, events.threads, events.queues, unrecorded))
}

/// The history of a keyed write, and of the record that it wrote.
pub async fn key(
    stores: &mut Stores<'_>,
    tenant: Option<&Tenant>,
    key: &IdempotencyKey,
) -> Result<Explanation, Failure> {
    let subject = format!("key {}", print::escaped(key.as_str()));
    let Some(keys) = stores.keys().await? else { return Err(missing(stores, &subject, &[])) };
    let found = ask_key(&*keys, tenant, key).await;
    let Some((entry, status)) = stores.answer("keys", found)? else {
        return Err(missing(stores, &subject, &[]));
    };
    let Some(entry) = entry else {
        let message = format!("there is no {subject}; {}", why_missing(&status));
        return Err(Error::NotFound(message).into());
    };
    let mut unrecorded = Unrecorded(vec!["requests that were answered from the key"], None);
    let (mut threads, mut queues) = (vec![keyed(&entry, &status)], Vec::new());
    if let KeyStatus::Done(kept) = &status
        && let Some((aggregate, seq)) = written(&kept.answer)
    {
        let events = events_of(stores, tenant, &aggregate, &mut unrecorded).await?;
        // Another service's answer may only look like that of a record.
        if !events.threads.is_empty() {
            let mut step = Step::new(Layer::Key, "the request wrote a record")
                .fact("aggregate", Some(aggregate.as_str()));
            step.seq = Some(seq);
            threads[0].push(step);
            threads.extend(events.threads);
            queues = events.queues;
        }
    }
    Ok(explanation(stores, Subject::Key(key.to_string()), tenant, threads, queues, unrecorded))
}

/// Puts it together.
fn explanation(
    stores: &mut Stores<'_>,
    of: Subject,
    tenant: Option<&Tenant>,
    threads: Vec<Vec<Step>>,
    scopes: Vec<Queue>,
    unrecorded: Unrecorded,
) -> Explanation {
    Explanation {
        of,
        tenant: tenant.map(ToString::to_string),
        asked_at: SystemClock.now(),
        steps: in_order(threads),
        scopes,
        stores: std::mem::take(&mut stores.answers),
        not_recorded: unrecorded.sentence(),
    }
}

/// Nothing was found: nobody knows it, or not everybody could be asked.
fn missing(stores: &Stores<'_>, what: &str, others: &[Option<Tenant>]) -> Failure {
    let messages: Vec<_> =
        stores.answers.iter().map(|one| format!("{}: {}", one.store, one.message)).collect();
    let messages = messages.join("; ");
    if stores.is_away() || stores.there == 0 {
        return Failure::dependency("unavailable", format!("nothing is known of {what}; {messages}"));
    }
    // Who else is a tenant is nobody's business who did not ask for it.
    let hint = if stores.visibility.is_bound {
        "of this tenant, in the scopes that may be seen".to_owned()
    } else if others.is_empty() || !stores.names_others {
        "an event belongs to a tenant: --tenant; --all-tenants names those that have one".to_owned()
    } else {
        format!("{}: give --tenant", known_to(others))
    };
    let messages = if messages.is_empty() { String::new() } else { format!("; {messages}") };
    Error::NotFound(format!("no store has {what} ({hint}){messages}")).into()
}

/// Which other tenants the ledger knows something of this name of.
fn known_to(others: &[Option<Tenant>]) -> String {
    let name = |tenant: &Option<Tenant>| match tenant {
        Some(tenant) => format!("tenant {}", print::escaped(tenant.as_str())),
        None => "no tenant".to_owned(),
    };
    let names: Vec<_> = others.iter().take(5).map(name).collect();
    let more = if others.len() > 5 { " and others" } else { "" };
    format!("the ledger knows one of {}{more}", names.join(", "))
}

async fn find(
    journal: &dyn Journal,
    tenant: Option<&Tenant>,
    id: &EventId,
) -> hapax::Result<(Option<Stored>, Vec<RelayState>)> {
    Ok((journal.find(tenant, id).await?, journal.relays().await?))
}

/// Notes what the ledger left out.
fn note_entries(stores: &mut Stores<'_>, found: &Found, unrecorded: &mut Unrecorded) {
    if found.seen.iter().any(|seen| seen.entry.attempts > 1) {
        unrecorded.0.push("runs of a scope before its last one");
    }
    unrecorded.1 = Some(found.unrecorded_skips());
    for message in &found.left_out {
        stores.say("ledger", message.as_str());
    }
}

/// The events of an aggregate.
#[derive(Default)]
struct Events {
    threads: Vec<Vec<Step>>,
    queues: Vec<Queue>,
    /// If there are none: the tenants that have one of its name.
    others: Vec<Option<Tenant>>,
}

/// Asks journal and ledger about an aggregate; if it is that of a record, also records and read model.
async fn events_of(
    stores: &mut Stores<'_>,
    tenant: Option<&Tenant>,
    aggregate: &Aggregate,
    unrecorded: &mut Unrecorded,
) -> Result<Events, Failure> {
    let (mut events, mut known) = (Events::default(), Vec::new());
    if let Some(journal) = stores.journal().await? {
        let read = read(&*journal, tenant, aggregate).await;
        if let Some(read) = stores.answer("journal", read)? {
            match (read.head, read.events.first()) {
                (0, _) => stores.say("journal", "it has no event of this aggregate"),
                (head, None) => {
                    stores.say(
                        "journal",
                        format!("its events of this aggregate, up to seq {head}, were swept"),
                    );
                }
                (head, Some(first)) if first.seq > 1 => {
                    stores.say(
                        "journal",
                        format!("shown are seq {} to {head}; earlier events are not", first.seq),
                    );
                }
                _ => {}
            }
            if !read.events.is_empty() {
                unrecorded.0.push("when the relay published an event");
            }
            known.extend(read.events.iter().map(|stored| stored.event.id.clone()));
            let visibility = &stores.visibility;
            let steps = read.events.iter().map(|stored| journaled(stored, &read.relays, visibility));
            events.threads.extend(steps);
        }
    }
    if let Some(ledger) = stores.ledger().await? {
        let filter = Filter { aggregate: Some(aggregate.clone()), ..Filter::default() };
        let found = entries::look(&*ledger, tenant, filter, &known, &stores.visibility).await;
        if let Some(found) = stores.answer("ledger", found)? {
            events.others.clone_from(&found.others);
            note_entries(stores, &found, unrecorded);
            let of_entries = found.threads();
            if of_entries.is_empty() {
                stores.say("ledger", "no scope has an entry of this aggregate");
            }
            events.threads.extend(found.forgotten());
            events.threads.extend(of_entries);
            events.threads.extend(found.skipped());
            events.queues = found.queues();
        }
    }
    if !events.threads.is_empty() && module_of(aggregate).is_some() {
        events.threads.extend(record(stores, tenant, aggregate).await?);
    }
    Ok(events)
}

/// The latest events of an aggregate.
struct Read {
    head: u64,
    events: Vec<Stored>,
    relays: Vec<RelayState>,
}

async fn read(journal: &dyn Journal, tenant: Option<&Tenant>, aggregate: &Aggregate) -> hapax::Result<Read> {
    let head = journal.head(tenant, aggregate).await?;
    let (mut events, mut from) = (Vec::new(), head.saturating_sub(EVENTS_MAX - 1).max(1));
    while from <= head {
        let page = journal.read_aggregate(tenant, aggregate, from, PAGE).await?;
        from = page.events.last().map_or(from, |last| last.seq + 1);
        events.extend(page.events);
        if !page.more {
            break;
        }
    }
    Ok(Read { head, events, relays: journal.relays().await? })
}

/// The aggregate of an event, if it is that of a record.
fn of_record(stored: &Stored) -> Option<Aggregate> {
    let is_record = stored.event.kind.as_ref().is_some_and(|kind| kind.as_str().starts_with(KIND_PREFIX));
    stored.aggregate().filter(|aggregate| is_record && module_of(aggregate).is_some()).cloned()
}

/// An event in the journal, and what relays did with it.
fn journaled(stored: &Stored, relays: &[RelayState], visibility: &Visibility) -> Vec<Step> {
    let event = &stored.event;
    let about = |step: Step| step.of(&event.id, Some(stored.seq));
    let header_bytes: usize = event.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    let what = format!("appended as seq {}{}", stored.seq, at_position(", at", &stored.position, visibility));
    let step = Step::new(Layer::Journal, what)
        .at(stored.at)
        .fact("aggregate", stored.aggregate().map(Aggregate::as_str))
        .fact("kind", event.kind.as_ref().map(Kind::as_str))
        .fact("event_time", event.time.map(stamp))
        .fact("fingerprint", Some(stored.fingerprint.to_string()))
        .fact("payload_bytes", Some(event.payload.len()))
        .fact("headers", Some(event.headers.iter().count()))
        .fact("header_bytes", Some(header_bytes));
    let mut steps = vec![about(step)];
    if relays.is_empty() {
        steps.push(about(Step::new(Layer::Relay, "not published: no relay has followed this journal yet")));
    }
    steps.extend(relays.iter().map(|relay| about(relayed(stored, relay, visibility))));
    steps
}

/// A position in words. One with a name is that of an event that may be another tenant's.
fn at_position(before: &str, position: &Position, visibility: &Visibility) -> String {
    if visibility.is_bound && position.name().is_some() {
        return String::new();
    }
    format!("{before} position {position}")
}

/// What a relay did with an event.
fn relayed(stored: &Stored, relay: &RelayState, visibility: &Visibility) -> Step {
    let step = |what: String| Step::new(Layer::Relay, what).named(&relay.relay);
    let Some(checkpoint) = &relay.checkpoint else {
        return step("not published yet: the relay has not saved how far it is".to_owned());
    };
    let position = &checkpoint.position;
    let saved = relay.saved_at.map(stamp);
    if let Some(behind) = behind(checkpoint, stored) {
        let what = match (behind.poison, behind.next == stored.seq) {
            (true, true) => "parked: it cannot be published, and waits for an operator".to_owned(),
            (false, true) => "not published yet: the relay tries again".to_owned(),
            (true, false) => format!("not published: its aggregate is parked at seq {}", behind.next),
            (false, false) => format!("not published yet: its aggregate is behind, at seq {}", behind.next),
        };
        return step(what)
            .at(Time::from_micros(behind.since))
            .fact("reason", Some(behind.reason.as_str()))
            .fact("attempts", Some(behind.attempts));
    }
    if *position < stored.position || checkpoint.holds_back(stored) {
        return step(format!("not published yet{}", at_position(": the relay is at", position, visibility)))
            .fact("checkpoint_saved_at", saved);
    }
    step(format!("published{}", at_position(": the relay is at", position, visibility)))
        .fact("checkpoint_saved_at", saved)
}

/// Why an event is behind, if its aggregate is.
fn behind<'c>(checkpoint: &'c Checkpoint, stored: &Stored) -> Option<&'c hapax::journal::Behind> {
    let is_of = |behind: &&hapax::journal::Behind| {
        stored.event.tenant.as_ref().map(Tenant::as_str) == behind.tenant.as_deref()
            && stored.aggregate().is_some_and(|aggregate| aggregate.as_str() == behind.aggregate)
            && stored.seq >= behind.next
            && stored.position <= checkpoint.position
    };
    checkpoint.behind.iter().find(is_of)
}

async fn ask_key(
    keys: &dyn Keys,
    tenant: Option<&Tenant>,
    key: &IdempotencyKey,
) -> hapax::Result<(Option<KeyEntry>, KeyStatus)> {
    Ok((keys.entry(tenant, key).await?, keys.get(tenant, key).await?))
}

/// The steps of a key.
fn keyed(entry: &KeyEntry, status: &KeyStatus) -> Vec<Step> {
    let begun = Step::new(Layer::Key, "the last request that ran with it began");
    let mut steps = vec![begun.at(entry.begun_at).fact("token", Some(entry.token.0))];
    if let Some(resolved) = &entry.resolved {
        let step = Step::new(Layer::Key, "an operator decided about it").at(resolved.at);
        let step = step.fact("by", Some(resolved.by.as_str())).fact("reason", Some(resolved.reason.as_str()));
        steps.push(step);
    }
    steps.push(match status {
        KeyStatus::Done(kept) => {
            let step = Step::new(Layer::Key, format!("its answer was stored: status {}", kept.answer.status));
            Step { at: entry.settled_at, ..step.fact("body_bytes", Some(kept.answer.body.len())) }
        }
        KeyStatus::Running { until } => {
            Step::new(Layer::Key, "it runs, and has no answer yet").fact("leased_until", until.map(stamp))
        }
        KeyStatus::OutcomeUnknown { .. } => {
            Step::new(Layer::Key, "its outcome is unknown: `hapax keys resolve` decides about it")
        }
        KeyStatus::Free => Step::new(Layer::Key, "its request failed, and may run again"),
        _ => Step::new(Layer::Key, "its answer was swept meanwhile"),
    });
    steps
}

/// The answer to a write of a record, as far as it is needed.
#[derive(Deserialize)]
struct Written {
    id: String,
    module: String,
    seq: u64,
}

/// The aggregate and the seq that a request wrote, if its answer is that of a record.
fn written(answer: &Answer) -> Option<(Aggregate, u64)> {
    if !(200..300).contains(&answer.status) {
        return None;
    }
    let written: Written = serde_json::from_slice(&answer.body).ok()?;
    let id = Uuid::try_parse(&written.id).ok()?;
    let aggregate = Aggregate::new(format!("{}/{id}", written.module)).ok()?;
    module_of(&aggregate).is_some().then_some((aggregate, written.seq))
}

/// A record as it is, and what the read model and the projection have of it.
async fn record(
    stores: &mut Stores<'_>,
    tenant: Option<&Tenant>,
    aggregate: &Aggregate,
) -> Result<Vec<Vec<Step>>, Failure> {
    let Some((module, id)) = module_of(aggregate).zip(id_of(aggregate)) else { return Ok(Vec::new()) };
    // Records have tenants that are UUIDs; of others there is none.
    let Ok(owner) = tenant_id(tenant) else { return Ok(Vec::new()) };
    let (mut steps, mut is_deleted) = (Vec::new(), false);
    if let Some(records) = stores.records().await? {
        let found = match records.get(tenant, &module, id).await {
            Err(Error::NotFound(message)) => {
                stores.say("records", message); // the module is not there
                None
            }
            other => stores.answer("records", other)?,
        };
        is_deleted = matches!(found, Some(None));
        steps.extend(found.map(|record| {
            match record {
                Some(record) => {
                    Step::new(Layer::Record, format!("the record was last written, as seq {}", record.seq))
                        .at(record.updated_at)
                        .fact("created_at", Some(stamp(record.created_at)))
                        .fact("payload_bytes", Some(record.payload.as_str().len()))
                }
                None => Step::new(Layer::Record, "there is no such record now: it was deleted"),
            }
        }));
    }
    if let Some(model) = stores.read_model()? {
        // The time first: it speaks of what is read after it.
        let asked = async {
            let synced = model.last_sync_at(owner).await?;
            Ok::<_, Error>((synced, model.version(owner, &module, id).await?))
        };
        if let Some((synced, version)) = stores.answer("read model", asked.await)? {
            let what = match version {
                // A deletion is a version too.
                Some(version) if is_deleted => {
                    format!("it is at seq {} of the record, which is deleted", version.seq())
                }
                Some(version) => format!("it has the record at seq {}", version.seq()),
                None => "it does not have the record yet".to_owned(),
            };
            let step = Step::new(Layer::ReadModel, what)
                .fact("generation", version.map(hapax::analytics::Version::generation))
                .fact("last_sync_at", synced.map(stamp));
            steps.push(step);
        }
    }
    steps.extend(projected(stores, Name { tenant: owner, module, id }).await?);
    // Each is a thread of its own: what has no time comes last.
    Ok(steps.into_iter().map(|step| vec![step]).collect())
}

/// What each search index and each cache has of a record.
async fn projected(stores: &mut Stores<'_>, name: Name) -> Result<Vec<Step>, Failure> {
    let mut steps = Vec::new();
    for projection in stores.projections().await? {
        let asked = projection.documents(std::slice::from_ref(&name)).await;
        let Some(found) = stores.answer("projection", asked)? else { continue };
        // Where it is concerns operators only.
        let about = (!stores.visibility.is_bound).then(|| projection.about());
        steps.push(Step { name: about, ..has(found) });
    }
    Ok(steps)
}

/// What a projection said about one record.
fn has(found: Vec<Option<Document>>) -> Step {
    let document = found.into_iter().next().flatten();
    let seq = document.as_ref().map_or(0, |document| document.version.seq());
    let (what, reason) = match document.as_ref().map(|document| &document.content) {
        None => ("it has nothing of the record".to_owned(), None),
        Some(Content::Present { .. }) => (format!("it has the record at seq {seq}"), None),
        Some(Content::Deleted) => (format!("it is at seq {seq}, with which the record was deleted"), None),
        Some(Content::Expired) => {
            (format!("it is at seq {seq} of the record, whose content has expired there"), None)
        }
        Some(Content::Unreadable { reason }) => {
            ("what it has of the record cannot be read".to_owned(), Some(reason.as_str()))
        }
        Some(_) => (format!("it is at seq {seq} of the record"), None),
    };
    let generation = document.as_ref().map(|document| document.version.generation());
    Step::new(Layer::Projection, what).fact("generation", generation).fact("reason", reason)
}

fn id_of(aggregate: &Aggregate) -> Option<Uuid> {
    aggregate.as_str().split_once('/').and_then(|(_, id)| Uuid::try_parse(id).ok())
}
