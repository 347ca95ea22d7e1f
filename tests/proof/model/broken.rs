//! Mistakes that the properties must catch: each is a change of one step.

use super::protocol::{Promise, Protocol};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// A claim takes a lease that has not lapsed.
    ClaimIgnoresLease,
    /// Settling does not compare the token.
    SettleWithoutToken,
    /// Tokens come from a sequence that begins anew.
    TokensRepeat,
    /// Whoever is in doubt about a claim asks with another nonce.
    DoubtAsksAnew,
    /// The offset is committed when the event is claimed, not when it is settled.
    OffsetBeforeSettle,
    /// A run is settled as done without its effect.
    DoneWithoutEffect,
    /// A sink that compares tokens, and does not know which events it has seen.
    SinkKnowsTokensOnly,
    /// Settling does not move the aggregate's order.
    DoneWithoutItsOrder,
    /// A claim does not look at lower seqs that are leased or in retry.
    OrderForgetsRetries,
    /// A delivery takes an event from the dead letters.
    DeadIsTakenAgain,
    /// An event whose week was dropped is new.
    TooOldIsNew,
    /// The sweep does not wait for statements that began before the week was closed.
    SweepDoesNotWait,
}

impl Broken {
    pub const ALL: [Broken; 12] = [
        Broken::ClaimIgnoresLease,
        Broken::SettleWithoutToken,
        Broken::TokensRepeat,
        Broken::DoubtAsksAnew,
        Broken::OffsetBeforeSettle,
        Broken::DoneWithoutEffect,
        Broken::SinkKnowsTokensOnly,
        Broken::DoneWithoutItsOrder,
        Broken::OrderForgetsRetries,
        Broken::DeadIsTakenAgain,
        Broken::TooOldIsNew,
        Broken::SweepDoesNotWait,
    ];

    /// The smallest world in which it shows.
    pub fn world(self) -> Protocol {
        let promise = match self {
            Broken::DoubtAsksAnew => Promise::AtMostOnce,
            Broken::TooOldIsNew | Broken::SweepDoesNotWait => Promise::Transactional,
            _ => Promise::Leased,
        };
        let sweep = matches!(self, Broken::TooOldIsNew | Broken::SweepDoesNotWait);
        let losses = u8::from(self == Broken::DoubtAsksAnew);
        let failures = u8::from(self == Broken::OrderForgetsRetries);
        let crashes = if self == Broken::DeadIsTakenAgain { 2 } else { 1 };
        Protocol { sweep, losses, failures, crashes, broken: Some(self), ..Protocol::new(promise) }
    }

    /// The property that must not hold with it.
    pub fn caught_by(self) -> &'static str {
        match self {
            Broken::ClaimIgnoresLease => "c1 one live lease",
            Broken::SettleWithoutToken => "c2 a stale token settles nothing",
            Broken::TokensRepeat => "c2 tokens only rise",
            Broken::DoubtAsksAnew => "at most once: what did not run is listed",
            Broken::OffsetBeforeSettle => "no loss: what is acknowledged is settled or listed",
            Broken::DoneWithoutEffect => "done means that it took effect",
            Broken::SinkKnowsTokensOnly => "once: no effect happens twice",
            Broken::DoneWithoutItsOrder => "c4 done moves the order with it",
            Broken::OrderForgetsRetries => "order: nothing overtakes what has begun",
            Broken::DeadIsTakenAgain => "dead: only a redrive leaves it",
            Broken::TooOldIsNew | Broken::SweepDoesNotWait => "c10 a dropped week grants nothing",
        }
    }
}
