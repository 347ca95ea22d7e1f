//! Follows the index.
//!
//! An append first announces itself, then gets its index time, which is later than the store's clock
//! when the pending append was written. So a reader that lists pending appends at some moment knows all appends
//! that can still get an earlier index time. Up to that moment, and up to the oldest of those
//! pending appends, nothing new can appear: that far the reader returns the index. It does not wait for a
//! pending append whose writer is gone. If that append was committed, the reader writes its index entry; if
//! not, the reader takes the slot with a void.

use std::time::Duration;

use super::append::{PendingAppend, millis};
use super::chain::{Link, PAGE};
use super::ids::json;
use super::journal::Inner;
use super::name::{self, Entry, Slot};
use crate::crash_point;
use crate::error::{Error, Result};
use crate::journal::{AggregateOf, Filling, Position, ReadBatch};

/// How long a read waits for the store's clock to pass the index time of a recent append.
const SETTLE_MAX: Duration = Duration::from_secs(3);
/// Readers leave younger pending appends to their writers.
const PENDING_AGE_MS: u64 = 500;

/// How far the index is final: up to there nothing new can appear.
struct Final {
    /// By the clock alone.
    now: u64,
    /// By the clock and by the appends under way.
    up_to: u64,
    /// Whether any append is under way.
    under_way: bool,
}

