//! Leases, tokens, and what becomes of a request that never ended.

#![allow(missing_docs, reason = "the name of a case says what it shows")]

use std::time::Duration;

use super::{KeysHarness, again, answer, done, first, person, request, request_of, word};
use crate::error::{Error, Result};
use crate::keyed::{
    AfterFailure, Answer, Begin, Begun, Ended, KeyLease, KeyState, KeyStatus, Keys, ListKeys,
    RequestFingerprint, RequestParts, Resolution,
};

#[allow(clippy::needless_pass_by_value)] // an answer is looked at once
fn fenced(answer: Result<()>) {
    assert!(matches!(answer, Err(Error::Fenced { .. })), "{answer:?}");
}

fn held(after_failure: AfterFailure) -> Begin {
    Begin { after_failure, ..request("key", "{}") }
}

pub async fn k5_a_stale_token_changes_nothing(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    let stale = first(&keys, &begin).await;
    harness.advance(begin.lease * 2).await;
    let Begun::First(lease) = again(&keys, &begin).await else { panic!("it runs again") };
    fenced(keys.finish(&stale, &answer("late")).await);
    fenced(keys.extend(&stale, begin.lease).await);
    fenced(keys.release(&stale, Ended::Undone).await);
    assert_eq!(word(&keys, &begin).await, "running");
    keys.finish(&lease, &answer("17")).await.unwrap();
    fenced(keys.finish(&stale, &answer("late")).await);
    match again(&keys, &begin).await {
        Begun::Done(kept) => assert_eq!(kept.answer, answer("17")),
        other => panic!("{other:?}"),
    }
    fenced(keys.finish(&KeyLease { key: super::key("nowhere"), ..lease }, &answer("x")).await);
}

pub async fn k5_finishing_twice_keeps_the_first_answer(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    let lease = first(&keys, &begin).await;
    keys.finish(&lease, &answer("17")).await.unwrap();
    keys.finish(&lease, &answer("18")).await.unwrap();
    fenced(keys.extend(&lease, begin.lease).await);
    fenced(keys.release(&lease, Ended::Failed).await);
    match again(&keys, &begin).await {
        Begun::Done(kept) => assert_eq!(kept.answer, answer("17")),
        other => panic!("{other:?}"),
    }
}

pub async fn k5_a_lease_that_was_released_or_decided_is_over(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let over = async |lease: &KeyLease, begin: &Begin, state: &str| {
        fenced(keys.extend(lease, begin.lease).await);
        assert_eq!(word(&keys, begin).await, state, "a heartbeat that comes late revives nothing");
        fenced(keys.release(lease, Ended::Failed).await);
        fenced(keys.finish(lease, &answer("late")).await);
        assert_eq!(word(&keys, begin).await, state);
        // A copy of its begin that comes late, under the same nonce.
        let late = keys.begin(begin).await.unwrap();
        match state {
            "done" => assert!(matches!(&late, Begun::Done(kept) if !kept.mine), "{late:?}"),
            "outcome-unknown" => assert!(matches!(late, Begun::OutcomeUnknown { .. }), "{late:?}"),
            _ => assert!(matches!(late, Begun::Running { until: Some(_) }), "{late:?}"),
        }
        assert_eq!(word(&keys, begin).await, state, "a begin that comes late revives nothing");
    };
    let releases = [
        (Ended::Undone, AfterFailure::Rerun, "free"),
        (Ended::Undone, AfterFailure::Hold, "free"),
        (Ended::Failed, AfterFailure::Rerun, "free"),
        (Ended::Failed, AfterFailure::Hold, "outcome-unknown"),
    ];
    for (n, (ended, rule, state)) in releases.into_iter().enumerate() {
        let begin = Begin { key: super::key(&format!("released-{n}")), ..held(rule) };
        let lease = first(&keys, &begin).await;
        keys.release(&lease, ended).await.unwrap();
        over(&lease, &begin, state).await;
        if state == "free" {
            assert!(matches!(again(&keys, &begin).await, Begun::First(_)));
        }
    }
    let resolutions = [(Resolution::Rerun, "free"), (Resolution::Answer(answer("17")), "done")];
    for (n, (how, state)) in resolutions.into_iter().enumerate() {
        let begin = Begin { key: super::key(&format!("decided-{n}")), ..held(AfterFailure::Hold) };
        let lease = first(&keys, &begin).await;
        harness.advance(begin.lease * 2).await;
        keys.resolve(&lease, &how, &person()).await.unwrap();
        over(&lease, &begin, state).await;
    }
}

