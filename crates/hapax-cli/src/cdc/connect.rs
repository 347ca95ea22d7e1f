//! Kafka Connect's REST API, as far as one connector needs it.

use std::time::Duration;

use reqwest::{Client, Method, Url};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::connector::{CLASS, Properties};
use crate::failure::Failure;

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a worker may be busy with a rebalance.
const REBALANCE: Duration = Duration::from_secs(60);
/// The pause between two questions.
pub const PAUSE: Duration = Duration::from_millis(300);

/// One connector of a Connect cluster.
pub struct Connect {
    client: Client,
    url: Url,
    shown: String,
    name: String,
}

/// What a connector and its task do.
pub struct State {
    /// The connector's own state.
    pub connector: String,
    /// The state of each task, and the first line of what it failed with.
    pub tasks: Vec<(String, Option<String>)>,
}

impl State {
    pub fn runs(&self) -> bool {
        self.connector == "RUNNING"
            && !self.tasks.is_empty()
            && self.tasks.iter().all(|(state, _)| state == "RUNNING")
    }

    /// Whether somebody stopped or paused it.
    pub fn is_stopped(&self) -> bool {
        matches!(self.connector.as_str(), "STOPPED" | "PAUSED")
    }

    /// Why it has failed, if so.
    pub fn failure(&self) -> Option<String> {
        let failed = self.tasks.iter().find(|(state, _)| state == "FAILED");
        let of_task = failed.map(|(_, trace)| trace.clone().unwrap_or_default());
        of_task.or_else(|| (self.connector == "FAILED").then(|| "the connector itself has failed".to_owned()))
    }
}

impl Connect {
    pub fn new(url: &str, shown: &str, name: &str) -> Result<Self, Failure> {
        let bad = |reason: &str| Failure::config(format!("cdc.connect_url {shown} is not a URL: {reason}"));
        let url = Url::parse(url).map_err(|error| bad(&error.to_string()))?;
        if url.host_str().is_none_or(str::is_empty) {
            return Err(bad("it has no host"));
        }
        // Keep a provider that is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // The connector's configuration has a password, which is for this address alone.
        let client = Client::builder().timeout(PATIENCE).redirect(reqwest::redirect::Policy::none());
        let client = client.build().map_err(|error| bad(&error.to_string()))?;
        Ok(Connect { client, url, shown: shown.to_owned(), name: name.to_owned() })
    }

    fn unavailable(&self, reason: &str) -> Failure {
        Failure::dependency("unavailable", format!("Kafka Connect at {}: {reason}", self.shown))
    }

