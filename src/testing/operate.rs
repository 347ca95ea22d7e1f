//! What an operator does: interventions with audit rows, listing, paging, statistics.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Harness;
use super::kit::{
    LEASE, PAST_LEASE, another, claim, dead, done, entry, expect, first, intervene, intervening, is_fenced,
    latest, lease, metadata, one, open, retry, run, settle, settled, there, v4,
};
use crate::error::Error;
use crate::event::{Origin, Record};
use crate::id::{EventId, Scope, Tenant, Topic};
use crate::ledger::{
    Claim, Claims, ConsumerStore, Filter, HeldQuery, Identity, Intervene, Intervention, Level, Mode,
    Operations, Outcome, State, Verdict,
};

const ALL: [Intervention; 7] = Intervention::ALL;

/// Every intervention draws a token: whoever held the entry is fenced off, and an audit row tells who and why.
pub async fn interventions_fence_and_are_audited(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (n, what) in [Intervention::Release, Intervention::Kill, Intervention::Forget].into_iter().enumerate()
    {
        let mine = claim(what.name(), lease());
        let grant = first(&ledger, &mine).await;
        let done_ = intervene(&ledger, &mine, what).await.unwrap();
        assert_eq!(done_.before.state, State::Leased);
        assert!(is_fenced(settle(&ledger, &mine, &grant, done()).await), "{what:?}");
        assert!(is_fenced(super::kit::extend(&ledger, &mine, &grant, LEASE).await), "{what:?}");
        let audit = ledger.audit(10).await.unwrap();
        assert_eq!(audit.len(), n + 1);
        let row = &audit[0];
        assert_eq!((row.what.as_str(), row.by.as_str(), row.reason.as_str()), (what.name(), "ada", "a test"));
        assert_eq!(row.identity, mine.identity.to_string());
        assert_eq!(row.of.as_ref(), Some(&mine.identity));
        match done_.after {
            Some(after) => {
                assert!(after.token > grant.token);
                assert_eq!(there(&ledger, &mine).await, after);
            }
            None => assert_eq!(entry(&ledger, &mine).await, None),
        }
    }
    let released = first(&ledger, &claim("release", lease())).await;
    assert_eq!(released.attempt, 2, "a released run had started, so it counts");
    expect(&ledger, &claim("kill", lease()), "dead").await;
    assert_eq!(first(&ledger, &claim("forget", lease())).await.attempt, 1);
    assert_eq!(ledger.audit(2).await.unwrap().len(), 2);
}

/// Redrive is for the dead: attempts begin anew. Retry is for what waits. Neither touches anything else.
pub async fn redrive_and_retry_bring_back(harness: &impl Harness) {
    let ledger = open(harness).await;
    let poison = claim("poison", lease());
    let grant = first(&ledger, &poison).await;
    settled(&ledger, &poison, &grant, dead()).await;
    let waiting = claim("waiting", lease());
    let grant = first(&ledger, &waiting).await;
    settled(&ledger, &waiting, &grant, retry(LEASE * 1000)).await;
    assert!(intervene(&ledger, &poison, Intervention::Retry).await.is_err());
    assert!(intervene(&ledger, &waiting, Intervention::Redrive).await.is_err());
    intervene(&ledger, &poison, Intervention::Redrive).await.unwrap();
    intervene(&ledger, &waiting, Intervention::Retry).await.unwrap();
    for mine in [poison, waiting] {
        assert_eq!(there(&ledger, &mine).await.state, State::Retry);
        assert_eq!(run(&ledger, &another(&mine)).await.attempt, 1);
    }
}

/// The names of two tenants' entries may be one text; their audit rows differ.
pub async fn t359_audit_rows_of_two_tenants_are_told_apart(harness: &impl Harness) {
    let ledger = open(harness).await;
    let named = |tenant: Option<&str>, scope: &str| {
        let mut mine = claim("e-1", lease());
        mine.identity.tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        mine.identity.scope = Scope::new(scope).unwrap();
        mine
    };
    let all = [named(Some("acme/eu"), "mail"), named(Some("acme"), "eu/mail"), named(None, "acme/eu/mail")];
    for mine in &all {
        let _ = first(&ledger, mine).await;
        intervene(&ledger, mine, Intervention::Kill).await.unwrap();
        assert_eq!(mine.identity.to_string(), all[0].identity.to_string());
    }
    let audit = ledger.audit(10).await.unwrap();
    let of: Vec<_> = audit.into_iter().rev().filter_map(|row| row.of).collect();
    assert_eq!(of, all.map(|mine| mine.identity));
}

