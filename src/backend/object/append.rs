//! Appends events: claims their ids, announces itself, commits, writes the index.
//!
//! An append may be killed at any point. Before the commit nothing has happened, and no number is
//! used up. After it the event is in the journal, and the next reader finds the pending append and writes the
//! index.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::allocator::{AllocatorMode, Reservation};
use super::chain::{Link, Tail};
use super::ids::{Claim, json};
use super::journal::Inner;
use super::name::{self, Entry, Slot};
use crate::clock::Time;
use crate::crash_point;
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::id::{Aggregate, Tenant};
use crate::journal::record::EventRecord;
use crate::journal::{AggregateOf, Append, Appended, Placed, Placing, Position, Ready};

/// How often an append tries again after losing a slot. Another append has won each time, so all
/// get through.
const ATTEMPTS_MAX: u32 = 1000;

/// How often a slot may be reported as taken although nothing is there.
const IN_VAIN_MAX: u32 = 20;

/// A pending append, and the slot at which it will commit, if at all.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PendingAppend {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tenant: Option<String>,
    pub(super) aggregate: String,
    pub(super) seq: u64,
    pub(super) void: u32,
    pub(super) nonce: String,
    /// The index time of the chain's last link.
    pub(super) ms: u64,
}

impl PendingAppend {
    pub(super) fn slot(&self) -> Slot {
        Slot { seq: self.seq, void: self.void }
    }

    pub(super) fn of(&self) -> Result<AggregateOf> {
        let tenant = self.tenant.as_deref().map(Tenant::new).transpose();
        match (tenant, Aggregate::new(&self.aggregate)) {
            (Ok(tenant), Ok(aggregate)) => Ok(AggregateOf { tenant, aggregate }),
            _ => Err(Error::Corrupt(format!("a pending append names the aggregate {:?}", self.aggregate))),
        }
    }
}

/// The result of trying to take a slot.
enum Commit {
    /// We took it, and this is the append's index entry.
    Done(Entry),
    /// Another writer has it.
    Lost,
}

impl Inner {
    pub(super) async fn append(&self, append: &Append) -> Result<Appended> {
        let ready = append.check(&self.settings)?;
        self.must_be_numbered(append)?;
        let of = append.of();
        let mut claims: HashMap<usize, Claim> = HashMap::new();
        let _lock = self.append_lock(&of).await;
        // Start from the tail seen last. If it is outdated, taking the slot fails.
        let (mut tail, mut looked) = match self.seen_tail(&of) {
            Some(tail) => (tail, false),
            None => (self.tail(&of).await?, true),
        };
        let mut in_vain = 0;
        for _ in 0..ATTEMPTS_MAX {
            if !looked && append.expected.check(tail.head()).is_err() {
                tail = self.catch_up(&of, tail, append, &mut claims).await?;
                looked = true;
            }
            let decided = self.decide(&ready, tail, &mut claims).await;
            if !looked && matches!(decided, Err(Error::Conflict { .. })) {
                tail = self.catch_up(&of, tail, append, &mut claims).await?;
                looked = true;
                continue;
            }
            let mut placed = decided?;
            if placed.iter().all(|placed| placed.placing != Placing::New) {
                return Ok(Appended::new(placed));
            }
            match self.commit(&ready, &of, tail, &placed, &claims).await? {
                Commit::Done(entry) => {
                    position(&mut placed, &ready, &entry);
                    self.changed.notify_waiters();
                    return Ok(Appended::new(placed));
                }
                Commit::Lost => {
                    let before = tail;
                    tail = self.catch_up(&of, tail, append, &mut claims).await?;
                    looked = true;
                    in_vain = if tail == before { in_vain + 1 } else { 0 };
                    if in_vain == IN_VAIN_MAX {
                        return Err(Error::Corrupt(format!(
                            "seq {} of {of} is taken, but the object is missing: was the object store restored from a backup?",
                            tail.next.seq
                        )));
                    }
                }
            }
        }
        Err(Error::Contended { what: format!("{of}: gave up after {ATTEMPTS_MAX} conflicts"), source: None })
    }

    /// If the caller numbers events, every event must have a seq.
    fn must_be_numbered(&self, append: &Append) -> Result<()> {
        let missing = append.events.iter().find(|event| event.seq.is_none());
        match missing {
            Some(event) if self.mode == AllocatorMode::Off => Err(Error::invalid(
                "event",
                format!("{} has no seq, and this journal does not number: the allocator is off", event.id),
            )),
            _ => Ok(()),
        }
    }

