//! Handlers as users write them: a plain `async fn`, or a type that has state.
//!
//! Each guarantee has a trait, which is implemented for functions, so users name it only if they
//! need state. `Args` distinguishes the forms of functions and is inferred; your own type leaves it
//! out.

use std::future::Future;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use async_trait::async_trait;
use serde::de::DeserializeOwned;

use super::handle::{BatchHandled, Failed, Handled, Permits};
use super::leased::{LeasedWorker, OnceWorker};
use super::leased_batch::{LeasedBatchWorker, LeasedEvent};
use super::transactional::{BatchHandler, TransactionalWorker};
use super::{Consumer, Counts};
use crate::error::Result;
use crate::event::Event;
use crate::guard::Run;
use crate::ledger::{Ledger, TransactionalLedger};

/// What a handler may take besides the event, decoded from it: as its last argument, or beside each
/// event of a batch.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not decoded from an event",
    label = "this handler takes `{Self}` as the decoded payload; take `Json<T>`, or a type of yours that implements `FromEvent`",
    note = "`Json<T>` decodes the payload into any `T` that is `serde::Deserialize`"
)]
pub trait FromEvent: Sized + Send + 'static {
    /// Decodes it. An error ends this attempt. Make it [fatal](Failed::fatal) if no retry can help.
    fn from_event(event: &Event) -> std::result::Result<Self, Failed>;
}

/// The payload, decoded from JSON. A payload that does not decode goes straight to the dead
/// letters, with the reason.
///
/// ```
/// use hapax::Event;
/// use hapax::consumer::{Handled, Json};
/// use hapax::guard::Run;
///
/// #[derive(serde::Deserialize)]
/// struct Paid { amount: u64 }
///
/// async fn receipt(event: &Event, run: &Run, Json(paid): Json<Paid>) -> Handled {
///     println!("{} paid {}, key {}", event.id, paid.amount, run.key());
///     Ok(())
/// }
/// # let _ = receipt;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromEvent for Json<T> {
    fn from_event(event: &Event) -> std::result::Result<Self, Failed> {
        match serde_json::from_slice(&event.payload) {
            Ok(value) => Ok(Json(value)),
            Err(error) => Err(Failed::fatal(format!("the payload does not decode: {error}"))),
        }
    }
}

impl<T> Deref for Json<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Json<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// A function of the form `(…, &Event)`.
#[derive(Debug)]
pub struct ByEvent;

/// A function of the form `(…, &Event, A)`, with `A` decoded from the event; of a batch,
/// `(…, &[(&Event, A)])`.
#[derive(Debug)]
pub struct Decoded<A>(PhantomData<fn() -> A>);

/// Makes an event's effects in the transaction of its claim: exactly once, through any crash.
///
/// Implemented for `async fn(&mut Tx, &Event) -> Handled`, and with [`Json<T>`](Json) (or any
/// [`FromEvent`]) as a third argument. If you need state, implement it for your own type:
///
/// ```
/// # #[cfg(feature = "postgres")] pub mod example {
/// use hapax::Event;
/// use hapax::backend::postgres::{PgTx, sqlx};
/// use hapax::consumer::{Handled, TransactionalHandler};
///
/// struct Billing { currency: String }
///
/// impl TransactionalHandler<PgTx> for Billing {
///     async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
///         sqlx::query("insert into paid (id, currency) values ($1, $2)")
///             .bind(event.id.as_str())
///             .bind(&self.currency)
///             .execute(&mut **tx)
///             .await?;
///         Ok(())
///     }
/// }
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transactional handler",
    label = "expected `async fn(&mut {Tx}, &Event) -> Handled`, or one with `Json<T>` as a third argument",
    note = "its future must be `Send`: nothing like an `Rc` or a lock's guard may be kept across an `.await`",
    note = "state goes into a type of yours that implements `TransactionalHandler<{Tx}>`"
)]
pub trait TransactionalHandler<Tx, Args = ()>: Send + Sync + 'static {
    /// Makes the effects of one event. An error undoes them.
    fn handle<'a>(&'a self, tx: &'a mut Tx, event: &'a Event) -> impl Future<Output = Handled> + Send + 'a;
}

