//! Who may do what: API tokens, what they permit, and who did what with them.
//!
//! A server that other machines can reach requires a token with each request (`Authorization:
//! Bearer hpx_…`).
//!
//! ```text
//! request ─▶ authenticate(token) ─┬─ Granted ──▶ role, tenant, scopes ──▶ the request
//!                                 ├─ Expired ──▶ 401, and says so: the secret was right
//!                                 └─ Revoked, Unknown, Malformed ──▶ 401
//! ```
//!
//! A token is [created](Access::create), given to a client once, [rotated](Access::rotate) and
//! [revoked](Access::revoke). [`Access`] is the store: [`MemoryAccess`], and with their features
//! `SqliteAccess` and `PgAccess`. It keeps hashes, never secrets. The same store keeps the audit
//! rows: who did what, and why.
//!
//! [`Authenticator`] stands in front of a store and remembers answers for a moment. [`RateLimit`]
//! limits how many requests one token may make.
//!
//! The rules (`decide.rs`) are pure: they get rows and the store's time. A store may touch its
//! tables of tokens and audit rows. Nothing here knows requests, ledgers or records.
//!
//! An API token is a client's credential. It has nothing to do with the token of a lease
//! ([`ledger::Token`](crate::ledger::Token)), which fences a claim.
//!
//! ```
//! use hapax::access::{Access, Actor, ApiToken, Authentication, MemoryAccess, NewToken, Role};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! let store = MemoryAccess::default();
//! let by = Actor::new("operator", "the new shop");
//! let token = ApiToken::generate();
//! store.create(&token, &NewToken::new("shop", Role::Write), &by).await?;
//!
//! let Authentication::Granted { grant, .. } = store.authenticate(token.expose()).await? else { panic!("it is good") };
//! assert!(grant.permits(Role::Write) && !grant.permits(Role::Admin));
//!
//! store.revoke(token.id(), &by).await?;
//! assert_eq!(store.authenticate(token.expose()).await?, Authentication::Revoked);
//! # Ok(()) }
//! ```

mod audit;
mod authenticator;
pub(crate) mod decide;
mod entry;
mod grant;
mod rate;
mod revoke;
pub(crate) mod token;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

pub use audit::{Actor, AuditEntry, AuditNote, AuditSweep, ListAudit, SweptAudit};
pub use authenticator::Authenticator;
pub use entry::{ListTokens, NewToken, Rotation, TokenEntry, TokenState};
pub use grant::{Authentication, Grant, Role, SCOPES_MAX, Scopes};
pub use rate::RateLimit;
pub use revoke::revoke_with_children;
pub use token::{ApiToken, TokenId};

pub use crate::backend::memory::access::MemoryAccess;

use crate::error::Result;

