//! An operator's decisions about an aggregate that is behind. Each one fences the current leader,
//! which then continues from the changed checkpoint.

use crate::error::{Error, Result};
use crate::id::RelayName;
use crate::journal::{AggregateOf, Behind, Checkpoint, Journal};
use crate::ledger::Token;

/// How often to retry a change that collides with others.
const ATTEMPTS_MAX: u32 = 20;

/// Retries an aggregate at once, because the obstacle is gone (for example, the bus now accepts
/// larger records). Returns its previous state.
pub async fn resume(journal: &dyn Journal, relay: &RelayName, of: &AggregateOf) -> Result<Behind> {
    let mut resumed = change_all(journal, relay, |checkpoint| {
        let behind = behind_of(checkpoint, relay, of)?;
        let before = behind.clone();
        behind.poison = false;
        Ok(vec![before])
    })
    .await?;
    resumed.pop().ok_or_else(|| is_not_behind(relay, of))
}

/// Does the same for every parked aggregate, in one change. Returns their previous states.
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

/// Permanently skips an event: the relay continues after it. `seq` must be the one that the
/// aggregate is stuck at. Returns the previous state.
pub async fn skip(journal: &dyn Journal, relay: &RelayName, of: &AggregateOf, seq: u64) -> Result<Behind> {
    let mut page = journal.read_aggregate(of.tenant.as_ref(), &of.aggregate, seq, 1).await?;
    let given_up = page.events.pop().filter(|stored| stored.seq == seq);
    let mut skipped = change_all(journal, relay, |checkpoint| {
        let behind = behind_of(checkpoint, relay, of)?;
        let before = behind.clone();
        if behind.next != seq {
            return Err(Error::Conflict {
                expected: format!("{of} stuck at seq {seq}"),
                actual: format!("seq {}", behind.next),
            });
        }
        behind.next += 1;
        behind.poison = false;
        behind.attempts = 0;
        behind.reason = format!("seq {seq} was given up; this one has not been tried yet");
        // Without this, a relay that looks back would take it for a late event.
        if let Some(stored) = &given_up
            && !checkpoint.recent.is_empty()
        {
            checkpoint.recent.push(stored.position.to_string());
        }
        Ok(vec![before])
    })
    .await?;
    skipped.pop().ok_or_else(|| is_not_behind(relay, of))
}

fn is_not_behind(relay: &RelayName, of: &AggregateOf) -> Error {
    Error::NotFound(format!("{of} is not behind in relay {relay}"))
}

fn behind_of<'c>(
    checkpoint: &'c mut Checkpoint,
    relay: &RelayName,
    of: &AggregateOf,
) -> Result<&'c mut Behind> {
    let mut all = checkpoint.behind.iter_mut();
    all.find(|behind| behind.of().is_ok_and(|other| other == *of)).ok_or_else(|| is_not_behind(relay, of))
}

/// Changes a checkpoint. Returns the previous state of what changed; saves nothing if that is
/// empty.
async fn change_all(
    journal: &dyn Journal,
    relay: &RelayName,
    change: impl Fn(&mut Checkpoint) -> Result<Vec<Behind>>,
) -> Result<Vec<Behind>> {
    let mut refused = None;
    for _ in 0..ATTEMPTS_MAX {
        let (mut checkpoint, token) = checkpoint_of(journal, relay).await?;
        // The token is unchanged, so no other change caused the refusal: the journal was put back.
        if let Some((_, error)) = refused.take_if(|(at, _)| *at == token) {
            return Err(error);
        }
        let before = change(&mut checkpoint)?;
        if before.is_empty() {
            return Ok(before);
        }
        // If the leader has saved meanwhile, it continues from this older checkpoint: some events
        // are published again, none is left out.
        match journal.rewind(relay, &checkpoint, Some(token)).await {
            // Another operator or leader came first: retry with the current state.
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
