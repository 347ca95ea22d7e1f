//! Clause 9 and what an identity is: fingerprints, tenants, scopes, times, texts.

use std::time::Duration;

use super::Harness;
use super::kit::{
    DAY, another, assert_invalid, claim, entry, expect, fingerprint, first, lease, metadata, named, one,
    open, run, settled, there, try_one, v7_at,
};
use crate::clock::Time;
use crate::event::Origin;
use crate::id::{EventId, Owner, Scope, Tenant, Topic};
use crate::ledger::{
    Claim, Claims, Identity, IdentityRule, MismatchRule, Mode, Operations, Outcome, Settings, State, Verdict,
    Week,
};

/// The nonce makes it the same claim; other content makes it another one, whoever sends it.
pub async fn c9_a_nonce_does_not_hide_other_content(harness: &impl Harness) {
    let ledger = open(harness).await;
    for (id, mode) in [("leased", lease()), ("once", Mode::Once { track: None }), ("done", Mode::Done)] {
        let mut original = claim(id, mode);
        original.fingerprint = Some(fingerprint(1));
        let grant = first(&ledger, &original).await;
        let before = there(&ledger, &original).await;
        let reused = Claim { fingerprint: Some(fingerprint(2)), ..original.clone() };
        match one(&ledger, &reused).await {
            Outcome::Mismatch(prior) => assert_eq!(prior.state, before.state),
            other => panic!("{other:?}"),
        }
        assert_eq!(there(&ledger, &original).await, before, "nothing was changed");
        assert_eq!(first(&ledger, &original).await.token, grant.token, "the same claim again");
    }
}

/// The same id for something else is a mismatch in every state, and the original stands.
pub async fn c9_other_fingerprint_is_a_mismatch(harness: &impl Harness) {
    let ledger = open(harness).await;
    let mut original = claim("e", lease());
    original.fingerprint = Some(fingerprint(1));
    let grant = first(&ledger, &original).await;
    let mut reused = another(&original);
    reused.fingerprint = Some(fingerprint(2));
    match named(&ledger, &reused, "mismatch").await {
        Outcome::Mismatch(prior) => assert_eq!(prior.state, State::Leased),
        outcome => panic!("{outcome:?}"),
    }
    settled(&ledger, &original, &grant, super::kit::done()).await;
    expect(&ledger, &reused, "mismatch").await;
    assert_eq!(there(&ledger, &original).await.fingerprint, Some(fingerprint(1)));
    assert!(!one(&ledger, &reused).await.may_acknowledge());
    expect(&ledger, &another(&original), "duplicate").await;
    let mut unknown = another(&original);
    unknown.fingerprint = None;
    expect(&ledger, &unknown, "duplicate").await;
}

/// With the rule `warn` the original stands and the delivery is answered as one of it.
pub async fn c9_warned_mismatch_is_answered_as_the_original(harness: &impl Harness) {
    let settings = Settings { mismatch: MismatchRule::Warn, ..Settings::default() };
    let ledger = harness.open(settings).await;
    let mut original = claim("e", lease());
    original.fingerprint = Some(fingerprint(1));
    run(&ledger, &original).await;
    let mut reused = another(&original);
    reused.fingerprint = Some(fingerprint(2));
    expect(&ledger, &reused, "duplicate").await;
    assert_eq!(there(&ledger, &original).await.fingerprint, Some(fingerprint(1)));
}

/// The same event with another time, or none, is just a duplicate.
pub async fn c9_other_time_is_a_duplicate(harness: &impl Harness) {
    let ledger = open(harness).await;
    let now = ledger.now().await.unwrap();
    for id in [EventId::new("text").unwrap(), v7_at(now, 1)] {
        let mut original = claim("x", lease());
        original.identity.id = id;
        original.fingerprint = Some(fingerprint(1));
        original.time = Some(now);
        run(&ledger, &original).await;
        for time in [None, Some(now.minus(DAY * 30)), Some(now.plus(DAY * 30)), Some(Time::from_micros(0))] {
            expect(&ledger, &Claim { time, ..another(&original) }, "duplicate").await;
        }
    }
}

