//! Tokens as they are made and listed.

use std::fmt;
use std::time::Duration;

use super::{Role, Scopes, TokenId};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{NAME_CHARS_MAX, Tenant};

/// The longest life of a token, and the longest overlap of a rotation: just under a century.
const TIME_MAX: Duration = Duration::from_secs(36_500 * 86_400);

/// What a new token permits, and for how long.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewToken {
    /// For people: who or what uses it. 1 to 255 characters.
    pub name: String,
    /// Whose data; `None` is the fixed default tenant.
    pub tenant: Option<Tenant>,
    /// For which scopes.
    pub scopes: Scopes,
    /// What kind of request.
    pub role: Role,
    /// How long it is good, from now, by the store's clock; `None`: until it is revoked.
    pub expires_in: Option<Duration>,
    /// The token that makes it, if one does. It must be live, and the new one ends no later than it does.
    pub made_by: Option<TokenId>,
}

impl NewToken {
    /// A token of the default tenant, for all scopes, until it is revoked.
    pub fn new(name: impl Into<String>, role: Role) -> Self {
        NewToken {
            name: name.into(),
            tenant: None,
            scopes: Scopes::All,
            role,
            expires_in: None,
            made_by: None,
        }
    }

    /// The token that makes it.
    #[must_use]
    pub fn made_by(mut self, maker: Option<TokenId>) -> Self {
        self.made_by = maker;
        self
    }

    /// Whose data.
    #[must_use]
    pub fn tenant(mut self, tenant: Option<Tenant>) -> Self {
        self.tenant = tenant;
        self
    }

    /// For which scopes.
    #[must_use]
    pub fn scopes(mut self, scopes: Scopes) -> Self {
        self.scopes = scopes;
        self
    }

    /// How long it is good.
    #[must_use]
    pub fn expires_in(mut self, expires_in: Option<Duration>) -> Self {
        self.expires_in = expires_in;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let chars = self.name.chars().count();
        if self.name.trim().is_empty() || chars > NAME_CHARS_MAX || self.name.contains('\0') {
            return Err(Error::invalid(
                "name of a token",
                format!(
                    "it needs 1 to {NAME_CHARS_MAX} characters, not blank and without NUL; it has {chars}"
                ),
            ));
        }
        self.scopes.check()?;
        match self.expires_in {
            Some(expires_in) if expires_in.is_zero() || expires_in > TIME_MAX => Err(Error::invalid(
                "life of a token",
                format!(
                    "it is {}; it must be more than 0 and at most 36500 days",
                    crate::words::span(expires_in)
                ),
            )),
            _ => Ok(()),
        }
    }
}

/// A token as a store knows it, without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenEntry {
    /// Its id.
    pub id: TokenId,
    /// Its name, for people.
    pub name: String,
    /// Whose data.
    pub tenant: Option<Tenant>,
    /// For which scopes.
    pub scopes: Scopes,
    /// What kind of request.
    pub role: Role,
    /// The token that made it, if one did.
    pub made_by: Option<TokenId>,
    /// How often its secret was rotated.
    pub rotations: u32,
    /// When it was made.
    pub created_at: Time,
    /// When it expires.
    pub expires_at: Option<Time>,
    /// Until when the secret before the last rotation is good, if it still is.
    pub overlap_until: Option<Time>,
    /// When it was last used, to within ten minutes.
    pub last_used_at: Option<Time>,
    /// When it was revoked.
    pub revoked_at: Option<Time>,
    /// Whether it is good, by the store's clock.
    pub state: TokenState,
}

/// Whether a token is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenState {
    /// It permits what its role and scopes say.
    Live,
    /// It has expired.
    Expired,
    /// Somebody ended it.
    Revoked,
}

impl TokenState {
    /// Its name in listings and in the API.
    pub fn label(self) -> &'static str {
        match self {
            TokenState::Live => "live",
            TokenState::Expired => "expired",
            TokenState::Revoked => "revoked",
        }
    }
}

impl fmt::Display for TokenState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Which tokens to list, oldest first.
#[derive(Debug, Clone, Default)]
pub struct ListTokens {
    /// Only those of this tenant (`Some(None)`: of the default tenant); `None` lists all tenants'.
    pub tenant: Option<Option<Tenant>>,
    /// Only those that this token made.
    pub made_by: Option<TokenId>,
    /// Only those that are neither expired nor revoked.
    pub live_only: bool,
    /// Only those after this one, for the next page.
    pub after: Option<TokenId>,
    /// The most to return; 0 means 100, and 1000 is the limit.
    pub limit: usize,
}

impl ListTokens {
    pub(crate) fn limit(&self) -> usize {
        if self.limit == 0 { 100 } else { self.limit.min(1000) }
    }
}

/// How to rotate a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rotation {
    /// How long the old secret stays good. The one before it ends at once.
    pub overlap: Duration,
    /// How often it was rotated before, as [`TokenEntry::rotations`] says. If somebody else rotated it
    /// meanwhile, nothing is changed: otherwise the secret that they hold would end unused.
    pub expected: u32,
}

impl Rotation {
    /// A rotation after so many others; the old secret ends at once.
    pub fn new(expected: u32) -> Self {
        Rotation { overlap: Duration::ZERO, expected }
    }

    /// How long the old secret stays good.
    #[must_use]
    pub fn overlap(mut self, overlap: Duration) -> Self {
        self.overlap = overlap;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.overlap > TIME_MAX {
            return Err(Error::invalid(
                "overlap",
                format!("it is {}; it is at most 36500 days", crate::words::span(self.overlap)),
            ));
        }
        Ok(())
    }
}
