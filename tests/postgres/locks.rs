//! Locks that stay in somebody's open transaction, and who waits for them.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres as support;
use std::time::Duration;

use crate::support::postgres::{ask, ledger, until_waiting};
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Grant, Mode, OnDead, OrderPolicy, Outcome, Settled, Verdict};
use hapax::testing::kit;
use hapax::{Aggregate, Error, EventId, Guard, Scope};
use sqlx::{AssertSqlSafe, PgTransaction};

/// Rows of a table that nobody else has locked.
async fn free(ledger: &PgLedger, table: &str, which: &str) -> i64 {
    let s = ledger.schema();
    let rows = format!("select 1 from {s}.{table} where {which} for update skip locked");
    ask(ledger.pool(), format!("with x as ({rows}) select count(*) from x")).await
}

/// The holder of a lease does what it must while somebody's transaction is open.
async fn holder_goes_on(ledger: &PgLedger, claim: &Claim, grant: &Grant) {
    for _ in 0..3 {
        let extended = kit::extend(ledger, claim, grant, Duration::from_mins(2)).await;
        assert!(matches!(extended, Settled::Ok { .. }), "{extended:?}");
    }
    kit::settled(ledger, claim, grant, kit::done()).await;
}

/// What any language calls, by its answer.
async fn call(tx: &mut PgTransaction<'_>, sql: String) -> String {
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut **tx).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn t66_a_sql_claim_that_answers_busy_leaves_the_holder_alone() {
    let ledger = ledger(8).await;
    let s = ledger.schema().to_owned();
    let claim_in = format!("select outcome from {s}.claim_in('orders', 'x')");
    let lease = format!("select outcome from {s}.lease('orders', 'x')");
    let settle = format!("select {s}.settle('orders', 'x', 1, 'done')::text");
    let mut n = 0;
    for (sql, answer, after) in
        [(claim_in, "busy", "duplicate"), (lease, "busy", "duplicate"), (settle, "false", "false")]
    {
        for level in ["read committed", "repeatable read", "serializable"] {
            n += 1;
            let id = format!("x-{n}");
            let sql = sql.replace("'x'", &format!("'{id}'"));
            let held = kit::claim(&id, kit::lease());
            let grant = kit::first(&ledger, &held).await;
            let mut tx = ledger.pool().begin().await.unwrap();
            let isolation = format!("set transaction isolation level {level}");
            sqlx::raw_sql(AssertSqlSafe(isolation)).execute(&mut *tx).await.unwrap();
            assert_eq!(call(&mut tx, sql.clone()).await, answer, "{sql} {level}");
            holder_goes_on(&ledger, &held, &grant).await;
            if level == "read committed" {
                assert_eq!(call(&mut tx, sql.clone()).await, after, "{sql}");
            }
            tx.commit().await.unwrap();
        }
    }
}

/// The name of a new owner is stored with a claim, and by nothing else; nobody waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn t66_a_new_owner_of_an_open_transaction_is_in_nobodys_way() {
    let ledger = ledger(8).await;
    let s = ledger.schema().to_owned();
    let owner = |id: &str| format!("select coalesce(owner, 'nobody') from {s}.entries where id = '{id}'");
    kit::first(&ledger, &kit::claim("x", kit::lease())).await;
    let by = |function: &str, id: &str, owner: &str| {
        format!("select outcome from {s}.{function}('orders', '{id}', p_owner => '{owner}')")
    };
    for function in ["claim_in", "lease"] {
        let (busy, claims) = (format!("busy-{function}"), format!("claims-{function}"));
        let mut tx = ledger.pool().begin().await.unwrap();
        assert_eq!(call(&mut tx, by(function, "x", &busy)).await, "busy");
        let mut other = ledger.pool().begin().await.unwrap();
        let id = format!("{function}-1");
        assert_eq!(call(&mut other, by(function, &id, &busy)).await, "claimed", "who was busy holds no name");
        other.commit().await.unwrap();
        assert_eq!(ask::<String>(ledger.pool(), owner(&id)).await, busy);

        assert_eq!(call(&mut tx, by(function, &format!("{function}-2"), &claims)).await, "claimed");
        let mut other = ledger.pool().begin().await.unwrap();
        let id = format!("{function}-3");
        assert_eq!(call(&mut other, by(function, &id, &claims)).await, "claimed", "nobody waits for a name");
        other.commit().await.unwrap();
        assert_eq!(ask::<String>(ledger.pool(), owner(&id)).await, "nobody");
        tx.commit().await.unwrap();
        assert_eq!(ask::<String>(ledger.pool(), owner(&format!("{function}-2"))).await, claims);
    }
}

