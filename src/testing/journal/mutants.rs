//! Deliberately broken journals. Each makes a mistake that people make; the suite must catch every one of them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::{JournalHarness, MemoryJournalHarness};
use crate::clock::Time;
use crate::error::Result;
use crate::event::Event;
use crate::id::{Aggregate, EventId, Owner, RelayName, Tenant};
use crate::journal::{
    Append, Appended, Checkpoint, Expected, Journal, JournalCapabilities, JournalSettings, JournalSweep,
    Leadership, MemoryJournal, Page, Placing, Position, ReadBatch, RelayState, RelayStore as _, Stored,
};
use crate::ledger::Token;
use crate::testing::forward::journal_over;

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalMutant {
    /// An append that is refused has drawn a number, and keeps it.
    BurnsNumbers,
    /// What is expected is checked before it is known whether the append is a repeat.
    ExpectsOfRepeats,
    /// Under `warn` the new payload takes the place of the original.
    StoresTheMismatch,
    /// Writers commit in another order than they drew their positions, and a reader goes past those that are late.
    SkipsHoles,
    /// Writers commit in another order than they drew their positions, and a reader waits for them: not a mistake.
    WaitsAtHoles,
    /// A page is sorted by something else than positions.
    OtherOrder,
    /// Whoever has ever led may save.
    StaleTokenSaves,
    /// A sweep goes by the fastest relay.
    SweepPassesARelay,
    /// One refused append takes the whole batch with it.
    AllOrNothing,
    /// Tenants share their ids.
    TenantsMeet,
    /// A page has as many events as asked for, however large they are.
    UnboundedPages,
    /// A page that is shorter than asked for is taken for the last.
    ShortIsTheEnd,
    /// The position of a horizon is that of the event before the last.
    HorizonTooLow,
    /// A horizon reads the position, and then the clock.
    HorizonReadsTheClockLast,
}

/// A broken journal in memory.
#[derive(Debug)]
pub struct MutantJournalHarness {
    mutant: JournalMutant,
    sound: MemoryJournalHarness,
    damage: Arc<Mutex<Damage>>,
}

impl MutantJournalHarness {
    /// With this mistake.
    pub fn new(mutant: JournalMutant) -> Self {
        MutantJournalHarness { mutant, sound: MemoryJournalHarness::new(), damage: Arc::default() }
    }
}

#[async_trait]
impl JournalHarness for MutantJournalHarness {
    type Journal = MutantJournal;

    async fn open(&self, settings: JournalSettings) -> MutantJournal {
        let unbounded = self.mutant == JournalMutant::UnboundedPages;
        let page_bytes_max = if unbounded { usize::MAX } else { settings.page_bytes_max };
        let journal = self.sound.open(JournalSettings { page_bytes_max, ..settings }).await;
        MutantJournal { mutant: self.mutant, inner: journal, damage: Arc::clone(&self.damage) }
    }
}

/// What the mistake has done.
#[derive(Debug, Default)]
struct Damage {
    /// Positions that are drawn and not committed yet.
    late: HashSet<Position>,
    /// Positions that nobody can read.
    hidden: HashSet<Position>,
    /// What lies at a position instead of what was put there.
    replaced: HashMap<Position, Event>,
    count: u64,
}

/// A memory journal with a mistake.
#[derive(Debug)]
pub struct MutantJournal {
    mutant: JournalMutant,
    inner: MemoryJournal,
    damage: Arc<Mutex<Damage>>,
}

impl MutantJournal {
    fn damage(&self) -> MutexGuard<'_, Damage> {
        self.damage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is read of events.
    fn seen(&self, events: Vec<Stored>) -> Vec<Stored> {
        let damage = self.damage();
        let mut seen: Vec<Stored> =
            events.into_iter().filter(|stored| !damage.hidden.contains(&stored.position)).collect();
        for stored in &mut seen {
            if let Some(event) = damage.replaced.get(&stored.position) {
                stored.event.payload = event.payload.clone();
            }
        }
        seen
    }

    fn mistake_the_end(&self, more: &mut bool, events: usize, limit: usize) {
        if self.mutant == JournalMutant::ShortIsTheEnd {
            *more = events == limit;
        }
    }

    /// A number is drawn for nothing: an event that nobody can read has it.
    async fn burn(&self, append: &Append) -> Result<()> {
        let number = {
            let mut damage = self.damage();
            damage.count += 1;
            damage.count
        };
        let ghost = Event::new(EventId::new(format!("ghost {number}"))?);
        let mut ghost = Append::new(append.aggregate.clone(), Expected::Any, [ghost]);
        ghost.tenant.clone_from(&append.tenant);
        let appended = self.inner.append(&ghost).await?;
        self.damage().hidden.extend(appended.placed.into_iter().map(|placed| placed.position));
        Ok(())
    }

    fn commits_late(&self) -> bool {
        use JournalMutant::{SkipsHoles, WaitsAtHoles};
        matches!(self.mutant, SkipsHoles | WaitsAtHoles)
    }

    /// Commits late: others may have drawn and committed meanwhile.
    async fn commit_late(&self, appended: &Appended, before: u64) {
        let new = |placed: &&crate::journal::Placed| placed.placing == Placing::New;
        let positions: Vec<_> =
            appended.placed.iter().filter(new).map(|placed| placed.position.clone()).collect();
        let turns = if before.is_multiple_of(2) { 50 } else { 0 };
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        let mut damage = self.damage();
        for position in positions {
            damage.late.remove(&position);
        }
    }

    fn shared(&self, append: &Append) -> Append {
        let mut append = append.clone();
        if self.mutant == JournalMutant::TenantsMeet {
            append.tenant = None;
            for event in &mut append.events {
                event.tenant = None;
            }
        }
        append
    }
}

