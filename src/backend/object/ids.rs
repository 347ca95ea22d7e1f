//! Tracks which ids are in the journal. Before an event is committed, an *intent* names the chain
//! its id will go to.
//!
//! An intent alone proves nothing. An id is in the journal if its event is in the chain that its
//! last intent names, less than [`WINDOW`] seqs after the intent's start. If it is not there, the
//! writer was slow or has died. Then
//! * an append to the same aggregate uses the same intent (or the next one, if the chain is beyond
//!   its window). Both writers try the chain's next slot; one gets it, and the other reads that
//!   slot before it tries again;
//! * an append to another aggregate first puts a void at the end of that chain, which bars the
//!   intent. The slow writer finds the void at the slot it wanted.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::chain::{Link, Tail};
use super::journal::Inner;
use super::name::{self, Slot};
use super::store::Listed;
use crate::clock::Time;
use crate::crash_point;
use crate::error::{Error, Result};
use crate::id::{Aggregate, EventId, Tenant};
use crate::journal::{AggregateOf, Stored};

/// An event's seq is less than this many above its intent's start. A writer that others push
/// further back writes a new intent, so a search for the event stays short.
pub(super) const WINDOW: u64 = 256;

/// How often an id's intents are read. Each repetition means that another writer wrote or barred
/// one.
const ATTEMPTS_MAX: u32 = 1000;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Intent {
    id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    aggregate: String,
    /// The lowest seq the event can have.
    from: u64,
}

/// What an append knows of one of its ids.
#[derive(Debug, Clone)]
pub(super) enum Claim {
    /// The id is in the journal.
    Known(Box<Stored>),
    /// We may commit the id under this intent, below this seq. The intent was written at `since` or
    /// later.
    Ours { number: u32, below: u64, since: Time },
}

/// What became of an intent.
pub(super) enum Found {
    Event(Box<Stored>),
    /// No event; `end` is the end of the chain. `newest` is the time of the newest append that was
    /// read.
    Nothing {
        end: Tail,
        newest: Time,
    },
    /// No event can be committed under the intent any more.
    Barred,
}

impl Inner {
    /// Looks up an id and, if it is not in the journal, claims it for an append at the end of a
    /// chain.
    pub(super) async fn claim(&self, of: &AggregateOf, id: &EventId, tail: Tail) -> Result<Claim> {
        let mut from = tail.next.seq;
        let mut number = 0;
        for _ in 0..ATTEMPTS_MAX {
            let since = self.objects.now().await?.low;
            if self.intend(of, id, number, from).await? {
                if number == 0 || self.is_intended(of.tenant.as_ref(), id, number - 1).await? {
                    return Ok(Claim::Ours { number, below: from + WINDOW, since });
                }
                // The intent before it was collected meanwhile. The next writer starts with the
                // first number and would not see ours.
                self.objects.delete(&name::intent(of.tenant.as_ref(), id, number)).await?;
                number = 0;
                continue;
            }
            number = match self.last_intent(of.tenant.as_ref(), id).await? {
                None => 0, // swept meanwhile
                Some((last, intent, at)) => match self.follow(of.tenant.as_ref(), last, &intent).await? {
                    Found::Event(stored) => return Ok(Claim::Known(stored)),
                    Found::Barred => last + 1,
                    // A sweep may remove the intent before we have committed.
                    Found::Nothing { .. }
                        if intent.aggregate == of.aggregate.as_str()
                            && at.plus(self.intent_max / 2) < self.objects.now().await?.high =>
                    {
                        last + 1
                    }
                    Found::Nothing { end, .. } if intent.aggregate == of.aggregate.as_str() => {
                        // Our tail may be outdated: an intent starting there would end before the
                        // other one does.
                        from = from.max(end.next.seq);
                        let below = intent.from + WINDOW;
                        if from < below {
                            return Ok(Claim::Ours { number: last, below, since: at });
                        }
                        last + 1
                    }
                    Found::Nothing { end, .. } => {
                        self.give_up(of.tenant.as_ref(), last, &intent, end).await?;
                        last // try it again: it is barred now, or was committed before
                    }
                },
            };
        }
        Err(Error::Contended { what: format!("claiming the id {id} for {of}"), source: None })
    }

    async fn intend(&self, of: &AggregateOf, id: &EventId, number: u32, from: u64) -> Result<bool> {
        let intent = Intent {
            id: id.as_str().into_owned(),
            tenant: of.tenant.as_ref().map(|tenant| tenant.as_str().to_owned()),
            aggregate: of.aggregate.as_str().to_owned(),
            from,
        };
        let name = name::intent(of.tenant.as_ref(), id, number);
        self.objects.create(&name, json(&intent)?).await
    }

    async fn is_intended(&self, tenant: Option<&Tenant>, id: &EventId, number: u32) -> Result<bool> {
        Ok(self.objects.get(&name::intent(tenant, id, number)).await?.is_some())
    }

