//! Tokens: what is granted, for how long, and to whom.

#![allow(missing_docs, reason = "the name of a case says what it shows")]

use std::time::Duration;

use super::{AccessHarness, all_rows, by, created, granted, said, writer};
use crate::access::{
    Access, ApiToken, Authentication, ListTokens, NewToken, Role, Rotation, Scopes, TokenEntry, TokenId,
    TokenState,
};
use crate::clock::Time;
use crate::error::Error;
use crate::id::{Scope, Tenant};

const HOUR: Duration = Duration::from_hours(1);

fn scopes(names: &[&str]) -> Scopes {
    Scopes::of(names.iter().map(|name| Scope::new(name).expect("a valid scope")))
}

pub async fn a1_creating_again_changes_nothing(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let token = ApiToken::generate();
    let tenant = Some(Tenant::new("acme's \"tenant\" é").expect("a valid tenant"));
    let about = NewToken::new("shop é", Role::Write)
        .tenant(tenant.clone())
        .scopes(scopes(&["mailer", "a\"b"]))
        .expires_in(Some(HOUR));
    let first = store.create(&token, &about, &by()).await.expect("a token is created");
    assert_eq!((first.id.clone(), first.state, first.rotations), (token.id().clone(), TokenState::Live, 0));
    assert_eq!(first.expires_at, Some(first.created_at.plus(HOUR)));
    harness.advance(Duration::from_secs(60)).await;
    // As after a lost answer, even with other words.
    let other = NewToken::new("other", Role::Admin);
    for store in [store, harness.open().await] {
        let again = store.create(&token, &other, &by()).await.expect("it is there");
        assert_eq!(TokenEntry { last_used_at: None, ..again }, first);
        let grant = granted(&store, &token).await;
        assert_eq!(
            (grant.role, grant.tenant, grant.name),
            (Role::Write, tenant.clone(), "shop é".to_owned())
        );
        assert_eq!(grant.scopes, scopes(&["mailer", "a\"b"]));
    }
}

pub async fn a1_an_id_with_another_secret_is_a_conflict(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let token = writer(&store).await;
    let other = ApiToken::with_secret(token.id().clone());
    let refused = store.create(&other, &NewToken::new("other", Role::Admin), &by()).await;
    assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
    assert_eq!(said(&store, &other).await, Authentication::Unknown);
    assert_eq!(granted(&store, &token).await.role, Role::Write);
}

pub async fn a1_of_many_creations_at_once_one_is_made(harness: &impl AccessHarness) {
    let token = ApiToken::generate();
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..8 {
        let (store, token) = (harness.open().await, token.clone());
        tasks.spawn(async move {
            let about = NewToken::new(format!("name {n}"), Role::Read);
            store.create(&token, &about, &by()).await.expect("one of them made it").name
        });
    }
    let names = tasks.join_all().await;
    assert!(names.iter().all(|name| *name == names[0]), "{names:?}");
    assert_eq!(all_rows(&harness.open().await).await.len(), 1);
}

pub async fn a2_only_the_whole_secret_is_granted(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let token = writer(&store).await;
    let text = token.expose();
    assert_eq!(granted(&store, &token).await.principal(), Some(token.id().as_str()));
    assert_eq!(said(&store, &ApiToken::with_secret(token.id().clone())).await, Authentication::Unknown);
    assert_eq!(said(&store, &ApiToken::generate()).await, Authentication::Unknown);
    let mut typo = text.to_owned();
    typo.replace_range(30..31, if &text[30..31] == "0" { "1" } else { "0" });
    let (upper, spaced, id) = (text.to_uppercase(), format!(" {text}"), token.id().to_string());
    let long = format!("{text}{}", "0".repeat(100_000));
    for wrong in ["", "hpx_", &typo, &upper, &spaced, &id, &text[..58], &long, "\0", "' or 1=1 --", "ж"] {
        let said = store.authenticate(wrong).await.expect("an answer");
        assert_eq!(said, Authentication::Malformed, "{wrong:.80}");
    }
}

