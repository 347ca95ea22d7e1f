//! What a read model lacks of everybody.

use super::{ReadModel, Rejected};
use crate::error::Result;
use crate::id::Topic;

/// How much that was rejected is looked at first. It is usually all.
const PAGE: usize = 1000;

/// Changes of everybody that came on no topic, if the model was told of such: of a table that was truncated, or of a
/// slot that was lost. Its reason says what to do. All that was rejected is looked at, however much.
pub async fn missing(model: &dyn ReadModel, topic: Option<&Topic>) -> Result<Option<Rejected>> {
    missing_by(model, topic, PAGE).await
}

async fn missing_by(model: &dyn ReadModel, topic: Option<&Topic>, page: usize) -> Result<Option<Rejected>> {
    let mut limit = page;
    loop {
        let rejected = model.rejected(limit).await?;
        let is_all = rejected.len() < limit;
        // What is broken has content.
        let missing = rejected.into_iter().map(|entry| entry.rejected).find(|one| {
            let is_asked_for = topic.is_none_or(|topic| one.origin.topic == *topic);
            one.tenant.is_none() && one.payload.is_empty() && is_asked_for
        });
        if is_all || missing.is_some() {
            return Ok(missing);
        }
        limit = limit.saturating_mul(4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analytics::{Block, MemoryReadModel};
    use crate::bus::Partition;
    use crate::event::Origin;

    /// A flood of broken messages comes before what says that changes are missing.
    #[tokio::test]
    async fn t464_what_is_missing_is_found_behind_any_number_of_broken_messages() {
        let (model, topic) = (MemoryReadModel::default(), Topic::new("cdc").unwrap());
        let told = async |page| missing_by(&model, Some(&topic), page).await.unwrap();
        assert_eq!(told(7).await, None);
        for number in 0..2 {
            let mut block = Block::new(Partition { topic: topic.clone(), number }, 2, 0..50);
            let rejected = |offset| {
                let is_missing = number == 1 && offset == 49;
                let (reason, payload) = if is_missing { ("truncated", "") } else { ("broken", "{") };
                let origin = Origin::new(topic.clone(), number, offset);
                (Rejected { tenant: None, origin, reason: reason.into(), payload: payload.into() }, None)
            };
            block.rejected = (0..50).map(rejected).collect();
            model.apply(&[block]).await.unwrap();
        }
        for page in [7, 50, 100, 1000] {
            assert_eq!(told(page).await.unwrap().reason, "truncated", "{page}");
        }
        let other = Topic::new("other").unwrap();
        assert_eq!(missing(&model, Some(&other)).await.unwrap(), None);
        assert_eq!(missing(&model, None).await.unwrap().unwrap().reason, "truncated");
    }
}
