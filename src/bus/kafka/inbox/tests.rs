//! What an inbox hands out, drops and reads again.

use super::*;
use crate::bus::Record;
use crate::event::Origin;
use crate::id::Topic;

/// A topic is created again while the consumer is about to pause its partition. The pause
/// belongs to the assignment that is over, so the new one, which nothing would resume, is not
/// paused.
#[tokio::test]
async fn t94_a_pause_that_comes_late_does_not_stop_the_next_assignment() {
    let inbox = Inbox::new(10, 1000, Arc::default());
    let topic = Topic::new("t").unwrap();
    let partition = Partition { topic: topic.clone(), number: 0 };
    inbox.assigned(vec![(partition.clone(), None)]);
    let Ok(BusEvent::Assigned(first)) = inbox.next().await else { panic!("assigned") };
    let record = |offset| Received::new(Record::default(), Origin::new(topic.clone(), 0, offset));
    assert_eq!(inbox.push(record(7), 1), Pushed::Open);
    assert!(matches!(inbox.next().await, Ok(BusEvent::Records(_))));
    assert_eq!(inbox.push(record(0), 1), Pushed::Anew(partition.clone()), "offsets have begun anew");
    assert_eq!(inbox.pause(&first), [], "it is over");
    let Ok(BusEvent::Lost(lost)) = inbox.next().await else { panic!("lost") };
    let Ok(BusEvent::Assigned(second)) = inbox.next().await else { panic!("assigned again") };
    assert_eq!(lost, first);
    let Ok(BusEvent::Records(records)) = inbox.next().await else { panic!("its records") };
    assert_eq!(records[0].origin.offset, 0);
    inbox.pause(&second);
    assert_eq!(inbox.push(record(1), 1), Pushed::Waits);
    assert!(inbox.take().is_none(), "{partition} is paused");
}

/// librdkafka pauses partitions by itself while it rebalances. A record that is just being handed over is fetched once more then: it
/// is not a topic that was made anew, and what waits before it is not lost.
#[tokio::test]
async fn t493_the_last_record_once_more_is_no_new_topic() {
    let (inbox, given) = three();
    let record = |offset, payload: &'static str| {
        let record = Record { payload: Some(payload.into()), ..Record::default() };
        Received::new(record, Origin::new(Topic::new("t").unwrap(), 0, offset))
    };
    for (offset, payload) in [(0, "a"), (1, "b"), (1, "b"), (2, "c")] {
        assert_eq!(inbox.push(record(offset, payload), 1), Pushed::Open);
    }
    assert_eq!(taken(&inbox), [(0, 0), (0, 1), (0, 2)]);
    // Another one in its place is of a new topic.
    assert_eq!(inbox.push(record(2, "d"), 1), Pushed::Anew(given[0].partition.clone()));
    assert!(matches!(inbox.take(), Some(Ok(BusEvent::Lost(_)))));
}

/// In a topic that was made again, the record at the last offset has the same time, key and payload, and another id in its headers: it
/// is another event.
#[test]
fn t503_another_id_in_the_headers_is_another_record() {
    let (inbox, given) = three();
    let record = |id: &str| {
        let headers = [("eventId", id.to_owned())].into_iter().collect();
        let record = Record { payload: Some("{}".into()), headers, ..Record::default() };
        Received::new(record, Origin::new(Topic::new("t").unwrap(), 0, 0))
    };
    assert_eq!(inbox.push(record("e-1"), 1), Pushed::Open);
    assert_eq!(inbox.push(record("e-1"), 1), Pushed::Open, "the same record once more");
    assert_eq!(taken(&inbox), [(0, 0)]);
    assert_eq!(inbox.push(record("e-2"), 1), Pushed::Anew(given[0].partition.clone()));
}

/// The inbox of partitions 0 to 2, with room for 100 bytes, and what was assigned.
fn three() -> (Inbox, Vec<Assignment>) {
    let inbox = Inbox::new(1000, 100, Arc::default());
    let partition = |number| (Partition { topic: Topic::new("t").unwrap(), number }, Some(0));
    inbox.assigned((0..3).map(partition).collect());
    let Some(Ok(BusEvent::Assigned(given))) = inbox.take() else { panic!("assigned") };
    (inbox, given)
}

/// A record of 90 bytes is fetched.
fn fetch(inbox: &Inbox, number: i32, offset: i64) -> Pushed {
    let record = Record { payload: Some(vec![b'x'; 90].into()), ..Record::default() };
    let bytes = record.bytes();
    let origin = Origin::new(Topic::new("t").unwrap(), number, offset);
    inbox.push(Received::new(record, origin), bytes)
}

/// What is delivered: partitions and offsets.
fn taken(inbox: &Inbox) -> Vec<(i32, i64)> {
    let Some(Ok(BusEvent::Records(records))) = inbox.take() else { return Vec::new() };
    records.iter().map(|record| (record.origin.partition, record.origin.offset)).collect()
}

