//! Indices and aliases: the one that is read, and one that is being made anew.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

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
/// When the engine writes to disk what it acknowledges, and what it must be.
const DURABILITY: &str = "index.translog.durability";
const ON_DISK: &str = "request";
/// The first version of OpenSearch with `flat_object`.
const VERSION_MIN: (u64, u64) = (2, 7);

/// The alias that is written to. Readers' aliases have no dot, so it is nobody's.
pub(super) fn writes(alias: &str) -> String {
    format!("{alias}.write")
}

/// The alias of an index that is being filled. Writes go through it, so that an index that was removed
/// meanwhile is not made again by a write. Whoever removes it decides what becomes of the index.
fn filling(index: &str) -> String {
    format!("{index}-filling")
}

/// The alias of an index that takes the writes and is not shown yet.
fn switching(index: &str) -> String {
    format!("{index}-switching")
}

/// The alias of an index that will be removed.
fn abandoned(index: &str) -> String {
    format!("{index}-abandoned")
}

/// What the alias shows.
fn shows() -> Value {
    json!({"term": {"deleted": false}})
}

/// What the aliases stand for. They differ while a rebuild catches up.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// The index that is read.
    pub(super) shown: Option<String>,
    /// The index that is written to.
    pub(super) written: Option<String>,
}

impl Places {
    /// The index of a rebuild that takes the writes and is not shown yet.
    pub(super) fn unswitched(&self) -> Option<&String> {
        self.written.as_ref().filter(|written| self.shown.as_ref() != Some(written))
    }
}

