//! A write that can be sent any number of times and takes effect once.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::error::{Error, Result};
use crate::id::Tenant;
use crate::keyed::IdempotencyKey;
use crate::records::ModuleSlug;

/// The version of the stored form.
const VERSION: u32 = 1;

/// A write with its key, made before the first attempt.
///
/// It is a value: store it before you send it (serde), and after a crash send what you stored.
/// However often it is sent, it takes effect once, for as long as the server keeps keys (30 days
/// unless configured otherwise). The bytes of the request are part of it, because the server
/// compares them: a later version of your program or of this crate sends exactly the same.
///
/// Send it to the server and the tenant it was prepared for. Another server or tenant has not seen the
/// key and would run the write again. It therefore remembers both, and
/// [`send`](super::Client::send) refuses any other.
///
/// ```
/// use hapax::client::{Client, PreparedWrite};
/// let client = Client::new("http://127.0.0.1:7070")?;
/// let write = client.data("orders").prepare_create(serde_json::json!({"amount": 7}))?;
/// let stored = serde_json::to_string(&write).unwrap();
/// // … the process dies here, and the next one goes on:
/// let again: PreparedWrite = serde_json::from_str(&stored).unwrap();
/// assert_eq!(again.key(), write.key());
/// # Ok::<(), hapax::client::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct PreparedWrite {
    key: IdempotencyKey,
    tenant: Option<Tenant>,
    module: String,
    operation: Operation,
    /// The request's body, to the byte.
    body: Option<String>,
    /// The URL of the server it was prepared for; none if it was stored without.
    server: Option<String>,
    maybe_sent: MaybeSent,
}

/// Whether the write may have reached a server before. Clones are the same write and share it. It is
/// not stored: what comes back from a store may have been sent.
#[derive(Debug, Clone, Default)]
struct MaybeSent(Arc<AtomicBool>);

/// Two writes are equal whether or not they were sent.
impl PartialEq for MaybeSent {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for MaybeSent {}

impl MaybeSent {
    fn yes() -> Self {
        MaybeSent(Arc::new(AtomicBool::new(true)))
    }
}

/// A write on its way. Dropped before it has ended, because the caller gave up, it leaves the write in
/// doubt.
pub(super) struct Sending<'w> {
    write: &'w PreparedWrite,
    untouched: bool,
}

impl Sending<'_> {
    /// It has ended; `in_doubt` if the server may have done the write.
    pub(super) fn ended(mut self, in_doubt: bool) {
        self.untouched = !in_doubt;
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if !self.untouched {
            self.write.maybe_sent.0.store(true, Ordering::SeqCst);
        }
    }
}

/// What is written, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Create,
    Update { id: Uuid },
    Delete { id: Uuid, expected_seq: u64 },
}

/// The stored form. Every field is always there, so that formats without names can hold it too.
#[derive(Serialize, Deserialize)]
struct Wire {
    v: u32,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    key: String,
    #[serde(default)]
    tenant: Option<String>,
    #[serde(default)]
    module: String,
    #[serde(default)]
    id: Option<Uuid>,
    #[serde(default)]
    expected_seq: Option<u64>,
    #[serde(default)]
    body: Option<String>,
    #[serde(default)]
    server: Option<String>,
}

impl PreparedWrite {
    pub(super) fn new(
        server: String,
        module: &str,
        tenant: Option<Tenant>,
        operation: Operation,
        body: Option<String>,
    ) -> Result<Self> {
        check_module(module)?;
        Ok(PreparedWrite {
            key: IdempotencyKey::now_v7(),
            tenant,
            module: module.to_owned(),
            operation,
            body,
            server: Some(server),
            maybe_sent: MaybeSent::default(),
        })
    }

    /// The key: a UUIDv7, unless you chose another.
    pub fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// Replaces the key by one that you derive from what caused the write, such as the id of a form:
    /// two processes that prepare the same write then have one key. Both must prepare the same content:
    /// the server compares the JSON, in which the order of fields does not count and the digits of a
    /// number do.
    ///
    /// Gives up: the expiry of UUIDv7 keys (a retry after the server's retention is a new write), and
    /// knowing that nothing was sent: another process may have sent the key, so a write that fails is
    /// [in doubt](Error::in_doubt).
    #[must_use]
    pub fn with_key(mut self, key: IdempotencyKey) -> Self {
        self.key = key;
        self.maybe_sent = MaybeSent::yes();
        self
    }