/// Makes the effects of many events in one transaction, for effects that work on sets, such as a
/// multi-row insert.
///
/// Implemented for `async fn(&mut Tx, &[Event]) -> Handled`, and for
/// `async fn(&mut Tx, &[(&Event, Json<T>)]) -> Handled` with [`Json<T>`](Json) or any other
/// [`FromEvent`] that is `Sync`. All the events are new, and those of each key are in order. An error
/// undoes the effects of all; the batch is then split until the failing event is found. An event
/// that does not decode fails by itself: the others run without it.
///
/// ```
/// # #[cfg(feature = "postgres")] pub mod example {
/// use hapax::Event;
/// use hapax::backend::postgres::{PgTx, sqlx};
/// use hapax::consumer::{Handled, Json};
///
/// #[derive(serde::Deserialize)]
/// struct Paid { amount: i64 }
///
/// async fn paid(tx: &mut PgTx, events: &[(&Event, Json<Paid>)]) -> Handled {
///     let (ids, amounts): (Vec<_>, Vec<_>) =
///         events.iter().map(|(event, Json(paid))| (event.id.to_string(), paid.amount)).unzip();
///     sqlx::query("insert into paid (id, amount) select * from unnest($1::text[], $2::bigint[])")
///         .bind(ids)
///         .bind(amounts)
///         .execute(&mut **tx)
///         .await?;
///     Ok(())
/// }
///
/// # async fn run(consumer: hapax::Consumer<hapax::backend::postgres::PgLedger>) -> hapax::Result<()> {
/// consumer.transactional_batch(paid).await?;
/// # Ok(()) }
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transactional batch handler",
    label = "expected `async fn(&mut {Tx}, &[Event]) -> Handled`, or one of `&[(&Event, Json<T>)]`",
    note = "its future must be `Send`: nothing like an `Rc` or a lock's guard may be kept across an `.await`",
    note = "state goes into a type of yours that implements `TransactionalBatchHandler<{Tx}>`"
)]
pub trait TransactionalBatchHandler<Tx, Args = ()>: Send + Sync + 'static {
    /// Makes the effects of all events.
    fn handle<'a>(&'a self, tx: &'a mut Tx, events: &'a [Event])
    -> impl Future<Output = Handled> + Send + 'a;
}

/// Makes an event's effect elsewhere, under a lease: at least once, and exactly once if the sink
/// dedups on the key of the [`Run`].
///
/// Implemented for `async fn(&Event, &Run) -> Handled`, and with [`Json<T>`](Json) as a third
/// argument. A unit test calls it as any other function, with [`Run::for_test`]:
///
/// ```
/// use hapax::consumer::{FailedExt, Handled};
/// use hapax::guard::Run;
/// use hapax::ledger::{Identity, Token};
/// use hapax::{Event, Scope};
///
/// async fn receipt(event: &Event, run: &Run) -> Handled {
///     let amount: u64 = std::str::from_utf8(&event.payload).fatal()?.parse().fatal()?;
///     println!("{amount} under {}, token {}", run.key(), run.token()); // the effect
///     Ok(())
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
/// let paid = Event::of("order-17-paid")?.payload("7");
/// let run = Run::for_test(Identity::new(Scope::new("receipts")?, paid.id.clone()), Token(1));
/// assert!(receipt(&paid, &run).await.is_ok());
/// let garbled = Event::of("order-17-paid")?.payload("seven");
/// assert!(receipt(&garbled, &run).await.unwrap_err().is_fatal());
/// # Ok(()) }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a leased handler",
    label = "expected `async fn(&Event, &Run) -> Handled`, or one with `Json<T>` as a third argument",
    note = "its future must be `Send`: nothing like an `Rc` or a lock's guard may be kept across an `.await`",
    note = "state goes into a type of yours that implements `LeasedHandler`"
)]
pub trait LeasedHandler<Args = ()>: Send + Sync + 'static {
    /// Makes the effect of one event.
    fn handle<'a>(&'a self, event: &'a Event, run: &'a Run) -> impl Future<Output = Handled> + Send + 'a;

    /// Limits how many runs of this handler may be in progress at once.
    fn permits(&self) -> Option<&dyn Permits> {
        None
    }
}