    /// All intents of an id, by number; mostly one.
    async fn intents(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Vec<Listed>> {
        let prefix = name::intents(tenant, id);
        self.objects.list(&prefix, &prefix, usize::MAX).await
    }

    /// The last intent of an id, and the earliest time at which it was written.
    async fn last_intent(
        &self,
        tenant: Option<&Tenant>,
        id: &EventId,
    ) -> Result<Option<(u32, Intent, Time)>> {
        let listed = self.intents(tenant, id).await?;
        let Some(last) = listed.last() else { return Ok(None) };
        let Some(body) = self.objects.get(&last.name).await? else { return Ok(None) };
        let intent: Intent = serde_json::from_slice(&body)
            .map_err(|e| Error::Corrupt(format!("{} is not an intent: {e}", last.name)))?;
        if intent.id != id.as_str() || intent.tenant.as_deref() != tenant.map(Tenant::as_str) {
            return Err(Error::Corrupt(format!("{id} and {:?} share a name in the object store", intent.id)));
        }
        Ok(Some((name::intent_number(&last.name)?, intent, last.at)))
    }

    /// Looks for the event of an intent in the chain that the intent names.
    pub(super) async fn follow(
        &self,
        tenant: Option<&Tenant>,
        number: u32,
        intent: &Intent,
    ) -> Result<Found> {
        let of = intent.of(tenant)?;
        let mut newest = i64::MIN;
        let mut end = Tail { next: Slot { seq: intent.from, void: 0 }, ms: 0, last: None };
        let mut step = 2; // mostly the first slot has it; the rest is for failures
        loop {
            let slots = self.slots(&of, end.next, step).await?;
            let within: Vec<_> =
                slots.iter().copied().filter(|slot| slot.seq < intent.from + WINDOW).collect();
            for (slot, link) in self.links(&of, &within).await? {
                end = link.tail(slot);
                newest = newest.max(link.at); // a void has no time
                if link.barred.iter().any(|(barred, by)| *by == number && *barred == intent.id) {
                    return Ok(Found::Barred);
                }
                if let Some(nth) = link.left().find(|(_, event)| event.id == intent.id).map(|(nth, _)| nth)
                    && let Some(stored) = link.stored(slot, nth)?
                {
                    return Ok(Found::Event(Box::new(stored)));
                }
            }
            if within.len() < slots.len() {
                return Ok(Found::Barred); // the chain is beyond the window, so the event can no longer come
            }
            if slots.len() < step {
                return Ok(Found::Nothing { end, newest: Time::from_micros(newest) });
            }
            let last = slots[slots.len() - 1];
            if end.next <= last {
                end.next = Slot { seq: last.seq, void: last.void + 1 }; // swept meanwhile
            }
            step = (step * 4).min(4 * self.at_once());
        }
    }

    /// Puts a void at the end of a chain, so that no writer can commit under the intent any more.
    async fn give_up(&self, tenant: Option<&Tenant>, number: u32, intent: &Intent, end: Tail) -> Result<()> {
        let of = intent.of(tenant)?;
        // If no link was found from the intent's start on, that start may lie beyond the chain's
        // end: look the end up.
        let end = if end.last.is_some() { end } else { self.tail(&of).await? };
        let void = Link::void(&of, end.next, end.ms, vec![(intent.id.clone(), number)]);
        // If the slot is taken, the caller looks again.
        self.objects.create(&name::link(&of, end.next), json(&void)?).await?;
        crash_point!("journal.object.void");
        Ok(())
    }

    /// The event with an id.
    pub(super) async fn known(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        let Some((number, intent, _)) = self.last_intent(tenant, id).await? else { return Ok(None) };
        match self.follow(tenant, number, &intent).await? {
            Found::Event(stored) => Ok(Some(*stored)),
            Found::Nothing { .. } | Found::Barred => Ok(None),
        }
    }

    /// Deletes the intents of an id whose event is being swept, unless the id is already being
    /// appended again.
    pub(super) async fn forget(&self, tenant: Option<&Tenant>, id: &EventId, number: u32) -> Result<()> {
        let listed = self.intents(tenant, id).await?;
        let newest = listed.last().map(|last| name::intent_number(&last.name)).transpose()?;
        if newest.is_some_and(|newest| newest > number) {
            return Ok(());
        }
        // Deletes the newest last: a concurrent lookup finds either that one or none.
        for object in listed {
            self.objects.delete(&object.name).await?;
        }
        Ok(())
    }
}

impl Intent {
    pub(super) fn tenant(&self) -> Result<Option<Tenant>> {
        self.tenant.as_deref().map(Tenant::new).transpose()
    }

    fn of(&self, tenant: Option<&Tenant>) -> Result<AggregateOf> {
        let aggregate = Aggregate::new(&self.aggregate)
            .map_err(|_| Error::Corrupt(format!("an intent names the aggregate {:?}", self.aggregate)))?;
        Ok(AggregateOf { tenant: tenant.cloned(), aggregate })
    }
}

/// Serializes an object's content.
pub(super) fn json(content: &impl Serialize) -> Result<Bytes> {
    let text = serde_json::to_vec(content).map_err(|e| Error::Corrupt(format!("not JSON: {e}")))?;
    Ok(text.into())
}
