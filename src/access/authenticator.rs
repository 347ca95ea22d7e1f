//! Remembers what a store said about a token, for a moment.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;

use super::{Access, ApiToken, Authentication, RateLimit};
use crate::error::{Error, Result};

/// The most answers that are remembered.
const ANSWERS_MAX: usize = 10_000;
/// How many unknown tokens are looked up in a second, in all and for one address; and how many at
/// the same time, so that lookups of known tokens find a connection.
const UNKNOWN_PER_S: u32 = 50;
const UNKNOWN_PER_ADDRESS_PER_S: u32 = 10;
const UNKNOWN_AT_ONCE: usize = 2;
/// How long the lookup of an unknown token waits for its turn. If it has to, the store is slow or
/// does not answer.
const TURN: Duration = Duration::from_secs(5);
/// The bucket of all addresses together.
const GUESSES: &str = "";

/// A store behind a short memory, so that most requests cost no query. A revocation, a rotation and
/// an expiry take effect everywhere within [`Authenticator::memory`]. While the store does not
/// answer, remembered answers expire as usual, and requests fail.
///
/// Each unknown token costs a lookup. Two of these run at a time, and 10 a second for one address,
/// 50 in all: beyond that a token that was not granted here before is
/// [`Throttled`](Authentication::Throttled). Tokens that were granted here have lookups of their
/// own, so guesses do not delay them; and guesses from one address leave the budget of other
/// addresses alone.
#[derive(Debug)]
pub struct Authenticator {
    store: Arc<dyn Access>,
    memory: Duration,
    answers: Mutex<HashMap<[u8; 32], Answer>>,
    /// When the store was last asked whether it has tokens, and what it said.
    tokens: Mutex<Option<(Instant, bool)>>,
    /// The budget for lookups that find no token: of all addresses, and of each.
    unknown: RateLimit,
    unknown_from: RateLimit,
    /// Permits for lookups of tokens that were not granted here before.
    strangers: Semaphore,
}

#[derive(Debug, Clone)]
struct Answer {
    said: Authentication,
    asked_at: Instant,
    /// From then on one request asks the store again, while the others use this answer.
    renew_at: Instant,
    until: Instant,
}

/// Who shares a budget with whom.
fn place(peer: Option<IpAddr>) -> String {
    match peer.map(|peer| peer.to_canonical()) {
        Some(IpAddr::V6(six)) => format!("{:x?}", &six.segments()[..4]),
        Some(four) => four.to_string(),
        None => "nowhere".to_owned(),
    }
}

impl Authenticator {
    /// Remembers answers for two seconds.
    pub fn new(store: Arc<dyn Access>) -> Self {
        Authenticator::with_memory(store, Duration::from_secs(2))
    }

    /// Remembers answers for this long; at most 10 seconds.
    pub fn with_memory(store: Arc<dyn Access>, memory: Duration) -> Self {
        let memory = memory.min(Duration::from_secs(10));
        Authenticator {
            store,
            memory,
            answers: Mutex::default(),
            tokens: Mutex::default(),
            unknown: RateLimit::per_second(UNKNOWN_PER_S),
            unknown_from: RateLimit::per_second(UNKNOWN_PER_ADDRESS_PER_S),
            strangers: Semaphore::new(UNKNOWN_AT_ONCE),
        }
    }

