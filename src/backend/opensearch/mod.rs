//! A projection in OpenSearch: a document for each record, searched through an alias.
//!
//! ```text
//! ALIAS       ─▶ ALIAS-<32 hex digits>   one index; the alias shows what is not deleted
//! ALIAS.write ─▶ the same index          all that is written to; another index only while a rebuild catches up
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
use index::{Fresh, cut_off, writes};

/// How many records a page of a scan has.
const PAGE: usize = 500;
/// How long the engine keeps a scan between two pages.
const SCROLL: &str = "5m";
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
        projection.places().await?;
        Ok(projection)
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
#[serde(deny_unknown_fields)]
struct Source<'s> {
    tenant: String,
    module: String,
    id: String,
    seq: u64,
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
    source: Option<&'s RawValue>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Documents<'s> {
    #[serde(borrow)]
    docs: Vec<Found<'s>>,
}

impl Found<'_> {
    fn document(self, name: &Name) -> Result<Option<Document>> {
        if let Some(error) = self.error {
            let reason = client::reason_of(&error);
            return Err(Error::Unavailable { what: format!("reading documents: {reason}"), source: None });
        }
        let (Some(version), Some(source)) = (self.version, self.source.filter(|_| self.is_there)) else {
            return Ok(None);
        };
        let Ok(version) = Version::from_u64(version) else {
            return Ok(Some(Document::unreadable(None, format!("its version is {version}"))));
        };
        Ok(Some(match content(name, version, source.get()) {
            Ok(content) => Document::new(version, content),
            Err(reason) => Document::unreadable(Some(version), reason),
        }))
    }
}

/// What a stored document says. Every field is looked at: searches and filters go by all of them. The error
/// says what was not written so.
fn content(name: &Name, version: Version, source: &str) -> std::result::Result<Content, String> {
    let source: Source<'_> = serde_json::from_str(source).map_err(|error| error.to_string())?;
    let Name { tenant, module, id } = name;
    let (tenant, id) = (tenant.hyphenated().to_string(), id.hyphenated().to_string());
    for (field, has, should) in [
        ("tenant", &source.tenant, tenant.as_str()),
        ("module", &source.module, module.as_str()),
        ("id", &source.id, &id),
    ] {
        if has != should {
            return Err(format!("its field {field} is {has:?}"));
        }
    }
    if source.seq != version.seq() {
        return Err(format!(
            "its field seq is {}, and its version is that of seq {}",
            source.seq,
            version.seq()
        ));
    }
    let time =
        |field: &str, text: &str| Time::parse(text).map_err(|_| format!("its field {field} is {text:?}"));
    let created_at = time("created_at", &source.created_at)?;
    let updated_at = time("updated_at", &source.updated_at)?;
    let (payload, is_large) = match (source.payload, source.large_payload) {
        (None, None) if source.deleted => return Ok(Content::Deleted),
        (None, None) => return Err("it has no payload and is not deleted".to_owned()),
        (Some(payload), None) => (payload.get(), false),
        (None, Some(payload)) => (payload.get(), true),
        (Some(_), Some(_)) => return Err("it has both payload and large_payload".to_owned()),
    };
    if source.deleted {
        return Err("it is deleted and has a payload".to_owned());
    }
    if bulk::is_large(payload) != is_large {
        let field = if is_large { "large_payload" } else { "payload" };
        return Err(format!("its payload is in the field {field}, where one of its size does not belong"));
    }
    let payload = Payload::stored(payload).map_err(|error| error.to_string())?;
    Ok(Content::Present { payload, created_at, updated_at })
}

