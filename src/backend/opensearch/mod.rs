//! A projection in OpenSearch: a document for each record, searched through an alias.
//!
//! ```text
//! ALIAS ─▶ ALIAS-<32 hex digits>   one index; the alias shows what is not deleted, and is all that is written to
//! document id                      TENANT:MODULE:ID
//! document version                 the record's version (external): the engine refuses an older one
//! ```
//!
//! The engine forgets its own deletions after a minute, and would then let an older event bring a
//! record back. So a deletion is a document too, which the alias's filter hides.
//!
//! Payloads are one field of type `flat_object`: those of two tenants may have other types under the
//! same names.

mod bulk;
mod client;
mod index;

use std::sync::Arc;

use async_trait::async_trait;
use reqwest::Method;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::ledger::{Finding, Level};
use crate::projection::{Applied, Change, Content, Document, Name, Projection, Rebuilding, Scanned, Version};
use crate::records::Payload;
use client::Client;
pub use client::SearchSettings;
use index::Fresh;

/// How many records a page of a scan has.
const PAGE: usize = 500;
/// The greatest generation: the engine's versions have 63 bits.
const GENERATION_MAX: u16 = 32_767;

/// A projection in OpenSearch. Clones share the connections.
#[derive(Debug, Clone)]
pub struct SearchProjection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Client,
    alias: String,
}

/// What to do if the alias is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingAlias {
    /// Refuse, with a sentence.
    #[default]
    Refuse,
    /// Make an empty index with the alias.
    Create,
}

impl SearchProjection {
    /// Opens the projection behind an alias: `http://HOST:PORT/ALIAS`, with `USER:PASSWORD@` if need be.
    /// Refuses another engine, one that is too old, and an alias that was not made for this.
    pub async fn connect(url: &str, settings: SearchSettings, missing: MissingAlias) -> Result<Self> {
        let projection = SearchProjection::new(url, settings)?;
        projection.engine().await?;
        if missing == MissingAlias::Create {
            projection.create().await?;
        }
        projection.place().await?;
        Ok(projection)
    }

    /// Opens a projection that may have no alias yet, to [rebuild](crate::projection::rebuild()) it.
    pub async fn connect_to_rebuild(url: &str, settings: SearchSettings) -> Result<Self> {
        let projection = SearchProjection::new(url, settings)?;
        projection.engine().await?;
        match projection.place().await {
            Ok(_) | Err(Error::NotFound(_)) => Ok(projection),
            Err(error) => Err(error),
        }
    }

    fn new(url: &str, settings: SearchSettings) -> Result<Self> {
        let (client, alias) = Client::new(url, settings)?;
        Ok(SearchProjection(Arc::new(Inner { client, alias })))
    }

    /// The alias, which searches go to.
    pub fn alias(&self) -> &str {
        &self.0.alias
    }

    /// Makes what was applied visible to searches now. The engine does so by itself every second.
    pub async fn refresh(&self) -> Result<()> {
        self.0
            .client
            .ok(Method::POST, &format!("{}/_refresh", self.0.alias), None, "refreshing")
            .await
            .map(drop)
    }
}

/// A stored document.
#[derive(Deserialize)]
struct Source<'s> {
    created_at: String,
    updated_at: String,
    deleted: bool,
    #[serde(borrow)]
    payload: Option<&'s RawValue>,
    #[serde(borrow)]
    large_payload: Option<&'s RawValue>,
}

#[derive(Deserialize)]
struct Found<'s> {
    #[serde(default, rename = "found")]
    is_there: bool,
    #[serde(rename = "_version")]
    version: Option<u64>,
    #[serde(borrow, rename = "_source")]
    source: Option<Source<'s>>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Documents<'s> {
    #[serde(borrow)]
    docs: Vec<Found<'s>>,
}

impl Found<'_> {
    fn document(self) -> Result<Option<Document>> {
        if let Some(error) = self.error {
            let reason = client::reason_of(&error);
            return Err(Error::Unavailable { what: format!("reading documents: {reason}"), source: None });
        }
        let (Some(version), Some(source)) = (self.version, self.source.filter(|_| self.is_there)) else {
            return Ok(None);
        };
        let version = Version::from_u64(version)?;
        let content = match source.payload.or(source.large_payload) {
            _ if source.deleted => Content::Deleted,
            None => return Err(Error::Corrupt("a document has no payload and is not deleted".into())),
            Some(payload) => Content::Present {
                payload: Payload::stored(payload.get())?,
                created_at: Time::parse(&source.created_at)?,
                updated_at: Time::parse(&source.updated_at)?,
            },
        };
        Ok(Some(Document::new(version, content)))
    }
}

#[async_trait]
impl Projection for SearchProjection {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        self.0.client.apply(&self.0.alias, changes).await
    }

    async fn documents(&self, names: &[Name]) -> Result<Vec<Option<Document>>> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<String> = names.iter().map(ToString::to_string).collect();
        let body = json!({ "ids": ids }).to_string();
        let path = format!("{}/_mget", self.0.alias);
        let answer = self.0.client.ok(Method::POST, &path, Some(body), "reading documents").await?;
        let answer: Documents<'_> = client::parsed(&answer)?;
        if answer.docs.len() != names.len() {
            return Err(Error::Corrupt(format!("{} ids had {} documents", names.len(), answer.docs.len())));
        }
        answer.docs.into_iter().map(Found::document).collect()
    }

    async fn scan(&self, after: Option<&str>) -> Result<Scanned> {
        let (client, index) = (&self.0.client, self.place().await?); // the alias would hide deleted ones
        let mut body = json!({
            "size": PAGE, "sort": ["tenant", "module", "id"], "_source": false, "version": true, "query": {"match_all": {}}
        });
        match after {
            None => _ = client.ok(Method::POST, &format!("{index}/_refresh"), None, "refreshing").await?,
            Some(after) => {
                let bad = |_| Error::invalid("cursor", "it is none of a scan".to_owned());
                body["search_after"] = serde_json::from_str(after).map_err(bad)?;
            }
        }
        let path = format!("{index}/_search");
        let answer = client.ok(Method::POST, &path, Some(body.to_string()), "scanning").await?;
        let answer: Value = client::parsed(&answer)?;
        let hits = answer.pointer("/hits/hits").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut found = Vec::with_capacity(hits.len());
        for hit in hits {
            let (id, version) = (hit["_id"].as_str().unwrap_or_default(), hit["_version"].as_u64());
            found.push((id.parse()?, Version::from_u64(version.unwrap_or_default())?));
        }
        let last = hits.last().filter(|_| hits.len() == PAGE);
        Ok(Scanned::new(found, last.map(|hit| hit["sort"].to_string())))
    }

    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>> {
        Ok(Box::new(Fresh::begin(self.clone()).await?))
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        let version = self.engine().await?;
        let fine = |check, message| Finding { level: Level::Fine, check, message };
        let index = self.place().await?;
        Ok(vec![
            fine("opensearch.version", format!("OpenSearch {version}")),
            fine("opensearch.alias", format!("{} is an alias of {index}", self.0.alias)),
        ])
    }

    fn durable(&self) -> bool {
        true
    }

    fn about(&self) -> String {
        format!("{} at {}", self.0.alias, self.0.client.server())
    }
}

/// Refuses a generation that the engine's versions cannot hold.
fn check_generation(version: Version) -> Result<()> {
    if version.generation() <= GENERATION_MAX {
        return Ok(());
    }
    let told = format!(
        "it is {}; OpenSearch's versions have 63 bits, so it can be {GENERATION_MAX} at most",
        version.generation()
    );
    Err(Error::invalid("generation", told))
}
