//! The transaction of a request: opened by the layer, taken by the handler, ended by the layer.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use axum::{
    extract::FromRequestParts,
    http::request::Parts,
    response::{IntoResponse as _, Response},
};

#[cfg(any(feature = "postgres", feature = "sqlite"))]
use super::problem::Problem;
use crate::error::Result;
use crate::keyed::{Answer, Begin, Begun, KeyLease, Keys};

/// Keys that can commit with the rows of their database.
pub trait TransactionalKeys: Keys {
    #[doc(hidden)]
    fn transactions(&self) -> Arc<dyn Transactions>;
}

/// Opens the transactions of requests.
#[async_trait]
pub trait Transactions: Send + Sync {
    #[doc(hidden)]
    async fn open(&self, begin: &Begin) -> Result<Result<Box<dyn OpenRequest>, Begun>>;
}

/// A request that runs in a transaction. Dropping it rolls back.
#[async_trait]
pub trait OpenRequest: Send {
    #[doc(hidden)]
    fn lease(&self) -> &KeyLease;
    /// False: the acknowledgement was lost, and nothing was committed. `within` is how long an answer
    /// of the store is waited for; then it counts as lost.
    #[doc(hidden)]
    async fn commit(self: Box<Self>, answer: &Answer, undo: bool, within: Duration) -> Result<bool>;
    #[doc(hidden)]
    async fn roll_back(self: Box<Self>, within: Duration) -> Result<()>;
    #[doc(hidden)]
    fn as_any(&self) -> &dyn Any;
    #[doc(hidden)]
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// On SQLite a transaction holds the file's only writer, so it may not take longer than this.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
const SQLITE_MAX: Duration = Duration::from_secs(5);

#[cfg(feature = "postgres")]
mod postgres {
    use super::{
        Answer, Any, Arc, Begin, Begun, Duration, KeyLease, OpenRequest, Result, Transactions, async_trait,
    };
    use crate::backend::postgres::PgKeys;
    use crate::backend::postgres::keys::PgOpenKey;

    impl super::TransactionalKeys for PgKeys {
        fn transactions(&self) -> Arc<dyn Transactions> {
            Arc::new(self.clone())
        }
    }

    #[async_trait]
    impl Transactions for PgKeys {
        async fn open(&self, begin: &Begin) -> Result<Result<Box<dyn OpenRequest>, Begun>> {
            let opened = PgKeys::open(self, begin).await?;
            Ok(opened.map(|open| -> Box<dyn OpenRequest> { Box::new(open) }))
        }
    }

    #[async_trait]
    impl OpenRequest for PgOpenKey {
        fn lease(&self) -> &KeyLease {
            &self.lease
        }

        async fn commit(self: Box<Self>, answer: &Answer, undo: bool, within: Duration) -> Result<bool> {
            PgOpenKey::commit(*self, answer, undo, within).await
        }

        async fn roll_back(self: Box<Self>, within: Duration) -> Result<()> {
            PgOpenKey::roll_back(*self, within).await
        }

        fn as_any(&self) -> &dyn Any {
            self
        }

        fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
            self
        }
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use super::{
        Answer, Any, Arc, Begin, Begun, Duration, KeyLease, OpenRequest, Result, SQLITE_MAX, Transactions,
        async_trait,
    };
    use crate::backend::sqlite::SqliteKeys;
    use crate::backend::sqlite::keys::SqliteOpenKey;
    use crate::error::Error;

    impl super::TransactionalKeys for SqliteKeys {
        fn transactions(&self) -> Arc<dyn Transactions> {
            Arc::new(self.clone())
        }
    }

    #[async_trait]
    impl Transactions for SqliteKeys {
        async fn open(&self, begin: &Begin) -> Result<Result<Box<dyn OpenRequest>, Begun>> {
            let begin = Begin { lease: begin.lease.min(SQLITE_MAX), ..begin.clone() };
            let opened = self.open_key(&begin).await?;
            Ok(opened.map(|open| -> Box<dyn OpenRequest> { Box::new(open) }))
        }
    }

    #[async_trait]
    impl OpenRequest for SqliteOpenKey {
        fn lease(&self) -> &KeyLease {
            &self.lease
        }

        async fn commit(self: Box<Self>, answer: &Answer, undo: bool, within: Duration) -> Result<bool> {
            let commit = SqliteOpenKey::commit(*self, answer, undo);
            let late = |late| Error::unavailable("committing a request", late);
            tokio::time::timeout(within, commit).await.map_err(late)?.map(|()| true)
        }

        async fn roll_back(self: Box<Self>, _: Duration) -> Result<()> {
            drop(self); // its thread rolls back
            Ok(())
        }

        fn as_any(&self) -> &dyn Any {
            self
        }

        fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
            self
        }
    }
}

/// Where the layer leaves the transaction for the handler. Extensions of requests may be cloned; all
/// clones have the same place.
#[derive(Clone)]
pub(super) struct Slot(Arc<Mutex<Place>>);

struct Place {
    open: Option<Box<dyn OpenRequest>>,
    undo: bool,
    /// A handler has taken the transaction. It is taken once: a second handler (a middleware that tries
    /// again) would add its writes to those of the first.
    taken: bool,
    /// The handler has answered: what comes back now is rolled back.
    closed: bool,
}

/// What a handler leaves behind.
pub(super) struct Closed {
    pub(super) open: Box<dyn OpenRequest>,
    /// Whether to undo its work.
    pub(super) undo: bool,
    /// Whether it has taken the transaction.
    pub(super) taken: bool,
}