fn of_aggregate(aggregate: &str, seq: u64, mode: Mode) -> Claim {
    let mut claim = kit::ordered(&format!("{aggregate}-{seq}"), mode, seq, OrderPolicy::Latest, OnDead::Park);
    claim.order.as_mut().unwrap().aggregate = Aggregate::new(aggregate).unwrap();
    claim
}

/// A batch in a caller's transaction with every kind of answer: locked is what was written to, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn t66_a_batch_in_a_transaction_holds_only_what_it_changed() {
    let ledger = ledger(8).await;
    let leased = of_aggregate("a", 1, kit::lease());
    let grant = kit::first(&ledger, &leased).await;
    let busy = kit::claim("busy", kit::lease());
    let busy_grant = kit::first(&ledger, &busy).await;
    let other = Claim { fingerprint: Some(kit::fingerprint(1)), ..kit::claim("other", kit::lease()) };
    let other_grant = kit::first(&ledger, &other).await;
    let dead = kit::claim("dead", kit::lease());
    let dead_grant = kit::first(&ledger, &dead).await;
    kit::settled(&ledger, &dead, &dead_grant, kit::dead()).await;

    let mut tx = ledger.pool().begin().await.unwrap();
    let claims = [
        of_aggregate("a", 2, Mode::Done),
        of_aggregate("b", 1, Mode::Done),
        of_aggregate("a", 1, Mode::Done),
        kit::claim("busy", Mode::Done),
        Claim { fingerprint: Some(kit::fingerprint(2)), ..kit::claim("other", Mode::Done) },
        kit::claim("dead", Mode::Done),
        kit::claim("new", Mode::Done),
    ];
    let outcomes = ledger.claim_in(&mut tx, &claims).await.unwrap();
    let names: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().unwrap().name()).collect();
    assert_eq!(names, ["wait", "claimed", "busy", "busy", "mismatch", "dead", "claimed"]);
    assert_eq!(free(&ledger, "entry", "true").await, 4, "those that were there");
    assert_eq!(free(&ledger, "head", "aggregate = 'a'").await, 1, "the head that is waited for");
    holder_goes_on(&ledger, &leased, &grant).await;
    holder_goes_on(&ledger, &busy, &busy_grant).await;
    holder_goes_on(&ledger, &other, &other_grant).await;
    // What was claimed is held until the end.
    let rival = kit::one(&ledger, &of_aggregate("b", 1, kit::lease())).await;
    assert!(matches!(rival, Outcome::Busy { until: None, .. }), "{rival:?}");
    tx.commit().await.unwrap();
    kit::expect(&ledger, &of_aggregate("b", 1, kit::lease()), "duplicate").await;
    kit::run(&ledger, &of_aggregate("a", 2, kit::lease())).await;
}

/// Claims that change their own row and not the order: what is stale, or dead and takes its bytes. The caller's transaction keeps no
/// head from those who run other events of the aggregate.
#[tokio::test(flavor = "multi_thread")]
async fn t403_a_claim_that_changes_no_head_holds_none() {
    let ledger = ledger(8).await;
    let s = ledger.schema().to_owned();
    kit::run(&ledger, &of_aggregate("a", 2, kit::lease())).await;
    let third = of_aggregate("a", 3, kit::lease());
    let grant = kit::first(&ledger, &third).await;
    // In b the dead one is above the one that runs. It has died without its bytes.
    let dead = of_aggregate("b", 2, kit::lease());
    let dead_grant = kit::first(&ledger, &dead).await;
    kit::settled(&ledger, &dead, &dead_grant, kit::dead()).await;
    let first = of_aggregate("b", 1, kit::lease());
    let first_grant = kit::first(&ledger, &first).await;
    let used = of_aggregate("b", 3, Mode::Done);
    let used = Claim { identity: first.identity.clone(), fingerprint: Some(kit::fingerprint(1)), ..used };
    let body = hapax::bus::Record { payload: Some("bytes".into()), ..hapax::bus::Record::default() };

    for level in ["read committed", "repeatable read"] {
        let mut tx = ledger.pool().begin().await.unwrap();
        let isolation = format!("set transaction isolation level {level}");
        sqlx::raw_sql(AssertSqlSafe(isolation)).execute(&mut *tx).await.unwrap();
        let stale =
            Claim { identity: kit::identity(&format!("stale {level}")), ..of_aggregate("a", 1, Mode::Done) };
        let claims = [
            stale.clone(),
            Claim { body: Some(body.clone()), mode: Mode::Done, ..kit::another(&dead) },
            Claim {
                identity: kit::identity(&format!("stale too {level}")),
                ..of_aggregate("a", 2, kit::failed())
            },
            used.clone(),
        ];
        let outcomes = ledger.claim_in(&mut tx, &claims).await.unwrap();
        let names: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().unwrap().name()).collect();
        assert_eq!(names, ["stale", "dead", "stale", "busy"], "{level}");
        assert_eq!(free(&ledger, "head", "true").await, 2, "{level}");
        for (claim, grant) in [(&third, &grant), (&first, &first_grant)] {
            let extended = kit::extend(&ledger, claim, grant, Duration::from_mins(2)).await;
            assert!(matches!(extended, Settled::Ok { .. }), "{level}: {extended:?}");
        }
        tx.commit().await.unwrap();
        // It is recorded all the same.
        let recorded = format!("select state from {s}.entries where id = 'stale {level}'");
        assert_eq!(ask::<String>(ledger.pool(), recorded).await, "stale");
        let entry = hapax::Claims::get(&ledger, &dead.identity, None).await.unwrap().unwrap();
        assert_eq!(entry.body.clone().and_then(|body| body.payload), body.payload, "{level}");
    }
    holder_goes_on(&ledger, &third, &grant).await;
    holder_goes_on(&ledger, &first, &first_grant).await;
}

