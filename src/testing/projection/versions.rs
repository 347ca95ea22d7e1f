//! Which change counts.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Barrier;

use super::{ProjectionHarness, apply, change, document, name, shows, under};
use crate::projection::{Applied, Change, Content, Document, Name, Projection as _};
use crate::testing::model::{Rng, cases, seed};

/// Every order of three versions.
pub async fn p1_the_highest_version_counts_in_any_order(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let orders = [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 1, 2], [3, 2, 1]];
    for (id, order) in (1..).zip(orders) {
        let mut highest = 0;
        for seq in order {
            let applied = apply(&projection, &[change(id, seq, Some(&format!(r#"{{"seq":{seq}}}"#)))]).await;
            let expected = if seq > highest { Applied::Newer } else { Applied::Stale };
            assert_eq!(applied, [expected], "{seq} of {order:?}");
            highest = highest.max(seq);
        }
        shows(&projection, &change(id, 3, Some(r#"{"seq":3}"#))).await;
    }
}

/// A repeat changes nothing, even one that lies.
pub async fn p1_an_equal_version_changes_nothing(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let first = change(1, 2, Some(r#"{"first":true}"#));
    assert_eq!(apply(&projection, std::slice::from_ref(&first)).await, [Applied::Newer]);
    let lies = [change(1, 2, Some(r#"{"first":false}"#)), change(1, 2, None), first.clone()];
    for lie in lies {
        assert_eq!(apply(&projection, &[lie]).await, [Applied::Stale]);
        shows(&projection, &first).await;
    }
    let gone = change(2, 2, None);
    assert_eq!(apply(&projection, std::slice::from_ref(&gone)).await, [Applied::Newer]);
    assert_eq!(apply(&projection, &[change(2, 2, Some("{}"))]).await, [Applied::Stale]);
    shows(&projection, &gone).await;
}

/// A source that begins anew counts from 1 again.
pub async fn p1_a_later_generation_is_newer_than_every_seq(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let old = change(1, 900, Some(r#"{"generation":1}"#));
    let new = under(2, 1, &change(1, 1, Some(r#"{"generation":2}"#)));
    apply(&projection, std::slice::from_ref(&old)).await;
    assert_eq!(apply(&projection, std::slice::from_ref(&new)).await, [Applied::Newer]);
    assert_eq!(apply(&projection, &[under(1, 901, &old)]).await, [Applied::Stale]);
    shows(&projection, &new).await;
}

/// Writers that do not know each other, each with another version of a record, at the same moment.
pub async fn p1_many_at_once_leave_the_highest(harness: &impl ProjectionHarness) {
    const WRITERS: u64 = 6;
    let json = |seq: u64| format!(r#"{{"seq":{seq}}}"#);
    for id in 1..=8 {
        let together = Arc::new(Barrier::new(WRITERS as usize));
        let mut writers = tokio::task::JoinSet::new();
        for seq in 1..=WRITERS {
            let (projection, together) = (harness.open().await, Arc::clone(&together));
            writers.spawn(async move {
                together.wait().await;
                apply(&projection, &[change(id, seq, Some(&json(seq)))]).await
            });
        }
        let applied = writers.join_all().await;
        assert!(applied.iter().flatten().any(|one| *one == Applied::Newer), "somebody was first");
        shows(&harness.open().await, &change(id, WRITERS, Some(&json(WRITERS)))).await;
    }
}

/// The lives of some records, with deletions and second lives, in order.
fn lives(rng: &mut Rng) -> Vec<Change> {
    let mut changes = Vec::new();
    for id in 1..=4 {
        let mut alive = false;
        for seq in 1..=1 + rng.below(9) {
            alive = !alive || rng.chance(70);
            let json = format!(r#"{{"id":{id},"seq":{seq},"n":{}}}"#, rng.next());
            changes.push(change(id, seq, alive.then_some(json.as_str())));
        }
    }
    changes
}

/// What the changes leave if each comes once and in order.
fn expected(changes: &[Change]) -> BTreeMap<Name, Document> {
    let document = |change: &Change| Document::new(change.version, Content::of(change));
    changes.iter().map(|change| (Name::of(change), document(change))).collect()
}

/// The property that everything else serves: shuffled and repeated changes give the same documents as
/// ordered ones.
pub async fn p1_shuffled_and_repeated_changes_give_the_same_documents(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let mut rng = Rng::new(seed());
    for round in 0..u16::try_from(cases(12)).expect("few") {
        let changes = lives(&mut rng);
        // Each round has its own generation, so that one storage serves all.
        let changes: Vec<Change> =
            changes.iter().map(|one| under(round + 1, one.version.seq(), one)).collect();
        let mut deliveries = changes.clone();
        for _ in 0..changes.len() {
            deliveries.push(rng.pick(&changes));
        }
        for at in (1..deliveries.len()).rev() {
            deliveries.swap(at, usize::try_from(rng.below(at as u64 + 1)).expect("small"));
        }
        for batch in deliveries.chunks(1 + usize::try_from(rng.below(20)).expect("small")) {
            apply(&projection, batch).await;
        }
        let expected = expected(&changes);
        let names: Vec<Name> = expected.keys().cloned().collect();
        let found = projection.documents(&names).await.expect("documents");
        for (name, found) in names.iter().zip(found) {
            assert_eq!(found.as_ref(), expected.get(name), "round {round}, {name}");
        }
    }
}

/// Whatever older changes come later, one by one and together.
pub async fn p2_a_deleted_record_stays_deleted_whatever_arrives_later(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    apply(&projection, &[change(1, 1, Some("{}")), change(1, 2, Some("{}"))]).await;
    let gone = change(1, 3, None);
    assert_eq!(apply(&projection, std::slice::from_ref(&gone)).await, [Applied::Newer]);
    for seq in [2, 1, 2] {
        assert_eq!(apply(&projection, &[change(1, seq, Some("{}"))]).await, [Applied::Stale]);
        shows(&projection, &gone).await;
    }
}

/// A deletion of a record that was never seen leaves its version.
pub async fn p2_a_deletion_may_come_before_what_it_deletes(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    let gone = change(7, 5, None);
    assert_eq!(apply(&projection, std::slice::from_ref(&gone)).await, [Applied::Newer]);
    let late: Vec<Change> = (1..=4).map(|seq| change(7, seq, Some("{}"))).collect();
    assert!(apply(&projection, &late).await.iter().all(|applied| *applied == Applied::Stale));
    shows(&projection, &gone).await;
}

/// A higher version than that of the deletion is a new life.
pub async fn p2_a_record_that_is_created_again_is_back(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    apply(&projection, &[change(1, 1, Some("{}")), change(1, 2, None)]).await;
    let again = change(1, 3, Some(r#"{"life":2}"#));
    assert_eq!(
        apply(&projection, &[again.clone(), change(1, 2, None)]).await,
        [Applied::Newer, Applied::Stale]
    );
    shows(&projection, &again).await;
}

/// A double cannot tell these versions apart, and a script that computes with doubles does not.
pub async fn p5_versions_above_2_to_the_53_are_told_apart(harness: &impl ProjectionHarness) {
    let projection = harness.open().await;
    for (id, seq) in [(1, 1_u64 << 40), (2, (1 << 48) - 2)] {
        let lower = under(32_000, seq, &change(id, 1, Some(r#"{"lower":true}"#)));
        let higher = under(32_000, seq + 1, &change(id, 1, Some(r#"{"lower":false}"#)));
        assert!(lower.version.as_u64() > 1 << 53);
        assert_eq!(apply(&projection, std::slice::from_ref(&lower)).await, [Applied::Newer]);
        assert_eq!(apply(&projection, std::slice::from_ref(&higher)).await, [Applied::Newer]);
        assert_eq!(apply(&projection, &[lower]).await, [Applied::Stale]);
        shows(&projection, &higher).await;
    }
    assert_eq!(document(&projection, &name(3)).await, None);
}
