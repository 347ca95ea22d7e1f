//! The records of a module.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::Client;
use super::analytics::Analytics;
use super::error::{Error, Result};
use super::exchange::{Call, Reply};
use super::prepared::{Operation, PreparedWrite, check_module};
use crate::clock::Time;
use crate::id::Visible;

/// The content of a record: JSON, as the server wrote it. Its numbers have all their digits.
///
/// ```no_run
/// # async fn run(orders: hapax::client::Data, id: hapax::client::Uuid) -> hapax::client::Result<()> {
/// let record = orders.get(id).await?;
/// let value: serde_json::Value = record.payload.parse()?; // a number beyond f64 is rounded
/// let text: &str = record.payload.as_str(); // {"amount":12345678901234567890.12}
/// orders.update(id, record.seq, &record.payload).await?; // to the digit
/// # Ok(()) }
/// ```
#[derive(Clone, Serialize)]
#[serde(transparent)]
pub struct Payload(Box<RawValue>);

impl Payload {
    /// The JSON text.
    pub fn as_str(&self) -> &str {
        self.0.get()
    }

    /// The content as your type.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(self.as_str())
            .map_err(|error| Error::invalid("the payload", format!("it does not fit the type: {error}")))
    }
}

/// The text, as it is.
impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Equal texts.
impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

/// Equal values: the order of fields does not count.
impl PartialEq<Value> for Payload {
    fn eq(&self, other: &Value) -> bool {
        serde_json::from_str::<Value>(self.as_str()).is_ok_and(|value| value == *other)
    }
}

/// A record as the server has it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Record {
    /// Its id.
    pub id: Uuid,
    /// Its module.
    pub module: String,
    /// Its version: every write raises it.
    pub seq: u64,
    /// Its content; of a deleted record, what the server tells of it.
    pub payload: Payload,
    /// When it was created.
    pub created_at: Option<Time>,
    /// When it was last written.
    pub updated_at: Option<Time>,
}

impl Record {
    /// The record, if it is the one that was asked for: of this module, with this id. Anything else is
    /// somebody else's answer.
    fn is(self, module: &str, id: Option<Uuid>) -> std::result::Result<Self, String> {
        if self.module == module && id.is_none_or(|id| id == self.id) {
            return Ok(self);
        }
        Err(format!("the answer is about record {} of {}", self.id, Visible(&self.module)))
    }

    /// Names the write that left it so, for readers that wait until it is visible
    /// ([`Analytics::after_token`]): `orders/ID@SEQ`.
    pub fn read_token(&self) -> String {
        format!("{}/{}@{}", self.module, self.id, self.seq)
    }

    /// Its content as your type.
    pub fn payload_as<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(self.payload.as_str()).map_err(|error| {
            Error::invalid("the payload", format!("record {} does not fit the type: {error}", self.id))
        })
    }
}

/// The answer to a write.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Written {
    /// The record as the write left it. Others may have written since.
    pub record: Record,
    /// Whether the write was done before: an earlier attempt got through, or the same prepared write
    /// was sent before.
    pub replayed: bool,
}

/// Some records, ordered by id.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Page {
    /// The records.
    pub records: Vec<Record>,
    /// Where the next page begins; `None`: this is the last one.
    pub next: Option<Uuid>,
}

#[derive(Deserialize)]
struct RecordBody {
    id: Uuid,
    module: String,
    seq: u64,
    /// `None` if there is none, and if it is null.
    #[serde(default)]
    payload: Option<Box<RawValue>>,
    #[serde(default)]
    created_at: Option<String>,
    #[serde(default)]
    updated_at: Option<String>,
}

impl RecordBody {
    fn record(self) -> std::result::Result<Record, String> {
        let time = |text: Option<String>| text.map(|text| Time::parse(&text)).transpose();
        Ok(Record {
            created_at: time(self.created_at).map_err(|error| error.to_string())?,
            updated_at: time(self.updated_at).map_err(|error| error.to_string())?,
            id: self.id,
            module: self.module,
            seq: self.seq,
            payload: Payload(self.payload.unwrap_or_else(|| RawValue::NULL.to_owned())),
        })
    }
}

#[derive(Deserialize)]
pub(super) struct PageBody {
    records: Vec<RecordBody>,
    next: Option<Uuid>,
}

impl PageBody {
    /// The page behind `after`, if its records are the module's.
    pub(super) fn page(self, module: &str, after: Option<Uuid>) -> std::result::Result<Page, String> {
        // A cursor that does not move would go round for ever.
        if self.next.is_some() && self.next <= after {
            return Err("the server's cursor does not move".to_owned());
        }
        let record = |body: RecordBody| body.record()?.is(module, None);
        let records = self.records.into_iter().map(record).collect::<std::result::Result<_, _>>()?;
        Ok(Page { records, next: self.next })
    }
}