pub async fn k7_a_lapsed_lease_runs_again(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    let lost = first(&keys, &begin).await;
    harness.advance(begin.lease / 2).await;
    assert!(matches!(again(&keys, &begin).await, Begun::Running { .. }));
    harness.advance(begin.lease).await;
    assert_eq!(word(&keys, &begin).await, "free");
    let Begun::First(lease) = again(&keys, &begin).await else { panic!("its process is gone") };
    assert!(lease.token > lost.token);
    assert!(matches!(again(&keys, &begin).await, Begun::Running { .. }), "one at a time");
}

pub async fn k7_a_lease_that_is_extended_does_not_lapse(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    for after_failure in [AfterFailure::Rerun, AfterFailure::HoldFor(Duration::from_secs(600))] {
        let begin =
            Begin { key: super::key(&format!("{after_failure:?}").replace(' ', "")), ..held(after_failure) };
        let lease = first(&keys, &begin).await;
        for _ in 0..3 {
            harness.advance(begin.lease / 2).await;
            keys.extend(&lease, begin.lease).await.unwrap();
        }
        assert!(matches!(again(&keys, &begin).await, Begun::Running { .. }));
        harness.advance(begin.lease * 2).await;
        let state = if after_failure == AfterFailure::Rerun { "free" } else { "outcome-unknown" };
        assert_eq!(word(&keys, &begin).await, state);
    }
}

pub async fn k7_a_held_key_waits_for_a_person(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = held(AfterFailure::Hold);
    let lease = first(&keys, &begin).await;
    let early = keys.resolve(&lease, &Resolution::Rerun, &person()).await;
    assert!(matches!(early, Err(Error::Conflict { .. })), "it still runs: {early:?}");
    harness.advance(Duration::from_hours(24 * 400)).await;
    assert!(matches!(again(&keys, &begin).await, Begun::OutcomeUnknown { .. }));
    let open = keys.list(&ListKeys { open_only: true, ..ListKeys::default() }).await.unwrap();
    assert_eq!((open.len(), open[0].state, open[0].token), (1, KeyState::OutcomeUnknown, lease.token));
    let other = KeyLease { token: crate::ledger::Token(lease.token.0 + 1000), ..lease.clone() };
    assert!(matches!(keys.resolve(&other, &Resolution::Rerun, &person()).await, Err(Error::Conflict { .. })));
    let nobody = crate::keyed::Decided::new(" ", "because");
    assert!(
        keys.resolve(&lease, &Resolution::Rerun, &nobody).await.is_err_and(|error| error.code() == "invalid")
    );
    keys.resolve(&lease, &Resolution::Rerun, &person()).await.unwrap();
    assert!(matches!(again(&keys, &begin).await, Begun::First(_)));
    fenced(keys.finish(&lease, &answer("late")).await);
}

pub async fn k7_a_held_key_waits_for_its_time(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = held(AfterFailure::HoldFor(Duration::from_secs(3600)));
    first(&keys, &begin).await;
    harness.advance(begin.lease + Duration::from_secs(60)).await;
    assert!(matches!(again(&keys, &begin).await, Begun::OutcomeUnknown { .. }));
    harness.advance(Duration::from_secs(3600)).await;
    assert!(matches!(again(&keys, &begin).await, Begun::First(_)));
}

pub async fn k7_a_person_gives_the_answer(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = held(AfterFailure::Hold);
    let lease = first(&keys, &begin).await;
    harness.advance(begin.lease * 2).await;
    keys.resolve(&lease, &Resolution::Answer(answer("it was 17")), &person()).await.unwrap();
    match again(&keys, &begin).await {
        Begun::Done(kept) => assert_eq!(kept.answer, answer("it was 17")),
        other => panic!("{other:?}"),
    }
    let twice = keys.resolve(&lease, &Resolution::Answer(answer("no, 18")), &person()).await;
    assert!(matches!(twice, Err(Error::Conflict { .. })), "{twice:?}");
}

pub async fn k7_who_decided_and_why_is_stored(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = held(AfterFailure::Hold);
    let lease = first(&keys, &begin).await;
    harness.advance(begin.lease * 2).await;
    assert_eq!(keys.entry(None, &begin.key).await.unwrap().unwrap().resolved, None);
    keys.resolve(&lease, &Resolution::Rerun, &person()).await.unwrap();
    let Begun::First(next) = again(&keys, &begin).await else { panic!("it may run again") };
    keys.finish(&next, &answer("17")).await.unwrap();
    let entry = keys.entry(None, &begin.key).await.unwrap().unwrap();
    let resolved = entry.resolved.clone().expect("it outlives the next run");
    assert_eq!((resolved.by.as_str(), resolved.reason.as_str()), ("ann", "the provider says so"));
    assert!(resolved.at <= entry.begun_at && entry.state == KeyState::Done && entry.token == next.token);
    assert_eq!(keys.list(&ListKeys::default()).await.unwrap(), [entry]);
    assert_eq!(keys.entry(crate::Tenant::new("acme").ok().as_ref(), &begin.key).await.unwrap(), None);
}