/// Two times on either side of Monday 00:00 are one identity: the week follows from the id.
pub async fn t10_one_id_with_two_times_is_claimed_once(harness: &impl Harness) {
    let ledger = open(harness).await;
    let monday = Week::of(ledger.now().await.unwrap()).start();
    let (sunday, after) = (monday.minus(Duration::from_mins(30)), monday.plus(Duration::from_mins(30)));
    for id in [EventId::new("text").unwrap(), super::kit::v4(), v7_at(sunday, 1), v7_at(after, 2)] {
        let mut mine = claim("x", lease());
        mine.identity.id = id;
        mine.time = Some(sunday);
        let grant = first(&ledger, &mine).await;
        for time in [Some(after), Some(sunday), None] {
            expect(&ledger, &Claim { time, ..another(&mine) }, "busy").await;
        }
        settled(&ledger, &mine, &grant, super::kit::done()).await;
        expect(&ledger, &Claim { time: Some(after), ..another(&mine) }, "duplicate").await;
    }
}

/// Whoever asks for `id_and_time` gets just that: the week of the time is part of the identity.
pub async fn id_and_time_makes_two_weeks_two_identities(harness: &impl Harness) {
    let settings = Settings { identity: IdentityRule::IdAndTime, ..Settings::default() };
    let ledger = harness.open(settings).await;
    let monday = Week::of(ledger.now().await.unwrap()).start();
    let mut mine = claim("e", lease());
    mine.time = Some(monday.minus(Duration::from_mins(30))); // Sunday 23:30Z
    let sunday = run(&ledger, &mine).await;
    assert_eq!(sunday.week, Week::of(monday.minus(DAY)));
    mine.time = Some(monday.plus(Duration::from_mins(30))); // Monday 00:30Z
    let monday_ = run(&ledger, &another(&mine)).await;
    assert_eq!(monday_.week, Week::of(monday));
    mine.time = Some(monday.plus(DAY));
    expect(&ledger, &another(&mine), "duplicate").await;
    assert_eq!(there(&ledger, &mine).await.week, Week::of(monday));
    mine.time = None;
    assert_invalid(try_one(&ledger, &mine).await, "time");
    assert_invalid(ledger.get(&mine.identity, None).await, "time");
}

/// Sunday 23:30Z and Monday 00:30Z are two weeks, whatever the time zone of process and server.
pub async fn weeks_begin_on_monday_in_utc(harness: &impl Harness) {
    let ledger = open(harness).await;
    let monday = Week::of(ledger.now().await.unwrap()).start();
    let half_hour = Duration::from_mins(30);
    let mut weeks = Vec::new();
    for (n, time) in [(1, monday.minus(half_hour)), (2, monday.plus(half_hour))] {
        let mut mine = claim("x", lease());
        mine.identity.id = v7_at(time, n);
        weeks.push(run(&ledger, &mine).await.week);
        assert_eq!(there(&ledger, &mine).await.week, *weeks.last().unwrap());
    }
    assert_eq!(weeks, [Week::of(monday.minus(DAY)), Week::of(monday)]);
    assert_eq!(weeks[0].start().plus(DAY * 7), weeks[1].start());
    let stat = ledger.stat().await.unwrap();
    assert!(stat.weeks.iter().filter(|week| weeks.contains(week)).count() == 2);
    // Each has the one entry, and is as large as it is.
    let sized: Vec<_> = stat.week_sizes.iter().map(|size| size.week).collect();
    assert_eq!(sized, stat.weeks);
    for size in stat.week_sizes.iter().filter(|size| weeks.contains(&size.week)) {
        assert!(size.entries >= 1 && size.bytes != Some(0), "{size:?}");
    }
}

/// Two tenants with equal scopes and ids never meet; no tenant is a tenant of its own.
pub async fn two_tenants_never_meet(harness: &impl Harness) {
    let ledger = open(harness).await;
    let tenants = [None, Some("acme"), Some("ACME"), Some("acme ")];
    let claims = tenants.map(|tenant| {
        let mut mine = super::kit::latest(7);
        mine.identity.tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        mine
    });
    for mine in &claims {
        let grant = first(&ledger, mine).await;
        settled(&ledger, mine, &grant, super::kit::done()).await;
    }
    for mine in &claims {
        assert_eq!(there(&ledger, mine).await.identity, mine.identity);
        expect(&ledger, &another(mine), "duplicate").await;
    }
    assert_eq!(ledger.stat().await.unwrap().counts.len(), tenants.len());
}

/// A scope remembers what it did under its own name only.
pub async fn t14_a_scope_remembers_only_under_its_own_name(harness: &impl Harness) {
    let ledger = open(harness).await;
    for scope in ["mailer", "Mailer", "mailer-pod-1", "mailer "] {
        let identity = Identity::new(Scope::new(scope).unwrap(), EventId::new("e").unwrap());
        let mine = Claim::new(identity, lease());
        run(&ledger, &mine).await;
        expect(&ledger, &another(&mine), "duplicate").await;
    }
}