pub async fn a3_a_token_ends_by_the_stores_clock(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let token = created(&store, &NewToken::new("shop", Role::Read).expires_in(Some(HOUR))).await;
    harness.advance(HOUR.saturating_sub(Duration::from_secs(1))).await;
    match said(&store, &token).await {
        Authentication::Granted { left, .. } => assert_eq!(left, Some(Duration::from_secs(1))),
        other => panic!("{other:?}"),
    }
    harness.advance(Duration::from_secs(1)).await;
    assert_eq!(said(&store, &token).await, Authentication::Expired);
    let entry = store.get(token.id()).await.expect("an answer").expect("it stays");
    assert_eq!(entry.state, TokenState::Expired);
    let again = store.create(&token, &NewToken::new("shop", Role::Read), &by()).await.expect("it is there");
    assert_eq!(again.state, TokenState::Expired, "creating it again does not revive it");
    let refused = store.rotate(&ApiToken::with_secret(token.id().clone()), &Rotation::new(0), &by()).await;
    assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
}

pub async fn a3_only_the_right_secret_learns_why(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let expired = created(&store, &NewToken::new("shop", Role::Read).expires_in(Some(HOUR))).await;
    let revoked = writer(&store).await;
    store.revoke(revoked.id(), &by()).await.expect("it is revoked");
    harness.advance(HOUR).await;
    for token in [expired, revoked] {
        let guess = ApiToken::with_secret(token.id().clone());
        assert_ne!(said(&store, &token).await, Authentication::Unknown);
        assert_eq!(said(&store, &guess).await, Authentication::Unknown);
    }
}

pub async fn a4_a_revoked_token_stays_revoked(harness: &impl AccessHarness) {
    let (store, other) = (harness.open().await, harness.open().await);
    let token = writer(&store).await;
    let overlap = ApiToken::with_secret(token.id().clone());
    store.rotate(&overlap, &Rotation::new(0).overlap(HOUR), &by()).await.expect("it is rotated");
    let revoked = store.revoke(token.id(), &by()).await.expect("it is revoked");
    assert_eq!(revoked.state, TokenState::Revoked);
    for secret in [&token, &overlap] {
        let said = said(&other, secret).await;
        assert!(matches!(said, Authentication::Revoked | Authentication::Unknown), "{said:?}");
    }
    assert_eq!(said(&other, &overlap).await, Authentication::Revoked);
    harness.advance(HOUR).await;
    let again = other.revoke(token.id(), &by()).await.expect("it stays revoked");
    assert_eq!(again.revoked_at, revoked.revoked_at);
    let next = ApiToken::with_secret(token.id().clone());
    let refused = other.rotate(&next, &Rotation::new(1), &by()).await;
    assert!(matches!(refused, Err(Error::Conflict { .. })), "{refused:?}");
    let there =
        other.create(&overlap, &NewToken::new("shop", Role::Admin), &by()).await.expect("it is there");
    assert_eq!(there.state, TokenState::Revoked);
    assert_eq!(said(&other, &overlap).await, Authentication::Revoked);
    let missing = store.revoke(ApiToken::generate().id(), &by()).await;
    assert!(matches!(missing, Err(Error::NotFound(_))), "{missing:?}");
}

pub async fn a5_a_rotation_keeps_everything_but_the_secret(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let about = NewToken::new("shop", Role::Admin)
        .tenant(Some(Tenant::new("acme").expect("a valid tenant")))
        .scopes(scopes(&["mailer"]))
        .expires_in(Some(HOUR));
    let token = created(&store, &about).await;
    let before = granted(&store, &token).await;
    let next = ApiToken::with_secret(token.id().clone());
    let entry = store.rotate(&next, &Rotation::new(0), &by()).await.expect("it is rotated");
    assert_eq!((entry.rotations, entry.overlap_until), (1, None));
    assert_eq!(granted(&store, &next).await, before, "the principal too");
    assert_eq!(said(&store, &token).await, Authentication::Unknown, "without an overlap it ends at once");
    harness.advance(HOUR).await;
    assert_eq!(said(&store, &next).await, Authentication::Expired, "a rotation lengthens no life");
    let missing = store.rotate(&ApiToken::generate(), &Rotation::new(0), &by()).await;
    assert!(matches!(missing, Err(Error::NotFound(_))), "{missing:?}");
}

