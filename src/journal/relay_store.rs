//! What a journal keeps for the relays that follow it: who leads, and how far each one got.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{Checkpoint, Leadership, Position, RelayState, Stored};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName};
use crate::ledger::Token;

/// Leadership and checkpoints of the relays that follow a journal.
///
/// Every [`Journal`](super::Journal) is one, because a sweep may only remove what every relay has
/// passed. Programs that only append and read do not need this trait.
///
/// # Contract
///
/// The clauses continue the numbers of the [journal's contract](super::Journal#contract), and the
/// conformance cases are named after them.
///
/// 9. One relay of a name leads at a time. Each leadership has a higher token than any before it. A
///    relay that has lost leadership saves nothing and gets `Fenced`.
/// 10. A checkpoint is stored whole or not at all, and belongs to one journal. Another journal's
///     checkpoint is refused, and so is one at a position that was never assigned (`Conflict`, with
///     both): the journal was restored to an earlier state, and the relay would skip events that
///     now get old positions.
/// 11. A forgotten relay holds no sweep back. A relay with a current leader cannot be forgotten
///     (`Conflict`, with the leader and until when it leads). A relay that reuses a forgotten name
///     begins at the start.
#[async_trait]
pub trait RelayStore: Send + Sync + 'static {
    /// Takes leadership among the relays of a name, unless another one holds it.
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership>;

    /// Extends leadership by `lease` from now. `Fenced`: leadership is lost.
    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()>;

    /// Saves a checkpoint. `Fenced`: leadership is lost, and nothing was saved.
    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()>;

    /// Releases leadership, so that the next relay need not wait for the lease to expire.
    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()>;

    /// Every relay that has ever led, with its checkpoint, by name.
    async fn relays(&self) -> Result<Vec<RelayState>>;

    /// Moves a relay's checkpoint, for an operator, and returns the previous one. Fences the
    /// current leader first. With `if_token`, only if that is still the relay's last token:
    /// otherwise `Conflict`, and nothing changes, because the relay was led or rewound in the
    /// meantime.
    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>>;

    /// Forgets a relay that has no leader, for an operator: its name was a mistake, or it no longer
    /// runs. It no longer holds back sweeps, and a new relay of that name begins at the start.
    /// Returns its last state. `NotFound`: there is no such relay; `Conflict`: it has a leader.
    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState>;

    /// How many events follow a position, counted up to `limit`: the lag of a relay that is there.
    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64>;
}

#[async_trait]
impl<S: RelayStore + ?Sized> RelayStore for Arc<S> {
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        (**self).acquire_leadership(relay, owner, lease).await
    }
    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()> {
        (**self).renew_leadership(relay, token, lease).await
    }
    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        (**self).save(relay, token, checkpoint).await
    }
    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()> {
        (**self).release_leadership(relay, token).await
    }
    async fn relays(&self) -> Result<Vec<RelayState>> {
        (**self).relays().await
    }
    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>> {
        (**self).rewind(relay, to, if_token).await
    }
    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState> {
        (**self).forget_relay(relay).await
    }
    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64> {
        (**self).count_after(after, limit).await
    }
}

/// The position up to which a sweep may remove events: the lowest that any relay has reached. None
/// if no relay follows the journal.
pub(crate) fn swept_up_to(relays: &[RelayState]) -> Option<Position> {
    relays.iter().map(|relay| relay.checkpoint.as_ref().map(Checkpoint::passed).unwrap_or_default()).min()
}

/// Refuses a position that was never assigned.
pub(crate) fn must_be_drawn(relay: &RelayName, position: &Position, last: u64) -> Result<()> {
    if position.number() <= last {
        return Ok(());
    }
    let found = format!("the last position it has given out is {last}");
    Err(put_back(Some(relay.as_str()), position, &found, &Position::of(last)))
}

/// The journal is not in the state in which a follower left it. Continuing would skip events that
/// have been assigned old positions since.
pub(crate) fn put_back(relay: Option<&str>, position: &Position, found: &str, safe: &Position) -> Error {
    let name = relay.map(|relay| format!("--name {relay} ")).unwrap_or_default();
    Error::Conflict {
        expected: format!(
            "the journal as {} left it, at position {position}",
            relay.map_or_else(|| "its follower".to_owned(), |relay| format!("relay {relay}"))
        ),
        actual: format!(
            "{found}: it was put back (a restore, or a fail-over that lost its last commits). A relay that is started again goes on \
             if its checkpoint was put back too; else `hapax relay {name}rewind --to {safe}` publishes again what came after {safe}"
        ),
    }
}

/// Refuses to forget a relay that has a leader or does not exist.
pub(crate) fn may_be_forgotten(
    relay: &RelayName,
    state: Option<RelayState>,
    now: Time,
) -> Result<RelayState> {
    let state = state.ok_or_else(|| Error::NotFound(format!("this journal has no relay {relay}")))?;
    match &state.until {
        Some(until) if state.owner.is_some() && *until > now => {
            let by = state.owner.as_ref().map_or("someone", Owner::as_str);
            Err(Error::Conflict {
                expected: format!("relay {relay} without a leader"),
                actual: format!("{by}, who leads it until {until}; stop it first"),
            })
        }
        _ => Ok(state),
    }
}

/// Refuses to change a relay whose token is not the one that was read.
pub(crate) fn must_be_last(relay: &RelayName, read: Option<Token>, last: Option<Token>) -> Result<()> {
    if read.is_none() || read == last {
        return Ok(());
    }
    let text = |token: Option<Token>| token.map_or_else(|| "none".to_owned(), |token| token.0.to_string());
    Err(Error::Conflict {
        expected: format!("relay {relay} at token {}, as it was read", text(read)),
        actual: format!("token {}: someone has led or changed it since", text(last)),
    })
}

/// Whether any relay has yet to publish this event although its checkpoint is past it.
pub(crate) fn is_behind(relays: &[RelayState], stored: &Stored) -> bool {
    let of = |checkpoint: &Checkpoint| checkpoint.holds_back(stored);
    relays.iter().any(|relay| relay.checkpoint.as_ref().is_some_and(of))
}
