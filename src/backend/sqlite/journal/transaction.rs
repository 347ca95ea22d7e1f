//! Appending in the caller's own transaction: the transactional outbox.

use rusqlite::{Connection, Transaction};

use super::{SqliteJournal, append, schema};
use crate::backend::sqlite::connect::must_be_durable;
use crate::backend::sqlite::fault;
use crate::backend::sqlite::transaction::SqliteTransaction;
use crate::error::{Error, Result};
use crate::journal::{Append, Appended};

/// A transaction that events can be appended in: rusqlite's own, or the one that the consumer hands to a transactional
/// handler.
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
    /// Appends in the caller's own transaction, on the caller's own connection to the journal's file: events and business
    /// rows are committed, or rolled back, as one. A transactional handler of the consumer passes its own transaction, if the
    /// ledger is in the same file.
    ///
    /// The rows must be in that file too. A connection whose main database is another file is refused
    /// ([`Error::Unsupported`]), because SQLite does not commit to two files at once in WAL mode; so do not put the rows into
    /// an attached file.
    ///
    /// Begin the transaction with [`Immediate`](rusqlite::TransactionBehavior::Immediate) behaviour. One that has read
    /// before it writes may find that another connection has written meanwhile: that is [`Error::Contended`], and the
    /// whole transaction is to be done again. An append that is refused (`Conflict`, `Mismatch`, `Invalid`) has changed
    /// nothing, and the transaction may go on; after any other error roll back.
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
                return Err(if schema::is_there(conn)? {
                    fault::meaning("appending in the caller's transaction", error)
                } else {
                    self.elsewhere()
                });
            }
        };
        append::append(conn, append, &self.0.settings, self.0.clock.now(), &mut last)?
    }

    fn elsewhere(&self) -> Error {
        Error::Unsupported(format!(
            "this transaction's main database is not the journal's file ({}), so events and rows would not be committed as \
             one; open that file, and keep the rows in it",
            self.0.path.display()
        ))
    }

    /// Limits the file's size in pages, to see what a full disk does.
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