/// Scopes are apart, and what is too long never reaches the storage.
pub async fn t17_scopes_are_apart_and_long_ids_are_refused_before_sql(harness: &impl Harness) {
    let ledger = open(harness).await;
    let long = "ü".repeat(255);
    let mine = Claim::new(Identity::new(Scope::new(&long).unwrap(), EventId::new(&long).unwrap()), lease());
    run(&ledger, &mine).await;
    expect(&ledger, &another(&mine), "duplicate").await;
    run(&ledger, &claim(&long, lease())).await;
    for bad in ["", " ", "\u{a0}\t", "a\0b", &"x".repeat(256), &"ü".repeat(256)] {
        assert_invalid(EventId::new(bad), "event id");
        assert_invalid(Scope::new(bad), "scope");
        assert_invalid(Tenant::new(bad), "tenant");
    }
}

/// Ids are equal if their bytes are: no folding, no trimming, no normal forms, and a UUID is not its upper case.
pub async fn ids_are_compared_as_bytes(harness: &impl Harness) {
    let ledger = open(harness).await;
    let uuid = "0190d3a0-5b7e-4c3a-9f51-2f6f1f3b7c10";
    let upper = uuid.to_uppercase();
    let ids = [
        "e",
        "E",
        " e",
        "e ",
        "é",
        "e\u{301}",
        "ﬁ",
        "fi",
        "🦀",
        "a'b",
        "a\"b",
        "a\\b",
        "a%b",
        "a\nb",
        "\u{202e}abc",
        "0123456789abcdef",
        "0123456789abcde",
        uuid,
        &upper,
        "null",
        "-1",
        "\u{1}",
    ];
    for id in ids {
        run(&ledger, &claim(id, lease())).await;
    }
    for id in ids {
        expect(&ledger, &claim(id, lease()), "duplicate").await;
        assert_eq!(there(&ledger, &claim(id, lease())).await.identity.id.as_str(), id);
    }
}