journal_over!(MutantJournal {
    async fn append(&self, append: &Append) -> Result<Appended> {
        let append = &self.shared(append);
        if self.mutant == JournalMutant::ExpectsOfRepeats {
            let head = self.inner.head(append.tenant.as_ref(), &append.aggregate).await?;
            append.expected.check(head)?;
        }
        if self.commits_late() {
            // Drawing and being late is one step: nobody reads in between.
            let (appended, before) = {
                let mut damage = self.damage();
                let appended = self.inner.append_now(append)?;
                damage.count += 1;
                let count = damage.count;
                let new = appended.placed.iter().filter(|placed| placed.placing == Placing::New);
                damage.late.extend(new.map(|placed| placed.position.clone()));
                (appended, count)
            };
            self.commit_late(&appended, before).await;
            return Ok(appended);
        }
        let answer = self.inner.append(append).await;
        match (&answer, self.mutant) {
            (Err(error), JournalMutant::BurnsNumbers) if error.code() != "invalid" => {
                self.burn(append).await?;
            }
            (Ok(appended), JournalMutant::StoresTheMismatch) => {
                let mut damage = self.damage();
                for (event, placed) in append.events.iter().zip(&appended.placed) {
                    if placed.placing == Placing::Kept {
                        damage.replaced.insert(placed.position.clone(), event.clone());
                    }
                }
            }
            _ => {}
        }
        answer
    }
    async fn append_many(&self, appends: &[Append]) -> Result<Vec<Result<Appended>>> {
        let mut answers = Vec::with_capacity(appends.len());
        for append in appends {
            let answer = self.append(append).await;
            if self.mutant == JournalMutant::AllOrNothing {
                answers.push(Ok(answer?));
            } else {
                answers.push(answer);
            }
        }
        Ok(answers)
    }
    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page> {
        let mut page = self.inner.read_aggregate(tenant, aggregate, from, limit).await?;
        self.mistake_the_end(&mut page.more, page.events.len(), limit);
        page.events = self.seen(page.events);
        Ok(page)
    }
    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        let late = self.damage().late.clone();
        let mut batch = self.inner.read(after, limit).await?;
        match self.mutant {
            JournalMutant::SkipsHoles => {
                batch.events.retain(|stored| !late.contains(&stored.position));
            }
            JournalMutant::WaitsAtHoles => {
                // What was drawn after `late` was looked at is behind all of it, and may be late as well.
                let now_late = self.damage().late.clone();
                let is_late =
                    |stored: &Stored| late.contains(&stored.position) || now_late.contains(&stored.position);
                if let Some(hole) = batch.events.iter().position(is_late) {
                    batch.events.truncate(hole);
                    batch.next =
                        batch.events.last().map_or(after.clone(), |stored| stored.position.clone());
                    (batch.at_hole, batch.more) = (true, false);
                }
            }
            JournalMutant::OtherOrder => {
                batch.events.sort_by(|one, other| one.event.payload.cmp(&other.event.payload));
            }
            _ => {}
        }
        self.mistake_the_end(&mut batch.more, batch.events.len(), limit);
        batch.events = self.seen(batch.events);
        Ok(batch)
    }
    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        let tenant = tenant.filter(|_| self.mutant != JournalMutant::TenantsMeet);
        let found = self.inner.find(tenant, id).await?;
        Ok(self.seen(found.into_iter().collect()).pop())
    }
    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        if self.damage().late.is_empty() {
            return self.inner.wait(after, at_most).await;
        }
        tokio::task::yield_now().await;
        Ok(())
    }
    async fn sweep(&self, settings: &JournalSweep) -> Result<u64> {
        if self.mutant != JournalMutant::SweepPassesARelay {
            return self.inner.sweep(settings).await;
        }
        // Every relay is put where the fastest is for as long as it takes.
        let relays = self.inner.relays().await?;
        let checkpoints: BTreeMap<_, _> =
            relays.into_iter().filter_map(|state| Some((state.relay, state.checkpoint?))).collect();
        let fastest = checkpoints.values().max_by(|one, other| one.position.cmp(&other.position)).cloned();
        let Some(fastest) = fastest else { return self.inner.sweep(settings).await };
        for relay in checkpoints.keys() {
            self.inner.rewind(relay, &fastest, None).await?;
        }
        let swept = self.inner.sweep(settings).await;
        for (relay, checkpoint) in &checkpoints {
            self.inner.rewind(relay, checkpoint, None).await?;
        }
        swept
    }
    async fn horizon(&self) -> Result<(Time, Position)> {
        let (time, position) = self.inner.horizon().await?;
        match self.mutant {
            JournalMutant::HorizonTooLow => Ok((time, Position::of(position.number().saturating_sub(1)))),
            JournalMutant::HorizonReadsTheClockLast => {
                // As if the server took its time in between: someone appends, and gets an acknowledgement.
                self.inner.wait(&position, Duration::from_millis(20)).await?;
                tokio::time::sleep(Duration::from_millis(2)).await;
                Ok((self.inner.now().await?, position))
            }
            _ => Ok((time, position)),
        }
    }
    fn capabilities(&self) -> JournalCapabilities {
        self.inner.capabilities()
    }
} {
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        self.inner.acquire_leadership(relay, owner, lease).await
    }
    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        let mut token = token;
        if self.mutant == JournalMutant::StaleTokenSaves {
            let relays = self.inner.relays().await?;
            let current = relays.iter().find(|state| state.relay == *relay).map(|state| state.token);
            token = current.filter(|current| *current > token).unwrap_or(token);
        }
        self.inner.save(relay, token, checkpoint).await
    }
    async fn relays(&self) -> Result<Vec<RelayState>> {
        self.inner.relays().await
    }
});
