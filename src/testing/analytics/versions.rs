//! One row per record, whatever arrives.

use std::collections::BTreeMap;

use super::{ReadModelHarness, apply, at, block, change, module, orders, partition, rejected, shown, tally};
use crate::analytics::{Block, Change, ReadModel as _, Selection, Tally, Uuid, Version};
use crate::erase::Subject;
use crate::error::Error;
use crate::id::Tenant;
use crate::testing::model::rng::{Rng, seed};

/// Changes of a few records: each is created, updated, sometimes deleted and created again.
fn history(random: &mut Rng) -> Vec<Change> {
    let mut changes = Vec::new();
    for id in 1..=8_u128 {
        for seq in 1..=1 + random.below(9) {
            let json = format!(r#"{{"id":{id},"seq":{seq}}}"#);
            let deleted = seq > 1 && random.below(4) == 0;
            changes.push(change(id, seq, (!deleted).then_some(json.as_str())));
        }
    }
    changes
}

/// What the last version of each record says.
fn expected(changes: &[Change]) -> Vec<(u128, u64, String)> {
    let mut last: BTreeMap<u128, &Change> = BTreeMap::new();
    for change in changes {
        let row = last.entry(change.id.as_u128()).or_insert(change);
        if change.version > row.version {
            *row = change;
        }
    }
    let live = |(id, change): (u128, &Change)| {
        change.payload.as_ref().map(|payload| (id, change.version.seq(), payload.as_str().to_owned()))
    };
    last.into_iter().filter_map(live).collect()
}

/// Changes that arrive shuffled, repeated and in blocks of any size give what they give in order.
pub async fn m1_the_highest_version_counts_in_any_order(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let mut random = Rng::new(seed());
    let mut changes = history(&mut random);
    let expected = expected(&changes);
    let again: Vec<_> = changes.iter().filter(|_| random.below(2) == 0).cloned().collect();
    changes.extend(again);
    for place in (1..changes.len()).rev() {
        let other = usize::try_from(random.below(place as u64 + 1)).expect("an index");
        changes.swap(place, other);
    }
    let mut rest = &changes[..];
    while !rest.is_empty() {
        let count = usize::try_from(1 + random.below(7)).expect("a small number").min(rest.len());
        apply(&model, block(rest[..count].to_vec())).await;
        rest = &rest[count..];
    }
    assert_eq!(shown(&model).await, expected);
    let count = tally(&model, &Tally::default()).await.groups[0].count;
    assert_eq!(count, expected.len() as u64, "each record counts once");
}

/// An equal version changes nothing.
pub async fn m1_an_equal_version_changes_nothing(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    apply(&model, block([change(1, 2, Some(r#"{"n":1}"#))])).await;
    apply(&model, block([change(1, 2, Some(r#"{"n":1}"#)), change(1, 2, Some(r#"{"n":1}"#))])).await;
    assert_eq!(shown(&model).await, [(1, 2, r#"{"n":1}"#.to_owned())]);
    // After a deletion at that version, the version is deleted for good.
    apply(&model, block([change(1, 3, None)])).await;
    apply(&model, block([change(1, 2, Some(r#"{"n":1}"#))])).await;
    assert_eq!(shown(&model).await, []);
}

/// A generation is newer than every seq before it.
pub async fn m1_a_later_generation_is_newer_than_every_seq(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let later = |generation, seq, json| Change {
        version: Version::new(generation, seq).expect("a valid seq"),
        ..change(1, 1, Some(json))
    };
    apply(&model, block([later(2, 1, r#"{"g":2}"#), change(1, 99, Some(r#"{"g":1}"#))])).await;
    assert_eq!(shown(&model).await, [(1, 1, r#"{"g":2}"#.to_owned())]);
    apply(&model, block([later(40_000, 7, r#"{"g":3}"#), later(39_999, 8, r#"{"g":1}"#)])).await;
    assert_eq!(shown(&model).await, [(1, 7, r#"{"g":3}"#.to_owned())]);
}

/// An older change does not bring a deleted record back.
pub async fn m2_a_deleted_record_stays_deleted_whatever_arrives_later(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    apply(&model, block([change(1, 3, None)])).await;
    for seq in [1, 2] {
        apply(&model, block([change(1, seq, Some(r#"{"n":1}"#))])).await;
    }
    assert_eq!(shown(&model).await, []);
    assert_eq!(tally(&model, &Tally::default()).await.groups[0].count, 0);
    let version = model.version(Uuid::nil(), &module("orders"), Uuid::from_u128(1)).await.expect("a version");
    assert_eq!(version.map(Version::seq), Some(3), "a deleted record has a version");
}

/// A record whose id is created again goes on at its seq.
pub async fn m2_a_record_that_is_created_again_is_back(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    apply(&model, block([change(1, 4, Some(r#"{"n":2}"#)), change(1, 2, None), change(1, 1, Some("{}"))]))
        .await;
    assert_eq!(shown(&model).await, [(1, 4, r#"{"n":2}"#.to_owned())]);
}

/// A block that is applied again leaves everything as it is.
pub async fn m3_a_repeated_block_changes_nothing(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let mut first = Block::new(partition(0), 2, 5..8);
    first.changes = vec![change(1, 1, Some("{}")), change(2, 2, None)];
    first.rejected = vec![(super::rejected(None, 0, 6), Some(at(3)))];
    first.pulse = Some(at(4));
    let mut second = Block::new(partition(1), 2, 0..9);
    second.changes = vec![change(3, 1, Some("{}"))];
    second.pulse = Some(at(5));
    let look = async || {
        let sync =
            (model.partitions().await, model.last_sync_at(Uuid::nil()).await, model.rejected(10).await);
        let sync = (sync.0.expect("partitions"), sync.1.expect("a time"), sync.2.expect("rejected changes"));
        (shown(&model).await, sync)
    };
    model.apply(&[first.clone(), second.clone()]).await.expect("blocks are applied");
    let before = look().await;
    model.apply(&[second, first]).await.expect("blocks are applied");
    assert_eq!(look().await, before);
}

/// What was applied is there for whoever opens the model next.
pub async fn m10_what_was_applied_is_there_when_it_is_opened_again(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let mut of = block([change(1, 1, Some(r#"{"n":1}"#)), change(2, 1, None)]);
    of.pulse = Some(at(9));
    apply(&model, of).await;
    let (rows, sync) = (shown(&model).await, model.partitions().await.expect("partitions"));
    drop(model);
    let model = harness.open().await;
    assert_eq!((shown(&model).await, model.partitions().await.expect("partitions")), (rows, sync));
    assert_eq!(model.last_sync_at(orders().tenant).await.expect("a time"), Some(at(9)));
}

/// Whoever opens the model finds the same id.
pub async fn m11_the_id_stays(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let id = model.id().await.expect("an id");
    apply(&model, block([change(1, 1, Some("{}"))])).await;
    assert_eq!(model.id().await.expect("an id"), id);
    drop(model);
    assert_eq!(harness.open().await.id().await.expect("an id"), id);
    assert!(id.is_none_or(|id| !id.is_nil()), "nobody else has it");
}

/// Content of a deleted record and of a rejected change goes; the deletion, and everything of others, stays.
pub async fn m13_what_is_erased_has_no_content_and_stays_deleted(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let tenant = Uuid::from_u128(7);
    let of_tenant = |id, seq, json| Change { tenant, ..change(id, seq, json) };
    let secret = r#"{"secret":1}"#;
    let mut first =
        block([of_tenant(1, 1, Some(secret)), of_tenant(2, 1, Some(secret)), change(1, 1, Some(secret))]);
    first.rejected = vec![(rejected(Some(tenant), 0, 5), None), (rejected(Some(Uuid::nil()), 0, 6), None)];
    apply(&model, first).await;
    apply(&model, block([of_tenant(1, 2, Some(secret))])).await;
    let all = Subject::tenant(Tenant::new(tenant.to_string()).expect("a valid tenant"));
    let one = Subject::record(all.tenant.clone(), module("orders"), Uuid::from_u128(1));
    if let Err(error) = model.erasable(&all).await {
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
        assert!(matches!(model.erase(&all).await, Err(Error::Unsupported(_))));
        return;
    }
    let left = async |of: &Subject| model.erasable(of).await.expect("a count");
    let erase = async |of: &Subject| model.erase(of).await.expect("it is erased");
    assert!(left(&one).await >= 1 && left(&all).await >= 3, "record and rejected change count");
    // A record that is not deleted keeps its content.
    erase(&one).await;
    assert_eq!(left(&one).await, 1, "only the version that counts is left");
    apply(&model, block([of_tenant(1, 3, None)])).await;
    erase(&one).await;
    assert_eq!((left(&one).await, left(&all).await), (0, 2), "the other record and the rejected change");
    apply(&model, block([of_tenant(2, 2, None)])).await;
    erase(&all).await;
    assert_eq!(erase(&all).await, 0, "nothing is left to erase");
    assert_eq!(left(&all).await, 0);
    let version = model.version(tenant, &module("orders"), Uuid::from_u128(1)).await.expect("a version");
    assert_eq!(version.map(Version::seq), Some(3), "the deletion stays");
    let kept = model.rejected(10).await.expect("rejected changes");
    assert_eq!(kept.len(), 2, "they still hold back");
    assert!(
        kept.iter().all(|kept| kept.rejected.payload.is_empty() == (kept.rejected.tenant == Some(tenant)))
    );
    // What arrives late is hidden, and goes with the next erasure.
    apply(&model, block([of_tenant(1, 2, Some(secret))])).await;
    let of = Selection { tenant, ..orders() };
    assert!(super::all(&model, &of, 10).await.is_empty());
    erase(&all).await;
    assert_eq!(left(&all).await, 0);
    assert_eq!(shown(&model).await, [(1, 1, secret.to_owned())], "others are as they were");
}

/// One that is made for a generation keeps it, says so, and refuses a block with a change of another.
pub async fn m15_a_model_of_a_generation_takes_no_other(harness: &impl ReadModelHarness) {
    let model = harness.open_for(3).await;
    assert_eq!(model.generation().await.expect("a generation"), Some(3));
    let of = |generation, id| {
        let version = Version::new(generation, 1).expect("a valid version");
        Change { version, ..change(id, 1, Some("{}")) }
    };
    apply(&model, block([of(3, 1)])).await;
    for other in [2, 4] {
        let refused = model.apply(&[block([of(other, 1), of(other, 2)])]).await;
        assert!(matches!(&refused, Err(Error::Schema(_))), "{refused:?}");
    }
    assert_eq!(shown(&model).await, [(1, 1, "{}".to_owned())], "nothing of another is in it");
    drop(model);
    for model in [harness.open().await, harness.open_for(4).await] {
        assert_eq!(model.generation().await.expect("a generation"), Some(3), "it keeps its own");
    }
}