/// The claims of a batch that must go one by one lock the heads of their aggregates in one order, whatever order the batch has: two
/// transactions with crossed batches would each be the other's obstacle.
#[tokio::test(flavor = "multi_thread")]
async fn t404_a_batch_in_a_transaction_locks_heads_in_one_order() {
    let ledger = ledger(8).await;
    let s = ledger.schema().to_owned();
    let once = Mode::Once { track: None };
    for aggregate in ["a", "b"] {
        kit::run(&ledger, &of_aggregate(aggregate, 1, kit::lease())).await;
    }
    let functions = "select string_agg(format('alter function %s set lock_timeout = 0', p.oid::regprocedure), ';') \
                     from pg_proc p join pg_namespace n on n.oid = p.pronamespace";
    let waiting: String =
        ask(ledger.pool(), format!("{functions} where n.nspname = '{s}' and p.proname = 'claim_each'")).await;
    support::run(ledger.pool(), waiting).await;
    // Somebody holds the event of a, and not its head.
    let unordered = Claim { order: None, ..of_aggregate("a", 2, once) };
    let mut foreign = ledger.pool().begin().await.unwrap();
    let held = ledger.claim_in(&mut foreign, std::slice::from_ref(&unordered)).await.unwrap();
    assert!(held[0].as_ref().unwrap().is_claimed());
    let claiming = tokio::spawn({
        let ledger = ledger.clone();
        async move {
            let mut tx = ledger.pool().begin().await.unwrap();
            let claims = [of_aggregate("b", 2, once), of_aggregate("a", 2, once)];
            let outcomes = ledger.claim_in(&mut tx, &claims).await.unwrap();
            tx.commit().await.unwrap();
            outcomes.into_iter().map(|outcome| outcome.unwrap().name()).collect::<Vec<_>>()
        }
    });
    until_waiting(ledger.pool(), &format!("{s}.claim_each")).await;
    assert_eq!(free(&ledger, "head", "aggregate = 'b'").await, 1, "its turn has not come");
    foreign.rollback().await.unwrap();
    assert_eq!(claiming.await.unwrap(), ["claimed", "claimed"], "each has its own outcome");
}

/// A settling with a stale token changes nothing, so it holds nothing.
#[tokio::test(flavor = "multi_thread")]
async fn t66_a_stale_settling_in_a_transaction_leaves_the_holder_alone() {
    let ledger = ledger(8).await;
    let (plain, ordered) = (kit::claim("x", kit::lease()), of_aggregate("a", 1, kit::lease()));
    let grants = [kit::first(&ledger, &plain).await, kit::first(&ledger, &ordered).await];
    let mut tx = ledger.pool().begin().await.unwrap();
    let stale = |claim, grant: &Grant| {
        let mut settle = kit::settling(claim, grant, Verdict::release());
        settle.token.0 += 1_000_000;
        settle
    };
    let settles = [stale(&plain, &grants[0]), stale(&ordered, &grants[1])];
    let answers = ledger.settle_in(&mut tx, &settles).await.unwrap();
    assert!(answers.into_iter().all(|answer| kit::is_fenced(answer.unwrap())));
    holder_goes_on(&ledger, &plain, &grants[0]).await;
    holder_goes_on(&ledger, &ordered, &grants[1]).await;
    tx.rollback().await.unwrap();
}