/// Makes the effects of many events elsewhere in one call, each under its own lease: for sinks that
/// take many at a time. At least once, and exactly once if the sink dedups on the key of each
/// [`Run`].
///
/// Implemented for `async fn(&[LeasedEvent]) -> BatchHandled`, and for
/// `async fn(&[(&LeasedEvent, Json<T>)]) -> BatchHandled` with [`Json<T>`](Json) or any other
/// [`FromEvent`] that is `Sync`. The answer has an outcome for each event, in order: an event that
/// failed is retried or dead by itself, the others are done. An event that does not decode fails by
/// itself, and the handler gets the others. An error instead of outcomes is the failure of each of
/// them. If the handler panics, takes too long or returns another number of outcomes, nobody knows
/// which event it was: its events then run one by one. A unit test makes its batch with
/// [`LeasedEvent::new`].
///
/// ```no_run
/// use hapax::consumer::{BatchHandled, Consumer, Json, LeasedEvent};
///
/// #[derive(serde::Deserialize)]
/// struct Paid { amount: u64 }
///
/// async fn receipts(batch: &[(&LeasedEvent, Json<Paid>)]) -> BatchHandled {
///     for (item, Json(paid)) in batch {
///         println!("{} as {}", paid.amount, item.run.key());
///     }
///     Ok(batch.iter().map(|_| Ok(())).collect())
/// }
///
/// # async fn run<L: hapax::Ledger>(consumer: Consumer<L>) -> hapax::Result<()> {
/// consumer.leased_batch(receipts).await?;
/// # Ok(()) }
/// ```
///
/// A type that has state:
///
/// ```
/// use hapax::Event;
/// use hapax::consumer::{BatchHandled, Failed, LeasedBatchHandler, LeasedEvent};
/// use hapax::guard::Run;
/// use hapax::ledger::{Identity, Token};
///
/// struct Index { name: String }
///
/// impl LeasedBatchHandler for Index {
///     async fn handle(&self, batch: &[LeasedEvent]) -> BatchHandled {
///         let outcome = |item: &LeasedEvent| match item.event.payload.is_empty() {
///             true => Err(Failed::fatal(format!("nothing to put into {}", self.name))),
///             false => Ok(()),
///         };
///         Ok(batch.iter().map(outcome).collect())
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
/// let event = Event::of("order-17-paid")?; // without a payload
/// let run = Run::for_test(Identity::new(hapax::Scope::new("index")?, event.id.clone()), Token(1));
/// let index = Index { name: "orders".to_owned() };
/// let outcomes = index.handle(&[LeasedEvent::new(event, run)]).await.unwrap();
/// assert!(outcomes[0].is_err());
/// # Ok(()) }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler of leased batches",
    label = "expected `async fn(&[LeasedEvent]) -> BatchHandled`, or one of `&[(&LeasedEvent, Json<T>)]`",
    note = "its future must be `Send`: nothing like an `Rc` or a lock's guard may be kept across an `.await`",
    note = "state goes into a type of yours that implements `LeasedBatchHandler`"
)]
pub trait LeasedBatchHandler<Args = ()>: Send + Sync + 'static {
    /// Makes the effects of all events, and tells the outcome of each, in order.
    fn handle<'a>(&'a self, batch: &'a [LeasedEvent]) -> impl Future<Output = BatchHandled> + Send + 'a;
}

/// Makes an event's effect at most once: never twice, and never retried automatically.
///
/// Implemented for `async fn(&Event) -> Handled`, and with [`Json<T>`](Json) as a second argument.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an at-most-once handler",
    label = "expected `async fn(&Event) -> Handled`, or one with `Json<T>` as a second argument",
    note = "its future must be `Send`: nothing like an `Rc` or a lock's guard may be kept across an `.await`",
    note = "state goes into a type of yours that implements `AtMostOnceHandler`"
)]
pub trait AtMostOnceHandler<Args = ()>: Send + Sync + 'static {
    /// Makes the effect of one event.
    fn handle<'a>(&'a self, event: &'a Event) -> impl Future<Output = Handled> + Send + 'a;

    /// Limits how many runs of this handler may be in progress at once.
    fn permits(&self) -> Option<&dyn Permits> {
        None
    }
}