/// What to tell about a rebuild that takes the writes and is not shown.
pub(super) fn cut_off(index: &str) -> String {
    format!(
        "a rebuild has not switched yet: records are written to {index}, and readers do not see it. If no rebuild runs, it was cut \
         off: run `hapax project rebuild` again, which goes on with it"
    )
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

    /// The index that is read. Refuses an alias that is missing or was not made for this.
    pub(super) async fn place(&self) -> Result<String> {
        let (client, alias) = (&self.0.client, &self.0.alias);
        let Places { shown, written } = self.places().await?;
        let Some(shown) = shown else {
            return Err(Error::NotFound(format!(
                "there is no alias {alias} at {}; `hapax project rebuild` makes it, and `hapax project run --create` an empty one",
                client.server()
            )));
        };
        if written.is_none() {
            return Err(Error::Unsupported(format!(
                "{alias} at {} has no alias {}, which records are written to; `hapax project rebuild` makes it",
                client.server(),
                writes(alias)
            )));
        }
        Ok(shown)
    }

    /// The indices behind the aliases. Refuses those that were not made for this.
    pub(super) async fn places(&self) -> Result<Places> {
        let (client, alias) = (&self.0.client, &self.0.alias);
        let path = format!("{alias},{}?ignore_unavailable=true&allow_no_indices=true", writes(alias));
        let (status, text) = client.ask(Method::GET, &path, None, "looking for the alias").await?;
        if status.as_u16() == 404 {
            return Ok(Places::default());
        }
        if !status.is_success() {
            return Err(client.refused(status, &text, "looking for the alias"));
        }
        let answer: Value = parsed(&text)?;
        let of = |name: &str| {
            let named =
                |(index, about): &(&String, &Value)| *index == name || !about["aliases"][name].is_null();
            answer.as_object().into_iter().flatten().filter(named).collect::<Vec<_>>()
        };
        let written = self.one(&writes(alias), &of(&writes(alias)))?;
        let shown = self.one(alias, &of(alias))?;
        if let Some(index) = &shown
            && answer[index]["aliases"][alias.as_str()]["filter"] != shows()
        {
            return Err(Error::Unsupported(format!(
                "{alias} at {} has another filter than {}: it would show deleted records; remove the alias, and rebuild it",
                client.server(),
                shows()
            )));
        }
        Ok(Places { shown, written })
    }

    /// The one index of an alias, if it is one of ours.
    fn one(&self, alias: &str, indices: &[(&String, &Value)]) -> Result<Option<String>> {
        let server = self.0.client.server();
        let refuse = |problem: String| Err(Error::Unsupported(format!("{alias} at {server} {problem}")));
        let (index, about) = match indices {
            [] => return Ok(None),
            [one] => one,
            several => return refuse(format!("is an alias of {} indices; it must be one", several.len())),
        };
        if *index == alias {
            return refuse("is an index; records are written to an alias, so that it can be rebuilt".into());
        }
        if about["mappings"]["_meta"]["hapax"]["format"].as_u64() != Some(FORMAT) {
            return refuse(format!(
                "is an alias of {index}, which is not an index of records of this version of hapax (format {FORMAT})"
            ));
        }
        Ok(Some((*index).clone()))
    }

    /// Makes an empty index with its aliases, unless they are there.
    pub(super) async fn create(&self) -> Result<()> {
        match self.place().await {
            Err(Error::NotFound(_)) => {}
            other => return other.map(drop),
        }
        if let Some(index) = self.places().await?.written {
            return Err(Error::NotFound(format!(
                "{} at {}: {}",
                self.0.alias,
                self.0.client.server(),
                cut_off(&index)
            )));
        }
        let (alias, writes) = (self.0.alias.as_str(), writes(&self.0.alias));
        let aliases = json!({alias: {"filter": shows()}, writes: {"is_write_index": true}});
        let index = self.fresh_name();
        match self.make(&index, &aliases).await {
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
            "settings": {
                "number_of_shards": settings.shards, "number_of_replicas": settings.replicas,
                DURABILITY: ON_DISK, // also where a template says something else
            },
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

    /// Removes the indices of rebuilds that were cut off before they took the writes. Of an index that is being
    /// filled the alias goes first: whoever fills it needs that to go on, so of both only one can have it.
    async fn remove_unfinished(&self) -> Result<()> {
        let (client, doing) = (&self.0.client, "removing an unfinished rebuild");
        for (index, about) in &self.ours(doing).await? {
            let has = |alias: String| !about["aliases"][alias].is_null();
            if has(filling(index)) {
                let actions = json!([
                    {"remove": {"index": index, "alias": filling(index), "must_exist": true}},
                    {"add": {"index": index, "alias": abandoned(index)}},
                ]);
                match self.change_aliases(&actions, doing).await {
                    Err(Error::NotFound(_)) => continue, // it is not unfinished any more
                    other => other?,
                }
            } else if !has(abandoned(index)) {
                continue;
            }
            crate::crash_point!("projection.after-abandon");
            let (status, text) = client.ask(Method::DELETE, index, None, doing).await?;
            if !status.is_success() && status.as_u16() != 404 {
                return Err(client.refused(status, &text, doing));
            }
        }
        Ok(())
    }

    /// The indices that have the name of one of ours, each with its aliases.
    async fn ours(&self, doing: &str) -> Result<Vec<(String, Value)>> {
        let (client, alias) = (&self.0.client, &self.0.alias);
        let path = format!("{alias}-*/_alias?allow_no_indices=true");
        let answer: serde_json::Map<String, Value> =
            parsed(&client.ok(Method::GET, &path, None, doing).await?)?;
        let is_ours = |index: &str| {
            let rest = index.strip_prefix(&format!("{alias}-")).unwrap_or_default();
            rest.len() == 32 && rest.bytes().all(|b| b.is_ascii_hexdigit())
        };
        Ok(answer.into_iter().filter(|(index, _)| is_ours(index)).collect())
    }

    /// The indices of ours that nobody reads, a sentence about each: they may have records that are deleted.
    pub(super) async fn unread(&self) -> Result<Vec<String>> {
        let alias = &self.0.alias;
        let found = match self.ours("looking for indices of rebuilds").await {
            Ok(found) => found,
            // Whoever may use the aliases only can write and read, and not know.
            Err(Error::Refused { what, .. }) => return Ok(vec![what]),
            Err(error) => return Err(error),
        };
        let about = |(index, about): (String, Value)| {
            let has = |alias: &str| !about["aliases"][alias].is_null();
            if has(alias) {
                None
            } else if has(&writes(alias)) {
                Some(cut_off(&index))
            } else if has(&filling(&index)) || has(&abandoned(&index)) {
                Some(format!(
                    "a rebuild fills {index}, or was cut off: the next `hapax project rebuild` removes what was cut off"
                ))
            } else {
                Some(format!(
                    "{index} has the name of an index of records, and no alias leads to it: remove it if nobody needs it"
                ))
            }
        };
        Ok(found.into_iter().filter_map(about).collect())
    }

    /// The indices that acknowledge what is not on disk yet, a sentence about each.
    pub(super) async fn volatile(&self) -> Result<Vec<String>> {
        let (client, Places { shown, written }) = (&self.0.client, self.places().await?);
        let indices: BTreeSet<String> = shown.into_iter().chain(written).collect();
        let mut found = Vec::new();
        for index in indices {
            let path = format!("{index}/_settings/{DURABILITY}?include_defaults=true&flat_settings=true");
            let settings = match client.ok(Method::GET, &path, None, "reading the settings of an index").await
            {
                Ok(answer) => parsed::<Value>(&answer)?,
                // Whoever may use the aliases only can write and read, and not know.
                Err(Error::Refused { what, .. }) => {
                    found.push(what);
                    continue;
                }
                // A rebuild has removed it meanwhile.
                Err(Error::NotFound(_)) => continue,
                Err(error) => return Err(error),
            };
            let of = &settings[&index];
            let set = of["settings"][DURABILITY].as_str().or_else(|| of["defaults"][DURABILITY].as_str());
            let set = set.unwrap_or("unknown");
            if !set.eq_ignore_ascii_case(ON_DISK) {
                found.push(format!(
                    "{DURABILITY} of {index} is {set}: what was acknowledged in the last seconds is lost if the machine stops, and \
                     its consumer does not repeat it; set {ON_DISK}"
                ));
            }
        }
        Ok(found)
    }

    /// All of these at once, or nothing.
    async fn change_aliases(&self, actions: &Value, doing: &str) -> Result<()> {
        let body = json!({ "actions": actions }).to_string();
        self.0.client.ok(Method::POST, "_aliases", Some(body), doing).await.map(drop)
    }
}

/// An index that is being filled.
pub(super) struct Fresh {
    of: SearchProjection,
    index: String,
    /// Whether consumers write to it.
    is_written: AtomicBool,
}

impl Fresh {
    pub(super) async fn begin(of: SearchProjection) -> Result<Self> {
        // What was written to such an index is nowhere else, so it must not be given up.
        if let Some(index) = of.places().await?.unswitched().cloned() {
            return Ok(Fresh { of, index, is_written: true.into() });
        }
        of.remove_unfinished().await?;
        let index = of.fresh_name();
        of.make(&index, &json!({filling(&index): {}})).await?;
        Ok(Fresh { of, index, is_written: false.into() })
    }

    fn fenced(&self) -> Error {
        Error::Fenced {
            what: format!("the index {} was given up: another rebuild has begun since", self.index),
        }
    }
}

#[async_trait]
impl Rebuilding for Fresh {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        let client = &self.of.0.client;
        if self.is_written.load(Ordering::Relaxed) {
            return client.apply(&writes(&self.of.0.alias), changes).await;
        }
        let applied = client.apply(&filling(&self.index), changes).await?;
        let is_gone =
            |one: &Applied| matches!(one, Applied::Busy { reason } if reason.contains("index_not_found"));
        if applied.iter().any(is_gone) { Err(self.fenced()) } else { Ok(applied) }
    }

    async fn take_writes(&self) -> Result<()> {
        if self.is_written.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (new, writes) = (&self.index, writes(&self.of.0.alias));
        let mut actions = vec![
            json!({"remove": {"index": new, "alias": filling(new), "must_exist": true}}),
            json!({"add": {"index": new, "alias": switching(new)}}),
            json!({"add": {"index": new, "alias": writes, "is_write_index": true}}),
        ];
        let old = self.of.places().await?.written;
        actions.extend(old.map(|old| json!({"remove": {"index": old, "alias": writes}})));
        match self.of.change_aliases(&actions.into(), "switching writes").await {
            Ok(()) => {}
            // The answer may be lost, and the switch done.
            Err(error) => match self.of.places().await?.written {
                Some(index) if index == *new => {}
                _ if matches!(error, Error::NotFound(_)) => return Err(self.fenced()),
                _ => return Err(error),
            },
        }
        self.is_written.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn switch(&self) -> Result<()> {
        self.take_writes().await?;
        let (alias, new) = (&self.of.0.alias, &self.index);
        // One request, so that the alias never stands for none or for two. The old index goes with it: a write that is under
        // way to it fails, and is repeated to the new one.
        let mut actions = vec![
            json!({"remove": {"index": new, "alias": switching(new), "must_exist": true}}),
            json!({"add": {"index": new, "alias": alias, "filter": shows()}}),
        ];
        let old = self.of.places().await?.shown.filter(|old| old != new);
        actions.extend(old.map(|old| json!({"remove_index": {"index": old}})));
        match self.of.change_aliases(&actions.into(), "switching the alias").await {
            Ok(()) => Ok(()),
            // The answer may be lost, and the switch done; or another rebuild has gone on with this one.
            Err(error) => match self.of.places().await?.shown {
                Some(index) if index == *new => Ok(()),
                _ => Err(error),
            },
        }
    }
}
