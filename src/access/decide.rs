//! The rules about tokens, as pure functions over rows: the only place that decides. Every store looks
//! up a row, asks here, and writes the answer, in one transaction.

use std::time::Duration;

use super::token::TokenHash;
use super::{
    ApiToken, Authentication, Grant, NewToken, Role, Rotation, Scopes, TokenEntry, TokenId, TokenState,
};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;

/// The last use is stored at most this often: a write for each request would cost too much.
pub(crate) const USE_NOTED: Duration = Duration::from_secs(600);

/// A token as stored.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub id: TokenId,
    pub name: String,
    pub tenant: Option<Tenant>,
    pub scopes: Scopes,
    pub role: Role,
    /// The token that made it, if one did.
    pub made_by: Option<TokenId>,
    pub hash: TokenHash,
    /// The secret before the last rotation, and until when it is good.
    pub previous: Option<(TokenHash, Time)>,
    pub rotations: u32,
    pub created_at: Time,
    pub expires_at: Option<Time>,
    pub revoked_at: Option<Time>,
    pub last_used_at: Option<Time>,
}

/// What becomes of a row.
#[derive(Debug)]
pub(crate) struct Change {
    pub row: Row,
    /// The word and the details of its audit row; `None` if the change was made before, and nothing is
    /// to be written.
    pub note: Option<(&'static str, String)>,
}

impl Change {
    fn none(row: &Row) -> Self {
        Change { row: row.clone(), note: None }
    }
}

/// What a store found: the token, and the one that makes it ([`NewToken::made_by`]).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Found<'a> {
    pub row: Option<&'a Row>,
    pub maker: Option<&'a Row>,
}

/// Creates a token. Repeating this changes nothing. The token expires no later than the token that
/// creates it, which must be live: that one's row is locked, so that a revocation comes before or
/// after.
pub(crate) fn create(found: Found<'_>, token: &ApiToken, about: &NewToken, now: Time) -> Result<Change> {
    let hash = token.hash();
    if let Some(row) = found.row {
        // After a rotation its first secret is another one too.
        if row.hash.matches(&hash) {
            return Ok(Change::none(row));
        }
        return Err(Error::Conflict {
            expected: format!("no token {}", row.id),
            actual: "there is one, with another secret".into(),
        });
    }
    let ends = about.expires_in.map(|expires_in| now.plus(expires_in));
    let ends = match &about.made_by {
        None => ends,
        Some(id) => {
            let maker = found.maker.ok_or_else(|| missing(id))?;
            let state = maker.state(now);
            if state != TokenState::Live {
                return Err(Error::Conflict {
                    expected: format!("that {id}, which makes the token, is live"),
                    actual: format!("it is {state}"),
                });
            }
            ends.into_iter().chain(maker.expires_at).min()
        }
    };
    let row = Row {
        id: token.id().clone(),
        name: about.name.clone(),
        tenant: about.tenant.clone(),
        scopes: about.scopes.clone(),
        role: about.role,
        made_by: about.made_by.clone(),
        hash,
        previous: None,
        rotations: 0,
        created_at: now,
        expires_at: ends,
        revoked_at: None,
        last_used_at: None,
    };
    let tenant = about.tenant.as_ref().map_or("the default tenant", Tenant::as_str);
    let scopes = about.scopes.text().unwrap_or_else(|| "all".into());
    let maker = about.made_by.as_ref().map_or_else(String::new, |id| format!(", made by {id}"));
    let details =
        format!("name {:?}, role {}, tenant {tenant}, scopes {scopes}{maker}", about.name, about.role);
    Ok(Change { row, note: Some(("token.create", details)) })
}

