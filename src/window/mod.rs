//! stand-in
use async_trait::async_trait;
use crate::error::Result;
use crate::ledger::Identity;
/// stand-in
#[async_trait]
pub trait Window: std::fmt::Debug + Send + Sync + 'static {
    /// seen
    async fn seen(&self, identities: &[Identity]) -> Result<Vec<bool>>;
    /// remember
    async fn remember(&self, identities: &[Identity]) -> Result<()>;
}
