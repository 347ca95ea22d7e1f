//! What an operator decides about an aggregate that is behind. Whoever leads is fenced and goes on from what was decided.

use crate::error::{Error, Result};
use crate::id::RelayName;
use crate::journal::{AggregateOf, Behind, Checkpoint, Journal};
use crate::ledger::Token;

/// How often a change is tried that others come before.
const TRIES: u32 = 20;

/// Has an aggregate tried again, at once: what was in the way is gone (the bus takes larger records now, say). Says what it was.
pub async fn resume(journal: &dyn Journal, relay: &RelayName, of: &AggregateOf) -> Result<Behind> {
    change(journal, relay, of, |behind| {
        behind.poison = false;
        Ok(())
    })
    .await
}

/// The same for every aggregate that is parked, in one change. Says what they were.
pub async fn resume_all(journal: &dyn Journal, relay: &RelayName) -> Result<Vec<Behind>> {
    change_all(journal, relay, |checkpoint| {
        let parked = checkpoint.behind.iter_mut().filter(|behind| behind.poison);
        let resumed = parked.map(|behind| {
            let before = behind.clone();
            behind.poison = false;
            before
        });
        Ok(resumed.collect())
    })
    .await
}

/// Gives up an event for good: the relay goes on behind it. `seq` must be the one that the aggregate is stuck at. Says what it was.
pub async fn skip(journal: &dyn Journal, relay: &RelayName, of: &AggregateOf, seq: u64) -> Result<Behind> {
    let skipped = change(journal, relay, of, |behind| {
        if behind.next != seq {
            return Err(Error::Conflict {
                expected: format!("{of} stuck at seq {seq}"),
                actual: format!("seq {}", behind.next),
            });
        }
        behind.next += 1;
        behind.poison = false;
        behind.tries = 0;
        behind.reason = format!("seq {seq} was given up; this one has not been tried yet");
        Ok(())
    })
    .await?;
    let mut given_up = journal.read_aggregate(of.tenant.as_ref(), &of.aggregate, seq, 1).await?.events;
    given_up.retain(|stored| stored.seq == seq);
    journal.published(&given_up).await?; // it is as good as published to whoever looks for what is not
    Ok(skipped)
}

async fn change(
    journal: &dyn Journal,
    relay: &RelayName,
    of: &AggregateOf,
    change: impl Fn(&mut Behind) -> Result<()>,
) -> Result<Behind> {
    let nobody = || Error::NotFound(format!("{of} is not behind in relay {relay}"));
    let changed = change_all(journal, relay, |checkpoint| {
        let mut all = checkpoint.behind.iter_mut();
        let behind = all.find(|behind| behind.of().is_ok_and(|other| other == *of)).ok_or_else(nobody)?;
        let before = behind.clone();
        change(behind)?;
        Ok(vec![before])
    });
    changed.await?.pop().ok_or_else(nobody)
}

/// Changes a checkpoint. Answers with what was changed, as it was; nothing of it is saved if that is nothing.
async fn change_all(
    journal: &dyn Journal,
    relay: &RelayName,
    change: impl Fn(&mut Checkpoint) -> Result<Vec<Behind>>,
) -> Result<Vec<Behind>> {
    let mut refused = None;
    for _ in 0..TRIES {
        let (mut checkpoint, token) = checkpoint_of(journal, relay).await?;
        // Nobody came between, so it was refused for what it is: the journal was put back.
        if let Some((_, error)) = refused.take_if(|(at, _)| *at == token) {
            return Err(error);
        }
        let before = change(&mut checkpoint)?;
        if before.is_empty() {
            return Ok(before);
        }
        // If the leader saved meanwhile it goes on from this older checkpoint: some is published again, nothing is left out.
        match journal.rewind(relay, &checkpoint, Some(token)).await {
            // Someone else decided something, or another leads: as it is now, then.
            Err(error @ Error::Conflict { .. }) => refused = Some((token, error)),
            other => return other.map(|_| before),
        }
    }
    Err(Error::Contended {
        what: format!("changing relay {relay}: others change it all the time"),
        source: None,
    })
}

async fn checkpoint_of(journal: &dyn Journal, relay: &RelayName) -> Result<(Checkpoint, Token)> {
    let state = journal.relays().await?.into_iter().find(|state| state.relay == *relay);
    state
        .and_then(|state| Some((state.checkpoint?, state.token)))
        .ok_or_else(|| Error::NotFound(format!("relay {relay} has no checkpoint in this journal")))
}