    /// How long an answer is remembered: how late a revocation can take effect.
    pub fn memory(&self) -> Duration {
        self.memory
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Access> {
        &self.store
    }

    /// What a text, as a client sent it, permits.
    pub async fn authenticate(&self, text: &str) -> Result<Authentication> {
        self.authenticate_from(text, None).await
    }

    /// The same, for a client at this address: it has to wait when too many unknown tokens come
    /// from there. Addresses of one IPv6 network (/64) count as one.
    pub async fn authenticate_from(&self, text: &str, peer: Option<IpAddr>) -> Result<Authentication> {
        let from = place(peer);
        if ApiToken::parse(text).is_err() {
            return Ok(Authentication::Malformed);
        }
        // By its hash: a dump of this process's memory shows fewer secrets.
        let key: [u8; 32] = Sha256::digest(text.as_bytes()).into();
        let asked_at = Instant::now();
        if let Some(said) = self.remembered(&key, asked_at) {
            return Ok(said);
        }
        if self.is_known(&key) {
            return self.look_up(key, text, asked_at).await;
        }
        let throttled = |wait| Ok(Authentication::Throttled { wait });
        let budget = || self.unknown_from.look(&from).and_then(|()| self.unknown.look(GUESSES));
        if let Err(wait) = budget() {
            return throttled(wait);
        }
        let waited = tokio::time::timeout(TURN, self.strangers.acquire()).await;
        let _turn = waited.map_err(|_| {
            Error::unavailable(
                "looking for a token",
                "others wait for the same, and the store does not answer",
            )
        })?;
        // Those before it may have used up the budget, or it may have been granted meanwhile.
        if let Some(said) = self.remembered(&key, Instant::now()) {
            return Ok(said);
        }
        if let Err(wait) = budget() {
            return throttled(wait);
        }
        let said = self.look_up(key, text, Instant::now()).await?;
        if said == Authentication::Unknown {
            // The next one is told. No more buckets are made than lookups are allowed.
            let (_, _) = (self.unknown.take(GUESSES), self.unknown_from.take(&from));
        }
        Ok(said)
    }

    async fn look_up(&self, key: [u8; 32], text: &str, asked_at: Instant) -> Result<Authentication> {
        let said = self.store.authenticate(text).await?;
        self.remember(key, &said, asked_at);
        Ok(said)
    }

    /// Whether the token's last answer here was that it is granted.
    fn is_known(&self, key: &[u8; 32]) -> bool {
        let granted = |answer: &Answer| matches!(answer.said, Authentication::Granted { .. });
        self.answers().get(key).is_some_and(granted)
    }

    /// Whether the store has tokens: then a token is needed. Once it has, it always has.
    pub async fn has_tokens(&self) -> Result<bool> {
        let asked_at = Instant::now();
        let known = *self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, has)) = known
            && (has || asked_at.duration_since(at) < self.memory)
        {
            return Ok(has);
        }
        let has = self.store.has_tokens().await?;
        let mut known = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.is_some_and(|(_, has)| has) {
            *known = Some((asked_at, has));
        }
        Ok(has)
    }

    fn answers(&self) -> MutexGuard<'_, HashMap<[u8; 32], Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remembered(&self, key: &[u8; 32], now: Instant) -> Option<Authentication> {
        let mut answers = self.answers();
        let answer = answers.get_mut(key).filter(|answer| now < answer.until)?;
        if now >= answer.renew_at {
            answer.renew_at = answer.until; // one asks the store; if it is cut off, the rest follows at the end
            return None;
        }
        Some(answer.said.clone())
    }

    /// From when the store was asked, not from when it answered: what was decided is that old.
    fn remember(&self, key: [u8; 32], said: &Authentication, asked_at: Instant) {
        let lasts = match said {
            Authentication::Granted { left, .. } => left.map_or(self.memory, |left| left.min(self.memory)),
            // Never good again.
            Authentication::Revoked | Authentication::Expired => self.memory,
            // May be created in a moment. What was remembered is over, for everybody at once.
            Authentication::Unknown | Authentication::Malformed | Authentication::Throttled { .. } => {
                self.answers().remove(&key);
                return;
            }
        };
        let (renew_at, until) = (asked_at + lasts / 2, asked_at + lasts);
        let answer = Answer { said: said.clone(), asked_at, renew_at, until };
        let mut answers = self.answers();
        if answers.len() >= ANSWERS_MAX && !answers.contains_key(&key) {
            let now = Instant::now();
            answers.retain(|_, answer| now < answer.until);
            if answers.len() >= ANSWERS_MAX {
                return;
            }
        }
        // A slow answer must not replace one that was asked for later.
        if answers.get(&key).is_none_or(|known| known.asked_at <= asked_at) {
            answers.insert(key, answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{Actor, MemoryAccess, NewToken, Role};

    /// Someone guesses as fast as it can; a token that this server has not seen yet comes from elsewhere.
    #[tokio::test]
    async fn t310_guesses_from_one_address_leave_the_others_their_share() {
        let store = Arc::new(MemoryAccess::default());
        let access = Authenticator::new(store.clone());
        let from = |text: &str| Some(text.parse().unwrap());
        let mut answer = Authentication::Unknown;
        for n in 0..200 {
            // Addresses of one network are one address.
            let peer = from(["10.0.0.1", "::ffff:10.0.0.1"][n % 2]);
            answer = access.authenticate_from(ApiToken::generate().expose(), peer).await.unwrap();
        }
        assert!(matches!(answer, Authentication::Throttled { .. }), "{answer:?}");
        for (n, peer) in ["2001:db8::1", "2001:db8::2", "10.0.0.2"].into_iter().enumerate() {
            let token = ApiToken::generate();
            let about = NewToken::new(format!("shop-{n}"), Role::Read);
            store.create(&token, &about, &Actor::new("me", "why")).await.unwrap();
            let answer = access.authenticate_from(token.expose(), from(peer)).await.unwrap();
            assert!(matches!(answer, Authentication::Granted { .. }), "{peer}: {answer:?}");
        }
        assert_eq!(place(from("2001:db8::1")), place(from("2001:db8::2")));
        assert_ne!(place(from("2001:db8::1")), place(from("2001:db8:0:1::1")));
    }
}