pub(super) fn check_limit(limit: u32) -> Result<()> {
    if (1..=1000).contains(&limit) {
        return Ok(());
    }
    Err(Error::invalid("the limit", format!("{limit} is not in 1 to 1000")))
}

/// Reads a success as JSON; otherwise it is not an answer of the server.
pub(super) fn parse<T: DeserializeOwned>(reply: &Reply) -> std::result::Result<T, String> {
    serde_json::from_slice(&reply.body)
        .map_err(|error| format!("the answer is not what the server answers to this ({error})"))
}

/// The segments of the path of a module's records.
pub(super) fn records_path(module: &str) -> Vec<String> {
    ["v1", "modules", module, "records"].map(str::to_owned).to_vec()
}

/// The body of a write. The order of its fields is part of the bytes that the server compares.
#[derive(Serialize)]
struct WriteBody<P> {
    payload: P,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expected_seq: Option<u64>,
}

/// The records of one module. See [`Client::data`].
#[derive(Debug, Clone)]
pub struct Data {
    client: Client,
    module: String,
}

impl Data {
    pub(super) fn new(client: Client, module: String) -> Self {
        Data { client, module }
    }

    /// Creates a record. Retries by itself. If it fails without an answer, the error has the write with
    /// its key ([`Error::prepared`]): send that again.
    ///
    /// If you drop the future, as a timeout around it does, or your process ends, the key is gone, and
    /// nobody can find out whether the record was created. Then use
    /// [`prepare_create`](Data::prepare_create), and send what you prepared again; the deadline belongs
    /// into [`ClientSettings`](super::ClientSettings).
    pub async fn create(&self, payload: impl Serialize) -> Result<Written> {
        self.client.send(&self.prepare_create(payload)?).await
    }

    /// Creates a record with an id that you choose. Retries and fails like [`create`](Data::create).
    pub async fn create_as(&self, id: Uuid, payload: impl Serialize) -> Result<Written> {
        self.client.send(&self.prepare_create_as(id, payload)?).await
    }

    /// Replaces the content of a record whose seq is `expected_seq`; otherwise it is a
    /// [`Conflict`](Error::Conflict). Retries and fails like [`create`](Data::create).
    pub async fn update(&self, id: Uuid, expected_seq: u64, payload: impl Serialize) -> Result<Written> {
        self.client.send(&self.prepare_update(id, expected_seq, payload)?).await
    }

    /// Deletes a record whose seq is `expected_seq`; otherwise it is a [`Conflict`](Error::Conflict).
    /// Retries and fails like [`create`](Data::create).
    pub async fn delete(&self, id: Uuid, expected_seq: u64) -> Result<Written> {
        self.client.send(&self.prepare_delete(id, expected_seq)?).await
    }

    /// A create with its key, not sent yet.
    pub fn prepare_create(&self, payload: impl Serialize) -> Result<PreparedWrite> {
        self.prepare(Operation::Create, Some(&WriteBody { payload, id: None, expected_seq: None }))
    }

    /// A create with an id that you choose, with its key, not sent yet.
    pub fn prepare_create_as(&self, id: Uuid, payload: impl Serialize) -> Result<PreparedWrite> {
        self.prepare(Operation::Create, Some(&WriteBody { payload, id: Some(id), expected_seq: None }))
    }

    /// An update with its key, not sent yet.
    pub fn prepare_update(
        &self,
        id: Uuid,
        expected_seq: u64,
        payload: impl Serialize,
    ) -> Result<PreparedWrite> {
        let body = WriteBody { payload, id: None, expected_seq: Some(expected_seq) };
        self.prepare(Operation::Update { id }, Some(&body))
    }

    /// A delete with its key, not sent yet.
    pub fn prepare_delete(&self, id: Uuid, expected_seq: u64) -> Result<PreparedWrite> {
        self.prepare(Operation::Delete { id, expected_seq }, None::<&WriteBody<()>>)
    }

    fn prepare<P: Serialize>(
        &self,
        operation: Operation,
        body: Option<&WriteBody<P>>,
    ) -> Result<PreparedWrite> {
        let body = body.map(serde_json::to_string).transpose();
        let body = body.map_err(|error| Error::invalid("the payload", format!("it is not JSON: {error}")))?;
        let (bytes, limit) = (body.as_ref().map_or(0, String::len), self.client.settings().body_bytes_max);
        if bytes > limit {
            let problem = format!("the request would have {bytes} bytes; the limit is {limit}");
            return Err(Error::invalid("the payload", problem));
        }
        let (server, tenant) = (self.client.server().to_owned(), self.client.tenant_name().cloned());
        PreparedWrite::new(server, &self.module, tenant, operation, body)
    }