    /// Places the events after a tail, given what is known of their ids. Claims ids only if the
    /// expectation holds.
    async fn decide(
        &self,
        ready: &Ready<'_>,
        tail: Tail,
        claims: &mut HashMap<usize, Claim>,
    ) -> Result<Vec<Placed>> {
        let append = ready.append;
        let of = append.of();
        let stale = |claim: &Claim| matches!(claim, Claim::Ours { below, .. } if tail.next.seq >= *below);
        claims.retain(|_, claim| !stale(claim));
        let wanted: Vec<usize> =
            (0..append.events.len()).filter(|n| ready.same[*n] == *n && !claims.contains_key(n)).collect();
        if append.expected.check(tail.head()).is_err() {
            for index in wanted {
                if let Some(stored) = self.known(append.tenant.as_ref(), &append.events[index].id).await? {
                    claims.insert(index, Claim::Known(Box::new(stored)));
                }
            }
        } else {
            let ids = wanted.iter().map(|index| append.events[*index].id.clone()).collect();
            let claimed = self.each(ids, move |inner, id| {
                let of = of.clone();
                async move {
                    let claim = inner.claim(&of, &id, tail).await;
                    crash_point!("journal.object.intent");
                    claim
                }
            });
            claims.extend(wanted.into_iter().zip(claimed.await?));
        }
        ready.decide(tail.head(), &self.settings, |index| match claims.get(&index) {
            Some(Claim::Known(stored)) => Some((stored.seq, stored.position.clone(), stored.fingerprint)),
            _ => None,
        })
    }

    /// Reads the links after a tail: they may contain our ids, or bar our intents.
    async fn catch_up(
        &self,
        of: &AggregateOf,
        since: Tail,
        append: &Append,
        claims: &mut HashMap<usize, Claim>,
    ) -> Result<Tail> {
        let mut tail = since;
        loop {
            let slots = self.slots(of, tail.next, 4 * self.at_once()).await?;
            if slots.is_empty() {
                self.see_tail(of, tail);
                return Ok(tail);
            }
            for (slot, link) in self.links(of, &slots).await? {
                tail = link.tail(slot);
                let ours = |claim: &Claim, id: &str| match claim {
                    // The claim is so old that a sweep may have removed its intent.
                    Claim::Ours { since, .. } if Time::from_micros(link.at) > since.plus(self.intent_max) => {
                        true
                    }
                    Claim::Ours { number, .. } => link.barred.iter().any(|(b, by)| by == number && b == id),
                    Claim::Known(_) => false,
                };
                claims.retain(|index, claim| !ours(claim, &append.events[*index].id.as_str()));
                for (nth, record) in link.left() {
                    let same = |n: &usize| append.events[*n].id.as_str() == record.id;
                    if let Some(index) = (0..append.events.len()).find(same)
                        && let Some(stored) = link.stored(slot, nth)?
                    {
                        claims.insert(index, Claim::Known(Box::new(stored)));
                    }
                }
            }
            if tail.next <= slots[slots.len() - 1] {
                return Err(lost(of, tail.next)); // a taken slot stays taken, swept or not
            }
        }
    }

    async fn commit(
        &self,
        ready: &Ready<'_>,
        of: &AggregateOf,
        tail: Tail,
        placed: &[Placed],
        claims: &HashMap<usize, Claim>,
    ) -> Result<Commit> {
        let nonce = uuid::Uuid::new_v4().simple().to_string();
        let mut link = Link::void(of, tail.next, tail.ms, Vec::new());
        link.nonce.clone_from(&nonce);
        let mut first: Option<(String, Fingerprint)> = None;
        for (index, event) in ready.append.events.iter().enumerate() {
            if placed[index].placing != Placing::New || ready.same[index] != index {
                continue;
            }
            let fingerprint = ready.fingerprints[index];
            first.get_or_insert_with(|| (event.id.as_str().into_owned(), fingerprint));
            link.events.push(EventRecord::new(event, fingerprint));
            link.intents.push(match claims.get(&index) {
                Some(Claim::Ours { number, .. }) => *number,
                _ => return Err(Error::Corrupt(format!("{} was not claimed", event.id))),
            });
        }
        link.count = link.events.len() as u64;
        if !self.reserve(of, tail, &link, first).await? {
            return Ok(Commit::Lost);
        }
        let pending = self.announce(&link, tail).await?;
        crash_point!("journal.object.noted");
        // Later than anything that a reader who did not see the pending append can have returned.
        let now = self.objects.now().await?;
        link.ms = self.take_ms((millis(now.high) + 1 + self.objects.skew_ms()).max(tail.ms + 1));
        link.previous_ms = tail.ms;
        link.at = now.about.as_micros();
        let won = self.take_place(of, tail.next, &link).await?;
        if !won {
            self.remove_pending(&pending).await;
            return Ok(Commit::Lost);
        }
        crash_point!("journal.object.committed");
        self.see_tail(of, link.tail(tail.next));
        let entry = Entry::new(of, tail.next, link.ms, link.count);
        self.finish(of, tail.next, &link, &entry, &pending).await;
        Ok(Commit::Done(entry))
    }