pub async fn k8_what_did_nothing_runs_again_at_once(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    for (n, after_failure) in [AfterFailure::Rerun, AfterFailure::Hold].into_iter().enumerate() {
        let begin = Begin { key: super::key(&format!("key-{n}")), ..held(after_failure) };
        let lease = first(&keys, &begin).await;
        keys.release(&lease, Ended::Undone).await.unwrap();
        assert_eq!(word(&keys, &begin).await, "free");
        let Begun::First(next) = again(&keys, &begin).await else { panic!("{after_failure:?}") };
        assert!(next.token > lease.token);
    }
}

pub async fn k8_what_did_nothing_leaves_the_key_to_any_request(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let of = |key: &str, body: &str, rule| Begin { after_failure: rule, ..request(key, body) };
    for rule in [AfterFailure::Rerun, AfterFailure::Hold] {
        let key = format!("{rule:?}");
        let one = of(&key, "an old token", rule);
        let lease = first(&keys, &one).await;
        let early = keys.begin(&of(&key, "a new token", rule)).await.unwrap();
        assert!(matches!(early, Begun::Mismatch { .. }), "it runs, and it is another: {early:?}");
        keys.release(&lease, Ended::Undone).await.unwrap();
        let two = of(&key, "a new token", rule);
        let next = first(&keys, &two).await;
        assert!(next.token > lease.token);
        let late = keys.begin(&one).await.unwrap();
        assert!(matches!(late, Begun::Mismatch { .. }), "now it is the other's: {late:?}");
        keys.release(&next, Ended::Undone).await.unwrap();
        done(&keys, &of(&key, "a third one", rule), "17").await;
        assert!(matches!(again(&keys, &two).await, Begun::Mismatch { .. }), "what was done stays");
    }
    // A run that failed, or that never ended, may have done something: the key is its request's for good, also after a
    // later run of the same request that did nothing.
    let failed = of("failed", "a", AfterFailure::Rerun);
    keys.release(&first(&keys, &failed).await, Ended::Failed).await.unwrap();
    let lapsed = of("lapsed", "a", AfterFailure::Rerun);
    first(&keys, &lapsed).await;
    harness.advance(lapsed.lease * 2).await;
    for key in ["failed", "lapsed"] {
        for _ in 0..2 {
            let other = keys.begin(&request(key, "b")).await.unwrap();
            assert!(matches!(other, Begun::Mismatch { .. }), "{key}: {other:?}");
            keys.release(&first(&keys, &request(key, "a")).await, Ended::Undone).await.unwrap();
        }
    }
}

pub async fn k8_what_failed_follows_its_rule(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let rules = [
        (AfterFailure::Rerun, "free"),
        (AfterFailure::Hold, "outcome-unknown"),
        (AfterFailure::HoldFor(Duration::from_secs(60)), "outcome-unknown"),
    ];
    for (n, (after_failure, state)) in rules.into_iter().enumerate() {
        let begin = Begin { key: super::key(&format!("key-{n}")), ..held(after_failure) };
        let lease = first(&keys, &begin).await;
        keys.release(&lease, Ended::Failed).await.unwrap();
        assert_eq!(word(&keys, &begin).await, state, "{after_failure:?}");
        harness.advance(Duration::from_secs(61)).await;
        let state = if after_failure == AfterFailure::Hold { "outcome-unknown" } else { "free" };
        assert_eq!(word(&keys, &begin).await, state, "{after_failure:?} a minute later");
    }
}

pub async fn k10_looking_changes_nothing(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    assert_eq!(word(&keys, &begin).await, "unknown");
    assert!(keys.list(&ListKeys::default()).await.unwrap().is_empty());
    done(&keys, &begin, "17").await;
    let before = keys.list(&ListKeys::default()).await.unwrap();
    assert_eq!(word(&keys, &begin).await, "done");
    assert_eq!(keys.list(&ListKeys::default()).await.unwrap(), before);
    assert_eq!(
        (before[0].state, before[0].status, before[0].tenant.clone()),
        (KeyState::Done, Some(201), None)
    );
    assert!(before[0].settled_at >= Some(before[0].begun_at));
}

