//! What a token permits.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::{TokenId, TokenState};
use crate::error::{Error, Result};
use crate::id::{Scope, Tenant};

/// The most scopes that a token can name.
pub const SCOPES_MAX: usize = 64;

/// What kind of request a token may make. Each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Look at things.
    Read,
    /// Claim, append, and write records.
    Write,
    /// Intervene: dead letters, keys of other clients, tokens.
    Admin,
}

impl Role {
    /// All roles, from the least to the most.
    pub const ALL: [Role; 3] = [Role::Read, Role::Write, Role::Admin];

    /// Its word: `read`, `write` or `admin`.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Write => "write",
            Role::Admin => "admin",
        }
    }

    /// Reads a word.
    pub fn parse(text: &str) -> Result<Self> {
        let found = Role::ALL.into_iter().find(|role| role.as_str() == text);
        found.ok_or_else(|| {
            Error::invalid(
                "role",
                format!("{:?} is not one of read, write, admin", crate::id::Visible(text).to_string()),
            )
        })
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// For which scopes a token may claim and intervene. Requests that concern no scope (the journal,
/// records, keys) are decided by the role alone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Scopes {
    /// Every scope of the tenant.
    #[default]
    All,
    /// These only.
    Only(BTreeSet<Scope>),
}

impl Scopes {
    /// These scopes; all if none is named.
    pub fn of(scopes: impl IntoIterator<Item = Scope>) -> Self {
        let scopes: BTreeSet<_> = scopes.into_iter().collect();
        if scopes.is_empty() { Scopes::All } else { Scopes::Only(scopes) }
    }

    /// Whether a scope is among them.
    pub fn contain(&self, scope: &Scope) -> bool {
        match self {
            Scopes::All => true,
            Scopes::Only(scopes) => scopes.contains(scope),
        }
    }

    /// Whether all of others are among them.
    pub fn contain_all(&self, others: &Scopes) -> bool {
        match (self, others) {
            (Scopes::All, _) => true,
            (Scopes::Only(_), Scopes::All) => false,
            (Scopes::Only(mine), Scopes::Only(others)) => others.is_subset(mine),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Scopes::Only(scopes) if scopes.is_empty() || scopes.len() > SCOPES_MAX => Err(Error::invalid(
                "scopes",
                format!("a token names 1 to {SCOPES_MAX} scopes, or all; these are {}", scopes.len()),
            )),
            _ => Ok(()),
        }
    }

    /// As stored: a JSON array; nothing means all.
    #[allow(dead_code, reason = "memory needs no text")]
    pub(crate) fn text(&self) -> Option<String> {
        match self {
            Scopes::All => None,
            Scopes::Only(scopes) => {
                Some(scopes.iter().map(Scope::as_str).collect::<serde_json::Value>().to_string())
            }
        }
    }

    #[allow(dead_code, reason = "memory needs no text")]
    pub(crate) fn stored(text: Option<&str>) -> Result<Self> {
        let Some(text) = text else { return Ok(Scopes::All) };
        let wrong = || Error::Corrupt("the scopes of a token are not a list of names".into());
        let names: Vec<String> = serde_json::from_str(text).map_err(|_| wrong())?;
        let scopes =
            names.into_iter().map(Scope::new).collect::<Result<BTreeSet<_>>>().map_err(|_| wrong())?;
        // An empty list permits nothing. It must not become all.
        Ok(Scopes::Only(scopes))
    }
}

/// What the caller may do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The token; `None` where a listener asks for none.
    pub token: Option<TokenId>,
    /// The token's name, for people.
    pub name: String,
    /// Whose data.
    pub tenant: Option<Tenant>,
    /// For which scopes.
    pub scopes: Scopes,
    /// What kind of request.
    pub role: Role,
}

impl Grant {
    /// Everything of one tenant, without a token: for listeners that only this machine can reach.
    pub fn without_token(tenant: Option<Tenant>) -> Self {
        Grant { token: None, name: "no token".to_owned(), tenant, scopes: Scopes::All, role: Role::Admin }
    }