    /// Reads a record.
    pub async fn get(&self, id: Uuid) -> Result<Record> {
        check_module(&self.module)?;
        let mut path = records_path(&self.module);
        path.push(id.to_string());
        let what = format!("reading record {id} of {}", self.module);
        let call = Call::question(what, self.client.url(&path, None));
        self.client
            .call(&call, |reply| parse::<RecordBody>(reply)?.record()?.is(&self.module, Some(id)))
            .await
    }

    /// Reads up to `limit` records (1 to 1000) in the order of their ids, from behind `after` on.
    pub async fn list(&self, after: Option<Uuid>, limit: u32) -> Result<Page> {
        check_module(&self.module)?;
        check_limit(limit)?;
        let from = after.map_or_else(String::new, |after| format!("after={after}&"));
        let url = self.client.url(&records_path(&self.module), Some(&format!("{from}limit={limit}")));
        let call = Call::question(format!("listing records of {}", self.module), url);
        self.client.call(&call, |reply| parse::<PageBody>(reply)?.page(&self.module, after)).await
    }

    /// Questions to the read model of the module: counts, sums, and records with the time up to which the
    /// answer is complete. Nothing is asked yet.
    pub fn analytics(&self) -> Analytics {
        Analytics::new(self.client.clone(), self.module.clone())
    }

    /// All records in the order of their ids, read page by page. It is not a snapshot: what is
    /// written meanwhile may or may not be seen.
    pub fn records(&self) -> Records {
        Records { data: self.clone(), page: VecDeque::new(), next: None, ended: false, limit: 100 }
    }
}

/// The records of a module, one after the other. See [`Data::records`].
#[derive(Debug)]
pub struct Records {
    data: Data,
    page: VecDeque<Record>,
    next: Option<Uuid>,
    ended: bool,
    limit: u32,
}

impl Records {
    /// How many records to read at once; 100 by default. Fewer if they are too large together.
    #[must_use]
    pub fn page_max(mut self, records: u32) -> Self {
        self.limit = records;
        self
    }

    /// The next record; `None` after the last. After an error, call it again to go on where it was.
    pub async fn next(&mut self) -> Result<Option<Record>> {
        while self.page.is_empty() && !self.ended {
            let page = match self.data.list(self.next, self.limit).await {
                // The client reads no answer of that size; half of the records may fit.
                Err(error) if error.is_too_large() && self.limit > 1 => {
                    self.limit /= 2;
                    continue;
                }
                page => page?,
            };
            self.ended = page.next.is_none();
            self.next = page.next;
            self.page = page.records.into();
        }
        Ok(self.page.pop_front())
    }
}

impl Client {
    /// Sends a prepared write until there is an answer, within the deadline. It takes effect once,
    /// however often it is sent, also if this future is dropped: send it again then. Refuses a write
    /// that was prepared for another server or tenant, which has not seen the key and would run the
    /// write again.
    pub async fn send(&self, write: &PreparedWrite) -> Result<Written> {
        if let Some(server) = write.server()
            && server != self.server()
        {
            let problem = format!(
                "it was prepared for {server}, and this is a client of {}; if both are one server, use send_anywhere",
                self.server()
            );
            return Err(Error::invalid("the prepared write", problem));
        }
        self.send_anywhere(write).await
    }

    /// Like [`send`](Client::send), to a server with another URL than the write was prepared for.
    /// Gives up: the check that it is the same server. Use it for one that has moved with its data, or
    /// that is reached another way. Another server has not seen the key, and would run the write again.
    pub async fn send_anywhere(&self, write: &PreparedWrite) -> Result<Written> {
        if write.tenant() != self.tenant_name() {
            let name = |tenant: Option<&crate::id::Tenant>| {
                tenant
                    .map_or_else(|| "no tenant".to_owned(), |tenant| format!("tenant {:?}", tenant.as_str()))
            };
            let problem = format!(
                "it was prepared for {}, and this client names {}",
                name(write.tenant()),
                name(self.tenant_name())
            );
            return Err(Error::invalid("the prepared write", problem));
        }
        let (path, query) = write.target();
        let call = Call {
            what: format!("{} {}", write.method(), path.join("/")),
            method: write.method(),
            url: self.url(&path, query.as_deref()),
            key: Some(write.key()),
            body: write.body().map(|body| bytes::Bytes::copy_from_slice(body.as_bytes())),
            in_doubt: write.maybe_sent(),
            wait: Duration::ZERO,
        };
        let read = |reply: &Reply| {
            let record = parse::<RecordBody>(reply)?.record()?.is(write.module(), write.record_id())?;
            Ok(Written { record, replayed: reply.replayed })
        };
        let sending = write.sending();
        let answer = self.call(&call, read).await.map_err(|error| error.about(write));
        sending.ended(answer.as_ref().map_or_else(Error::in_doubt, |_| true));
        answer
    }
}