/// A function with borrowed arguments whose future is `Send`, which `AsyncFn` bounds cannot
/// express.
macro_rules! borrowing_fn {
    ($name:ident <$a:lifetime $(, $param:ident)*> ($($argument:ty),*)) => {
        borrowing_fn!($name<$a $(, $param)*>($($argument),*) -> Handled);
    };
    ($name:ident <$a:lifetime $(, $param:ident)*> ($($argument:ty),*) -> $output:ty) => {
        #[doc(hidden)]
        pub trait $name<$a $(, $param: $a)*>: Fn($($argument),*) -> Self::Future {
            /// The future it returns.
            type Future: Future<Output = $output> + Send + $a;
        }
        impl<$a $(, $param: $a)*, F, R> $name<$a $(, $param)*> for F
        where
            F: Fn($($argument),*) -> R,
            R: Future<Output = $output> + Send + $a,
        {
            type Future = R;
        }
    };
}

borrowing_fn!(TxFn<'a, Tx>(&'a mut Tx, &'a Event));
borrowing_fn!(TxDecodedFn<'a, Tx, A>(&'a mut Tx, &'a Event, A));
borrowing_fn!(TxBatchFn<'a, Tx>(&'a mut Tx, &'a [Event]));
borrowing_fn!(TxDecodedBatchFn<'a, Tx, A>(&'a mut Tx, &'a [(&'a Event, A)]));
borrowing_fn!(RunFn<'a>(&'a Event, &'a Run));
borrowing_fn!(RunBatchFn<'a>(&'a [LeasedEvent]) -> BatchHandled);
borrowing_fn!(RunDecodedBatchFn<'a, A>(&'a [(&'a LeasedEvent, A)]) -> BatchHandled);
borrowing_fn!(RunDecodedFn<'a, A>(&'a Event, &'a Run, A));
borrowing_fn!(EventFn<'a>(&'a Event));
borrowing_fn!(EventDecodedFn<'a, A>(&'a Event, A));

impl<Tx, F> TransactionalHandler<Tx, ByEvent> for F
where
    Tx: Send + 'static,
    F: for<'a> TxFn<'a, Tx> + Send + Sync + 'static,
{
    fn handle<'a>(&'a self, tx: &'a mut Tx, event: &'a Event) -> impl Future<Output = Handled> + Send + 'a {
        self(tx, event)
    }
}

impl<Tx, A, F> TransactionalHandler<Tx, Decoded<A>> for F
where
    Tx: Send + 'static,
    A: FromEvent,
    F: for<'a> TxDecodedFn<'a, Tx, A> + Send + Sync + 'static,
{
    async fn handle(&self, tx: &mut Tx, event: &Event) -> Handled {
        self(tx, event, A::from_event(event)?).await
    }
}

impl<Tx, F> TransactionalBatchHandler<Tx, ByEvent> for F
where
    Tx: Send + 'static,
    F: for<'a> TxBatchFn<'a, Tx> + Send + Sync + 'static,
{
    fn handle<'a>(
        &'a self,
        tx: &'a mut Tx,
        events: &'a [Event],
    ) -> impl Future<Output = Handled> + Send + 'a {
        self(tx, events)
    }
}

impl<Tx, A, F> TransactionalBatchHandler<Tx, Decoded<A>> for F
where
    Tx: Send + 'static,
    A: FromEvent + Sync,
    F: for<'a> TxDecodedBatchFn<'a, Tx, A> + Send + Sync + 'static,
{
    async fn handle(&self, tx: &mut Tx, events: &[Event]) -> Handled {
        self(tx, &decoded(events)?).await
    }
}

/// The payloads of a batch. One that does not decode is named, and the batch goes on without it. If there are several
/// they are found by halves: one by one, the rest would be claimed again for each of them.
fn decoded<A: FromEvent>(events: &[Event]) -> std::result::Result<Vec<(&Event, A)>, Failed> {
    let (mut all, mut failure) = (Vec::with_capacity(events.len()), None);
    for (at, event) in events.iter().enumerate() {
        match A::from_event(event) {
            Ok(payload) => all.push((event, payload)),
            Err(failed) if failure.is_some() => return Err(failed),
            Err(failed) => failure = Some(failed.at(at)),
        }
    }
    failure.map_or(Ok(all), Err)
}