/// The rows of some entries are found behind any number of rows of others, newest first, also when the entries are gone.
/// Those of another tenant's or scope's entry with the same id are not among them.
pub async fn t536_audit_rows_of_an_entry_are_found_behind_those_of_others(harness: &impl Harness) {
    let ledger = open(harness).await;
    let named = |id: &str, tenant: Option<&str>, scope: &str| {
        let mut mine = claim(id, lease());
        mine.identity.tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        mine.identity.scope = Scope::new(scope).unwrap();
        mine
    };
    let mine = named("e-1", Some("acme"), "mail");
    let gone = named("\"e\\2", None, "mail");
    for (one, all) in
        [(&mine, &[Intervention::Kill, Intervention::Redrive][..]), (&gone, &[Intervention::Forget][..])]
    {
        let _ = first(&ledger, one).await;
        for what in all {
            intervene(&ledger, one, *what).await.unwrap();
        }
    }
    let others: Vec<_> = (0..9).map(|n| named(&format!("other-{n}"), None, "mail")).collect();
    for other in others.iter().chain(&[named("e-1", None, "mail"), named("e-1", Some("acme"), "print")]) {
        let _ = first(&ledger, other).await;
        intervene(&ledger, other, Intervention::Kill).await.unwrap();
    }
    let rows = async |of: &[&Claim], limit| {
        let of: Vec<_> = of.iter().map(|one| one.identity.clone()).collect();
        let rows = ledger.audit_of(&of, limit).await.unwrap();
        rows.into_iter().map(|row| (row.of.unwrap().id.to_string(), row.what)).collect::<Vec<_>>()
    };
    let row = |id: &str, what: Intervention| (id.to_owned(), what.name().to_owned());
    let all = [
        row("\"e\\2", Intervention::Forget),
        row("e-1", Intervention::Redrive),
        row("e-1", Intervention::Kill),
    ];
    assert_eq!(rows(&[&mine, &gone], 10).await, all);
    assert_eq!(rows(&[&mine, &gone], 2).await, all[..2]);
    assert_eq!(rows(&[&mine], 10).await, all[1..]);
    assert!(rows(&[], 10).await.is_empty());
    assert_eq!(ledger.audit(20).await.unwrap().len(), 14);
}

/// What an intervention does not fit is a conflict that says so; nothing is changed and nothing is audited.
pub async fn interventions_that_do_not_fit_are_refused(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("done", lease());
    run(&ledger, &mine).await;
    let before = there(&ledger, &mine).await;
    for what in ALL.into_iter().filter(|what| *what != Intervention::Forget) {
        match intervene(&ledger, &mine, what).await {
            Err(Error::Conflict { actual, .. }) => assert!(actual.contains("done"), "{actual}"),
            other => panic!("{what:?}: {other:?}"),
        }
    }
    for what in ALL {
        match intervene(&ledger, &claim("nobody", lease()), what).await {
            Err(Error::NotFound(_)) => {}
            other => panic!("{what:?}: {other:?}"),
        }
    }
    assert_eq!(there(&ledger, &mine).await, before);
    assert!(ledger.audit(10).await.unwrap().is_empty());
}

/// Somebody looks at a dead letter. Another operator redrives it, and it dies again, perhaps of something else. What the
/// first one wanted to do with it is refused.
pub async fn t390_an_intervention_changes_only_what_was_looked_at(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    settled(&ledger, &mine, &grant, dead()).await;
    let looked_at = there(&ledger, &mine).await.token;
    intervene(&ledger, &mine, Intervention::Redrive).await.unwrap();
    let again = another(&mine);
    let grant = first(&ledger, &again).await;
    settled(&ledger, &again, &grant, dead()).await;
    let before = there(&ledger, &mine).await;
    assert_ne!(before.token, looked_at);
    let audited = ledger.audit(10).await.unwrap().len();
    for (what, dry_run) in
        [Intervention::Redrive, Intervention::Drop].map(|what| [(what, true), (what, false)]).concat()
    {
        let late = Intervene { token: Some(looked_at), dry_run, ..intervening(&mine, what) };
        match ledger.intervene(&late).await {
            Err(Error::Conflict { actual, .. }) => assert!(actual.contains("changed since"), "{actual}"),
            other => panic!("{what:?}: {other:?}"),
        }
    }
    assert_eq!(there(&ledger, &mine).await, before);
    assert_eq!(ledger.audit(10).await.unwrap().len(), audited);
    let now = Intervene { token: Some(before.token), ..intervening(&mine, Intervention::Drop) };
    assert_eq!(ledger.intervene(&now).await.unwrap().after.unwrap().state, State::Lost);
}