pub async fn k10_keys_are_listed_in_pages(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    for n in 0..5 {
        done(&keys, &request_of(Some("acme"), &format!("key-{n}"), "{}"), "17").await;
        first(&keys, &request_of(Some("umbrella"), &format!("key-{n}"), "{}")).await;
    }
    let mut which = ListKeys { limit: 3, ..ListKeys::default() };
    let mut found = Vec::new();
    loop {
        let page = keys.list(&which).await.unwrap();
        assert!(page.len() <= 3);
        let Some(last) = page.last() else { break };
        which.after = Some((last.tenant.clone(), last.key.clone()));
        found.extend(page);
    }
    let names: Vec<_> = found.iter().map(|entry| (entry.tenant.clone(), entry.key.clone())).collect();
    assert!(names.is_sorted() && names.len() == 10, "{names:?}");
    let acme = ListKeys { tenant: Some(crate::Tenant::new("acme").ok()), ..ListKeys::default() };
    assert_eq!(keys.list(&acme).await.unwrap().len(), 5);
    let open = ListKeys { open_only: true, ..ListKeys::default() };
    assert!(keys.list(&open).await.unwrap().iter().all(|entry| entry.state == KeyState::Running));
}

pub async fn k10_no_tenant_is_a_tenant_of_its_own(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    for tenant in [None, Some("acme"), Some("umbrella")] {
        done(&keys, &request_of(tenant, "key", "{}"), "17").await;
    }
    for tenant in [None, Some("acme")] {
        let tenant = tenant.map(|of| crate::Tenant::new(of).expect("a valid tenant"));
        let of = ListKeys { tenant: Some(tenant.clone()), ..ListKeys::default() };
        let found = keys.list(&of).await.unwrap();
        assert_eq!(found.iter().map(|entry| entry.tenant.clone()).collect::<Vec<_>>(), [tenant]);
    }
    assert_eq!(keys.list(&ListKeys::default()).await.unwrap().len(), 3, "all tenants");
}

pub async fn k10_an_answer_says_whose_it_is(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let secret = *keys.secret();
    let parts = RequestParts { principal: Some("ann"), method: "POST", target: "/", ..Default::default() };
    let begin = Begin::new(None, super::key("key"), RequestFingerprint::of(&secret, &parts));
    done(&keys, &begin, "17").await;
    let KeyStatus::Done(got) = keys.get(None, &begin.key).await.unwrap() else { panic!("it is done") };
    let Begun::Done(replayed) = again(&keys, &begin).await else { panic!("it is done") };
    for kept in [got, replayed] {
        assert!(kept.is_of(&secret, Some("ann")));
        assert!(!kept.is_of(&secret, Some("bob")) && !kept.is_of(&secret, None));
    }
    done(&keys, &super::opaque(&request("other", "{}"), [3; 16]), "18").await;
    let KeyStatus::Done(nobodys) = keys.get(None, &super::key("other")).await.unwrap() else { panic!() };
    assert!(!nobodys.is_of(&secret, None), "it is not known whose it is");
}

pub async fn k11_bad_input_is_refused_with_a_sentence(harness: &impl KeysHarness) {
    let keys = harness.open().await;
    let begin = request("key", "{}");
    let long = Begin { lease: Duration::from_hours(25), ..begin.clone() };
    for begin in [long, Begin { lease: Duration::ZERO, ..begin.clone() }] {
        let error = keys.begin(&begin).await.expect_err("no such lease");
        assert!(error.to_string().contains("1 millisecond to 24 hours"), "{error}");
    }
    let nobody = request_of(Some("00000000-0000-0000-0000-000000000000"), "key", "{}");
    let error = keys.begin(&nobody).await.expect_err("no tenant");
    assert!(error.code() == "invalid" && error.to_string().contains("nil UUID"), "{error}");
    assert_eq!(word(&keys, &begin).await, "unknown", "nothing was changed");
    let lease = first(&keys, &begin).await;
    let mut cookie = answer("x");
    cookie.headers.push(("set-cookie".into(), b"a=1".to_vec()));
    let huge = Answer::new(200, vec![0; crate::keyed::ANSWER_BYTES_MAX + 1]);
    for (bad, says) in [(Answer::new(100, ""), "status"), (cookie, "set-cookie"), (huge, "16777216")] {
        let error = keys.finish(&lease, &bad).await.expect_err("no such answer");
        assert!(error.code() == "invalid" && error.to_string().contains(says), "{error}");
    }
    assert!(keys.extend(&lease, Duration::ZERO).await.is_err());
    assert_eq!(word(&keys, &begin).await, "running", "nothing was changed");
    let brief = crate::keyed::KeySweep::new(Duration::from_hours(23));
    assert!(keys.sweep(&brief).await.is_err_and(|error| error.to_string().contains("at least 1 day")));
}
