//! Clauses 3, 5, 6, 7 and 8: several members, and how partitions go from one to another.

use std::collections::BTreeSet;
use std::time::Duration;

use super::BusHarness;
use super::kit::{DEADLINE, Recorder, Stage, assert_fenced, drive, until};
use crate::bus::Bus;

/// Two members share four partitions; what stays is not disturbed; one of them receives each record.
pub async fn b3_each_partition_has_one_member<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 4).await;
    let mut a = stage.member("a").await;
    until(&mut a, "all partitions", |a| a.held.len() == 4).await;
    let alone = a.held.clone();
    let other = harness.open().await;
    let mut b = Recorder::new("b", other.subscribe(stage.subscription()).await.unwrap());
    drive(&mut [&mut a, &mut b], "two each", |members| {
        members.iter().all(|recorder| recorder.held.len() == 2)
    })
    .await;
    let both: BTreeSet<_> = a.held.keys().chain(b.held.keys()).collect();
    assert_eq!(both.len(), 4, "{a:?}, {b:?}");
    assert!(a.held.iter().all(|(partition, epoch)| alone[partition] == *epoch), "what stays stays: {a:?}");
    assert_eq!((&a.lost, &b.lost), (&vec![], &vec![]));
    stage.fill(5).await;
    let total = stage.total().await;
    drive(&mut [&mut a, &mut b], "all records", |members| {
        members.iter().map(|recorder| recorder.records.len()).sum::<usize>() >= total
    })
    .await;
    assert_eq!(a.records.len() + b.records.len(), total, "each record is heard once");
    a.leave().await;
    until(&mut b, "everything", |b| b.held.len() == 4).await;
    b.leave().await;
}

/// Each group receives everything.
pub async fn b3_groups_do_not_share<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    stage.fill(3).await;
    let total = stage.total().await;
    let mut a = stage.member("a").await;
    let mut subscription = stage.subscription();
    subscription.group = harness.unique("other").into();
    let mut b = Recorder::new("b", stage.bus.subscribe(subscription).await.unwrap());
    drive(&mut [&mut a, &mut b], "everything twice", |members| {
        members.iter().all(|recorder| recorder.records.len() >= total)
    })
    .await;
    assert_eq!((a.records.len(), b.records.len()), (total, total));
    a.leave().await;
    b.leave().await;
}

/// Who gave a partition back commits nothing of it, and its neighbours' commits stand.
pub async fn b5_a_commit_of_an_epoch_that_is_over_is_fenced<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    stage.fill(5).await;
    let mut a = stage.member("a").await;
    until(&mut a, "both partitions", |a| a.held.len() == 2).await;
    let before: Vec<_> = a.held.keys().map(|partition| a.assigned(partition)).collect();
    let mut b = stage.member("b").await;
    drive(&mut [&mut a, &mut b], "one each", |members| {
        members.iter().all(|recorder| recorder.held.len() == 1)
    })
    .await;
    let gone = before.iter().find(|assigned| b.held.contains_key(&assigned.partition)).unwrap();
    let kept = before.iter().find(|assigned| a.held.contains_key(&assigned.partition)).unwrap();
    let answers = a.subscriber().commit(&[(gone.clone(), 4), (kept.clone(), 2)]).await.unwrap();
    assert_fenced(&answers[0]);
    assert!(answers[1].is_ok(), "{answers:?}");
    assert_eq!(stage.committed(gone.partition.number).await, None, "a fenced commit changes nothing");
    assert_eq!(stage.committed(kept.partition.number).await, Some(2));
    // The same member gets it again: what it did under the old epoch is still over.
    b.leave().await;
    until(&mut a, "both again", |a| a.held.len() == 2).await;
    let now = a.assigned(&gone.partition);
    assert!(now.epoch > gone.epoch, "epochs grow: {} and {}", gone.epoch, now.epoch);
    let late = a.commit(gone, 4).await;
    assert_fenced(&late);
    a.commit(&now, 3).await.unwrap();
    assert_eq!(stage.committed(gone.partition.number).await, Some(3));
    a.leave().await;
}

/// A member gives a partition back and gets it again: pauses and resumptions of the first assignment do not concern the second.
pub async fn b8_a_pause_of_an_epoch_that_is_over_changes_nothing<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    let mut a = stage.member("a").await;
    until(&mut a, "both partitions", |a| a.held.len() == 2).await;
    let before: Vec<_> = a.held.keys().map(|partition| a.assigned(partition)).collect();
    let mut b = stage.member("b").await;
    drive(&mut [&mut a, &mut b], "one each", |members| {
        members.iter().all(|recorder| recorder.held.len() == 1)
    })
    .await;
    let gone = before.iter().find(|assigned| b.held.contains_key(&assigned.partition)).unwrap();
    let kept = before.iter().find(|assigned| a.held.contains_key(&assigned.partition)).unwrap();
    b.leave().await;
    until(&mut a, "both again", |a| a.held.len() == 2).await;
    let now = a.assigned(&gone.partition);
    a.subscriber().pause(std::slice::from_ref(gone)).await.unwrap();
    stage.fill(5).await;
    let total = stage.total().await;
    until(&mut a, "all records, since nothing is paused", |a| a.records.len() >= total).await;
    a.subscriber().pause(std::slice::from_ref(&now)).await.unwrap();
    a.subscriber().resume(std::slice::from_ref(gone)).await.unwrap();
    let delivered = a.offsets(&gone.partition);
    let (_, end) = stage.bus.range(&kept.partition).await.unwrap();
    stage.fill(end + 5).await;
    let (_, end) = stage.bus.range(&kept.partition).await.unwrap();
    until(&mut a, "the other one", |a| a.offsets(&kept.partition).last() == Some(&(end - 1))).await;
    assert_eq!(a.offsets(&gone.partition), delivered, "a paused partition delivers");
    a.subscriber().resume(std::slice::from_ref(&now)).await.unwrap();
    let total = stage.total().await;
    until(&mut a, "all records", |a| a.records.len() >= total).await;
    a.leave().await;
}

