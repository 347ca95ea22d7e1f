//! Leadership and checkpoints of relays: objects that are written once, named by the leadership's
//! token.
//!
//! ```text
//! relay/NAME/TOKEN.lead              who leads, and for how long at first; whoever creates it does
//! relay/NAME/TOKEN.keep.MS.LEASE     kept for another LEASE ms since it was written
//! relay/NAME/TOKEN.save.N            a checkpoint; N = 0: the one this leader began with
//! relay/NAME/TOKEN.end               given up
//! ```
//!
//! Forgetting a relay writes a leadership without an owner that is marked as forgotten, with an
//! empty checkpoint. Its token is never used again, and the relay is no longer listed.
//!
//! The checkpoint that counts is the last one under the highest token, so readers ignore what a
//! zombie writes under an older token. The store's clock alone decides whether a leadership has
//! expired: by when the object was written and the time now, both rounded in the leader's favour.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::append::millis;
use super::ids::json;
use super::journal::Inner;
use super::name;
use super::store::Listed;
use super::sweep::AHEAD_MS;
use crate::clock::Time;
use crate::crash_point;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName};
use crate::journal::{Checkpoint, Leadership, RelayState, may_be_forgotten, must_be_drawn, must_be_last};
use crate::ledger::Token;

/// More objects than a relay ever has, since every step removes old ones.
const OBJECTS_MAX: usize = 10_000;

/// How often to list again because a listed object was replaced meanwhile.
const LISTINGS_MAX: u32 = 50;

/// How often to look at a leadership without a checkpoint: a leader writes one at once, unless it
/// was killed.
const FIRST_SAVE_MAX: u32 = 3;

/// How many bits of a token identify the relay.
const RELAY_BITS: u32 = 20;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct LeaderObject {
    relay: String,
    owner: Option<String>,
    lease_ms: u64,
    /// Whether this ended the relay. It takes effect once there is a checkpoint under the same
    /// token.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    forgotten: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct SaveObject {
    checkpoint: Option<Checkpoint>,
    /// When it was saved, in microseconds since 1970.
    saved_at: Option<i64>,
}

/// What an object of a relay is, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Leader,
    /// The number of the checkpoint.
    Save(u64),
    Keep {
        lease_ms: u64,
    },
    End,
}

impl Kind {
    /// The token and the kind.
    fn of(name: &str) -> Option<(i64, Kind)> {
        let file = name.rsplit('/').next()?;
        let parts: Vec<&str> = file.split('.').collect();
        let kind = match parts[1..] {
            ["lead"] => Kind::Leader,
            ["save", number] => Kind::Save(number.parse().ok()?),
            ["keep", _, lease_ms] => Kind::Keep { lease_ms: lease_ms.parse().ok()? },
            ["end"] => Kind::End,
            _ => return None,
        };
        Some((parts[0].parse().ok()?, kind))
    }
}

/// A relay's state, as the names of its objects tell it.
#[derive(Debug, Default)]
struct StoredRelay {
    objects: Vec<Listed>,
    /// The highest token of a leadership; 0 if there is none.
    token: i64,
    lead_at: Option<Time>,
    /// The last renewal, and its lease in milliseconds.
    kept: Option<(Time, u64)>,
    ended: bool,
    /// The last checkpoint: token, number, name.
    save: Option<(i64, u64, String)>,
}

impl StoredRelay {
    fn of(objects: Vec<Listed>) -> Self {
        let mut relay_objects = StoredRelay::default();
        // Objects with other names were not written by a relay.
        let named = || objects.iter().filter_map(|object| Some((object, Kind::of(&object.name)?)));
        for (object, (token, kind)) in named() {
            match kind {
                Kind::Leader if token > relay_objects.token => {
                    relay_objects = StoredRelay {
                        token,
                        lead_at: Some(object.at),
                        save: relay_objects.save,
                        ..StoredRelay::default()
                    };
                }
                Kind::Save(n)
                    if relay_objects.save.as_ref().is_none_or(|(t, m, _)| (token, n) >= (*t, *m)) =>
                {
                    relay_objects.save = Some((token, n, object.name.clone()));
                }
                Kind::Leader | Kind::Save(_) | Kind::Keep { .. } | Kind::End => {}
            }
        }
        let current = relay_objects.token;
        for (object, (_, kind)) in named().filter(|(_, (token, _))| *token == current) {
            match kind {
                Kind::End => relay_objects.ended = true,
                Kind::Keep { lease_ms } if relay_objects.kept.is_none_or(|(at, _)| object.at >= at) => {
                    relay_objects.kept = Some((object.at, lease_ms));
                }
                Kind::Leader | Kind::Save(_) | Kind::Keep { .. } => {}
            }
        }
        relay_objects.objects = objects;
        relay_objects
    }

