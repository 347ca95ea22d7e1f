//! The state of a stored key.

use std::fmt;

use crate::error::Error;

/// The state of a stored key, by the store's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyState {
    /// Its answer is stored.
    Done,
    /// A request holds it, under a lease or in an open transaction.
    Running,
    /// A run ended without an answer and may have had an effect. A person decides.
    OutcomeUnknown,
    /// The next request with this key runs.
    Free,
}

impl KeyState {
    /// Every state.
    pub const ALL: [KeyState; 4] =
        [KeyState::Done, KeyState::Running, KeyState::OutcomeUnknown, KeyState::Free];

    /// Its name in listings and in the API.
    pub fn label(self) -> &'static str {
        match self {
            KeyState::Done => "done",
            KeyState::Running => "running",
            KeyState::OutcomeUnknown => "outcome-unknown",
            KeyState::Free => "free",
        }
    }
}

impl fmt::Display for KeyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Reads a label. Any other word is corrupt data: taken for one of the states, it could let a request
/// run a second time.
impl TryFrom<&str> for KeyState {
    type Error = Error;

    fn try_from(label: &str) -> Result<Self, Error> {
        let found = KeyState::ALL.into_iter().find(|state| state.label() == label);
        found.ok_or_else(|| Error::Corrupt(format!("a key in the state {label:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_state_is_corrupt_data_and_never_free() {
        for state in KeyState::ALL {
            assert_eq!(KeyState::try_from(state.label()).unwrap(), state);
        }
        for label in ["", "Free", "free ", "outcome_unknown", "settled"] {
            assert!(matches!(KeyState::try_from(label), Err(Error::Corrupt(_))), "{label:?}");
        }
    }
}