/// A store of API tokens and audit rows.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. A token is stored by its id, as a hash; its secret is never stored. Creating the same token
///    again changes nothing and returns its current state; an id with another secret is a
///    `Conflict`. A token that another one creates expires no later than that one, and is not
///    created once that one has expired or was revoked (`Conflict`): a revocation of the creator
///    comes before it, or finds it in `list`.
/// 2. Only the whole secret is granted. A wrong secret and an unknown id are both `Unknown`; what has a
///    wrong form or checksum is `Malformed` and is not looked up. Secrets are compared in constant time.
/// 3. A token expires by the store's clock. Only a caller with the right secret learns that it is
///    `Expired` or `Revoked`.
/// 4. A revoked token stays revoked: no creation and no rotation revives it. Revoking it again changes
///    nothing.
/// 5. A rotation keeps the id, and with it the name, the tenant, the scopes, the role and the
///    expiry. The old secret is valid for the overlap, by the store's clock; the one before it is
///    not. A rotation that expects another number of rotations is a `Conflict`; the same rotation
///    again changes nothing.
/// 6. Tokens are never deleted. Once `has_tokens` is true, it stays true.
/// 7. When a token was last used is known to within ten minutes, and costs no more than one write in
///    that time.
/// 8. `get`, `list` and `audit` change nothing. Lists have pages, and each token or row is on one.
/// 9. A creation, a rotation and a revocation leave one audit row, in the same transaction; what changes
///    nothing leaves none.
/// 10. Audit rows are added and never changed. Adding the same note again adds nothing.
/// 11. A sweep removes audit rows that are older than the retention, in batches, and nothing else.
///     A leap of the clock removes nothing. Of many sweepers one sweeps.
/// 12. Bad input is refused with a sentence and changes nothing.
#[async_trait]
pub trait Access: fmt::Debug + Send + Sync + 'static {
    /// Stores a new token. Make it with [`ApiToken::generate`] and keep it until this returns: after a
    /// lost answer, the same call again finds out.
    async fn create(&self, token: &ApiToken, about: &NewToken, by: &Actor) -> Result<TokenEntry>;

    /// Gives a token a new secret: that of `token`, which has the same id
    /// ([`ApiToken::with_secret`]). `NotFound`: there is no such token. `Conflict`: it is not live, or
    /// somebody else has rotated it.
    async fn rotate(&self, token: &ApiToken, how: &Rotation, by: &Actor) -> Result<TokenEntry>;

    /// Ends a token for good. `NotFound`: there is none.
    async fn revoke(&self, id: &TokenId, by: &Actor) -> Result<TokenEntry>;

    /// What a text, as a client sent it, permits.
    async fn authenticate(&self, text: &str) -> Result<Authentication>;

    /// One token.
    async fn get(&self, id: &TokenId) -> Result<Option<TokenEntry>>;

    /// Lists tokens, oldest first.
    async fn list(&self, which: &ListTokens) -> Result<Vec<TokenEntry>>;

    /// Whether a token was ever created here.
    async fn has_tokens(&self) -> Result<bool>;

    /// Adds an audit row.
    async fn note(&self, note: &AuditNote) -> Result<()>;

    /// Lists audit rows, newest first.
    async fn audit(&self, which: &ListAudit) -> Result<Vec<AuditEntry>>;

    /// Forgets old audit rows. If another sweep runs, it does nothing.
    async fn sweep(&self, settings: &AuditSweep) -> Result<SweptAudit>;

    /// The name of the backend: `memory`, `sqlite`, `postgres`.
    fn backend(&self) -> &'static str;
}

#[async_trait]
impl<T: Access + ?Sized> Access for Arc<T> {
    async fn create(&self, token: &ApiToken, about: &NewToken, by: &Actor) -> Result<TokenEntry> {
        (**self).create(token, about, by).await
    }

    async fn rotate(&self, token: &ApiToken, how: &Rotation, by: &Actor) -> Result<TokenEntry> {
        (**self).rotate(token, how, by).await
    }

    async fn revoke(&self, id: &TokenId, by: &Actor) -> Result<TokenEntry> {
        (**self).revoke(id, by).await
    }

    async fn authenticate(&self, text: &str) -> Result<Authentication> {
        (**self).authenticate(text).await
    }

    async fn get(&self, id: &TokenId) -> Result<Option<TokenEntry>> {
        (**self).get(id).await
    }

    async fn list(&self, which: &ListTokens) -> Result<Vec<TokenEntry>> {
        (**self).list(which).await
    }

    async fn has_tokens(&self) -> Result<bool> {
        (**self).has_tokens().await
    }

    async fn note(&self, note: &AuditNote) -> Result<()> {
        (**self).note(note).await
    }

    async fn audit(&self, which: &ListAudit) -> Result<Vec<AuditEntry>> {
        (**self).audit(which).await
    }

    async fn sweep(&self, settings: &AuditSweep) -> Result<SweptAudit> {
        (**self).sweep(settings).await
    }

    fn backend(&self) -> &'static str {
        (**self).backend()
    }
}
