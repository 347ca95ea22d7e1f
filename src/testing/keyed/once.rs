//! One run, and the same answer for everybody.

#![allow(missing_docs, reason = "the name of a case says what it shows")]

use super::{KeysHarness, again, answer, done, first, opaque, person, request, request_of, word};
use crate::error::Error;
use crate::keyed::{Begin, Begun, KeyLease, Keys, Resolution};
use crate::ledger::Nonce;

pub async fn k1_of_100_at_once_one_is_first(harness: &impl KeysHarness) {
    let stores = [harness.open().await, harness.open().await];
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..100 {
        let (keys, begin) = (stores[n % 2].clone(), request("key", "{}"));
        tasks.spawn(async move {
            loop {
                match keys.begin(&begin).await {
                    Err(error) if error.is_retryable() => tokio::task::yield_now().await,
                    other => return other.expect("a request begins"),
                }
            }
        });
    }
    let (mut firsts, mut running) = (0, 0);
    while let Some(outcome) = tasks.join_next().await {
        match outcome.expect("no panic") {
            Begun::First(_) => firsts += 1,
            Begun::Running { .. } => running += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((firsts, running), (1, 99));
}

pub async fn k1_others_see_that_it_runs(harness: &impl KeysHarness) {
    let (one, two) = (harness.open().await, harness.open().await);
    let begin = request("key", "{}");
    let lease = first(&one, &begin).await;
    let now = two.info().await.unwrap().now;
    match again(&two, &begin).await {
        Begun::Running { until: Some(until) } => assert!(until > now, "{until} after {now}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(word(&two, &begin).await, "running");
    one.finish(&lease, &answer("17")).await.unwrap();
    assert!(matches!(again(&two, &begin).await, Begun::Done(_)), "at once");
}

pub async fn k2_two_tenants_never_meet(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let of = |tenant| request_of(tenant, "key", "{}");
    done(&keys, &of(Some("acme")), "acme's").await;
    assert_eq!(word(&keys, &of(Some("umbrella"))).await, "unknown");
    done(&keys, &of(Some("umbrella")), "umbrella's").await;
    done(&keys, &of(None), "nobody's").await;
    for (tenant, wanted) in [(Some("acme"), "acme's"), (Some("umbrella"), "umbrella's"), (None, "nobody's")] {
        match again(&keys, &of(tenant)).await {
            Begun::Done(kept) => assert_eq!(kept.answer.body, wanted),
            other => panic!("{other:?}"),
        }
    }
    // Another body under another tenant's key is not a mismatch.
    let other = request_of(Some("third"), "key", "another body");
    assert!(matches!(keys.begin(&other).await.unwrap(), Begun::First(_)));
    // A lease of one tenant settles nothing of another.
    let mut stolen = first(&keys, &request_of(Some("acme"), "k2", "{}")).await;
    stolen.tenant = crate::Tenant::new("umbrella").ok();
    assert!(matches!(keys.finish(&stolen, &answer("x")).await, Err(Error::Fenced { .. })));
}

pub async fn k3_another_request_is_a_mismatch_in_every_state(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let mismatch = async |key: &str, state: &str| {
        assert_eq!(word(&keys, &request(key, "a")).await, state);
        let outcome = keys.begin(&request(key, "b")).await.unwrap();
        assert!(matches!(outcome, Begun::Mismatch { .. }), "{state}: {outcome:?}");
        assert_eq!(word(&keys, &request(key, "a")).await, state, "nothing was changed");
    };
    first(&keys, &request("running", "a")).await;
    mismatch("running", "running").await;
    done(&keys, &request("done", "a"), "17").await;
    mismatch("done", "done").await;
    let hold = Begin { after_failure: crate::keyed::AfterFailure::Hold, ..request("held", "a") };
    let lease = first(&keys, &hold).await;
    keys.release(&lease, crate::keyed::Ended::Failed).await.unwrap();
    mismatch("held", "outcome-unknown").await;
    let token = keys.entry(None, &hold.key).await.unwrap().expect("it is stored").token;
    keys.resolve(&KeyLease { token, ..lease }, &Resolution::Rerun, &person()).await.unwrap();
    mismatch("held", "free").await;
}

pub async fn k3_a_mismatch_names_what_differs_and_nothing_else(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    done(&keys, &request("key", r#"{"item": 1, "card": "4111"}"#), "the answer").await;
    let other = keys.begin(&request("key", r#"{"item": 1, "card": "4242"}"#)).await.unwrap();
    assert_eq!(other, Begun::Mismatch { differing: vec!["/card".to_owned()] });
    let outcome = keys.begin(&opaque(&request("key", "{}"), [9; 16])).await.unwrap();
    assert_eq!(outcome, Begun::Mismatch { differing: Vec::new() }, "a fingerprint of one's own cannot tell");
}

pub async fn k4_the_answer_comes_back_byte_for_byte(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    for (n, body) in [Vec::new(), vec![0, 255, 10, 13, 0], vec![b'x'; 300_000]].into_iter().enumerate() {
        let begin = request(&format!("key-{n}"), "{}");
        let mut stored = answer("");
        stored.body = body.into();
        let lease = first(&keys, &begin).await;
        keys.finish(&lease, &stored).await.unwrap();
        for keys in [&keys, &harness.open().await] {
            match again(keys, &begin).await {
                Begun::Done(kept) => {
                    assert_eq!(kept.answer, stored);
                    assert!(!kept.mine);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

pub async fn k6_the_same_begin_again_gets_the_same_token(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    let lease = first(&keys, &begin).await;
    assert_eq!(first(&harness.open().await, &begin).await, lease, "an answer that was lost");
    // Even after its lease has ended, as long as nobody else has begun.
    harness.advance(begin.lease * 2).await;
    assert_eq!(first(&keys, &begin).await, lease);
    assert!(matches!(again(&keys, &begin).await, Begun::Running { .. }), "the lease is renewed");
    harness.advance(begin.lease * 2).await;
    let next = Begin { nonce: Nonce::random(), ..begin.clone() };
    assert!(first(&keys, &next).await.token > lease.token);
    assert!(matches!(keys.begin(&begin).await.unwrap(), Begun::Running { .. }), "it is another's now");
}

pub async fn k6_its_own_answer_is_known_as_its_own(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    done(&keys, &begin, "17").await;
    match keys.begin(&begin).await.unwrap() {
        Begun::Done(kept) => assert!(kept.mine),
        other => panic!("{other:?}"),
    }
}

pub async fn k12_a_transaction_is_all_or_nothing(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    if !keys.capabilities().transactional {
        let refused = harness.in_transaction(&keys, &begin, None, true).await;
        assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
        return;
    }
    let stored = answer("17");
    let outcome = harness.in_transaction(&keys, &begin, Some(&stored), false).await.unwrap();
    assert!(matches!(outcome, Begun::First(_)), "{outcome:?}");
    assert_eq!(word(&keys, &begin).await, "unknown", "a rollback leaves no trace");
    let outcome = harness.in_transaction(&keys, &begin, Some(&stored), true).await.unwrap();
    assert!(matches!(outcome, Begun::First(_)), "{outcome:?}");
    match harness.in_transaction(&keys, &begin, Some(&answer("18")), true).await.unwrap() {
        Begun::Done(kept) => assert!(kept.mine && kept.answer == stored, "{kept:?}"),
        other => panic!("{other:?}"),
    }
    match again(&keys, &begin).await {
        Begun::Done(kept) => assert!(!kept.mine && kept.answer == stored, "leased requests see it too"),
        other => panic!("{other:?}"),
    }
    // A leased one that runs is met in a transaction, and left alone.
    first(&keys, &request("leased", "{}")).await;
    let met = harness.in_transaction(&keys, &request("leased", "{}"), Some(&stored), true).await.unwrap();
    assert!(matches!(met, Begun::Running { until: Some(_) }), "{met:?}");
    assert_eq!(word(&keys, &request("leased", "{}")).await, "running");
}

pub async fn k12_a_transaction_without_an_answer_never_runs_again(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    if !keys.capabilities().transactional {
        return; // the case above asserts that
    }
    let begin = request("key", "{}");
    let outcome = harness.in_transaction(&keys, &begin, None, true).await.unwrap();
    let Begun::First(lease) = outcome else { panic!("{outcome:?}") };
    // Its work may be committed: whoever comes with the key, under any nonce, must not repeat it.
    for retry in [begin.clone(), Begin { nonce: Nonce::random(), ..begin.clone() }] {
        assert!(matches!(keys.begin(&retry).await.unwrap(), Begun::OutcomeUnknown { .. }));
    }
    keys.resolve(&lease, &Resolution::Answer(answer("17")), &person()).await.unwrap();
    assert!(matches!(again(&keys, &begin).await, Begun::Done(_)));
}