    /// Whether this is the current token. A relay that never had a leader has none.
    fn is_led_by(&self, token: Token) -> bool {
        self.lead_at.is_some() && self.token == token.0
    }

    /// When the current leadership expires.
    fn until(&self, leader: &LeaderObject, grain_ms: u64) -> Option<Time> {
        let (at, lease_ms) = match self.kept {
            Some(kept) => kept,
            None => (self.lead_at?, leader.lease_ms),
        };
        (!self.ended && lease_ms > 0)
            .then(|| at.plus(Duration::from_millis(lease_ms.saturating_add(grain_ms))))
    }
}

fn file(relay: &RelayName, token: i64, what: &str) -> String {
    format!("{}{token:020}.{what}", name::relay(relay))
}

impl Inner {
    async fn relay_objects(&self, relay: &RelayName) -> Result<StoredRelay> {
        let prefix = name::relay(relay);
        Ok(StoredRelay::of(self.objects.list(&prefix, &prefix, OBJECTS_MAX).await?))
    }

    async fn leader_object(&self, relay: &RelayName, token: i64) -> Result<Option<LeaderObject>> {
        let Some(leader) = self.read_json::<LeaderObject>(&file(relay, token, "lead")).await? else {
            return Ok(None);
        };
        if leader.relay != relay.as_str() {
            return Err(Error::Corrupt(format!(
                "{relay} and {:?} share a name in the object store",
                leader.relay
            )));
        }
        Ok(Some(leader))
    }

