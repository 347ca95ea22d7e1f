//! Indices and aliases: the one that is read, and one that is being made anew.

use async_trait::async_trait;
use reqwest::Method;
use serde_json::{Value, json};
use uuid::Uuid;

use super::SearchProjection;
use super::client::parsed;
use crate::error::{Error, Result};
use crate::projection::{Applied, Change, Rebuilding};

/// The layout of documents. Another number is another layout.
const FORMAT: u64 = 1;
/// The first version of OpenSearch with `flat_object`.
const VERSION_MIN: (u64, u64) = (2, 7);

/// The alias of an index that is being filled. Writes go through it, so that an index that was removed
/// meanwhile is not made again by a write.
fn filling(index: &str) -> String {
    format!("{index}-filling")
}

/// What the alias shows.
fn shown() -> Value {
    json!({"term": {"deleted": false}})
}

impl SearchProjection {
    /// The engine's version, if it is OpenSearch and new enough.
    pub(super) async fn engine(&self) -> Result<String> {
        let client = &self.0.client;
        let answer: Value = parsed(&client.ok(Method::GET, "", None, "asking for the version").await?)?;
        let version = answer.pointer("/version/number").and_then(Value::as_str).unwrap_or("unknown");
        let is_it = answer.pointer("/version/distribution").and_then(Value::as_str) == Some("opensearch");
        let mut numbers = version.split('.').map(|part| part.parse::<u64>().unwrap_or(0));
        let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if !is_it || number < VERSION_MIN {
            let engine = if is_it { "OpenSearch" } else { "not OpenSearch but something" };
            return Err(Error::Unsupported(format!(
                "{} is {engine} of version {version}; the projection needs OpenSearch {}.{} or later",
                client.server(),
                VERSION_MIN.0,
                VERSION_MIN.1
            )));
        }
        Ok(version.to_owned())
    }

    /// The index behind the alias. Refuses an alias that is missing or was not made for this.
    pub(super) async fn place(&self) -> Result<String> {
        let (client, alias) = (&self.0.client, &self.0.alias);
        let (status, text) = client.ask(Method::GET, alias, None, "looking for the alias").await?;
        if status.as_u16() == 404 {
            return Err(Error::NotFound(format!(
                "there is no alias {alias} at {}; `hapax project rebuild` makes it, and `hapax project run --create` an empty one",
                client.server()
            )));
        }
        if !status.is_success() {
            return Err(client.refused(status, &text, "looking for the alias"));
        }
        let answer: Value = parsed(&text)?;
        let indices: Vec<(&String, &Value)> = answer.as_object().into_iter().flatten().collect();
        let refuse =
            |problem: String| Err(Error::Unsupported(format!("{alias} at {} {problem}", client.server())));
        let [(index, about)] = indices[..] else {
            return refuse(format!("is an alias of {} indices; it must be one", indices.len()));
        };
        if index == alias {
            return refuse("is an index; records are written to an alias, so that it can be rebuilt".into());
        }
        if about["mappings"]["_meta"]["hapax"]["format"].as_u64() != Some(FORMAT) {
            return refuse(format!(
                "is an alias of {index}, which is no index of records of this version of hapax (format {FORMAT})"
            ));
        }
        let filter = &about["aliases"][alias.as_str()]["filter"];
        if *filter != shown() {
            return refuse(format!(
                "has another filter than {}: it would show deleted records; rebuild it",
                shown()
            ));
        }
        Ok(index.clone())
    }

    /// Makes an empty index with the alias, unless that is there.
    pub(super) async fn create(&self) -> Result<()> {
        match self.place().await {
            Err(Error::NotFound(_)) => {}
            other => return other.map(drop),
        }
        let alias = json!({self.0.alias.as_str(): {"filter": shown(), "is_write_index": true}});
        let index = self.fresh_name();
        match self.make(&index, &alias).await {
            Ok(()) => Ok(()),
            // Of two that make it at once the engine refuses one. If the answer was lost, it may be ours.
            Err(error) => self.place().await.map(drop).map_err(|_| error),
        }
    }