pub async fn a5_the_old_secret_lasts_for_the_overlap(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let first = writer(&store).await;
    let second = ApiToken::with_secret(first.id().clone());
    let entry = store.rotate(&second, &Rotation::new(0).overlap(HOUR), &by()).await.expect("it is rotated");
    assert!(entry.overlap_until.is_some());
    match said(&store, &first).await {
        Authentication::Granted { left, .. } => assert_eq!(left, Some(HOUR)),
        other => panic!("{other:?}"),
    }
    harness.advance(HOUR.saturating_sub(Duration::from_millis(1))).await;
    granted(&store, &first).await;
    match said(&store, &second).await {
        Authentication::Granted { left, .. } => assert_eq!(left, None),
        other => panic!("{other:?}"),
    }
    harness.advance(Duration::from_millis(1)).await;
    assert_eq!(said(&store, &first).await, Authentication::Unknown);
    granted(&store, &second).await;
    // At most two secrets are good.
    let third = ApiToken::with_secret(first.id().clone());
    let fourth = ApiToken::with_secret(first.id().clone());
    store.rotate(&third, &Rotation::new(1).overlap(HOUR), &by()).await.expect("it is rotated");
    store.rotate(&fourth, &Rotation::new(2).overlap(HOUR), &by()).await.expect("it is rotated");
    assert_eq!(said(&store, &second).await, Authentication::Unknown);
    granted(&store, &third).await;
    granted(&store, &fourth).await;
}

pub async fn a5_a_rotation_that_came_second_is_a_conflict(harness: &impl AccessHarness) {
    let token = writer(&harness.open().await).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (store, next) = (harness.open().await, ApiToken::with_secret(token.id().clone()));
        tasks.spawn(async move {
            match store.rotate(&next, &Rotation::new(0), &by()).await {
                Ok(_) => Some(next),
                Err(Error::Conflict { .. }) => None,
                Err(other) => panic!("{other}"),
            }
        });
    }
    let won: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(won.len(), 1, "whoever gets a secret can use it");
    let store = harness.open().await;
    granted(&store, &won[0]).await;
    // As after a lost answer.
    let again = store.rotate(&won[0], &Rotation::new(0), &by()).await.expect("it was rotated");
    assert_eq!(again.rotations, 1);
    assert_eq!(all_rows(&store).await.len(), 2);
}

pub async fn a6_a_store_that_had_tokens_always_has(harness: &impl AccessHarness) {
    let store = harness.open().await;
    assert!(!store.has_tokens().await.expect("an answer"));
    let token = writer(&store).await;
    assert!(store.has_tokens().await.expect("an answer"));
    store.revoke(token.id(), &by()).await.expect("it is revoked");
    harness.advance(HOUR * 24 * 400).await;
    assert!(harness.open().await.has_tokens().await.expect("an answer"), "it must not fall open again");
}