    async fn announce(&self, link: &Link, tail: Tail) -> Result<String> {
        let pending = PendingAppend {
            tenant: link.tenant.clone(),
            aggregate: link.aggregate.clone(),
            seq: tail.next.seq,
            void: tail.next.void,
            nonce: link.nonce.clone(),
            ms: tail.ms,
        };
        let since = millis(self.objects.now().await?.low);
        let name = name::pending(since, &link.nonce);
        self.objects.put(&name, json(&pending)?).await?;
        Ok(name)
    }

    async fn remove_pending(&self, pending: &str) {
        if let Err(e) = self.objects.delete(pending).await {
            tracing::debug!("a pending append stays until someone reads the journal: {}", e.chain());
        }
    }

    /// The commit point. If the answer is lost, the object itself tells who won.
    async fn take_place(&self, of: &AggregateOf, slot: Slot, link: &Link) -> Result<bool> {
        let name = name::link(of, slot);
        let body = json(link)?;
        for _ in 0..3 {
            let created = self.objects.create(&name, body.clone()).await;
            if matches!(created, Ok(true)) {
                return Ok(true);
            }
            match (self.link(of, slot).await, created) {
                (Ok(Some(there)), _) => return Ok(there.nonce == link.nonce),
                // Taken but empty: some stores refuse two concurrent writes and keep neither.
                (Ok(None), Ok(_)) => {}
                (_, Err(e)) | (Err(e), _) => return Err(e),
            }
        }
        Err(Error::Contended { what: format!("appending to {of}"), source: None })
    }

    /// The steps after a commit. If one fails, the pending append stays, and the next reader does them.
    async fn finish(&self, of: &AggregateOf, slot: Slot, link: &Link, entry: &Entry, pending: &str) {
        if let Err(e) = self.objects.put(&entry.name(), bytes::Bytes::new()).await {
            tracing::warn!("an append to {of} is in the journal but not in its index yet: {}", e.chain());
            return;
        }
        crash_point!("journal.object.indexed");
        self.remove_pending(pending).await;
        crash_point!("journal.object.done");
        self.leave_hint(of, slot, link.count).await;
        self.settle(of, link.tail(slot)).await;
    }

    /// Announces to the allocator which numbers we are about to take. Returns false if they are
    /// taken.
    async fn reserve(
        &self,
        of: &AggregateOf,
        tail: Tail,
        link: &Link,
        first: Option<(String, Fingerprint)>,
    ) -> Result<bool> {
        let (Some(allocator), Some((id, fingerprint))) = (&self.allocator, first) else { return Ok(true) };
        let reservation = Reservation { after: tail, count: link.count, id, fingerprint };
        let reserved = allocator.reserve(of, &reservation).await?;
        crash_point!("journal.object.reserved");
        Ok(reserved)
    }
}

/// Sets the positions of stored events, and of repeats within the append.
fn position(placed: &mut [Placed], ready: &Ready<'_>, entry: &Entry) {
    let mut nth = 0;
    for index in 0..placed.len() {
        let first = ready.same[index];
        if first != index {
            placed[index].position = placed[first].position.clone();
        } else if placed[index].placing == Placing::New {
            placed[index].position = entry.position(nth);
            nth += 1;
        }
    }
    debug_assert!(placed.iter().all(|placed| placed.position != Position::START));
}

fn lost(of: &AggregateOf, slot: Slot) -> Error {
    Error::Corrupt(format!(
        "the object at seq {} of {of} is gone: was the object store restored from a backup?",
        slot.seq
    ))
}

pub(super) fn millis(time: Time) -> u64 {
    u64::try_from(time.as_micros() / 1000).unwrap_or_default()
}