    async fn read_json<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(body) = self.objects.get(name).await? else { return Ok(None) };
        serde_json::from_slice(&body)
            .map(Some)
            .map_err(|e| Error::Corrupt(format!("{name} cannot be parsed: {e}")))
    }

    /// The checkpoint that a listing names. `None` if it was replaced meanwhile; then list again.
    async fn saved(&self, relay_objects: &StoredRelay) -> Result<Option<SaveObject>> {
        let Some((.., name)) = &relay_objects.save else {
            return Ok(Some(SaveObject { checkpoint: None, saved_at: None }));
        };
        self.read_json::<SaveObject>(name).await
    }

    pub(super) async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        loop {
            let relay_objects = self.relay_objects(relay).await?;
            if relay_objects.token > 0
                && let Some(leader) = self.leader_object(relay, relay_objects.token).await?
                && let Some(until) = relay_objects.until(&leader, self.objects.grain_ms())
                && self.objects.now().await?.low < until
            {
                let by = leader.owner.as_deref().map_or_else(|| Owner::new("unknown"), Owner::new)?;
                return Ok(Leadership::Taken { by, until });
            }
            let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
            let leader = LeaderObject {
                relay: relay.as_str().into(),
                owner: Some(owner.as_str().into()),
                lease_ms,
                forgotten: false,
            };
            let Some((token, checkpoint)) =
                self.take_over(relay, next_token(relay, relay_objects.token), &leader).await?
            else {
                continue;
            };
            let checkpoint = checkpoint.unwrap_or_else(|| Checkpoint::start(&self.id));
            if let Err(error) = must_be_drawn(relay, &checkpoint.position, self.last_place().await?) {
                self.release_leadership(relay, Token(token)).await?;
                return Err(error);
            }
            return Ok(Leadership::Acquired { token: Token(token), checkpoint });
        }
    }

    /// Creates a leadership, then copies the checkpoint. Everything saved before the leadership was
    /// created is seen; what is saved under an older token afterwards is not.
    async fn take_over(
        &self,
        relay: &RelayName,
        token: i64,
        leader: &LeaderObject,
    ) -> Result<Option<(i64, Option<Checkpoint>)>> {
        if !self.objects.create(&file(relay, token, "lead"), json(leader)?).await? {
            return Ok(None);
        }
        crash_point!("journal.object.lead");
        let mut listings = 0;
        let (relay_objects, save) = loop {
            let relay_objects = self.relay_objects(relay).await?;
            if !relay_objects.is_led_by(Token(token)) {
                // Another leader took over and cleaned up since we looked, so the name was free again.
                // Our object has no effect; delete it.
                self.objects.delete(&file(relay, token, "lead")).await?;
                return Ok(None);
            }
            if let Some(save) = self.saved(&relay_objects).await? {
                break (relay_objects, save);
            }
            listings += 1;
            if listings == LISTINGS_MAX {
                return Err(replaced(relay.as_str()));
            }
        };
        let empty = SaveObject { checkpoint: None, saved_at: None };
        let first = json(if leader.forgotten { &empty } else { &save })?;
        self.objects.create(&file(relay, token, &save_name(0)), first).await?;
        crash_point!("journal.object.lead_checkpoint");
        // Keep the first leadership, so that every listing, however long it takes, shows that the
        // relay exists.
        let first = file(relay, next_token(relay, 0), "lead");
        let older = |object: &&Listed| object.name < file(relay, token, "") && object.name != first;
        self.remove(relay_objects.objects.iter().filter(older)).await;
        Ok(Some((token, save.checkpoint)))
    }

    /// Removes old objects. They have no effect any more; the next step removes those that stay.
    async fn remove(&self, objects: impl Iterator<Item = &Listed>) {
        for object in objects {
            let _ = self.objects.delete(&object.name).await;
        }
    }

    pub(super) async fn renew_leadership(
        &self,
        relay: &RelayName,
        token: Token,
        lease: Duration,
    ) -> Result<()> {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        let ms = millis(self.objects.now().await?.about);
        let name = file(relay, token.0, &format!("keep.{ms:013}.{lease_ms}"));
        self.objects.put(&name, bytes::Bytes::new()).await?;
        let relay_objects = self.relay_objects(relay).await?;
        if !relay_objects.is_led_by(token) || relay_objects.ended {
            self.objects.delete(&name).await?;
            return Err(fenced(relay));
        }
        let old = |object: &&Listed| object.name.contains(".keep.") && object.name < name;
        self.remove(relay_objects.objects.iter().filter(old)).await;
        Ok(())
    }

    pub(super) async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.must_be_of(&self.id)?;
        let saved_at = Some(self.objects.now().await?.about.as_micros());
        let save = json(&SaveObject { checkpoint: Some(checkpoint.clone()), saved_at })?;
        let relay_objects = self.relay_objects(relay).await?;
        if !relay_objects.is_led_by(token) {
            return Err(fenced(relay));
        }
        must_be_drawn(relay, &checkpoint.position, self.last_place().await?)?;
        let mut n =
            relay_objects.save.as_ref().filter(|(t, ..)| *t == token.0).map_or(0, |(_, n, ..)| *n) + 1;
        // The name may be taken by an earlier try of ours whose answer was lost, or by another task
        // of ours.
        while !self.objects.create(&file(relay, token.0, &save_name(n)), save.clone()).await? {
            n += 1;
        }
        crash_point!("journal.object.saved");
        let name = file(relay, token.0, &save_name(n));
        if !self.relay_objects(relay).await?.is_led_by(token) {
            // The next leader may have started from this checkpoint; it is correct in any case.
            return Err(fenced(relay));
        }
        let old = |object: &&Listed| object.name.contains(".save.") && object.name < name;
        self.remove(relay_objects.objects.iter().filter(old)).await;
        Ok(())
    }

    /// The latest index time that an append can have got by now. Index times follow the clock, so a
    /// restored store does not assign old ones again.
    async fn last_place(&self) -> Result<u64> {
        Ok(millis(self.objects.now().await?.high) + AHEAD_MS + self.objects.skew_ms())
    }

    pub(super) async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()> {
        if !self.relay_objects(relay).await?.is_led_by(token) {
            return Err(fenced(relay));
        }
        self.objects.put(&file(relay, token.0, "end"), bytes::Bytes::new()).await
    }

    /// All relays. None is left out: if an object was replaced during the listing, it lists again.
    pub(super) async fn relays(&self) -> Result<Vec<RelayState>> {
        for nth in 1..=LISTINGS_MAX {
            if let Some(relays) = self.relays_listed(nth >= FIRST_SAVE_MAX).await? {
                return Ok(relays);
            }
        }
        Err(replaced("all"))
    }

    /// `None` if a listed object no longer exists.
    async fn relays_listed(&self, unsaved: bool) -> Result<Option<Vec<RelayState>>> {
        let listed = self.objects.list(name::RELAYS, name::RELAYS, usize::MAX).await?;
        let mut boards: BTreeMap<String, Vec<Listed>> = BTreeMap::new();
        for object in listed {
            let directory = object.name.rsplit_once('/').map_or("", |(directory, _)| directory).to_owned();
            boards.entry(directory).or_default().push(object);
        }
        let mut relays = Vec::with_capacity(boards.len());
        for (directory, objects) in boards {
            let relay_objects = StoredRelay::of(objects);
            let name = format!("{directory}/{:020}.lead", relay_objects.token);
            let Some(leader) = self.read_json::<LeaderObject>(&name).await? else { return Ok(None) };
            if leader.forgotten
                && relay_objects.save.as_ref().is_some_and(|(token, ..)| *token == relay_objects.token)
            {
                continue;
            }
            let until = relay_objects.until(&leader, self.objects.grain_ms());
            let Some(save) = self.saved(&relay_objects).await? else { return Ok(None) };
            if relay_objects.save.is_none() && !unsaved {
                return Ok(None);
            }
            let saved_at = save.saved_at.map(Time::from_micros);
            let owner = leader.owner.as_deref().map(Owner::new).transpose()?;
            let relay = RelayName::new(&leader.relay)?;
            relays.push(RelayState::new(
                relay,
                owner,
                until,
                Token(relay_objects.token),
                save.checkpoint,
                saved_at,
            ));
        }
        relays.sort_by(|a, b| a.relay.cmp(&b.relay));
        Ok(Some(relays))
    }

    pub(super) async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>> {
        to.must_be_of(&self.id)?;
        loop {
            let token = self.relay_objects(relay).await?.token;
            must_be_last(relay, if_token, (token != 0).then_some(Token(token)))?;
            must_be_drawn(relay, &to.position, self.last_place().await?)?;
            let owner = self.leader_object(relay, token).await?.and_then(|leader| leader.owner);
            let leader = LeaderObject { relay: relay.as_str().into(), owner, lease_ms: 0, forgotten: false };
            let Some((token, before)) = self.take_over(relay, next_token(relay, token), &leader).await?
            else {
                continue;
            };
            self.save(relay, Token(token), to).await?;
            return Ok(before);
        }
    }

    pub(super) async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState> {
        loop {
            let known = self.relays().await?.into_iter().find(|state| state.relay == *relay);
            let state = may_be_forgotten(relay, known, self.objects.now().await?.low)?;
            let leader =
                LeaderObject { relay: relay.as_str().into(), owner: None, lease_ms: 0, forgotten: true };
            let token = next_token(relay, state.token.0);
            // A leader that takes over now may have started before the checkpoint was emptied: then
            // the relay is not forgotten.
            if let Some((token, checkpoint)) = self.take_over(relay, token, &leader).await?
                && self.relay_objects(relay).await?.is_led_by(Token(token))
            {
                return Ok(RelayState { checkpoint, ..state });
            }
        }
    }
}

