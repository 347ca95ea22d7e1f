//! Deliberately broken stores of API tokens. Each makes one mistake, and the suite must notice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::{AccessHarness, MemoryAccessHarness};
use crate::access::{
    Access, Actor, ApiToken, AuditEntry, AuditNote, AuditSweep, Authentication, ListAudit, ListTokens,
    MemoryAccess, NewToken, Rotation, SweptAudit, TokenEntry, TokenId, TokenState,
};
use crate::error::{Error, Result};

/// The mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessMutant {
    /// What was granted once is granted also after the token's time.
    ExpiryIgnored,
    /// The id of a token is enough.
    SecretIgnored,
    /// A token that is said to be revoked is good.
    RevokedLives,
}

/// A store that makes one mistake.
#[derive(Debug, Clone)]
pub struct MutantAccess {
    inner: MemoryAccess,
    mutant: AccessMutant,
    remembered: Arc<Mutex<Remembered>>,
}

#[derive(Debug, Default)]
struct Remembered {
    /// What was granted, by the text of the token.
    granted: HashMap<String, Authentication>,
    /// The secret of a token, by its id.
    secrets: HashMap<TokenId, ApiToken>,
}

impl MutantAccess {
    fn is(&self, mutant: AccessMutant) -> bool {
        self.mutant == mutant
    }

    fn with<T>(&self, look: impl FnOnce(&mut Remembered) -> T) -> T {
        look(&mut self.remembered.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn remember(&self, token: &ApiToken) {
        self.with(|remembered| remembered.secrets.insert(token.id().clone(), token.clone()));
    }
}

#[async_trait]
impl Access for MutantAccess {
    async fn create(&self, token: &ApiToken, about: &NewToken, by: &Actor) -> Result<TokenEntry> {
        let created = self.inner.create(token, about, by).await?;
        self.remember(token);
        Ok(created)
    }

    async fn rotate(&self, token: &ApiToken, how: &Rotation, by: &Actor) -> Result<TokenEntry> {
        let rotated = self.inner.rotate(token, how, by).await?;
        self.remember(token);
        Ok(rotated)
    }

    async fn revoke(&self, id: &TokenId, by: &Actor) -> Result<TokenEntry> {
        if !self.is(AccessMutant::RevokedLives) {
            return self.inner.revoke(id, by).await;
        }
        let found = self.inner.get(id).await?;
        let entry = found.ok_or_else(|| Error::NotFound(format!("token {id}")))?;
        Ok(TokenEntry { state: TokenState::Revoked, revoked_at: Some(entry.created_at), ..entry })
    }

    async fn authenticate(&self, text: &str) -> Result<Authentication> {
        let known = ApiToken::parse(text)
            .ok()
            .filter(|_| self.is(AccessMutant::SecretIgnored))
            .and_then(|token| self.with(|remembered| remembered.secrets.get(token.id()).cloned()));
        let said = self.inner.authenticate(known.as_ref().map_or(text, ApiToken::expose)).await?;
        if matches!(said, Authentication::Granted { .. }) {
            self.with(|remembered| remembered.granted.insert(text.to_owned(), said.clone()));
        }
        if said == Authentication::Expired && self.is(AccessMutant::ExpiryIgnored) {
            return Ok(self.with(|remembered| remembered.granted.get(text).cloned()).unwrap_or(said));
        }
        Ok(said)
    }

    async fn get(&self, id: &TokenId) -> Result<Option<TokenEntry>> {
        self.inner.get(id).await
    }

    async fn list(&self, which: &ListTokens) -> Result<Vec<TokenEntry>> {
        self.inner.list(which).await
    }

    async fn has_tokens(&self) -> Result<bool> {
        self.inner.has_tokens().await
    }

    async fn note(&self, note: &AuditNote) -> Result<()> {
        self.inner.note(note).await
    }

    async fn audit(&self, which: &ListAudit) -> Result<Vec<AuditEntry>> {
        self.inner.audit(which).await
    }

    async fn sweep(&self, settings: &AuditSweep) -> Result<SweptAudit> {
        self.inner.sweep(settings).await
    }

    fn backend(&self) -> &'static str {
        self.inner.backend()
    }
}

/// A broken store on a clock of its own.
#[derive(Debug)]
pub struct MutantAccessHarness(MemoryAccessHarness, AccessMutant, Arc<Mutex<Remembered>>);

impl MutantAccessHarness {
    /// An empty one.
    pub fn new(mutant: AccessMutant) -> Self {
        MutantAccessHarness(MemoryAccessHarness::new(), mutant, Arc::default())
    }
}

#[async_trait]
impl AccessHarness for MutantAccessHarness {
    type Access = MutantAccess;

    async fn open(&self) -> MutantAccess {
        MutantAccess { inner: self.0.open().await, mutant: self.1, remembered: Arc::clone(&self.2) }
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }
}
