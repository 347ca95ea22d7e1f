//! Handlers as people get them wrong. `t551_…` compiles this file: on a line that ends with
//! `//~ SENTENCE` the compiler must report an error with this sentence, and no error on any other line.
#![allow(dead_code, reason = "the compiler stops before it looks")]

use std::rc::Rc;

use hapax::Event;
use hapax::consumer::{BatchHandled, Consumer, Handled, Json, LeasedEvent};
use hapax::guard::Run;
use hapax::ledger::{Ledger, TransactionalLedger};

struct Tx;
struct Shape;
type Paid = Json<u64>;

// Right ones, which get no error.
async fn right(_: &mut Tx, _: &Event) -> Handled {
    Ok(())
}
async fn right_batch(_: &mut Tx, _: &[(&Event, Paid)]) -> Handled {
    Ok(())
}
async fn right_leased(_: &Event, _: &Run, _: Paid) -> Handled {
    Ok(())
}

// Transactional.
async fn arguments_swapped(_: &Event, _: &mut Tx) -> Handled {
    Ok(())
}
async fn event_by_value(_: &mut Tx, _: Event) -> Handled {
    Ok(())
}
fn not_async(_: &mut Tx, _: &Event) -> Handled {
    Ok(())
}
async fn returns_nothing(_: &mut Tx, _: &Event) {}
async fn not_send(_: &mut Tx, _: &Event) -> Handled {
    let count = Rc::new(());
    std::future::ready(()).await;
    drop(count);
    Ok(())
}
async fn bare_payload(_: &mut Tx, _: &Event, _: Shape) -> Handled {
    Ok(())
}
async fn not_deserialize(_: &mut Tx, _: &Event, _: Json<Shape>) -> Handled {
    Ok(())
}
async fn payload_first(_: &mut Tx, _: Paid, _: &Event) -> Handled {
    Ok(())
}

// Transactional batches.
async fn one_of_a_batch(_: &mut Tx, _: &Event) -> Handled {
    Ok(())
}
async fn batch_by_value(_: &mut Tx, _: Vec<Event>) -> Handled {
    Ok(())
}
async fn batch_of_values(_: &mut Tx, _: &[(Event, Paid)]) -> Handled {
    Ok(())
}
async fn bare_payloads(_: &mut Tx, _: &[(&Event, Shape)]) -> Handled {
    Ok(())
}
async fn batch_not_send(_: &mut Tx, _: &[Event]) -> Handled {
    let count = Rc::new(());
    std::future::ready(()).await;
    drop(count);
    Ok(())
}

// Leased.
async fn without_its_run(_: &Event) -> Handled {
    Ok(())
}
async fn returns_a_number(_: &Event, _: &Run) -> Result<u64, hapax::Error> {
    Ok(1)
}

// Leased batches.
async fn one_outcome(_: &[LeasedEvent]) -> Handled {
    Ok(())
}
fn batch_not_async(_: &[LeasedEvent]) -> BatchHandled {
    Ok(vec![])
}

// At most once.
async fn with_a_run(_: &Event, _: &Run) -> Handled {
    Ok(())
}
async fn once_by_value(_: Event) -> Handled {
    Ok(())
}

async fn transactional<L: TransactionalLedger<Transaction = Tx>>(make: impl Fn() -> Consumer<L>) {
    let _ = make().transactional(right).await;
    let _ = make().transactional(arguments_swapped).await; //~ is not a transactional handler
    let _ = make().transactional(event_by_value).await; //~ is not a transactional handler
    let _ = make().transactional(not_async).await; //~ is not a transactional handler
    let _ = make().transactional(returns_nothing).await; //~ is not a transactional handler
    let _ = make().transactional(not_send).await; //~ is not a transactional handler
    let _ = make().transactional(bare_payload).await; //~ is not decoded from an event
    let _ = make().transactional(not_deserialize).await; //~ Deserialize
    let _ = make().transactional(payload_first).await; //~ is not a transactional handler
    let _ = make().transactional_batch(right_batch).await;
    let _ = make().transactional_batch(one_of_a_batch).await; //~ is not a transactional batch handler
    let _ = make().transactional_batch(batch_by_value).await; //~ is not a transactional batch handler
    let _ = make().transactional_batch(batch_of_values).await; //~ is not a transactional batch handler
    let _ = make().transactional_batch(bare_payloads).await; //~ is not decoded from an event
    let _ = make().transactional_batch(batch_not_send).await; //~ is not a transactional batch handler
}

async fn leased<L: Ledger>(make: impl Fn() -> Consumer<L>) {
    let _ = make().leased(right_leased).await;
    let _ = make().leased(without_its_run).await; //~ is not a leased handler
    let _ = make().leased(returns_a_number).await; //~ is not a leased handler
    let _ = make().leased_batch(one_outcome).await; //~ is not a handler of leased batches
    let _ = make().leased_batch(batch_not_async).await; //~ is not a handler of leased batches
    let _ = make().at_most_once(with_a_run).await; //~ is not decoded from an event
    let _ = make().at_most_once(once_by_value).await; //~ is not an at-most-once handler
}
