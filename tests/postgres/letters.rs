//! Dead letters while the ledger's server is away for a moment.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::sync::Arc;
use std::time::Duration;

use super::doubt::{Scene, scene};
use crate::support::gated::Gated;
use crate::support::postgres::{ask, run, until};
use hapax::bus::{Bus as _, Record};
use hapax::consumer::{Consumer, ConsumerHandle, Counts, Failed};
use hapax::ledger::{ConsumerStore as _, HeldQuery};
use hapax::{Event, Headers, Result, Scope, Topic};
use tokio::task::JoinHandle;

/// A consumer whose events all die, and one of them on the bus.
async fn dying(scene: &Scene, bus: &Arc<Gated>) -> (ConsumerHandle, JoinHandle<Result<Counts>>) {
    let consumer = Consumer::builder(bus.clone(), scene.ledger.clone()).scope("orders").topic("orders");
    let consumer = consumer.with(|settings| {
        settings.held_interval = Duration::from_millis(10);
        settings.dead_reserve = Duration::from_mins(10);
    });
    let consumer = consumer.build().unwrap();
    let handle = consumer.handle();
    let running =
        tokio::spawn(consumer.leased(|_: &Event, _: &hapax::guard::Run| async { Err(Failed::fatal("no")) }));
    let headers = Headers::from_iter([("idempotency_key", "e".to_owned())]);
    let record = Record { payload: Some("{}".into()), headers, ..Record::default() };
    bus.publish(&Topic::new("orders").unwrap(), &[record]).await.unwrap().remove(0).unwrap();
    until("it is being copied", async || bus.under_way() == 1).await;
    (handle, running)
}

async fn until_noted(scene: &Scene) {
    let (ledger, scope) = (&scene.ledger, Scope::new("orders").unwrap());
    until("it is noted", async || {
        ledger.unpublished_dead(&scope, &HeldQuery::all(), 9, None).await.is_ok_and(|dead| dead.is_empty())
    })
    .await;
}

/// A dead letter is published, and the connection is lost before that is noted. The same member notes it when the server is back;
/// otherwise somebody would copy it again as soon as its reservation ends.
#[tokio::test(flavor = "multi_thread")]
async fn t118_a_copy_that_could_not_be_noted_is_noted_later_and_not_made_again() {
    let scene = scene().await;
    let bus = Gated::shut(&["orders"]).await;
    let (handle, running) = dying(&scene, &bus).await;
    scene.proxy.refuse();
    scene.proxy.cut();
    let before = scene.proxy.lost();
    bus.open();
    until("noting it has failed", async || scene.proxy.lost() > before + 3).await;
    scene.proxy.heal();
    until_noted(&scene).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!(bus.copies("orders").await, 1);
}

/// A dead letter is published, and that cannot be noted for longer than it is reserved, while the ledger can be asked for more: the
/// member reserves the same letter again, and must not publish it again.
#[tokio::test(flavor = "multi_thread")]
async fn t250_a_copy_that_is_not_noted_before_its_reservation_ends_is_not_made_again() {
    let scene = scene().await;
    let bus = Gated::shut(&["orders"]).await;
    let (handle, running) = dying(&scene, &bus).await;
    let (s, direct) = (&scene.schema, &scene.direct);
    run(
        direct,
        format!(
            "create function {s}.in_the_way() returns trigger language plpgsql as \
             $$ begin raise exception 'in the way' using errcode = '40001'; end $$; \
             create trigger in_the_way before update of copied on {s}.held for each row \
             execute function {s}.in_the_way()"
        ),
    )
    .await;
    bus.open();
    until("the bus has answered", async || bus.under_way() == 0).await;
    run(direct, format!("update {s}.held set reserved = clock_timestamp() - interval '1 s'")).await;
    let again = format!("select count(*) from {s}.held where reserved > clock_timestamp()");
    until("it is reserved again", async || ask::<i64>(direct, again.clone()).await == 1).await;
    run(direct, format!("drop trigger in_the_way on {s}.held")).await;
    until_noted(&scene).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!(bus.copies("orders").await, 1);
}