impl<F: for<'a> RunFn<'a> + Send + Sync + 'static> LeasedHandler<ByEvent> for F {
    fn handle<'a>(&'a self, event: &'a Event, run: &'a Run) -> impl Future<Output = Handled> + Send + 'a {
        self(event, run)
    }
}

impl<A, F> LeasedHandler<Decoded<A>> for F
where
    A: FromEvent,
    F: for<'a> RunDecodedFn<'a, A> + Send + Sync + 'static,
{
    async fn handle(&self, event: &Event, run: &Run) -> Handled {
        self(event, run, A::from_event(event)?).await
    }
}

impl<F: for<'a> RunBatchFn<'a> + Send + Sync + 'static> LeasedBatchHandler<ByEvent> for F {
    fn handle<'a>(&'a self, batch: &'a [LeasedEvent]) -> impl Future<Output = BatchHandled> + Send + 'a {
        self(batch)
    }
}

impl<A, F> LeasedBatchHandler<Decoded<A>> for F
where
    A: FromEvent + Sync,
    F: for<'a> RunDecodedBatchFn<'a, A> + Send + Sync + 'static,
{
    async fn handle(&self, batch: &[LeasedEvent]) -> BatchHandled {
        let (mut decoded, mut failures) = (Vec::with_capacity(batch.len()), Vec::new());
        for (at, item) in batch.iter().enumerate() {
            match A::from_event(&item.event) {
                Ok(value) => decoded.push((item, value)),
                Err(failed) => failures.push((at, failed)),
            }
        }
        if decoded.is_empty() {
            return Ok(failures.into_iter().map(|(_, failed)| Err(failed)).collect());
        }
        let mut outcomes = match self(&decoded).await {
            Ok(outcomes) => outcomes,
            Err(failed) if failures.is_empty() => return Err(failed),
            Err(failed) => decoded.iter().map(|_| Err(failed.repeated())).collect(),
        };
        for (at, failed) in failures {
            // Beyond the end only if the handler returned too few; the worker sees that by their number.
            outcomes.insert(at.min(outcomes.len()), Err(failed));
        }
        Ok(outcomes)
    }
}

impl<F: for<'a> EventFn<'a> + Send + Sync + 'static> AtMostOnceHandler<ByEvent> for F {
    fn handle<'a>(&'a self, event: &'a Event) -> impl Future<Output = Handled> + Send + 'a {
        self(event)
    }
}

impl<A, F> AtMostOnceHandler<Decoded<A>> for F
where
    A: FromEvent,
    F: for<'a> EventDecodedFn<'a, A> + Send + Sync + 'static,
{
    async fn handle(&self, event: &Event) -> Handled {
        self(event, A::from_event(event)?).await
    }
}

/// Calls a per-event handler for each event of a batch.
struct PerEvent<H, Args>(H, PhantomData<fn() -> Args>);

#[async_trait]
impl<L, H, Args> BatchHandler<L> for PerEvent<H, Args>
where
    L: TransactionalLedger,
    H: TransactionalHandler<L::Transaction, Args>,
    Args: 'static,
{
    async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled {
        for (at, event) in events.iter().enumerate() {
            self.0.handle(tx, event).await.map_err(|failed| failed.at(at))?;
        }
        Ok(())
    }
}

/// Calls a batch handler with the whole batch.
struct PerBatch<H, Args>(H, PhantomData<fn() -> Args>);

#[async_trait]
impl<L, H, Args> BatchHandler<L> for PerBatch<H, Args>
where
    L: TransactionalLedger,
    H: TransactionalBatchHandler<L::Transaction, Args>,
    Args: 'static,
{
    async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled {
        self.0.handle(tx, events).await
    }
}