    /// The module it writes to.
    pub fn module(&self) -> &str {
        &self.module
    }

    pub(super) fn tenant(&self) -> Option<&Tenant> {
        self.tenant.as_ref()
    }

    pub(super) fn server(&self) -> Option<&str> {
        self.server.as_deref()
    }

    /// Whether an attempt before may have reached the server.
    pub(super) fn maybe_sent(&self) -> bool {
        self.maybe_sent.0.load(Ordering::SeqCst)
    }

    pub(super) fn sending(&self) -> Sending<'_> {
        Sending { write: self, untouched: false }
    }

    /// The id of the record, unless the server chooses it.
    pub(super) fn record_id(&self) -> Option<Uuid> {
        match self.operation {
            Operation::Update { id } | Operation::Delete { id, .. } => Some(id),
            Operation::Create => {
                let fields: BTreeMap<String, &RawValue> = serde_json::from_str(self.body()?).ok()?;
                serde_json::from_str(fields.get("id")?.get()).ok()
            }
        }
    }

    pub(super) fn body(&self) -> Option<&str> {
        self.body.as_deref()
    }

    pub(super) fn method(&self) -> reqwest::Method {
        match self.operation {
            Operation::Create => reqwest::Method::POST,
            Operation::Update { .. } => reqwest::Method::PUT,
            Operation::Delete { .. } => reqwest::Method::DELETE,
        }
    }

    /// The segments of the path, and the query. They follow from the stored form and its version: the
    /// server compares them too.
    pub(super) fn target(&self) -> (Vec<String>, Option<String>) {
        let mut path = super::data::records_path(&self.module);
        match self.operation {
            Operation::Create => (path, None),
            Operation::Update { id } => {
                path.push(id.to_string());
                (path, None)
            }
            Operation::Delete { id, expected_seq } => {
                path.push(id.to_string());
                (path, Some(format!("expected_seq={expected_seq}")))
            }
        }
    }
}

/// Without the content, which may be nobody's business.
impl fmt::Debug for PreparedWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedWrite")
            .field("key", &self.key)
            .field("tenant", &self.tenant)
            .field("module", &self.module)
            .field("operation", &self.operation)
            .field("server", &self.server)
            .field("maybe_sent", &self.maybe_sent)
            .field("body_bytes", &self.body.as_ref().map(String::len))
            .finish()
    }
}

impl From<PreparedWrite> for Wire {
    fn from(write: PreparedWrite) -> Self {
        let (operation, id, expected_seq) = match write.operation {
            Operation::Create => ("create", None, None),
            Operation::Update { id } => ("update", Some(id), None),
            Operation::Delete { id, expected_seq } => ("delete", Some(id), Some(expected_seq)),
        };
        Wire {
            v: VERSION,
            operation: operation.to_owned(),
            key: write.key.as_str().to_owned(),
            tenant: write.tenant.map(|tenant| tenant.as_str().to_owned()),
            module: write.module,
            id,
            expected_seq,
            body: write.body,
            server: write.server,
        }
    }
}

impl TryFrom<Wire> for PreparedWrite {
    type Error = Error;

    fn try_from(wire: Wire) -> Result<Self> {
        if wire.v != VERSION {
            let problem = format!("its version is {}; this build reads version {VERSION}", wire.v);
            return Err(Error::invalid("the prepared write", problem));
        }
        let odd = |problem: &str| Error::invalid("the prepared write", problem);
        let operation = match (wire.operation.as_str(), wire.id, wire.expected_seq) {
            ("create", None, None) => Operation::Create,
            ("update", Some(id), None) => Operation::Update { id },
            ("delete", Some(id), Some(expected_seq)) => Operation::Delete { id, expected_seq },
            _ => {
                return Err(odd(
                    "it is not a create, an update with an id, or a delete with id and expected_seq",
                ));
            }
        };
        check_module(&wire.module)?;
        let deletes = matches!(operation, Operation::Delete { .. });
        match &wire.body {
            None if deletes => {}
            Some(body) if !deletes => check_body(body)?,
            _ => return Err(odd("a create and an update have a body, a delete has none")),
        }
        Ok(PreparedWrite {
            key: IdempotencyKey::new(&wire.key)?,
            tenant: wire.tenant.map(Tenant::new).transpose()?,
            module: wire.module,
            operation,
            body: wire.body,
            server: wire.server,
            maybe_sent: MaybeSent::yes(), // by the process that stored it
        })
    }
}

