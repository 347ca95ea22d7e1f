//! How current a read model is.

use super::{ReadModelHarness, apply, at, partition, rejected, topic};
use crate::analytics::{Block, ReadModel, Uuid};
use crate::clock::Time;

fn pulse(number: i32, partitions: i32, seconds: i64) -> Block {
    let mut block = Block::new(partition(number), partitions, seconds..seconds + 1);
    block.pulse = Some(at(seconds));
    block
}

async fn synced(model: &impl ReadModel, tenant: u128) -> Option<Time> {
    model.last_sync_at(Uuid::from_u128(tenant)).await.expect("a time or none")
}

/// Unknown until every partition has a pulse; then the earliest.
pub async fn m5_last_sync_at_is_the_earliest_of_the_last_pulses(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    assert_eq!(synced(&model, 0).await, None, "an empty model knows nothing");
    model.expect(&topic(), 3).await.expect("partitions are expected");
    apply(&model, pulse(0, 3, 5)).await;
    apply(&model, pulse(2, 3, 7)).await;
    assert_eq!(synced(&model, 0).await, None, "partition 1 has no pulse");
    apply(&model, pulse(1, 3, 6)).await;
    assert_eq!(synced(&model, 0).await, Some(at(5)));
    apply(&model, pulse(0, 3, 9)).await;
    assert_eq!(synced(&model, 0).await, Some(at(6)));
    // A block without a pulse says nothing new.
    apply(&model, Block::new(partition(1), 3, 8..9)).await;
    assert_eq!(synced(&model, 0).await, Some(at(6)));
    // A partition that is added has none yet, and takes nothing back.
    apply(&model, pulse(0, 4, 20)).await;
    apply(&model, pulse(1, 4, 20)).await;
    apply(&model, pulse(2, 4, 20)).await;
    assert_eq!(synced(&model, 0).await, Some(at(6)));
    apply(&model, pulse(3, 4, 18)).await;
    assert_eq!(synced(&model, 0).await, Some(at(18)));
}

/// A pulse that arrives late, or again, takes nothing back.
pub async fn m5_a_late_pulse_takes_nothing_back(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    for seconds in [5, 9, 3, 9, 1] {
        apply(&model, pulse(0, 1, seconds)).await;
    }
    assert_eq!(synced(&model, 0).await, Some(at(9)));
    let partitions = model.partitions().await.expect("partitions");
    assert_eq!((partitions[0].pulse, partitions[0].offset), (Some(at(9)), Some(2)));
}

/// A rejected change holds back what is said to its tenant, at the last pulse before it.
pub async fn m5_a_rejected_change_holds_its_tenant_back(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    apply(&model, pulse(0, 1, 5)).await;
    let mut block = pulse(0, 1, 9);
    let (one, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
    block.rejected = vec![(rejected(Some(one), 0, 6), None), (rejected(Some(other), 0, 7), Some(at(8)))];
    apply(&model, block).await;
    apply(&model, pulse(0, 1, 20)).await;
    assert_eq!(synced(&model, 1).await, Some(at(5)), "the pulse of an earlier block");
    assert_eq!(synced(&model, 2).await, Some(at(8)), "a pulse of its own block");
    assert_eq!(synced(&model, 3).await, Some(at(20)), "not of this tenant");
    let listed = model.rejected(10).await.expect("rejected changes");
    let seen: Vec<_> = listed.iter().map(|r| (r.rejected.tenant, r.rejected.origin.offset)).collect();
    assert_eq!(seen, [(Some(one), 6), (Some(other), 7)]);
    assert_eq!(
        (listed[0].rejected.reason.as_str(), &listed[0].rejected.payload[..]),
        ("it is broken", &b"{"[..])
    );
    assert_eq!(model.rejected(1).await.expect("rejected changes").len(), 1);
    assert!(model.drop_rejected(&partition(0), 6).await.expect("dropped"));
    assert!(!model.drop_rejected(&partition(0), 6).await.expect("dropped before"));
    assert_eq!((synced(&model, 1).await, synced(&model, 2).await), (Some(at(20)), Some(at(8))));
}

/// One whose tenant is unknown holds everybody back; without a pulse before it nothing is known.
pub async fn m5_a_rejected_change_of_nobody_holds_everybody_back(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let mut block = pulse(0, 1, 9);
    block.rejected = vec![(rejected(None, 0, 1), None)];
    apply(&model, block).await;
    let mut block = pulse(0, 1, 11);
    block.rejected = vec![(rejected(Some(Uuid::from_u128(1)), 0, 10), Some(at(10)))];
    apply(&model, block).await;
    for tenant in 0..3 {
        assert_eq!(synced(&model, tenant).await, None, "tenant {tenant}");
    }
    assert!(model.drop_rejected(&partition(0), 1).await.expect("dropped"));
    assert_eq!((synced(&model, 0).await, synced(&model, 1).await), (Some(at(11)), Some(at(10))));
}

/// What holds everybody back may be noted at the offset of a change that held one tenant back.
pub async fn m5_two_notes_at_one_offset_hold_back_what_each_does(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let mut block = pulse(0, 1, 9);
    block.rejected = vec![(rejected(Some(Uuid::from_u128(1)), 0, 9), Some(at(8)))];
    apply(&model, block.clone()).await;
    let mut gap = pulse(0, 1, 20);
    gap.rejected = vec![(rejected(None, 0, 9), Some(at(9)))];
    apply(&model, gap).await;
    apply(&model, block).await; // published again
    assert_eq!(synced(&model, 1).await, Some(at(8)));
    assert!(synced(&model, 2).await <= Some(at(9)), "{:?}", synced(&model, 2).await);
    assert!(model.drop_rejected(&partition(0), 9).await.expect("dropped"));
    assert_eq!((synced(&model, 1).await, synced(&model, 2).await), (Some(at(20)), Some(at(20))));
}

/// For those who look.
pub async fn m5_a_read_model_says_how_far_each_partition_is(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    model.expect(&topic(), 2).await.expect("partitions are expected");
    model.expect(&topic(), 1).await.expect("fewer change nothing");
    apply(&model, pulse(1, 2, 5)).await;
    apply(&model, Block::new(partition(1), 2, 2..3)).await;
    let partitions = model.partitions().await.expect("partitions");
    let seen: Vec<_> = partitions.iter().map(|one| (one.partition.number, one.offset, one.pulse)).collect();
    assert_eq!(seen, [(0, None, None), (1, Some(3), Some(at(5)))]);
    apply(&model, Block::aside(partition(1), 2)).await;
    let partitions = model.partitions().await.expect("partitions");
    assert_eq!(partitions[1].offset, Some(3), "what does not come from the topic is not a place in it");
}