#[async_trait]
impl Projection for SearchProjection {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        self.0.client.apply(&writes(&self.0.alias), changes).await
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
        answer.docs.into_iter().zip(names).map(|(found, name)| found.document(name)).collect()
    }

    /// By a scroll: what other fields a page would be sorted by, somebody may have changed.
    async fn scan(&self, after: Option<&str>) -> Result<Scanned> {
        let client = &self.0.client;
        let (path, body) = if let Some(after) = after {
            ("_search/scroll".to_owned(), json!({"scroll": SCROLL, "scroll_id": after}))
        } else {
            let index = self.place().await?; // the alias would hide deleted ones
            client.ok(Method::POST, &format!("{index}/_refresh"), None, "refreshing").await?;
            let body = json!({
                "size": PAGE, "sort": ["_doc"], "_source": false, "version": true, "query": {"match_all": {}}
            });
            (format!("{index}/_search?scroll={SCROLL}"), body)
        };
        let answer = client.ok(Method::POST, &path, Some(body.to_string()), "scanning").await?;
        let answer: Value = client::parsed(&answer)?;
        let hits = answer.pointer("/hits/hits").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let (mut found, mut foreign) = (Vec::with_capacity(hits.len()), Vec::new());
        for hit in hits {
            let id = hit["_id"].as_str().unwrap_or_default();
            match id.parse::<Name>() {
                Ok(name) => {
                    let version = Version::from_u64(hit["_version"].as_u64().unwrap_or_default());
                    found.push((name, version.unwrap_or(Version::LOWEST)));
                }
                Err(_) => foreign.push((id.to_owned(), "no record has such an id".to_owned())),
            }
        }
        let scroll = answer["_scroll_id"].as_str().map(str::to_owned);
        if hits.len() == PAGE {
            return Ok(Scanned::new(found, scroll).foreign(foreign));
        }
        let body = json!({ "scroll_id": scroll }).to_string();
        // The engine gives it up by itself later.
        let _ = client.ask(Method::DELETE, "_search/scroll", Some(body), "ending a scan").await;
        Ok(Scanned::new(found, None).foreign(foreign))
    }

    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>> {
        Ok(Box::new(Fresh::begin(self.clone()).await?))
    }

    async fn unfinished(&self) -> Result<Option<String>> {
        let unread = self.unread().await?;
        Ok((!unread.is_empty()).then(|| unread.join("; ")))
    }

    async fn erase(&self, deletions: &[Change]) -> Result<Vec<Applied>> {
        let mut applied = self.apply(deletions).await?;
        if self.places().await?.unswitched().is_some() {
            // Readers have the old index until the switch, and nothing else is written to that.
            let shown = self.0.client.apply(&self.0.alias, deletions).await?;
            let newer = |both: (Applied, Applied)| match both {
                (Applied::Newer | Applied::Stale, Applied::Newer) => Applied::Newer,
                (Applied::Newer | Applied::Stale, failed) if failed != Applied::Stale => failed,
                (written, _) => written,
            };
            applied = applied.into_iter().zip(shown).map(newer).collect();
        }
        // Searches have the content until the engine's next refresh, which an index may not have at all.
        self.refresh().await?;
        Ok(applied)
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        let version = self.engine().await?;
        let fine = |check, message| Finding { level: Level::Fine, check, message };
        let index = self.place().await?;
        let mut findings = vec![
            fine("opensearch.version", format!("OpenSearch {version}")),
            fine("opensearch.alias", format!("{} is an alias of {index}", self.0.alias)),
        ];
        let warning = |check| move |message| Finding { level: Level::Warning, check, message };
        findings.extend(self.volatile().await?.into_iter().map(warning("opensearch.durability")));
        if let Some(index) = self.places().await?.unswitched() {
            let (level, check) = (Level::Refusal, "opensearch.rebuild");
            findings.push(Finding { level, check, message: cut_off(index) });
        } else {
            findings.extend(self.unread().await?.into_iter().map(warning("opensearch.unfinished")));
        }
        Ok(findings)
    }

    fn accepts(&self, generation: u16) -> Result<()> {
        check_generation(generation)
    }

    fn durable(&self) -> bool {
        true
    }

    fn about(&self) -> String {
        format!("{} at {}", self.0.alias, self.0.client.server())
    }
}

/// Refuses a generation that the engine's versions cannot hold.
fn check_generation(generation: u16) -> Result<()> {
    if generation <= GENERATION_MAX {
        return Ok(());
    }
    let message = format!(
        "it is {generation}; OpenSearch's versions have 63 bits, so it can be {GENERATION_MAX} at most"
    );
    Err(Error::Config(format!("the generation of a projection (analytics.generation): {message}")))
}