impl<L: TransactionalLedger> Consumer<L> {
    /// Consumes until it is stopped, with each event's effects in the transaction of its claim:
    /// **exactly once**, through any crash, rebalance or lost acknowledgement. Many events share
    /// one transaction.
    ///
    /// Gives up: effects anywhere but in the ledger's database. Anything a handler does outside its
    /// transaction is repeated when it runs again.
    ///
    /// ```no_run
    /// # #[cfg(feature = "postgres")] pub mod example {
    /// use hapax::backend::postgres::{PgLedger, PgTx, sqlx};
    /// use hapax::consumer::{Consumer, Handled};
    /// use hapax::Event;
    ///
    /// async fn paid(tx: &mut PgTx, event: &Event) -> Handled {
    ///     sqlx::query("insert into paid (id) values ($1)").bind(event.id.as_str()).execute(&mut **tx).await?;
    ///     Ok(())
    /// }
    ///
    /// # async fn run(consumer: Consumer<PgLedger>) -> hapax::Result<()> {
    /// consumer.transactional(paid).await?;
    /// # Ok(()) }
    /// # }
    /// ```
    pub async fn transactional<Args: 'static>(
        self,
        handler: impl TransactionalHandler<L::Transaction, Args>,
    ) -> Result<Counts> {
        let handler = PerEvent(handler, PhantomData);
        self.run(|context, ledger| Arc::new(TransactionalWorker::new(context, ledger.clone(), handler))).await
    }

    /// Like [`transactional`](Self::transactional), with a handler for whole batches.
    pub async fn transactional_batch<Args: 'static>(
        self,
        handler: impl TransactionalBatchHandler<L::Transaction, Args>,
    ) -> Result<Counts> {
        let handler = PerBatch(handler, PhantomData);
        self.run(|context, ledger| Arc::new(TransactionalWorker::new(context, ledger.clone(), handler))).await
    }
}

impl<L: Ledger> Consumer<L> {
    /// Consumes until it is stopped, with each event under a lease: **at least once, one live lease
    /// at a time**, and exactly once if the sink dedups on the key that the handler gets.
    ///
    /// Gives up: a crash after the effect and before it is settled runs the handler again.
    pub async fn leased<Args: 'static>(self, handler: impl LeasedHandler<Args>) -> Result<Counts> {
        self.run(|context, _| Arc::new(LeasedWorker::new(context, handler))).await
    }

    /// Like [`leased`](Self::leased), with a handler for many events at a time: each has its own lease
    /// and its own outcome, so one that fails is retried or dead by itself.
    ///
    /// Gives up: a crash after the effects and before they are settled runs the handler again for all
    /// that were not settled.
    ///
    /// ```no_run
    /// use hapax::consumer::{BatchHandled, Consumer, LeasedEvent};
    ///
    /// async fn send_all(batch: &[LeasedEvent]) -> BatchHandled {
    ///     for item in batch {
    ///         println!("{} as {}", item.event.id, item.run.key());
    ///     }
    ///     Ok(batch.iter().map(|_| Ok(())).collect())
    /// }
    ///
    /// # async fn run<L: hapax::Ledger>(consumer: Consumer<L>) -> hapax::Result<()> {
    /// consumer.leased_batch(send_all).await?;
    /// # Ok(()) }
    /// ```
    pub async fn leased_batch<Args: 'static>(self, handler: impl LeasedBatchHandler<Args>) -> Result<Counts> {
        self.run(|context, _| Arc::new(LeasedBatchWorker::new(context, handler))).await
    }

    /// Consumes until it is stopped, each event **at most once**: never twice, never retried
    /// automatically.
    ///
    /// Gives up: an event that failed, timed out or crashed after its claim is `lost`. It is listed
    /// and counted, but not run again automatically.
    pub async fn at_most_once<Args: 'static>(self, handler: impl AtMostOnceHandler<Args>) -> Result<Counts> {
        self.run(|context, _| Arc::new(OnceWorker::new(context, handler))).await
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn t550_one_payload_that_does_not_decode_is_named_and_several_are_not() {
        let batch = |payloads: &[&'static str]| -> Vec<Event> {
            payloads.iter().map(|payload| Event::of("e").unwrap().payload(*payload)).collect()
        };
        let place = |payloads: &[&'static str]| decoded::<Json<i64>>(&batch(payloads)).unwrap_err().place();
        assert_eq!(place(&["1", "x", "3"]), Some(1));
        assert_eq!(place(&["1", "x", "3", "y"]), None);
        assert_eq!(decoded::<Json<i64>>(&batch(&["1", "2"])).unwrap().len(), 2);
    }
}
