//! Lets sweeps remove intents that killed appends left behind.
//!
//! A writer that has claimed an id may pause for any time and then commit, at the slot that was its
//! chain's end when it last looked. So an intent is removed only once the chain contains an append
//! made more than `intent_max` after the intent was written. No writer claims an id under an intent
//! of that age. A writer that still uses it looked before that append, and finds its slot taken. On
//! its way to the next slot it reads that append, sees by its time that its claim is too old, and
//! claims the id again. Only the store's clock counts.
//!
//! Intents are listed by name, ten thousand per sweep; the next sweep continues there. Only intents
//! older than everything that was swept are examined, since those of events in the journal are
//! mostly younger.

use std::time::Duration;

use super::append::millis;
use super::chain::PAGE;
use super::ids::{Found, Intent};
use super::journal::Inner;
use super::name;
use super::store::Listed;
use crate::clock::Time;
use crate::crash_point;
use crate::error::{Error, Result};
use crate::journal::swept_up_to;

/// The most listings of a thousand intents per sweep.
const PAGES_MAX: usize = 10;
/// The most intents examined per sweep.
const LOOKED_MAX: usize = 200;

impl Inner {
    /// Removes some of the abandoned intents. Events older than `older_than` were swept just
    /// before.
    pub(super) async fn collect(&self, older_than: Duration) -> Result<()> {
        let Some(up_to) = swept_up_to(&self.relays().await?) else { return Ok(()) };
        let now = self.objects.now().await?;
        let margin =
            Duration::from_millis(self.objects.grain_ms() + self.objects.skew_ms()) + self.intent_max;
        let published =
            Time::from_micros(i64::try_from(up_to.number()).unwrap_or(i64::MAX).saturating_mul(1000));
        let old = now.low.minus(older_than).min(published).minus(margin);
        let is_old = |intents: &[Listed]| intents.last().is_some_and(|last| last.at < old);
        let from = self.objects.get(name::COLLECTED).await?.unwrap_or_default();
        let mut after = String::from_utf8_lossy(&from).into_owned();
        let mut looked = 0;
        for _ in 0..PAGES_MAX {
            let listed = self.objects.list(name::INTENTS, &after, PAGE).await?;
            let is_last = listed.len() < PAGE;
            let mut ids = by_id(&listed)?;
            if !is_last && ids.len() > 1 {
                ids.pop(); // the next page may have more of this id
            }
            for intents in ids {
                if is_old(intents) {
                    self.collect_one(intents, margin).await?;
                    looked += 1;
                }
                after.clone_from(&intents[intents.len() - 1].name);
            }
            if is_last {
                after.clear(); // the next sweep begins again
            }
            if is_last || looked >= LOOKED_MAX {
                break;
            }
        }
        if after.as_bytes() != from {
            self.objects.put(name::COLLECTED, after.into()).await?;
        }
        Ok(())
    }

    /// Removes the intents of one id if no event can be committed under them any more.
    async fn collect_one(&self, intents: &[Listed], margin: Duration) -> Result<()> {
        let Some(last) = intents.last() else { return Ok(()) };
        let Some(body) = self.objects.get(&last.name).await? else { return Ok(()) };
        let intent: Intent = serde_json::from_slice(&body)
            .map_err(|e| Error::Corrupt(format!("{} is not an intent: {e}", last.name)))?;
        let found = self.follow(intent.tenant()?.as_ref(), name::intent_number(&last.name)?, &intent).await?;
        let is_over = match found {
            Found::Event(_) => false,
            Found::Barred => true,
            Found::Nothing { newest, .. } => newest > last.at.plus(margin),
        };
        if !is_over {
            return Ok(());
        }
        // Delete the first one last: while it exists, a writer that claims the id looks for the
        // later ones.
        for object in intents.iter().rev() {
            self.objects.delete(&object.name).await?;
            crash_point!("journal.object.collected");
        }
        let prefix = name::intents_of(&last.name)?;
        let since = self.objects.list(prefix, prefix, PAGE).await?;
        if since.first().is_some_and(|first| first.name != intents[0].name) {
            // A writer has just written the next one. Take the first name again, so that all
            // writers find it.
            self.objects.create(&intents[0].name, body).await?;
        }
        tracing::debug!(
            "an intent of an append that was never made is gone: {} ({})",
            last.name,
            millis(last.at)
        );
        Ok(())
    }
}

/// Groups the intents of a listing by id.
fn by_id(listed: &[Listed]) -> Result<Vec<&[Listed]>> {
    let mut ids = Vec::new();
    let mut from = 0;
    for at in 0..listed.len() {
        let next = listed.get(at + 1).map(|next| name::intents_of(&next.name)).transpose()?;
        if next != Some(name::intents_of(&listed[at].name)?) {
            ids.push(&listed[from..=at]);
            from = at + 1;
        }
    }
    Ok(ids)
}