/// A scope that somebody's open transaction is registering fails the claims that need it, and not the caller's transaction.
#[tokio::test(flavor = "multi_thread")]
async fn t72_a_scope_under_registration_does_not_abort_the_callers_transaction() {
    let ledger = ledger(8).await;
    let s = ledger.schema().to_owned();
    kit::run(&ledger, &kit::claim("warm", kit::lease())).await;
    let of_fresh = |id: &str| {
        let mut claim = kit::claim(id, Mode::Done);
        claim.identity.scope = Scope::new("fresh").unwrap();
        claim
    };
    let mut first = ledger.pool().begin().await.unwrap();
    assert!(ledger.claim_in(&mut first, &[of_fresh("a")]).await.unwrap()[0].as_ref().unwrap().is_claimed());

    let mut second = ledger.pool().begin().await.unwrap();
    let claims = [of_fresh("b"), kit::claim("c", Mode::Done), of_fresh("d")];
    let outcomes = ledger.claim_in(&mut second, &claims).await.expect("the transaction goes on");
    assert!(matches!(outcomes[0], Err(Error::Contended { .. })), "{:?}", outcomes[0]);
    assert!(outcomes[1].as_ref().unwrap().is_claimed());
    assert!(matches!(outcomes[2], Err(Error::Contended { .. })), "{:?}", outcomes[2]);
    // And from any language.
    assert_eq!(call(&mut second, format!("select outcome from {s}.claim_in('fresh', 'e')")).await, "busy");
    second.commit().await.expect("it was never aborted");
    kit::expect(&ledger, &kit::claim("c", Mode::Done), "duplicate").await;
    first.rollback().await.unwrap();
    kit::run(&ledger, &of_fresh("b")).await;
}

/// Tables that somebody has locked are waited for no longer than ids are.
#[tokio::test(flavor = "multi_thread")]
async fn t85_a_locked_table_is_busy_soon_for_every_kind_of_claim() {
    let ledger = ledger(8).await;
    let s = ledger.schema().to_owned();
    kit::run(&ledger, &kit::claim("warm", kit::lease())).await;
    let mut foreign = ledger.pool().begin().await.unwrap();
    let lock = format!("lock table {s}.entry in access exclusive mode");
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *foreign).await.unwrap();
    // The lock is kept until all have answered: whoever waits for it waits for ever.
    for claim in [kit::claim("x", kit::lease()), kit::claim("y", Mode::Done), kit::latest(1)] {
        let mut fastest = Duration::MAX;
        for _ in 0..5 {
            let began = std::time::Instant::now();
            let asked = tokio::time::timeout(Duration::from_secs(60), kit::one(&ledger, &claim)).await;
            let outcome = asked.expect("an answer while the table is locked");
            assert!(matches!(outcome, Outcome::Busy { until: None, .. }), "{outcome:?}");
            fastest = fastest.min(began.elapsed());
        }
        // It waits for 100 ms. A busy machine makes some answers late, not all of them.
        assert!(fastest < Duration::from_secs(3), "the fastest of five answers took {fastest:?}");
    }
    foreign.rollback().await.unwrap();
    kit::run(&ledger, &kit::claim("x", kit::lease())).await;
}

/// While an id is held by a foreign transaction, its neighbours' statements do not wait for it: only the first of them did.
#[tokio::test(flavor = "multi_thread")]
async fn t86_a_held_id_is_waited_for_by_itself() {
    let ledger = ledger(8).await;
    let guard = Guard::builder(ledger.clone()).scope("orders").build().unwrap();
    kit::run(&ledger, &kit::claim("warm", kit::lease())).await;
    let mut foreign = ledger.pool().begin().await.unwrap();
    let held = ledger.claim_in(&mut foreign, &[kit::claim("held", Mode::Done)]).await.unwrap();
    assert!(held[0].as_ref().unwrap().is_claimed());
    assert!(matches!(guard.lease("held").await.unwrap(), Outcome::Busy { until: None, .. }));
    // Others ask for it all the time.
    let asking = {
        let guard = guard.clone();
        tokio::spawn(async move {
            loop {
                let outcome = guard.lease("held").await.unwrap();
                if !matches!(outcome, Outcome::Busy { .. }) {
                    return outcome.name();
                }
            }
        })
    };
    // A neighbour that comes while one of those questions waits is answered before that one is: in ten tries, ten times, give
    // or take those whose question ended just then.
    let mut ahead = 0;
    for n in 0..10 {
        until_waiting(ledger.pool(), &format!("{}.claim_", ledger.schema())).await;
        let id = EventId::new(format!("neighbour-{n}")).unwrap();
        assert!(guard.lease(id).await.unwrap().is_claimed());
        let waiting: i64 = ask(
            ledger.pool(),
            format!(
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%{}.claim_%' \
                 and pid <> pg_backend_pid()",
                ledger.schema()
            ),
        )
        .await;
        ahead += waiting;
    }
    println!("{ahead} of 10 neighbours came before the question that waited");
    assert!(ahead >= 5, "{ahead} of 10");
    foreign.commit().await.unwrap();
    assert_eq!(asking.await.unwrap(), "duplicate");
}