/// Gives a token a new secret. The same again changes nothing.
pub(crate) fn rotate(found: Found<'_>, token: &ApiToken, rotation: &Rotation, now: Time) -> Result<Change> {
    let row = found.row.ok_or_else(|| missing(token.id()))?;
    let hash = token.hash();
    if row.hash.matches(&hash) {
        return Ok(Change::none(row));
    }
    let state = row.state(now);
    if state != TokenState::Live {
        return Err(Error::Conflict {
            expected: "a token that is live".into(),
            actual: format!("it is {state}"),
        });
    }
    if row.rotations != rotation.expected {
        return Err(Error::Conflict {
            expected: format!("{} rotations", rotation.expected),
            actual: format!("{} rotations: somebody else has rotated it meanwhile", row.rotations),
        });
    }
    let until = now.plus(rotation.overlap);
    let previous = (until > now).then_some((row.hash, until));
    let row = Row { hash, previous, rotations: row.rotations.saturating_add(1), ..row.clone() };
    let details =
        format!("name {:?}, the old secret ends in {}", row.name, crate::words::span(rotation.overlap));
    Ok(Change { row, note: Some(("token.rotate", details)) })
}

/// Ends a token for good. The same again changes nothing.
pub(crate) fn revoke(found: Found<'_>, id: &TokenId, now: Time) -> Result<Change> {
    let row = found.row.ok_or_else(|| missing(id))?;
    if row.revoked_at.is_some() {
        return Ok(Change::none(row));
    }
    let row = Row { revoked_at: Some(now), previous: None, ..row.clone() };
    let details = format!("name {:?}", row.name);
    Ok(Change { row, note: Some(("token.revoke", details)) })
}

fn missing(id: &TokenId) -> Error {
    Error::NotFound(format!("there is no token {id}"))
}

/// What a token permits. Only a caller with the right secret learns that it has expired or was
/// revoked.
pub(crate) fn authenticate(found: Option<&Row>, token: &ApiToken, now: Time) -> Authentication {
    let hash = token.hash();
    let Some(row) = found else { return Authentication::Unknown };
    let current = row.hash.matches(&hash);
    let previous = row.previous.filter(|(previous, until)| previous.matches(&hash) && now < *until);
    if !current && previous.is_none() {
        return Authentication::Unknown;
    }
    match row.state(now) {
        TokenState::Live => {}
        TokenState::Expired => return Authentication::Expired,
        TokenState::Revoked => return Authentication::Revoked,
    }
    let grant = Grant {
        token: Some(row.id.clone()),
        name: row.name.clone(),
        tenant: row.tenant.clone(),
        scopes: row.scopes.clone(),
        role: row.role,
    };
    let ends = [row.expires_at, previous.filter(|_| !current).map(|(_, until)| until)];
    let left = ends.into_iter().flatten().min().map(|end| end.since(now));
    Authentication::Granted { grant, left }
}

impl Row {
    fn state(&self, now: Time) -> TokenState {
        match (self.revoked_at, self.expires_at) {
            (Some(_), _) => TokenState::Revoked,
            (None, Some(end)) if end <= now => TokenState::Expired,
            (None, _) => TokenState::Live,
        }
    }

    pub(crate) fn entry(&self, now: Time) -> TokenEntry {
        TokenEntry {
            id: self.id.clone(),
            name: self.name.clone(),
            tenant: self.tenant.clone(),
            scopes: self.scopes.clone(),
            role: self.role,
            made_by: self.made_by.clone(),
            rotations: self.rotations,
            created_at: self.created_at,
            expires_at: self.expires_at,
            overlap_until: self.previous.map(|(_, until)| until).filter(|until| now < *until),
            last_used_at: self.last_used_at,
            revoked_at: self.revoked_at,
            state: self.state(now),
        }
    }

    /// Whether a use is to be noted now.
    pub(crate) fn is_use_noted(&self, now: Time) -> bool {
        self.last_used_at.is_some_and(|at| now < at.plus(USE_NOTED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_live_until_its_time_and_never_after_a_revocation() {
        let token = ApiToken::generate();
        let about = NewToken::new("app", Role::Write).expires_in(Some(Duration::from_secs(60)));
        let change = create(Found { row: None, maker: None }, &token, &about, Time::from_micros(0));
        let row = change.expect("a fresh token").row;
        let end = Time::from_micros(0).plus(Duration::from_secs(60));
        let before = Time::from_micros(end.as_micros() - 1);
        assert_eq!([row.state(before), row.state(end)], [TokenState::Live, TokenState::Expired]);
        let found = Found { row: Some(&row), maker: None };
        let revoked = revoke(found, token.id(), before).expect("it exists").row;
        assert_eq!([revoked.state(before), revoked.state(end)], [TokenState::Revoked; 2]);
    }
}