    /// Asks once. The status, and the body if it is JSON.
    async fn ask(
        &self,
        method: Method,
        path: &[&str],
        query: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), Failure> {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path); // escapes what a name may hold
        }
        url.set_query(Some(query).filter(|query| !query.is_empty()));
        let mut request = self.client.request(method, url).header("accept", "application/json");
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let silent = |error: reqwest::Error| {
            let error = error.without_url(); // it may hold a password
            let source =
                std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
            self.unavailable(&format!("no answer ({error}{source})"))
        };
        let answer = request.send().await.map_err(silent)?;
        let status = answer.status().as_u16();
        let text = answer.text().await.map_err(silent)?;
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::Null)))
    }

    /// Asks until no rebalance is in the way. `None`: there is no such thing (404).
    async fn call(
        &self,
        method: Method,
        path: &[&str],
        query: &str,
        body: Option<&Value>,
    ) -> Result<Option<Value>, Failure> {
        let end = Instant::now() + REBALANCE;
        loop {
            let (status, answer) = self.ask(method.clone(), path, query, body).await?;
            let said = answer["message"].as_str().unwrap_or("it does not say why");
            match status {
                200..=299 => return Ok(Some(answer)),
                404 => return Ok(None),
                409 | 503 if Instant::now() < end => tokio::time::sleep(PAUSE).await,
                400 | 422 => {
                    return Err(Failure::input(format!("Kafka Connect refuses the connector: {said}")));
                }
                _ => return Err(self.unavailable(&format!("{status}: {said}"))),
            }
        }
    }

    fn of<'p>(&'p self, rest: &[&'p str]) -> Vec<&'p str> {
        [&["connectors", self.name.as_str()], rest].concat()
    }

    /// The version of Debezium's connector for PostgreSQL, if the cluster has it.
    pub async fn debezium(&self) -> Result<Option<String>, Failure> {
        let plugins = self.call(Method::GET, &["connector-plugins"], "", None).await?.unwrap_or_default();
        let found = plugins.as_array().into_iter().flatten().find(|plugin| plugin["class"] == CLASS);
        Ok(found.map(|plugin| plugin["version"].as_str().unwrap_or("unknown").to_owned()))
    }

    /// The connector's configuration, if it is there.
    pub async fn config(&self) -> Result<Option<Properties>, Failure> {
        let found = self.call(Method::GET, &self.of(&["config"]), "", None).await?;
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Ok(found.map(|found| {
            let all = found.as_object().into_iter().flatten();
            all.map(|(key, value)| (key.clone(), text(value))).filter(|(key, _)| key != "name").collect()
        }))
    }

    /// Makes or changes the connector. Connect validates it first: given a wrong one, Connect 4.3 fails itself.
    pub async fn put(&self, properties: &Properties) -> Result<(), Failure> {
        let mut whole = json!(properties);
        whole["name"] = self.name.as_str().into();
        let path = ["connector-plugins", CLASS, "config", "validate"];
        let checked = self.call(Method::PUT, &path, "", Some(&whole)).await?.unwrap_or_default();
        let mut wrong = Vec::new();
        for property in checked["configs"].as_array().into_iter().flatten() {
            let errors =
                property["value"]["errors"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let errors: Vec<_> = errors.collect();
            if !errors.is_empty() {
                let name = property["value"]["name"].as_str().unwrap_or_default();
                wrong.push(format!("{name}: {}", errors.join(", ")));
            }
        }
        if !wrong.is_empty() {
            return Err(Failure::input(format!("Kafka Connect refuses the connector: {}", wrong.join("; "))));
        }
        self.call(Method::PUT, &self.of(&["config"]), "", Some(&json!(properties))).await.map(drop)
    }

    /// Lets a connector go on that was stopped or paused: Connect remembers that over changes of its
    /// configuration.
    pub async fn resume(&self) -> Result<(), Failure> {
        self.call(Method::PUT, &self.of(&["resume"]), "", None).await.map(drop)
    }

    /// Starts what has failed again.
    pub async fn restart_failed(&self) -> Result<(), Failure> {
        self.call(Method::POST, &self.of(&["restart"]), "includeTasks=true&onlyFailed=true", None)
            .await
            .map(drop)
    }

    /// What it does, if it is there.
    pub async fn state(&self) -> Result<Option<State>, Failure> {
        let Some(found) = self.call(Method::GET, &self.of(&["status"]), "", None).await? else {
            return Ok(None);
        };
        let text = |value: &Value| value.as_str().unwrap_or("unknown").to_owned();
        let trace = |task: &Value| {
            let lines = task["trace"].as_str()?.lines();
            // The causes say more than what wraps them.
            let lines: Vec<_> =
                lines.filter(|line| !line.starts_with(['\t', ' '])).map(str::trim).take(4).collect();
            Some(lines.join(" "))
        };
        let tasks = found["tasks"].as_array().into_iter().flatten();
        let tasks = tasks.map(|task| (text(&task["state"]), trace(task))).collect();
        Ok(Some(State { connector: text(&found["connector"]["state"]), tasks }))
    }

    /// Forgets how far the connector was. It is stopped for that, and made first if it is gone: Connect keeps
    /// the offsets of a connector that was removed, and forgets only those of one that is there.
    pub async fn forget_offsets(&self, properties: &Properties) -> Result<(), Failure> {
        if self.call(Method::PUT, &self.of(&["stop"]), "", None).await?.is_none() {
            let stopped = json!({"name": self.name, "config": properties, "initial_state": "STOPPED"});
            self.call(Method::POST, &["connectors"], "", Some(&stopped)).await?;
        }
        let end = Instant::now() + REBALANCE;
        loop {
            // For a connector that is not yet stopped the answer is a bad request.
            let (status, answer) = self.ask(Method::DELETE, &self.of(&["offsets"]), "", None).await?;
            match status {
                200..=299 | 404 => return Ok(()),
                _ if Instant::now() < end => tokio::time::sleep(PAUSE).await,
                _ => {
                    let said = answer["message"].as_str().unwrap_or("it does not say why");
                    return Err(self.unavailable(&format!("{status}: its offsets cannot be removed: {said}")));
                }
            }
        }
    }

    /// Removes the connector. False if there is none.
    pub async fn remove(&self) -> Result<bool, Failure> {
        Ok(self.call(Method::DELETE, &self.of(&[]), "", None).await?.is_some())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// A worker that sends the request elsewhere, and means the body too (307).
    #[tokio::test]
    async fn t450_a_password_for_connect_follows_no_redirect() {
        let elsewhere = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = format!("http://{}", elsewhere.local_addr().unwrap());
        let url = format!("http://{}", worker.local_addr().unwrap());
        let reached = tokio::spawn(async move { elsewhere.accept().await.map(drop) });
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = worker.accept().await {
                let mut request = Vec::new();
                while !request.ends_with(b"}")
                    && connection.read_buf(&mut request).await.is_ok_and(|read| read > 0)
                {}
                let answer = format!(
                    "HTTP/1.1 307 Temporary Redirect\r\nlocation: {to}/\r\ncontent-length: 0\r\n\r\n"
                );
                let _ = connection.write_all(answer.as_bytes()).await;
            }
        });
        let connect = Connect::new(&url, &url, "orders").ok().unwrap();
        let properties = Properties::from([("database.password".to_owned(), "s3cret".to_owned())]);
        let refused = connect.put(&properties).await;
        assert!(!reached.is_finished(), "the password went to an address that nobody configured");
        assert!(refused.is_err(), "a redirect is not a success");
    }
}