    fn fresh_name(&self) -> String {
        format!("{}-{}", self.0.alias, Uuid::now_v7().simple())
    }

    async fn make(&self, index: &str, aliases: &Value) -> Result<()> {
        let settings = &self.0.client.settings;
        let keyword = json!({"type": "keyword"});
        let date = json!({"type": "date"});
        let body = json!({
            "settings": {"number_of_shards": settings.shards, "number_of_replicas": settings.replicas},
            "mappings": {
                "dynamic": "strict",
                "_meta": {"hapax": {"format": FORMAT}},
                "properties": {
                    "tenant": keyword, "module": keyword, "id": keyword, "seq": {"type": "long"},
                    "created_at": date, "updated_at": date, "deleted": {"type": "boolean"},
                    "payload": {"type": "flat_object"},
                    "large_payload": {"type": "object", "enabled": false},
                },
            },
            "aliases": aliases,
        });
        self.0.client.ok(Method::PUT, index, Some(body.to_string()), "making an index").await.map(drop)
    }

    /// Indices of rebuilds that were not switched to.
    async fn unfinished(&self) -> Result<Vec<String>> {
        let alias = &self.0.alias;
        let path = format!("{alias}-*/_alias?allow_no_indices=true");
        let answer = self.0.client.ok(Method::GET, &path, None, "looking for unfinished rebuilds").await?;
        let answer: Value = parsed(&answer)?;
        let is_ours = |index: &&String| {
            let rest = index.strip_prefix(&format!("{alias}-")).unwrap_or_default();
            rest.len() == 32 && rest.bytes().all(|b| b.is_ascii_hexdigit())
        };
        let is_filling = |index: &&String| !answer[index.as_str()]["aliases"][filling(index)].is_null();
        let indices = answer.as_object().into_iter().flatten().map(|(index, _)| index);
        Ok(indices.filter(is_ours).filter(is_filling).cloned().collect())
    }
}

/// An index that is being filled.
pub(super) struct Fresh {
    of: SearchProjection,
    index: String,
}

impl Fresh {
    pub(super) async fn begin(of: SearchProjection) -> Result<Self> {
        let client = &of.0.client;
        for index in of.unfinished().await? {
            let (status, text) =
                client.ask(Method::DELETE, &index, None, "removing an unfinished rebuild").await?;
            if !status.is_success() && status.as_u16() != 404 {
                return Err(client.refused(status, &text, "removing an unfinished rebuild"));
            }
        }
        let index = of.fresh_name();
        of.make(&index, &json!({filling(&index): {}})).await?;
        Ok(Fresh { of, index })
    }

    /// The index that the alias stands for, if there is one.
    async fn current(&self) -> Result<Option<String>> {
        match self.of.place().await {
            Ok(index) => Ok(Some(index)),
            Err(Error::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl Rebuilding for Fresh {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        let applied = self.of.0.client.apply(&filling(&self.index), changes).await?;
        // Its alias goes only with its index.
        if applied
            .iter()
            .any(|one| matches!(one, Applied::Busy { reason } if reason.contains("index_not_found")))
        {
            let what = format!("the index {} is gone: another rebuild has begun since", self.index);
            return Err(Error::Fenced { what });
        }
        Ok(applied)
    }

    async fn switch(&self) -> Result<()> {
        let (client, alias, new) = (&self.of.0.client, &self.of.0.alias, &self.index);
        // One request, so that the alias never stands for none or for two. The old index goes with it: a write that is under
        // way to it fails, and is repeated to the new one.
        let mut actions = vec![
            json!({"add": {"index": new, "alias": alias, "filter": shown(), "is_write_index": true}}),
            json!({"remove": {"index": new, "alias": filling(new)}}),
        ];
        actions.extend(self.current().await?.map(|old| json!({"remove_index": {"index": old}})));
        let body = json!({ "actions": actions }).to_string();
        match client.ok(Method::POST, "_aliases", Some(body), "switching the alias").await {
            Ok(_) => Ok(()),
            // The answer may be lost, and the switch done.
            Err(error) => match self.current().await? {
                Some(index) if index == *new => Ok(()),
                _ => Err(error),
            },
        }
    }
}