/// The relay's next token. Its low bits identify the relay, so that two relays do not get the same
/// token.
fn next_token(relay: &RelayName, last: i64) -> i64 {
    (((last >> RELAY_BITS) + 1) << RELAY_BITS) | i64::from(name::relay_number(relay) >> (32 - RELAY_BITS))
}

fn save_name(n: u64) -> String {
    format!("save.{n:020}")
}

fn replaced(relay: &str) -> Error {
    let what = format!("reading where relays are ({relay}): it was replaced {LISTINGS_MAX} times meanwhile");
    Error::Contended { what, source: None }
}

fn fenced(relay: &RelayName) -> Error {
    Error::Fenced { what: format!("relay {relay} is led by someone else now") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_relay_writes_are_read_back_and_others_ignored() {
        let relay = RelayName::new("orders").expect("a name");
        let of = |what: &str| Kind::of(&file(&relay, 17, what));
        assert_eq!(of("lead"), Some((17, Kind::Leader)));
        assert_eq!(of(&save_name(3)), Some((17, Kind::Save(3))));
        assert_eq!(of("keep.0000000000001.30000"), Some((17, Kind::Keep { lease_ms: 30_000 })));
        assert_eq!(of("end"), Some((17, Kind::End)));
        for other in ["", "leader", "save.x", "keep.1", "lead.1"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(Kind::of("relay/orders/x.lead"), None);
    }
}