/// What a claim brings is what the entry shows.
pub async fn entries_keep_what_they_were_given(harness: &impl Harness) {
    let settings = Settings { owner: Some(Owner::new("wörker \"1\"").unwrap()), ..Settings::default() };
    let ledger = harness.open(settings.clone()).await;
    let now = ledger.now().await.unwrap();
    let mut mine = super::kit::latest(9);
    mine.identity.tenant = Some(Tenant::new("acme").unwrap());
    mine.fingerprint = Some(fingerprint(9));
    mine.origin = Some(Origin::new(Topic::new("orders").unwrap(), 3, i64::MAX));
    mine.metadata = Some(metadata(r#"{"a":"ü\"b","n":1.5,"deep":{"x":[null,true]}}"#));
    let grant = first(&ledger, &mine).await;
    super::kit::assert_near(harness, there(&ledger, &mine).await.first_at, now);
    let verdict = Verdict::Done { metadata: None };
    settled(&ledger, &mine, &grant, verdict).await;
    let entry = there(&ledger, &mine).await;
    assert_eq!(entry.identity, mine.identity);
    assert_eq!((entry.state, entry.token, entry.attempts), (State::Done, grant.token, 1));
    assert_eq!((entry.fingerprint, entry.owner.clone()), (mine.fingerprint, settings.owner));
    assert_eq!(entry.origin, mine.origin);
    assert_eq!(
        entry.row.order.map(|(aggregate, seq)| (aggregate.as_str().to_owned(), seq)),
        Some(("order-17".into(), 9))
    );
    let parse = |json: &str| serde_json::from_str::<serde_json::Value>(json).unwrap();
    assert_eq!(parse(entry.row.metadata.unwrap().as_str()), parse(mine.metadata.unwrap().as_str()));
}

/// Metadata is kept within its limit, replaced by the settling, refused beyond it; nothing is changed then.
pub async fn metadata_has_a_limit(harness: &impl Harness) {
    let settings = Settings { metadata_bytes_max: 64, ..Settings::default() };
    let ledger = harness.open(settings).await;
    let mut mine = claim("e", lease());
    let fits = format!("{{\"a\":\"{}\"}}", "x".repeat(64 - 8));
    mine.metadata = Some(metadata(&fits));
    let grant = first(&ledger, &mine).await;
    let mut big = claim("big", lease());
    big.metadata = Some(metadata(&format!("{{\"a\":\"{}\"}}", "x".repeat(64 - 7))));
    assert_invalid(try_one(&ledger, &big).await, "64");
    assert_eq!(entry(&ledger, &big).await, None);
    let replaced = metadata(r#"{"result":"ok"}"#);
    settled(&ledger, &mine, &grant, Verdict::Done { metadata: Some(replaced) }).await;
    let stored = there(&ledger, &mine).await.row.metadata.unwrap();
    let stored: serde_json::Value = serde_json::from_str(stored.as_str()).unwrap();
    assert_eq!(stored, serde_json::json!({"result": "ok"}));
    assert_invalid(crate::ledger::Metadata::new("{\"a\":\"\\u0000\"}"), "NUL");
    assert_invalid(crate::ledger::Metadata::new("{\"a\":"), "JSON");
}

/// An id of the year 2090 is refused and changes nothing, not even the list of scopes or weeks.
pub async fn far_future_ids_are_invalid_and_change_nothing(harness: &impl Harness) {
    let ledger = open(harness).await;
    first(&ledger, &claim("e", Mode::Done)).await;
    let before = ledger.stat().await.unwrap();
    let mut mine = claim("x", lease());
    mine.identity.scope = Scope::new("never seen").unwrap();
    mine.identity.id = v7_at(Time::parse("2090-06-01T00:00:00Z").unwrap(), 1);
    assert_invalid(try_one(&ledger, &mine).await, "2090-05-29");
    let after = ledger.stat().await.unwrap();
    assert_eq!((after.counts, after.weeks), (before.counts, before.weeks));
    assert_eq!(entry(&ledger, &mine).await, None);
}

/// Late and somewhat early weeks are made when they are needed.
pub async fn t11_late_and_future_weeks_are_made_on_demand(harness: &impl Harness) {
    let ledger = open(harness).await;
    let now = ledger.now().await.unwrap();
    let times = [now.minus(DAY * 700), now.minus(DAY * 7), now, now.plus(DAY * 20)];
    for (n, time) in (1..).zip(times) {
        let mut mine = claim("x", lease());
        mine.identity.id = v7_at(time, n);
        assert_eq!(run(&ledger, &mine).await.week, Week::of(time));
        expect(&ledger, &another(&mine), "duplicate").await;
    }
    let mut beyond = claim("x", lease());
    beyond.identity.id = v7_at(now.plus(DAY * 60), 9);
    assert_invalid(try_one(&ledger, &beyond).await, "more than 28 days");
    for (n, year) in [(1, "1999-06-01T00:00:00Z"), (2, "2150-01-01T00:00:00Z")] {
        let mut mine = claim("x", lease());
        mine.identity.id = v7_at(Time::parse(year).unwrap(), n);
        assert!(run(&ledger, &mine).await.week.is_timeless(), "{year}");
        expect(&ledger, &another(&mine), "duplicate").await;
    }
}

/// A flood of ids of all ages makes a limited number of weeks; beyond it they are invalid, and the rest goes on.
pub async fn weeks_are_capped(harness: &impl Harness) {
    let settings = Settings { weeks_max: 12, ..Settings::default() };
    let ledger = harness.open(settings).await;
    let now = ledger.now().await.unwrap();
    let mut claims: Vec<Claim> = (0..20u8)
        .map(|n| {
            let mut mine = claim("x", lease());
            mine.identity.id = v7_at(now.minus(DAY * 7 * u32::from(n)), n);
            mine
        })
        .collect();
    claims.push(claim("timeless", lease()));
    let outcomes = ledger.claim(&claims).await.unwrap();
    let invalid = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    assert!((6..=17).contains(&invalid), "{invalid} of 20 are invalid");
    assert!(outcomes[0].is_ok() && outcomes[20].is_ok(), "{outcomes:?}");
    assert!(ledger.stat().await.unwrap().weeks.len() <= 15);
    let refused = claims.iter().zip(&outcomes).find(|(_, outcome)| outcome.is_err()).unwrap().0;
    assert_invalid(try_one(&ledger, refused).await, "12 weeks");
    assert_eq!(entry(&ledger, refused).await, None);
    // Whatever odd weeks there are, those that time itself brings are made.
    for (n, time) in [(30, now.minus(DAY * 7)), (31, now.plus(DAY * 7)), (32, now.plus(DAY * 14))] {
        let mut mine = claim("x", lease());
        mine.identity.id = v7_at(time, n);
        assert_eq!(run(&ledger, &mine).await.week, Week::of(time));
    }
}