impl Slot {
    pub(super) fn new(open: Box<dyn OpenRequest>) -> Self {
        Slot(Arc::new(Mutex::new(Place { open: Some(open), undo: false, taken: false, closed: false })))
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the transaction back from the handler. `None`: it has answered and still uses it.
    pub(super) fn close(&self) -> Option<Closed> {
        let mut place = self.place();
        place.closed = true;
        let Place { undo, taken, .. } = *place;
        place.open.take().map(|open| Closed { open, undo, taken })
    }
}

/// What a handler holds of its transaction.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
struct Taken<T: OpenRequest + 'static> {
    slot: Slot,
    /// Present until it is returned.
    open: Option<Box<T>>,
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<T: OpenRequest + 'static> Taken<T> {
    #[allow(clippy::result_large_err)] // axum rejects with responses
    fn of(parts: &Parts) -> Result<Self, Response> {
        let slot = parts.extensions.get::<Slot>().cloned();
        let slot = slot.ok_or_else(|| Problem::no_transaction().into_response())?;
        let mut place = slot.place();
        let open = place.open.take().ok_or_else(|| Problem::in_use().into_response())?;
        if place.taken || !open.as_any().is::<T>() {
            let problem = if place.taken { Problem::taken_before() } else { Problem::no_transaction() };
            place.open = Some(open);
            return Err(problem.into_response());
        }
        place.taken = true;
        drop(place);
        Ok(Taken { slot, open: open.into_any().downcast().ok() })
    }

    fn rollback(self) {
        self.slot.place().undo = true;
    }

    #[allow(clippy::expect_used)] // it is there until it is dropped
    fn open(&self) -> &T {
        self.open.as_ref().expect("the transaction is present until it is returned")
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl<T: OpenRequest + 'static> Drop for Taken<T> {
    fn drop(&mut self) {
        let mut place = self.slot.place();
        if !place.closed
            && let Some(open) = self.open.take()
        {
            place.open = Some(open);
        }
    }
}

/// The transaction of a keyed request in PostgreSQL: an extractor for handlers behind a
/// [transactional](super::KeyedLayer::transactional) layer. It dereferences to sqlx's transaction; run
/// statements on `&mut **tx`, and pass `&mut tx` to
/// [`append_in`](crate::backend::postgres::PgJournal::append_in) and the like.
///
/// The layer commits when the handler has answered. The handler gives it back by dropping it, so it
/// must not move it into a task that outlives the answer. It can be taken once: a middleware inside the
/// layer that tries again gets 500 `transaction-in-use`, because the writes of both tries would be
/// committed. Let clients try again, or put such a middleware outside of the layer.
#[cfg(feature = "postgres")]
pub struct KeyedTx(Taken<crate::backend::postgres::keys::PgOpenKey>);

#[cfg(feature = "postgres")]
impl KeyedTx {
    /// Undoes the writes of this request, whatever it answers. The answer is kept as it would be
    /// otherwise.
    pub fn rollback(self) {
        self.0.rollback();
    }
}

#[cfg(feature = "postgres")]
impl std::fmt::Debug for KeyedTx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyedTx")
    }
}

#[cfg(feature = "postgres")]
impl std::ops::Deref for KeyedTx {
    type Target = crate::backend::postgres::PgTx;

    fn deref(&self) -> &Self::Target {
        &self.0.open().tx
    }
}

#[cfg(feature = "postgres")]
impl std::ops::DerefMut for KeyedTx {
    #[allow(clippy::expect_used)] // it is there until it is dropped
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0.open.as_mut().expect("the transaction is present until it is returned").tx
    }
}

#[cfg(feature = "postgres")]
impl<S: Sync> FromRequestParts<S> for KeyedTx {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        Taken::of(parts).map(KeyedTx)
    }
}

/// The transaction of a keyed request in SQLite: an extractor for handlers behind a
/// [transactional](super::KeyedLayer::transactional) layer.
///
/// It holds the file's only writer: the transaction is rolled back after 5 seconds, or after the
/// layer's timeout if that is shorter. Like `KeyedTx` it can be taken once.
#[cfg(feature = "sqlite")]
pub struct KeyedSqlite(Taken<crate::backend::sqlite::keys::SqliteOpenKey>);

#[cfg(feature = "sqlite")]
impl KeyedSqlite {
    /// Runs a function in the transaction, on a thread that may block. [`Error::Contended`]: the
    /// transaction took too long, and was rolled back.
    ///
    /// A statement is interrupted at the limit; anything else that blocks is not. A function that waits
    /// for something without SQL (a lock, a call of another service) keeps the file's only writer until
    /// it returns, and all other writes wait. Do that before or after.
    ///
    /// A function that panics is [`Error::Refused`], and its transaction is rolled back. If this
    /// future is dropped before the function has begun, it does not begin; once it has begun it
    /// runs to its end, and its writes are committed if the handler's answer commits.
    ///
    /// [`Error::Contended`]: crate::Error::Contended
    /// [`Error::Refused`]: crate::Error::Refused
    pub async fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&crate::backend::sqlite::SqliteTransaction) -> T + Send + 'static,
    ) -> Result<T> {
        self.0.open().run(work).await
    }

    /// Undoes the writes of this request, whatever it answers. The answer is kept as it would be
    /// otherwise.
    pub fn rollback(self) {
        self.0.rollback();
    }
}

#[cfg(feature = "sqlite")]
impl std::fmt::Debug for KeyedSqlite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyedSqlite")
    }
}

#[cfg(feature = "sqlite")]
impl<S: Sync> FromRequestParts<S> for KeyedSqlite {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        Taken::of(parts).map(KeyedSqlite)
    }
}