/// The last seq that an aggregate has come to.
async fn last_of(ledger: &PgLedger, aggregate: &str) -> Option<i64> {
    let s = ledger.schema();
    ask(ledger.pool(), format!("select last from {s}.head where aggregate = '{aggregate}'")).await
}

/// An event gets its order between an intervention's look, which tells the head to lock, and its lock: the head that was not read is
/// not written.
#[tokio::test(flavor = "multi_thread")]
async fn t64_an_intervention_writes_no_head_that_it_has_not_read() {
    let ledger = ledger(8).await;
    for seq in 1..=3 {
        kit::run(&ledger, &of_aggregate("a", seq, kit::lease())).await;
    }
    let ordered = of_aggregate("a", 5, kit::failed());
    let unordered = Claim { order: None, mode: kit::lease(), ..kit::another(&ordered) };
    let grant = kit::first(&ledger, &unordered).await;
    kit::settled(&ledger, &unordered, &grant, kit::retry(Duration::ZERO)).await;
    let mut tx = ledger.pool().begin().await.unwrap();
    let outcome = ledger.claim_in(&mut tx, std::slice::from_ref(&ordered)).await.unwrap().remove(0).unwrap();
    assert_eq!(outcome.name(), "retry_later");
    let killing = tokio::spawn({
        let (ledger, claim) = (ledger.clone(), ordered.clone());
        async move { kit::intervene(&ledger, &claim, hapax::ledger::Intervention::Kill).await }
    });
    until_waiting(ledger.pool(), &format!("{}.entry e left join", ledger.schema())).await;
    tx.commit().await.unwrap();
    let answer = killing.await.unwrap();
    assert_eq!(last_of(&ledger, "a").await, Some(3), "{answer:?}");
    assert!(matches!(answer, Err(Error::Contended { .. })), "{answer:?}");
    kit::intervene(&ledger, &ordered, hapax::ledger::Intervention::Kill).await.unwrap();
    assert_eq!(last_of(&ledger, "a").await, Some(3));
}

/// A head that cannot be stored fails what depends on it, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn t64_a_head_that_is_missing_is_no_success() {
    let ledger = ledger(8).await;
    let s = ledger.schema();
    let once = Mode::Once { track: None };
    let (broken, whole) = (of_aggregate("a", 1, once), of_aggregate("b", 1, once));
    let grants = (kit::first(&ledger, &broken).await, kit::first(&ledger, &whole).await);
    let sql = format!("update {s}.entry set aggregate = null where aggregate = 'a'");
    support::run(ledger.pool(), sql).await;
    let mut settle = kit::settling(&broken, &grants.0, Verdict::Finished { metadata: None });
    settle.order = None;
    let settles = [settle, kit::settling(&whole, &grants.1, Verdict::Finished { metadata: None })];
    for settles in [&settles[..1], &settles[..]] {
        let answers = hapax::Claims::settle(&ledger, settles).await.unwrap();
        assert!(matches!(answers[0], Err(Error::Corrupt(_))), "{answers:?}");
        assert!(answers[1..].iter().all(|answer| matches!(answer, Ok(Settled::Ok { .. }))), "{answers:?}");
    }
    let killed = of_aggregate("c", 1, kit::failed());
    kit::expect(&ledger, &killed, "retry_later").await;
    support::run(ledger.pool(), format!("delete from {s}.head where aggregate = 'c'")).await;
    let answer = kit::intervene(&ledger, &killed, hapax::ledger::Intervention::Kill).await;
    assert!(matches!(answer, Err(Error::Corrupt(_))), "{answer:?}");
    kit::expect(&ledger, &kit::another(&killed), "retry_later").await;
}
