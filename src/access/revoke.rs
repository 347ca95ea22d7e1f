//! Ends a token, and those that it made.

use std::collections::{BTreeSet, VecDeque};

use super::{Access, Actor, ListTokens, TokenEntry, TokenId};
use crate::error::Result;

/// Revokes a token, every token that it created, and those that they created. The token itself is
/// revoked first, so that it creates no more. If this is interrupted, the same call again revokes
/// the rest. Returns the tokens in their current state, the given one first. `NotFound`: there is
/// no such token.
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