    /// The caller's name, which stays the same when the secret is rotated.
    pub fn principal(&self) -> Option<&str> {
        self.token.as_ref().map(TokenId::as_str)
    }

    /// The caller, for an audit row.
    pub fn who(&self) -> String {
        match &self.token {
            Some(id) => format!("token {id} ({})", self.name),
            None => self.name.clone(),
        }
    }

    /// Whether the role suffices.
    pub fn permits(&self, needed: Role) -> bool {
        self.role >= needed
    }

    /// Whether this one permits everything that another token would permit: a caller cannot grant
    /// more than it has.
    pub fn covers(&self, tenant: Option<&Tenant>, scopes: &Scopes, role: Role) -> bool {
        self.tenant.as_ref() == tenant && self.scopes.contain_all(scopes) && self.permits(role)
    }
}

/// What a store says about a token.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Authentication {
    /// It is good.
    Granted {
        /// What it permits.
        grant: Grant,
        /// How long it is valid from now on, by the store's clock; `None` if it does not expire.
        left: Option<Duration>,
    },
    /// Its secret is right, and its time is over.
    Expired,
    /// Its secret is right, and it was revoked.
    Revoked,
    /// No token has this id, or it has another secret.
    Unknown,
    /// It is not a token: its form or its checksum is wrong.
    Malformed,
    /// Too many unknown tokens were tried just now, so this one was not looked up. An
    /// [`Authenticator`](super::Authenticator) answers this, never a store.
    Throttled {
        /// How long to wait before the next try.
        wait: Duration,
    },
}

impl Authentication {
    /// A stable word, for logs and counters.
    pub fn word(&self) -> &'static str {
        match self {
            Authentication::Granted { .. } => "granted",
            Authentication::Expired => TokenState::Expired.label(),
            Authentication::Revoked => TokenState::Revoked.label(),
            Authentication::Unknown => "unknown",
            Authentication::Malformed => "malformed",
            Authentication::Throttled { .. } => "throttled",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scopes(names: &[&str]) -> Scopes {
        Scopes::of(names.iter().map(|name| Scope::new(name).unwrap()))
    }

    #[test]
    fn roles_include_those_before() {
        for (at, has) in Role::ALL.into_iter().enumerate() {
            let grant = Grant { role: has, ..Grant::without_token(None) };
            for (needs_at, needs) in Role::ALL.into_iter().enumerate() {
                assert_eq!(grant.permits(needs), at >= needs_at, "{has} {needs}");
            }
            assert_eq!(Role::parse(has.as_str()).unwrap(), has);
        }
        assert!(Role::parse("Admin").is_err() && Role::parse("").is_err());
    }

    #[test]
    fn nobody_gives_away_more_than_they_have() {
        let tenant = |name: &str| Some(Tenant::new(name).unwrap());
        let mine = Grant {
            tenant: tenant("acme"),
            scopes: scopes(&["a", "b"]),
            role: Role::Write,
            ..Grant::without_token(None)
        };
        let covers =
            |tenant: Option<Tenant>, names: &[&str], role| mine.covers(tenant.as_ref(), &scopes(names), role);
        assert!(covers(tenant("acme"), &["a"], Role::Write));
        assert!(!covers(tenant("acme"), &["a", "c"], Role::Write));
        assert!(!covers(tenant("acme"), &[], Role::Read), "no names are all names");
        assert!(!covers(tenant("acme"), &["a"], Role::Admin));
        assert!(!covers(tenant("other"), &["a"], Role::Read) && !covers(None, &["a"], Role::Read));
    }

    #[test]
    fn stored_scopes_come_back_and_an_empty_list_permits_nothing() {
        for of in [scopes(&[]), scopes(&["mailer", "a\"b\\", "é"])] {
            assert_eq!(Scopes::stored(of.text().as_deref()).unwrap(), of);
        }
        assert!(!Scopes::stored(Some("[]")).unwrap().contain(&Scope::new("mailer").unwrap()));
        assert!(Scopes::stored(Some("{}")).is_err());
    }
}
