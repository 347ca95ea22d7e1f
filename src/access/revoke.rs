//! Ends a token, and those that it made.

use std::collections::{BTreeSet, VecDeque};

use super::{Access, Actor, ListTokens, TokenEntry, TokenId};
use crate::error::Result;

/// Ends a token, and every token that it made, or that one of those made. The token itself goes first:
/// from then on it makes no more. If this is cut off, the same call again ends the rest. Returns the
/// tokens as they are now, the first one first. `NotFound`: there is none.
pub async fn revoke_with_children(store: &dyn Access, id: &TokenId, by: &Actor) -> Result<Vec<TokenEntry>> {
    let mut revoked = vec![store.revoke(id, by).await?];
    let mut seen = BTreeSet::from([id.clone()]);
    let mut makers = VecDeque::from([id.clone()]);
    while let Some(maker) = makers.pop_front() {
        let mut after = None;
        loop {
            let which =
                ListTokens { made_by: Some(maker.clone()), after, limit: 1000, ..ListTokens::default() };
            let page = store.list(&which).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.id.clone());
            for child in page {
                if seen.insert(child.id.clone()) {
                    revoked.push(store.revoke(&child.id, by).await?);
                    makers.push_back(child.id);
                }
            }
        }
    }
    Ok(revoked)
}