pub async fn a7_a_use_is_noted_now_and_then(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let token = writer(&store).await;
    let used = async || store.get(token.id()).await.expect("an answer").expect("a token").last_used_at;
    assert_eq!(used().await, None);
    granted(&store, &token).await;
    // Who asked need not wait for the note.
    let noted = async |after: Option<Time>| {
        for _ in 0..12_000 {
            match used().await {
                Some(at) if Some(at) > after => return at,
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
        panic!("the use is not noted");
    };
    let first = noted(None).await;
    harness.advance(Duration::from_secs(599)).await;
    granted(&store, &token).await;
    let other = writer(&store).await; // whatever was noted is noted before
    assert_eq!(used().await, Some(first));
    harness.advance(Duration::from_secs(1)).await;
    granted(&store, &token).await;
    assert_eq!(noted(Some(first)).await, first.plus(Duration::from_secs(600)));
    // A wrong secret is useless.
    said(&store, &ApiToken::with_secret(other.id().clone())).await;
    writer(&store).await;
    assert_eq!(store.get(other.id()).await.expect("an answer").expect("a token").last_used_at, None);
}

pub async fn a8_tokens_are_listed_in_pages(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let acme = Some(Tenant::new("acme").expect("a valid tenant"));
    let mut ids: Vec<TokenId> = Vec::new();
    for n in 0..7 {
        let tenant = if n % 2 == 0 { None } else { acme.clone() };
        ids.push(
            created(&store, &NewToken::new(format!("n{n}"), Role::Read).tenant(tenant)).await.id().clone(),
        );
    }
    ids.sort();
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let which = ListTokens { after, limit: 3, ..ListTokens::default() };
        let page = store.list(&which).await.expect("a page");
        assert!(page.len() <= 3 && found.len() <= ids.len(), "the pages do not end");
        found.extend(page.iter().map(|entry| entry.id.clone()));
        match page.last() {
            Some(last) => after = Some(last.id.clone()),
            None => break,
        }
    }
    assert_eq!(found, ids);
    let of = async |tenant| {
        let which = ListTokens { tenant: Some(tenant), ..ListTokens::default() };
        store.list(&which).await.expect("a page").len()
    };
    assert_eq!((of(None).await, of(acme).await), (4, 3));
    store.revoke(&ids[0], &by()).await.expect("it is revoked");
    let live = ListTokens { live_only: true, ..ListTokens::default() };
    assert_eq!(store.list(&live).await.expect("a page").len(), 6);
    assert_eq!(store.get(ApiToken::generate().id()).await.expect("an answer"), None);
}

pub async fn a12_bad_input_is_refused_with_a_sentence(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let many = (0..65).map(|n| Scope::new(format!("scope-{n}")).expect("a valid scope"));
    let bad = [
        NewToken::new("", Role::Read),
        NewToken::new(" \t", Role::Read),
        NewToken::new("a\0b", Role::Read),
        NewToken::new("é".repeat(256), Role::Read),
        NewToken::new("shop", Role::Read).scopes(Scopes::of(many)),
        NewToken::new("shop", Role::Read).scopes(Scopes::Only(std::collections::BTreeSet::new())),
        NewToken::new("shop", Role::Read).expires_in(Some(Duration::ZERO)),
        NewToken::new("shop", Role::Read).expires_in(Some(Duration::from_secs(36_501 * 86_400))),
    ];
    for about in &bad {
        let refused = store.create(&ApiToken::generate(), about, &by()).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{about:?}: {refused:?}");
    }
    assert!(!store.has_tokens().await.expect("an answer") && all_rows(&store).await.is_empty());
    let token = writer(&store).await;
    let next = ApiToken::with_secret(token.id().clone());
    let forever = Rotation::new(0).overlap(Duration::from_secs(36_501 * 86_400));
    assert!(matches!(store.rotate(&next, &forever, &by()).await, Err(Error::Invalid { .. })));
    granted(&store, &token).await;
}

pub async fn a1_a_token_ends_with_the_one_that_made_it(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let (brief, lasting) = (ApiToken::generate(), ApiToken::generate());
    let about = NewToken::new("brief", Role::Admin).expires_in(Some(HOUR));
    let end = store.create(&brief, &about, &by()).await.expect("a token is created").expires_at;
    store.create(&lasting, &NewToken::new("lasting", Role::Admin), &by()).await.expect("a token is created");
    harness.advance(Duration::from_secs(600)).await;
    let made = async |maker: &ApiToken, expires_in: Option<Duration>| {
        let about =
            NewToken::new("child", Role::Write).expires_in(expires_in).made_by(Some(maker.id().clone()));
        store.create(&ApiToken::generate(), &about, &by()).await.expect("a token is created")
    };
    let child = made(&brief, None).await;
    assert_eq!((child.expires_at, &child.made_by), (end, &Some(brief.id().clone())));
    assert_eq!(made(&brief, Some(HOUR * 2)).await.expires_at, end, "it asked for more");
    let less = made(&brief, Some(Duration::from_secs(60))).await;
    assert_eq!(less.expires_at, Some(less.created_at.plus(Duration::from_secs(60))));
    assert_eq!(made(&lasting, None).await.expires_at, None);
    let found = store.get(&child.id).await.expect("it can be read");
    assert_eq!(found.and_then(|entry| entry.made_by), Some(brief.id().clone()));
}

pub async fn a1_a_token_that_is_over_makes_none(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let (revoked, expired, nobody) = (ApiToken::generate(), ApiToken::generate(), ApiToken::generate());
    let about = NewToken::new("maker", Role::Admin);
    store.create(&revoked, &about, &by()).await.expect("a token is created");
    store.create(&expired, &about.clone().expires_in(Some(HOUR)), &by()).await.expect("a token is created");
    let make = async |token: &ApiToken, maker: &ApiToken| {
        let about = NewToken::new("child", Role::Write).made_by(Some(maker.id().clone()));
        store.create(token, &about, &by()).await
    };
    let early = ApiToken::generate();
    make(&early, &revoked).await.expect("its maker is live");
    store.revoke(revoked.id(), &by()).await.expect("it is revoked");
    harness.advance(HOUR).await;
    for maker in [&revoked, &expired] {
        let late = ApiToken::generate();
        assert!(matches!(make(&late, maker).await, Err(Error::Conflict { .. })));
        assert_eq!(said(&store, &late).await, Authentication::Unknown);
    }
    assert!(matches!(make(&ApiToken::generate(), &nobody).await, Err(Error::NotFound(_))));
    make(&early, &revoked).await.expect("after a lost answer it is there");
}

pub async fn a1_what_a_token_made_is_revoked_with_it(harness: &impl AccessHarness) {
    let store = harness.open().await;
    let tokens: Vec<_> = (0..5).map(|_| ApiToken::generate()).collect();
    // 0 made 1 and 2, 1 made 3; 4 stands alone.
    for (token, maker) in [(0, None), (1, Some(0)), (2, Some(0)), (3, Some(1)), (4, None)] {
        let maker = maker.map(|at: usize| tokens[at].id().clone());
        let about = NewToken::new(format!("t{token}"), Role::Admin).made_by(maker);
        store.create(&tokens[token], &about, &by()).await.expect("a token is created");
    }
    let made_by = async |at: usize| {
        let which = ListTokens { made_by: Some(tokens[at].id().clone()), ..ListTokens::default() };
        let mut names: Vec<_> =
            store.list(&which).await.expect("a list").into_iter().map(|entry| entry.name).collect();
        names.sort();
        names
    };
    assert_eq!((made_by(0).await, made_by(3).await), (vec!["t1".to_owned(), "t2".to_owned()], Vec::new()));
    // Cut off after the first one: the same again ends the rest.
    store.revoke(tokens[0].id(), &by()).await.expect("it is revoked");
    for _ in 0..2 {
        let ended =
            crate::access::revoke_with_children(&store, tokens[0].id(), &by()).await.expect("revoked");
        let mut names: Vec<_> = ended.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names.remove(0), "t0");
        names.sort_unstable();
        assert_eq!(names, ["t1", "t2", "t3"]);
    }
    for token in &tokens[..4] {
        assert_eq!(said(&store, token).await, Authentication::Revoked);
    }
    granted(&store, &tokens[4]).await;
}