/// Partition after partition fills the buffer and is paused. What goes beyond three times the limit is dropped, and read again from
/// the first offset that was not delivered; nothing that comes before that is done counts.
#[test]
fn t79_what_is_paused_is_bounded_and_read_again() {
    let (inbox, given) = three();
    fetch(&inbox, 2, 0);
    assert_eq!(taken(&inbox), [(2, 0)]);
    for number in 0..2 {
        fetch(&inbox, number, 0);
        assert_eq!(inbox.pause(&given[number as usize..][..1]), [], "they fit");
    }
    assert!(inbox.rewinds().is_empty(), "two fit");
    fetch(&inbox, 2, 1);
    fetch(&inbox, 2, 2);
    let third = given[2].partition.clone();
    assert_eq!(inbox.pause(&given[2..]), std::slice::from_ref(&third));
    assert_eq!(inbox.rewinds(), [(third.clone(), 1)], "behind what was delivered");
    // It is resumed before the thread could go back, and the rest of an old fetch comes in.
    inbox.resume(&given[2..]);
    fetch(&inbox, 2, 3);
    assert_eq!(taken(&inbox), [], "3 is not delivered before 1");
    assert_eq!(inbox.rewinds(), [(third.clone(), 1)], "until it is done");
    inbox.clear(&third, 1);
    assert!(inbox.rewinds().is_empty());
    (1..4).for_each(|offset| drop(fetch(&inbox, 2, offset)));
    assert_eq!(taken(&inbox), [(2, 1), (2, 2), (2, 3)]);
    // The others kept theirs.
    inbox.resume(&given[..2]);
    let mut kept = taken(&inbox);
    kept.sort_unstable();
    assert_eq!(kept, [(0, 0), (1, 0)]);
}

/// Dropped with records that retention had removed before them, of which the subscriber has not heard: it goes back behind what
/// was heard of, so that it hears of them, once.
#[test]
fn t79_what_was_removed_is_still_reported_after_a_drop() {
    let (inbox, given) = three();
    for (number, offset) in [(0, 0), (0, 1), (1, 0)] {
        fetch(&inbox, number, offset);
    }
    inbox.pause(&given[..2]);
    let third = given[2].partition.clone();
    let gap = || {
        inbox.reset(Some(&("t".to_owned(), 2)));
        fetch(&inbox, 2, 5);
        inbox.answered(&third, &(0..5), Some(5));
    };
    gap();
    inbox.pause(&given[2..]);
    assert_eq!(inbox.rewinds(), [(third.clone(), 0)]);
    inbox.resume(&given[2..]);
    assert!(inbox.take().is_none(), "nothing until it is read again");
    inbox.clear(&third, 0);
    gap();
    assert!(matches!(inbox.take(), Some(Ok(BusEvent::Removed { offsets, .. })) if offsets == (0..5)));
    inbox.pause(&given[2..]);
    assert_eq!(inbox.rewinds(), [(third, 5)], "the consumer has received that");
}

/// A partition that is to be read again is revoked, and assigned anew: the new assignment begins where the group says.
#[test]
fn t79_a_rewind_ends_with_its_assignment() {
    let (inbox, given) = three();
    (0..4).for_each(|offset| drop(fetch(&inbox, 0, offset)));
    inbox.pause(&given[..1]);
    assert_eq!(inbox.rewinds().len(), 1);
    let partition = given[0].partition.clone();
    assert!(inbox.revoke(vec![partition.clone()], Instant::now() + Duration::from_secs(60)));
    assert!(inbox.rewinds().is_empty());
    inbox.release(&given[..1]);
    inbox.assigned(vec![(partition, Some(2))]);
    fetch(&inbox, 0, 2);
    while !matches!(inbox.take(), Some(Ok(BusEvent::Assigned(_)))) {}
    assert_eq!(taken(&inbox), [(0, 2)]);
}

/// A consumer at its limit pauses and resumes again and again: librdkafka, whose pause drops what it has fetched, hears nothing of
/// that, and what arrives meanwhile is delivered afterwards.
#[test]
fn t490_pauses_that_end_soon_stay_in_the_inbox() {
    let (inbox, given) = three();
    for offset in 0..100 {
        assert_eq!(inbox.pause(&given[..1]), []);
        assert_eq!(fetch(&inbox, 0, offset), Pushed::Waits);
        assert_eq!(taken(&inbox), [], "it is paused");
        assert_eq!(inbox.resume(&given[..1]), []);
        assert_eq!(taken(&inbox), [(0, offset)]);
    }
}

/// Partitions that stay paused, one after the other: together they keep four times the records, or twice the bytes, that the others
/// may have. Then no more of them is fetched, while the others go on.
#[test]
fn t491_what_arrives_of_paused_partitions_is_bounded() {
    for (records_max, bytes_max, bound) in [(10, usize::MAX, 40), (usize::MAX, 900, 20)] {
        let inbox = Inbox::new(records_max, bytes_max, Arc::default());
        let partition = |number| Partition { topic: Topic::new("t").unwrap(), number };
        inbox.assigned((0..100).map(|number| (partition(number), Some(0))).collect());
        let Some(Ok(BusEvent::Assigned(given))) = inbox.take() else { panic!("assigned") };
        inbox.pause(&given[1..]);
        let mut waiting = 0;
        for number in 1..100 {
            for offset in 0.. {
                waiting += 1;
                match fetch(&inbox, number, offset) {
                    Pushed::Waits => assert!(waiting < bound, "{waiting}"),
                    Pushed::Full(full) => {
                        assert!(waiting >= bound && full == partition(number));
                        inbox.set_fetch_paused(&[full], true);
                        break;
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert!(inbox.has_room() && fetch(&inbox, 0, i64::from(number)) == Pushed::Open);
            assert_eq!(taken(&inbox), [(0, i64::from(number))]);
        }
        assert!(waiting < bound + 100, "one more of each is all that arrives: {waiting}");
        // Only what was paused in librdkafka is resumed there.
        assert_eq!(inbox.resume(&given[..3]), [partition(1), partition(2)]);
        inbox.set_fetch_paused(&[partition(1), partition(2)], false);
        assert_eq!(inbox.resume(&given[..3]), []);
        assert_eq!(inbox.fetch_paused().len(), 97);
    }
}