fn check_body(body: &str) -> Result<()> {
    // The payload is not looked into: however deep it is, it was sent before.
    match serde_json::from_str::<BTreeMap<String, &RawValue>>(body) {
        Ok(fields) if fields.contains_key("payload") => Ok(()),
        _ => Err(Error::invalid("the prepared write", "its body is not a JSON object with a payload")),
    }
}

/// A module's name is part of the path.
pub(super) fn check_module(module: &str) -> Result<()> {
    ModuleSlug::new(module)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<PreparedWrite, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    /// The stored form of version 1 is read for ever: these lines are from its first day, when it did not
    /// name the server yet.
    #[test]
    fn the_stored_form_stays() {
        let id = "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
        for (text, path) in [
            (
                format!(
                    r#"{{"v":1,"operation":"create","key":"{id}","tenant":null,"module":"orders","id":null,"expected_seq":null,"body":"{{\"payload\":{{\"b\":1.0, \"a\":2}}}}"}}"#
                ),
                "v1/modules/orders/records".to_owned(),
            ),
            (
                format!(
                    r#"{{"v":1,"operation":"delete","key":"k","tenant":"t","module":"orders","id":"{id}","expected_seq":7,"body":null}}"#
                ),
                format!("v1/modules/orders/records/{id}?expected_seq=7"),
            ),
        ] {
            let write = read(&text).unwrap();
            let stored = serde_json::to_string(&write).unwrap();
            assert_eq!(stored, text[..text.len() - 1].to_owned() + r#","server":null}"#);
            assert!(write.maybe_sent(), "by the process that stored it");
            let named = stored.replace(r#""server":null"#, r#""server":"http://h""#);
            assert_eq!(read(&named).unwrap().server(), Some("http://h"));
            let (segments, query) = write.target();
            let query = query.map_or_else(String::new, |query| format!("?{query}"));
            assert_eq!(segments.join("/") + &query, path);
        }
    }

    /// Deeper than serde_json reads values.
    #[test]
    fn t254_what_can_be_prepared_can_be_stored_and_read_again() {
        let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
        let payload = serde_json::value::RawValue::from_string(deep).unwrap();
        let orders = super::super::Client::new("http://h").unwrap().data("orders");
        let write = orders.prepare_create(payload).unwrap();
        assert_eq!(read(&serde_json::to_string(&write).unwrap()).unwrap(), write);
    }

    #[test]
    fn what_was_tampered_with_is_refused_with_a_sentence() {
        let good = r#"{"v":1,"operation":"create","key":"k","module":"orders","body":"{\"payload\":{}}"}"#;
        assert!(read(good).is_ok());
        for (from, to, says) in [
            (r#""v":1"#, r#""v":2,"more":[]"#, "version is 2"),
            (r#""create""#, r#""drop""#, "not a create"),
            (r#""create""#, r#""update""#, "an update with an id"),
            (r#""orders""#, r#""../keys""#, "module is invalid"),
            (r#""k""#, r#""a b""#, "Idempotency-Key"),
            (r#"{\"payload\":{}}"#, "[]", "payload"),
            (r#"{\"payload\":{}}"#, "[{}]", "payload"),
            (r#"{\"payload\":{}}"#, r#"{\"payload\":{}"#, "payload"),
            (r#""body""#, r#""tenant":" ","body""#, "tenant"),
        ] {
            let error = read(&good.replace(from, to)).unwrap_err();
            assert!(error.contains(says), "{to}: {error}");
        }
    }

    #[test]
    fn a_debug_text_has_no_content() {
        let write = read(
            r#"{"v":1,"operation":"create","key":"k","module":"m","body":"{\"payload\":{\"card\":4711}}"}"#,
        );
        assert!(!format!("{write:?}").contains("4711"));
    }
}