/// A dry run tells what would be and changes nothing.
pub async fn interventions_dry_run_changes_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    let before = there(&ledger, &mine).await;
    for what in [Intervention::Release, Intervention::Kill, Intervention::Forget] {
        let mut dry = intervening(&mine, what);
        dry.dry_run = true;
        let outcome = ledger.intervene(&dry).await.unwrap();
        assert_eq!(outcome.before, before);
        assert_eq!(outcome.after.is_none(), what == Intervention::Forget);
    }
    assert_eq!(there(&ledger, &mine).await, before);
    assert!(ledger.audit(10).await.unwrap().is_empty());
    settled(&ledger, &mine, &grant, done()).await;
}

/// The listing has every entry once, whatever the page size, and an end.
pub async fn listing_pages_through_everything_once(harness: &impl Harness) {
    let ledger = open(harness).await;
    let now = ledger.now().await.unwrap();
    let mut claims = Vec::new();
    for n in 0..30u8 {
        let scope = Scope::new(format!("scope-{}", n % 3)).unwrap();
        let id = match n % 4 {
            0 => v4(),
            1 => super::kit::v7_at(now, n),
            2 => super::kit::v7_at(now.minus(Duration::from_hours(336)), n),
            _ => EventId::new(format!("text {n} \u{1f980}")).unwrap(),
        };
        let tenant = (n % 5 == 0).then(|| Tenant::new("acme").unwrap());
        claims.push(Claim::new(Identity { tenant, scope, id }, Mode::Done));
    }
    assert!(ledger.claim(&claims).await.unwrap().into_iter().all(|outcome| outcome.unwrap().is_claimed()));
    for limit in [1, 7, 30, 100] {
        let mut seen = Vec::new();
        let mut cursor = None;
        loop {
            let page = ledger.list(&Filter::default(), cursor.as_ref(), limit).await.unwrap();
            assert!(page.entries.len() <= limit);
            seen.extend(page.entries.into_iter().map(|entry| entry.identity));
            // A cursor survives being printed and read.
            cursor = page.next.map(|next| next.to_string().parse().unwrap());
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(seen.len(), 30, "limit {limit}");
        let mut wanted: Vec<_> = claims.iter().map(|claim| claim.identity.clone()).collect();
        wanted.sort();
        seen.sort();
        assert_eq!(seen, wanted);
    }
    assert!("nonsense".parse::<crate::ledger::Cursor>().is_err());
}

/// Filters by state, scope, tenant, id, time and metadata, and all of them together.
pub async fn listing_filters(harness: &impl Harness) {
    let ledger = open(harness).await;
    let start = ledger.now().await.unwrap();
    let mut tagged = claim("tagged", lease());
    tagged.metadata = Some(metadata(r#"{"region":"eu","n":7,"flag":true,"nothing":null}"#));
    run(&ledger, &tagged).await;
    let poison = claim("poison", lease());
    let grant = first(&ledger, &poison).await;
    settled(&ledger, &poison, &grant, dead()).await;
    harness.advance(LEASE).await;
    let later = ledger.now().await.unwrap();
    let mut tenant = claim("tagged", lease());
    tenant.identity.tenant = Some(Tenant::new("acme").unwrap());
    tenant.identity.scope = Scope::new("other").unwrap();
    first(&ledger, &tenant).await;
    let count = async |filter: Filter| ledger.list(&filter, None, 100).await.unwrap().entries.len();
    let by = Filter::default;
    assert_eq!(count(by()).await, 3);
    assert_eq!(count(Filter { states: vec![State::Dead], ..by() }).await, 1);
    assert_eq!(count(Filter { states: vec![State::Dead, State::Leased], ..by() }).await, 2);
    assert_eq!(count(Filter { scope: Some(Scope::new("other").unwrap()), ..by() }).await, 1);
    let tenant = |name: &str| Some(Some(Tenant::new(name).unwrap()));
    assert_eq!(count(Filter { tenant: tenant("acme"), ..by() }).await, 1);
    assert_eq!(count(Filter { tenant: tenant("nobody"), ..by() }).await, 0);
    assert_eq!(count(Filter { tenant: Some(None), ..by() }).await, 2, "the default tenant is one of its own");
    let scopes = |names: &[&str]| Some(names.iter().map(|name| Scope::new(name).unwrap()).collect());
    assert_eq!(count(Filter { scopes: scopes(&["other"]), ..by() }).await, 1);
    assert_eq!(count(Filter { scopes: scopes(&["other", "nobody"]), tenant: Some(None), ..by() }).await, 0);
    assert_eq!(count(Filter { scopes: scopes(&[]), ..by() }).await, 0, "no scopes are not all scopes");
    assert_eq!(count(Filter { id: Some(tagged.identity.id.clone()), ..by() }).await, 2);
    assert_eq!(count(Filter { since: Some(later), ..by() }).await, 1);
    assert_eq!(count(Filter { until: Some(later), ..by() }).await, 2);
    assert_eq!(count(Filter { until: Some(start), ..by() }).await, 0);
    let metadata = |key: &str, value: &str| Some((key.to_owned(), value.to_owned()));
    for (key, value, found) in [
        ("region", "eu", 1),
        ("n", "7", 1),
        ("flag", "true", 1),
        ("region", "us", 0),
        ("x", "eu", 0),
        ("nothing", "null", 0),
    ] {
        assert_eq!(count(Filter { metadata: metadata(key, value), ..by() }).await, found, "{key}={value}");
    }
    let both = Filter { states: vec![State::Dead], metadata: metadata("region", "eu"), ..by() };
    assert_eq!(count(both).await, 0);
}

/// Entries with large bodies make short pages, and every entry is on one.
pub async fn listing_pages_are_bounded_by_bytes(harness: &impl Harness) {
    let ledger = open(harness).await;
    let large = bytes::Bytes::from(vec![b'x'; 9 << 20]);
    for id in ["a", "b", "c"] {
        let claim = claim(id, lease());
        let grant = first(&ledger, &claim).await;
        let body = Some(crate::event::Record { payload: Some(large.clone()), ..Default::default() });
        settled(&ledger, &claim, &grant, Verdict::Dead { reason: "large".into(), body }).await;
    }
    for states in [vec![State::Dead], vec![]] {
        let filter = Filter { states, ..Filter::default() };
        let (mut pages, mut ids, mut after) = (Vec::new(), Vec::new(), None);
        loop {
            let page = ledger.list(&filter, after.as_ref(), 100).await.unwrap();
            pages.push(page.entries.len());
            ids.extend(page.entries.iter().map(|entry| entry.identity.id.to_string()));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        // The entry that reaches 16 MiB completes a page.
        assert_eq!((pages, ids), (vec![2, 1], vec!["a".to_owned(), "b".to_owned(), "c".to_owned()]));
    }
}

/// One tenant's page ends where its own entries end, whatever others have in between.
pub async fn a_cursor_is_made_from_what_the_filter_matches(harness: &impl Harness) {
    let ledger = open(harness).await;
    let of = |tenant: Option<&str>, scope: &str, id: &str| {
        let mut claim = claim(id, Mode::Done);
        claim.identity.tenant = tenant.map(|name| Tenant::new(name).unwrap());
        claim.identity.scope = Scope::new(scope).unwrap();
        claim
    };
    let claims = [
        of(None, "mine", "b-mine"),
        of(None, "mine", "d-mine"),
        of(None, "theirs", "a-other-scope"),
        of(Some("acme"), "mine", "c-acme"),
        of(Some("acme"), "mine", "e-acme"),
    ];
    for claim in &claims {
        first(&ledger, claim).await;
    }
    let scopes = Some([Scope::new("mine").unwrap()].into());
    for (tenant, wanted) in
        [(None, ["b-mine", "d-mine"]), (Some(Tenant::new("acme").unwrap()), ["c-acme", "e-acme"])]
    {
        let filter = Filter { tenant: Some(tenant), scopes: Clone::clone(&scopes), ..Filter::default() };
        let page = ledger.list(&filter, None, 1).await.unwrap();
        assert_eq!(page.entries[0].identity.id.as_str(), wanted[0]);
        let cursor = page.next.expect("there is one more").to_string();
        let key = crate::ledger::CursorParts::decode(&cursor).unwrap().key;
        assert_eq!(key, wanted[0].as_bytes(), "it is another's");
        let page = ledger.list(&filter, Some(&cursor.parse().unwrap()), 1).await.unwrap();
        assert_eq!((page.entries[0].identity.id.to_string(), page.next), (wanted[1].to_owned(), None));
    }
}

/// Statistics count by tenant, scope and state, and reading writes nothing.
pub async fn statistics_count_what_there_is(harness: &impl Harness) {
    let ledger = open(harness).await;
    let empty = ledger.stat().await.unwrap();
    assert!(empty.counts.is_empty() && empty.dropped.is_empty() && empty.held == 0);
    assert_eq!(entry(&ledger, &claim("e", lease())).await, None);
    for id in ["a", "b"] {
        run(&ledger, &claim(id, lease())).await;
    }
    let held = claim("held", lease());
    first(&ledger, &held).await;
    let mut tenant = claim("a", lease());
    tenant.identity.tenant = Some(Tenant::new("acme").unwrap());
    run(&ledger, &tenant).await;
    let mut counts = ledger.stat().await.unwrap().counts;
    counts.sort();
    let scope = held.identity.scope.clone();
    let mut wanted = vec![
        (None, scope.clone(), State::Leased, 1),
        (None, scope.clone(), State::Done, 2),
        (tenant.identity.tenant, scope, State::Done, 1),
    ];
    wanted.sort();
    assert_eq!(counts, wanted);
    assert!(ledger.check().await.unwrap().iter().all(|finding| finding.level != Level::Refusal));
}

/// Every scope is known by its name, once, whatever tenants it has and whether it has entries still.
pub async fn scopes_are_listed_also_without_entries(harness: &impl Harness) {
    let ledger = open(harness).await;
    assert!(ledger.scopes().await.unwrap().is_empty());
    let mut other = claim("a", lease());
    other.identity.scope = Scope::new("projection_worker:cache:here").unwrap();
    let mut tenant = claim("a", lease());
    tenant.identity.tenant = Some(Tenant::new("acme").unwrap());
    let all = [claim("a", lease()), other.clone(), tenant.clone()];
    for claim in &all {
        run(&ledger, claim).await;
    }
    let wanted = BTreeSet::from([tenant.identity.scope, other.identity.scope]);
    assert_eq!(ledger.scopes().await.unwrap(), wanted);
    for claim in &all {
        intervene(&ledger, claim, Intervention::Forget).await.unwrap();
    }
    assert_eq!(ledger.stat().await.unwrap().counts, [], "nothing is left of them");
    assert_eq!(ledger.scopes().await.unwrap(), wanted);
}

/// A kill on what is open keeps it out; a killed one is redriven like any dead one.
pub async fn kill_then_redrive(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mine = claim("e", lease());
    let grant = first(&ledger, &mine).await;
    settled(&ledger, &mine, &grant, retry(LEASE)).await;
    intervene(&ledger, &mine, Intervention::Kill).await.unwrap();
    harness.advance(PAST_LEASE).await;
    match one(&ledger, &another(&mine)).await {
        Outcome::Dead { .. } => {}
        outcome => panic!("{outcome:?}"),
    }
    assert_eq!(there(&ledger, &mine).await.reason.as_deref(), Some("a test"));
    intervene(&ledger, &mine, Intervention::Redrive).await.unwrap();
    run(&ledger, &another(&mine)).await;
}

/// Killed while leased or in a near retry, its bytes are with whoever delivered it. The next delivery brings them; then a
/// redrive is due with its bytes, and runs. So for one that is lost.
pub async fn t69_what_was_killed_takes_its_bytes_from_the_next_delivery(harness: &impl Harness) {
    let ledger = open(harness).await;
    let query = HeldQuery::all();
    for (n, state) in ["leased", "retry", "lost"].into_iter().enumerate() {
        let (mode, what) = match state {
            "lost" => (Mode::Once { track: None }, Intervention::Retry),
            _ => (lease(), Intervention::Redrive),
        };
        let origin = Some(Origin::new(Topic::new("orders").unwrap(), 0, 7));
        let mine = Claim { origin, ..claim(&format!("e{n}"), mode) };
        let grant = first(&ledger, &mine).await;
        match state {
            "retry" => drop(settled(&ledger, &mine, &grant, retry(LEASE)).await),
            "lost" => drop(settled(&ledger, &mine, &grant, Verdict::Lost { reason: "gone".into() }).await),
            _ => {}
        }
        if state != "lost" {
            intervene(&ledger, &mine, Intervention::Kill).await.unwrap();
        }
        let mut rehearsal = intervening(&mine, what);
        rehearsal.dry_run = true;
        assert!(ledger.intervene(&rehearsal).await.unwrap().needs_delivery(), "{state}: there are no bytes");
        let mut before = there(&ledger, &mine).await;
        let body = Record { payload: Some(format!("payload {n}").into()), ..Record::default() };
        let delivery = Claim { mode: lease(), body: Some(body.clone()), ..another(&mine) };
        expect(&ledger, &delivery, if state == "lost" { "duplicate" } else { "dead" }).await;
        let after = there(&ledger, &mine).await;
        before.row.body = Some(body.clone());
        assert_eq!(after, before, "{state}: nothing but the bytes is new");
        let later = Claim { body: Some(Record::default()), ..another(&delivery) };
        expect(&ledger, &later, if state == "lost" { "duplicate" } else { "dead" }).await;
        assert_eq!(there(&ledger, &mine).await, after, "{state}: it keeps the first ones");
        let unpublished = ledger.unpublished_dead(&mine.identity.scope, &query, 10, None).await.unwrap();
        assert_eq!(unpublished.len(), usize::from(state != "lost"), "{state}: a dead letter goes out");
        assert!(!intervene(&ledger, &mine, what).await.unwrap().needs_delivery());
        let due = ledger.due(&mine.identity.scope, &query, 10).await.unwrap().entries;
        assert_eq!(due.len(), 1, "{state}: it runs by itself");
        assert_eq!(due[0].body.as_ref(), Some(&body));
        run(&ledger, &another(&delivery)).await;
    }
}

/// Claimed without a topic, as a caller of the API does: no consumer is known to take it up, though its bytes are
/// held. So for a retry of one that is lost.
pub async fn t341_a_redrive_says_that_nobody_takes_the_event_up(harness: &impl Harness) {
    let ledger = open(harness).await;
    let body = Some(Record { payload: Some("payload".into()), ..Record::default() });
    for (n, origin) in [None, Some(Origin::new(Topic::new("orders").unwrap(), 0, 7))].into_iter().enumerate()
    {
        let mine = Claim { origin: origin.clone(), body: body.clone(), ..claim(&format!("e{n}"), lease()) };
        let grant = first(&ledger, &mine).await;
        settled(&ledger, &mine, &grant, dead()).await;
        expect(&ledger, &another(&mine), "dead").await;
        assert_eq!(there(&ledger, &mine).await.body, body, "it has its bytes");
        let redriven = intervene(&ledger, &mine, Intervention::Redrive).await.unwrap();
        assert_eq!(redriven.needs_delivery(), origin.is_none(), "{origin:?}");
        run(&ledger, &another(&mine)).await;
    }
}

/// Its aggregate does not wait behind it for ever.
pub async fn t69_an_aggregate_goes_on_behind_what_was_killed(harness: &impl Harness) {
    let ledger = open(harness).await;
    let (one, two) = (latest(1), latest(2));
    first(&ledger, &one).await;
    intervene(&ledger, &one, Intervention::Kill).await.unwrap();
    let with = |claim: &Claim| Claim { body: Some(Record::default()), ..another(claim) };
    expect(&ledger, &with(&two), "parked").await;
    expect(&ledger, &with(&one), "dead").await;
    intervene(&ledger, &one, Intervention::Redrive).await.unwrap();
    for mine in [one, two] {
        let due = ledger.due(&mine.identity.scope, &HeldQuery::all(), 10).await.unwrap().entries;
        assert_eq!(due.len(), 1, "the lowest runs by itself");
        assert_eq!(due[0].identity, mine.identity);
        run(&ledger, &another(&mine)).await;
    }
}

/// Whoever has the ledger open sees the same epoch, and nothing that is done in it changes that.
pub async fn c11_the_epoch_is_shared_and_stays(harness: &impl Harness) {
    let ledger = open(harness).await;
    let before = ledger.epoch().await.unwrap();
    run(&ledger, &claim("e", lease())).await;
    harness.advance(LEASE).await;
    assert_eq!(ledger.epoch().await.unwrap(), before);
    assert_eq!(open(harness).await.epoch().await.unwrap(), before);
}