impl Inner {
    pub(super) async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        let deadline = tokio::time::Instant::now() + SETTLE_MAX;
        let from = name::index_after(after)?;
        if limit == 0 {
            return Ok(ReadBatch::new(Vec::new(), after.clone(), false));
        }
        let names_max = limit.saturating_add(1).min(PAGE);
        loop {
            let fin = self.up_to().await?;
            let listed = self.objects.list(name::INDEX, &from, names_max).await?;
            let mut entries = name::entries(&listed)?;
            // An entry that was there before this read is returned even if its index time is still
            // ahead: wait for it.
            let newest = entries.last().map_or(0, |entry| entry.ms);
            if newest > fin.now && tokio::time::Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis((newest - fin.now).clamp(1, 500))).await;
                continue;
            }
            let settled = entries.partition_point(|entry| entry.ms <= fin.up_to);
            let at_hole = settled < entries.len() || fin.under_way;
            let cut = settled == entries.len() && listed.len() == names_max;
            entries.truncate(settled);
            let mut batch = self.batch(after, &entries, limit).await?;
            batch.more |= cut;
            batch.at_hole = at_hole && !batch.more;
            return Ok(batch);
        }
    }

    /// As many events of the entries as fit on a page.
    async fn batch(&self, after: &Position, entries: &[Entry], limit: usize) -> Result<ReadBatch> {
        let wanted: Vec<&Entry> =
            entries.iter().filter(|entry| entry.left_after(after).next().is_some()).collect();
        let mut page = Filling::new(limit, self.settings.page_bytes_max);
        let mut next = after.clone();
        let mut done = 0;
        while done < wanted.len() && !page.is_full() {
            let (mut count, mut events) = (0, page.len());
            while count < self.at_once() && done + count < wanted.len() && events < limit {
                events += wanted[done + count].left_after(after).count();
                count += 1;
            }
            let some: Vec<Entry> = wanted[done..done + count].iter().map(|entry| (*entry).clone()).collect();
            let links =
                self.each(
                    some,
                    |inner, entry| async move { Ok((inner.link_named(&entry.link()).await?, entry)) },
                );
            for (link, entry) in links.await? {
                for nth in entry.left_after(after) {
                    if page.is_full() {
                        return Ok(ReadBatch::new(page.done().events, next, false).more(true));
                    }
                    if let Some(stored) =
                        link.as_ref().map(|link| link.stored(entry.slot, nth as usize)).transpose()?.flatten()
                    {
                        page.take(stored); // otherwise it was swept
                    }
                    next = entry.position(nth);
                }
            }
            done += count;
        }
        let page = page.done();
        Ok(ReadBatch::new(page.events, next, false).more(page.more))
    }

    /// How far the index is final. Finishes appends that have been under way for too long.
    async fn up_to(&self) -> Result<Final> {
        let now = millis(self.objects.now().await?.low);
        let listed = self.objects.list(name::PENDING, name::PENDING, PAGE).await?;
        let mut up_to = now;
        let mut under_way = false;
        for pending in &listed {
            let since = name::pending_since(&pending.name)?;
            if since + PENDING_AGE_MS < now && self.bring_to_an_end(&pending.name, since, now).await? {
                continue;
            }
            up_to = up_to.min(since);
            under_way = true;
        }
        if listed.len() == PAGE
            && let Some(last) = listed.last()
        {
            up_to = up_to.min(name::pending_since(&last.name)?);
        }
        Ok(Final { now, up_to, under_way })
    }

    /// Finishes a pending append for its writer. Returns false if it is too early.
    async fn bring_to_an_end(&self, pending_name: &str, since: u64, now: u64) -> Result<bool> {
        let Some(body) = self.objects.get(pending_name).await? else { return Ok(true) }; // finished already
        let pending: PendingAppend = serde_json::from_slice(&body)
            .map_err(|e| Error::Corrupt(format!("{pending_name} is not a pending append: {e}")))?;
        let of = pending.of()?;
        match self.link(&of, pending.slot()).await? {
            Some(link) if link.nonce == pending.nonce => {
                let entry = Entry::new(&of, pending.slot(), link.ms, link.count);
                self.objects.put(&entry.name(), bytes::Bytes::new()).await?;
                crash_point!("journal.object.repaired");
            }
            Some(_) => {}
            None if since + self.grace_ms() > now => return Ok(false),
            None => {
                let slot = pending.slot();
                let void = Link::void(&of, slot, pending.ms, Vec::new());
                if !self.objects.create(&name::link(&of, slot), json(&void)?).await? {
                    return Ok(false); // just taken: look again
                }
                crash_point!("journal.object.voided");
            }
        }
        self.objects.delete(pending_name).await?;
        Ok(true)
    }

    fn grace_ms(&self) -> u64 {
        u64::try_from(self.grace.as_millis()).unwrap_or(u64::MAX)
    }

    /// Waits for an event after a position. Appends of this process wake it; for others it polls,
    /// less and less often.
    pub(super) async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        let deadline = tokio::time::Instant::now() + at_most;
        let mut pause = Duration::from_millis(50);
        loop {
            let appended = self.changed.notified();
            if self.count_after(after, 1).await? > 0 {
                // The event may be held back by an append under way: pause, so that callers do not
                // spin.
                tokio::time::sleep_until(
                    deadline.min(tokio::time::Instant::now() + Duration::from_millis(10)),
                )
                .await;
                return Ok(());
            }
            if tokio::time::Instant::now() >= deadline {
                return Ok(());
            }
            let until = deadline.min(tokio::time::Instant::now() + pause);
            let _ = tokio::time::timeout_at(until, appended).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    pub(super) async fn count_after(&self, after: &Position, limit: u64) -> Result<u64> {
        let mut from = name::index_after(after)?;
        let mut count = 0;
        while count < limit {
            let page = PAGE.min(usize::try_from(limit - count).unwrap_or(PAGE).saturating_add(1));
            let listed = self.objects.list(name::INDEX, &from, page).await?;
            for entry in name::entries(&listed)? {
                count += entry.left_after(after).count() as u64;
            }
            match listed.last() {
                Some(last) if listed.len() == page => from.clone_from(&last.name),
                _ => break,
            }
        }
        Ok(count.min(limit))
    }

    /// The links at the given slots, in order.
    pub(super) async fn links(&self, of: &AggregateOf, slots: &[Slot]) -> Result<Vec<(Slot, Link)>> {
        let of = of.clone();
        let links = self.each(slots.to_vec(), move |inner, slot| {
            let of = of.clone();
            async move { inner.link(&of, slot).await }
        });
        Ok(slots.iter().copied().zip(links.await?).filter_map(|(slot, link)| Some((slot, link?))).collect())
    }
}
