//! Appends in the caller's transaction: the transactional outbox.

use rusqlite::{Connection, Transaction};

use super::{SqliteJournal, append, codec, schema};
use crate::backend::sqlite::connect::must_be_durable;
use crate::backend::sqlite::fault;
use crate::backend::sqlite::transaction::SqliteTransaction;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::id::{Aggregate, Tenant};
use crate::journal::{Append, Appended};

/// A transaction in which events can be appended: rusqlite's own, or the one that a transactional
/// handler gets from the consumer.
pub trait InTransaction: sealed::Sealed {
    /// Its connection.
    #[doc(hidden)]
    fn connection(&self) -> &Connection;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for Transaction<'_> {}
impl InTransaction for Transaction<'_> {
    fn connection(&self) -> &Connection {
        self
    }
}

impl sealed::Sealed for SqliteTransaction {}
impl InTransaction for SqliteTransaction {
    fn connection(&self) -> &Connection {
        self
    }
}

impl SqliteJournal {
    /// Appends in the caller's transaction, on the caller's connection to the journal's file.
    /// Events and business rows commit or roll back together. A transactional handler of the
    /// consumer can pass its own transaction if the ledger is in the same file.
    ///
    /// The rows must be in that file too. A connection whose main database is another file is
    /// refused ([`Error::Unsupported`]), because in WAL mode SQLite does not commit to two files
    /// atomically; so do not put the rows into an attached file.
    ///
    /// Begin the transaction with [`Immediate`](rusqlite::TransactionBehavior::Immediate)
    /// behaviour. A transaction that reads before it writes may find that another connection has
    /// written meanwhile: it gets [`Error::Contended`], and must be repeated as a whole. A refused
    /// append (`Conflict`, `Mismatch`, `Invalid`) has changed nothing, and the transaction may go
    /// on; after any other error, roll back.
    ///
    /// ```
    /// use hapax::backend::sqlite::SqliteJournal;
    /// use hapax::journal::{Append, Expected, JournalSettings};
    /// use hapax::{Aggregate, Event, EventId};
    /// use rusqlite::{Connection, TransactionBehavior};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let file = dir.path().join("orders.db");
    /// let journal = SqliteJournal::open(&file, JournalSettings::default())?;
    /// let mut conn = Connection::open(&file)?;
    /// conn.execute("CREATE TABLE orders (id TEXT, state TEXT)", [])?;
    ///
    /// let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    /// tx.execute("INSERT INTO orders VALUES ('order-17', 'paid')", [])?;
    /// let paid = Event::new(EventId::new("order-17-paid")?).payload("7 EUR");
    /// let placed = journal.append_in(&tx, &Append::new(Aggregate::new("order-17")?, Expected::New, [paid]))?;
    /// tx.commit()?;
    /// assert_eq!(placed.last_seq(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn append_in(&self, tx: &impl InTransaction, append: &Append) -> Result<Appended> {
        let conn = tx.connection();
        if conn.is_autocommit() {
            return Err(Error::Unsupported(
                "the transaction is over already (a full disk, for one, undoes it), so events and rows would not be committed \
                 as one; begin another"
                    .into(),
            ));
        }
        must_be_durable(conn)?;
        let mut last = match append::enter(conn, &self.0.id) {
            Ok(Some(last)) => last,
            Ok(None) => return Err(self.elsewhere()),
            Err(error) => {
                return Err(if schema::PART.is_there(conn)? {
                    fault::meaning("appending in the caller's transaction", error)
                } else {
                    self.elsewhere()
                });
            }
        };
        append::append(conn, append, &self.0.settings, self.0.clock.now(), &mut last)?
    }

    /// The seq of the last event of an aggregate, as a transaction sees it.
    pub(crate) fn head_in(
        &self,
        conn: &Connection,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
    ) -> Result<u64> {
        if schema::PART.is_there(conn)? {
            codec::head(conn, tenant, aggregate)
        } else {
            Err(self.elsewhere())
        }
    }

    /// The clock that its events are dated by.
    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.0.clock
    }

    fn elsewhere(&self) -> Error {
        Error::Unsupported(format!(
            "this transaction's main database is not the journal's file ({}), so events and rows would not be committed as \
             one; open that file, and keep the rows in it",
            self.0.path.display()
        ))
    }

    /// Limits the file's size in pages, to test a full disk.
    #[cfg(feature = "testing")]
    pub async fn limit_pages(&self, pages: u32) -> Result<()> {
        use crate::backend::sqlite::fault::Doing as _;
        let limit = move |journal_tx: &mut super::writer::JournalTx<'_>| {
            let sql = format!("PRAGMA main.max_page_count = {pages}");
            journal_tx.conn.query_row(&sql, [], |_| Ok(())).doing("limiting the file")
        };
        crate::backend::sqlite::answer(self.0.write.send(limit)).await
    }
}
