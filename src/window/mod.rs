//! stand-in
use crate::error::Result;
use crate::ledger::Identity;
use async_trait::async_trait;
/// stand-in
#[async_trait]
pub trait Window: std::fmt::Debug + Send + Sync + 'static {
    /// seen
    async fn seen(&self, identities: &[Identity]) -> Result<Vec<bool>>;
    /// remember
    async fn remember(&self, identities: &[Identity]) -> Result<()>;
    /// check
    async fn check(&self, redelivery: Option<std::time::Duration>) -> Vec<crate::ledger::Finding>;
}