/// Until it is given back, a revoked partition is its member's: it commits, and the next one begins there.
pub async fn b6_a_revoked_partition_moves_once_it_is_given_back<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    stage.fill(5).await;
    let mut a = stage.member("a").await;
    a.keeps = true;
    let total = stage.total().await;
    until(&mut a, "all records", |a| a.records.len() >= total).await;
    let mut b = stage.member("b").await;
    drive(&mut [&mut a, &mut b], "a revocation", |members| !members[0].revoked.is_empty()).await;
    let revoked = a.revoked[0].clone();
    stage.fill(10).await;
    // The one that stays goes on meanwhile, and no one else has the revoked one.
    let kept = a.held.keys().find(|partition| **partition != revoked.partition).unwrap().clone();
    let (_, end) = stage.bus.range(&kept).await.unwrap();
    if harness.others_go_on() {
        drive(&mut [&mut a, &mut b], "the kept one to go on", |members| {
            members[0].offsets(&kept).last() == Some(&(end - 1))
        })
        .await;
    }
    assert!(b.held.is_empty(), "{b:?} has what was not given back");
    a.commit(&revoked, 4).await.expect("it may finish what it has");
    a.release().await;
    drive(&mut [&mut a, &mut b], "the hand-over", |members| !members[1].records.is_empty()).await;
    assert_eq!(b.records[0].origin.partition, revoked.partition.number);
    assert_eq!(b.records[0].origin.offset, 4, "it begins where the first one finished");
    drive(&mut [&mut a, &mut b], "the kept one to go on", |members| {
        members[0].offsets(&kept).last() == Some(&(end - 1))
    })
    .await;
    assert_eq!(a.lost, []);
    a.leave().await;
    b.leave().await;
}

/// Patience with what is asked back ends.
pub async fn b6_who_never_gives_back_is_thrown_out<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    stage.fill(2).await;
    let mut subscription = stage.subscription();
    subscription.revoke_timeout = harness.session() + Duration::from_millis(500);
    let mut a = Recorder::new("a", stage.bus.subscribe(subscription.clone()).await.unwrap());
    a.keeps = true;
    until(&mut a, "both partitions", |a| a.held.len() == 2).await;
    let mut b = Recorder::new("b", stage.bus.subscribe(subscription).await.unwrap());
    drive(&mut [&mut a, &mut b], "a revocation", |members| !members[0].revoked.is_empty()).await;
    let revoked = a.revoked[0].clone();
    drive(&mut [&mut a, &mut b], "the other to have it", |members| {
        members[1].held.contains_key(&revoked.partition)
    })
    .await;
    drive(&mut [&mut a, &mut b], "the loss to be reported", |members| members[0].lost.contains(&revoked))
        .await;
    let late = a.commit(&revoked, 1).await;
    assert_fenced(&late);
    assert_eq!(stage.committed(revoked.partition.number).await, None);
    a.leave().await;
    b.leave().await;
}

/// A member that stands still loses all its partitions, learns of it when it comes back, and takes
/// part again.
pub async fn b7_a_silent_member_loses_its_partitions<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    stage.fill(5).await;
    let still = harness.open().await;
    let mut a = Recorder::new("a", still.subscribe(stage.subscription()).await.unwrap());
    until(&mut a, "both partitions", |a| a.held.len() == 2).await;
    let before: Vec<_> = a.held.keys().map(|partition| a.assigned(partition)).collect();
    harness.silence(&still).await;
    let mut b = stage.member("b").await;
    until(&mut b, "everything", |b| b.held.len() == 2).await;
    let all: Vec<_> = b.held.keys().map(|partition| b.assigned(partition)).collect();
    for assigned in &all {
        b.commit(assigned, 5).await.unwrap();
    }
    harness.wake(&still).await;
    for assigned in &before {
        let late = a.commit(assigned, 1).await;
        assert_fenced(&late);
    }
    drive(&mut [&mut a, &mut b], "the loss to be reported", |members| members[0].lost.len() >= 2).await;
    let lost: BTreeSet<_> = a.lost.iter().map(|assigned| assigned.partition.clone()).collect();
    assert_eq!(lost.len(), 2, "{a:?}");
    drive(&mut [&mut a, &mut b], "one each", |members| {
        members.iter().all(|recorder| recorder.held.len() == 1)
    })
    .await;
    for number in 0..2 {
        assert_eq!(stage.committed(number).await, Some(5), "no commit went backwards");
    }
    a.leave().await;
    b.leave().await;
}

/// Leaving is not a time-out.
pub async fn b7_who_leaves_is_not_waited_for<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let mut subscription = stage.subscription();
    subscription.session_timeout = DEADLINE * 2; // longer than this case waits for anything
    subscription.revoke_timeout = DEADLINE * 2;
    let mut a = Recorder::new("a", stage.bus.subscribe(subscription.clone()).await.unwrap());
    until(&mut a, "the partition", |a| a.held.len() == 1).await;
    let mut b = Recorder::new("b", stage.bus.subscribe(subscription).await.unwrap());
    a.leave().await;
    until(&mut b, "the partition", |b| b.held.len() == 1).await;
    b.leave().await;
}
