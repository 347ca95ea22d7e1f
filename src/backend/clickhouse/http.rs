//! ClickHouse's HTTP interface: a statement per request, its settings and parameters in the URL.

use std::fmt;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use reqwest::{Client, Response, Url};

use super::fault;
use super::schema::RECORDS;
use crate::error::{Error, Result, chain};
use crate::secret::hide_password;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a statement may run whose answer arrives in one piece. The server may be silent a little longer.
const ANSWER_SECONDS: u64 = 60;

/// What holds for every statement, whatever the profile of the user says: nothing that returns a part of an
/// answer, another count of nothing, or versions that were replaced (a skip index or PREWHERE under FINAL).
const PINNED: &[(&str, &str)] = &[
    ("aggregate_functions_null_for_empty", "0"),
    ("do_not_merge_across_partitions_select_final", "0"),
    ("empty_result_for_aggregation_by_empty_set", "0"),
    ("extremes", "0"),
    ("final", "0"),
    ("group_by_overflow_mode", "throw"),
    ("limit", "0"),
    ("offset", "0"),
    ("optimize_move_to_prewhere_if_final", "0"),
    ("read_overflow_mode", "throw"),
    ("result_overflow_mode", "throw"),
    ("sort_overflow_mode", "throw"),
    ("timeout_overflow_mode", "throw"),
    ("use_query_cache", "0"),
    ("use_skip_indexes_if_final", "0"),
];

/// A statement whose answer arrives in one piece ends in time, so that the caller learns of it.
const IN_TIME: &[(&str, &str)] = &[("max_execution_time", "60")];

/// A file takes as long as its rows and its reader need, whatever the profile of the user says. While it arrives,
/// silence is what ends it.
const STREAMING: &[(&str, &str)] = &[("max_execution_time", "0")];

/// What holds for every insert: it is answered when it is stored, in one part, and once.
const INSERTING: &[(&str, &str)] = &[
    ("async_insert", "0"),
    ("input_format_parallel_parsing", "0"),
    ("insert_deduplicate", "1"),
    ("max_insert_block_size", "1048576"),
    ("min_insert_block_size_bytes", "0"),
    ("min_insert_block_size_rows", "1048576"),
];

/// A server, and the database on it.
#[derive(Clone)]
pub(super) struct Server {
    client: Client,
    url: Url,
    user: String,
    password: String,
    database: String,
    /// The table of rows that is read and written.
    table: String,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("url", &self.url.as_str())
            .field("database", &self.database)
            .finish_non_exhaustive()
    }
}

/// A statement with its parameters and settings.
#[derive(Debug, Clone)]
pub(super) struct Statement {
    sql: String,
    said: Vec<(String, String)>,
}

impl Statement {
    pub(super) fn new(sql: impl Into<String>) -> Self {
        Statement { sql: sql.into(), said: Vec::new() }
    }

    /// Binds `{name:Type}` of the statement.
    pub(super) fn bind(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.said.push((format!("param_{name}"), escaped(&value.to_string())));
        self
    }

    pub(super) fn set(mut self, name: &str, value: impl Into<String>) -> Self {
        self.said.push((name.to_owned(), value.into()));
        self
    }

    fn pin(mut self, settings: &[(&str, &str)]) -> Self {
        self.said.extend(settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }
}

/// As the server reads the value of a parameter.
fn escaped(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\t' => out.push_str("\\t"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\0' => out.push_str("\\0"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c => out.push(c),
        }
    }
    out
}

impl Server {
    /// The server that a URL names: `clickhouse://USER:PASSWORD@HOST:PORT/DATABASE`, or `clickhouses://` for
    /// TLS. Connects to nothing yet.
    pub(super) fn of(text: &str) -> Result<Self> {
        let shown = hide_password(text);
        let bad = |problem: String| Error::Config(format!("{shown:?}: {problem}"));
        let form = "write clickhouse://USER:PASSWORD@HOST:PORT/DATABASE, or clickhouses:// for TLS";
        let (scheme, port, rest) = match text.split_once("://") {
            Some(("clickhouse", rest)) => ("http", 8123, rest),
            Some(("clickhouses", rest)) => ("https", 8443, rest),
            _ => return Err(bad(form.to_owned())),
        };
        let parsed = Url::parse(&format!("{scheme}://{rest}"));
        let mut url = parsed.map_err(|error| bad(format!("it is not a URL ({error}); {form}")))?;
        if url.query().is_some() || url.fragment().is_some() {
            return Err(bad(format!("it has more than a database after its host; {form}")));
        }
        let decoded = |part: &str| {
            let text = percent_decode_str(part).decode_utf8();
            text.map(std::borrow::Cow::into_owned)
                .map_err(|_| bad("its user or its password is not UTF-8".into()))
        };
        let user = decoded(url.username())?;
        let password = decoded(url.password().unwrap_or_default())?;
        let database = match url.path().trim_matches('/') {
            "" => "analytics".to_owned(),
            name => name.to_owned(),
        };
        let sound = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if !database.chars().all(sound)
            || database.starts_with(|c: char| c.is_ascii_digit())
            || database.len() > 64
        {
            return Err(bad(
                "its database must be 1 to 64 letters, digits and underscores, and no digit first".into(),
            ));
        }
        if url.port().is_none() {
            url.set_port(Some(port)).map_err(|()| bad(form.to_owned()))?;
        }
        url.set_path("/");
        // They go into headers: a URL may be logged on its way.
        let cleared = url.set_username("").and_then(|()| url.set_password(None));
        cleared.map_err(|()| bad(form.to_owned()))?;
        // Keep a provider that the application has installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(Duration::from_secs(ANSWER_SECONDS + 10))
            .user_agent(concat!("hapax/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| bad(format!("there is no HTTP client for it: {}", chain(&error))))?;
        let user = if user.is_empty() { "default".to_owned() } else { user };
        Ok(Server { client, url, user, password, database, table: RECORDS.to_owned() })
    }

    pub(super) fn database(&self) -> &str {
        &self.database
    }

    /// The same server with another table of rows.
    pub(super) fn with_table(&self, table: String) -> Self {
        Server { table, ..self.clone() }
    }

    /// The name of the table of rows.
    pub(super) fn table(&self) -> &str {
        &self.table
    }

    /// The table of rows, with its database. Every statement and every filter names it so.
    pub(super) fn records(&self) -> String {
        format!("{}.{}", self.database, self.table)
    }

    /// The host and its port, for messages.
    pub(super) fn place(&self) -> String {
        let port = self.url.port_or_known_default().unwrap_or_default();
        format!("{}:{port}", self.url.host_str().unwrap_or_default())
    }

    /// Asks. The whole answer is there, in `RowBinary`, or it is an error.
    pub(super) async fn ask(&self, what: &str, statement: Statement) -> Result<Vec<u8>> {
        let statement = statement
            .pin(PINNED)
            .pin(IN_TIME)
            .set("wait_end_of_query", "1")
            .set("default_format", "RowBinary");
        let Statement { sql, said } = statement;
        let response = self.send(what, &said, sql.into_bytes()).await?;
        let body = response.bytes().await;
        Ok(body.map_err(|error| self.away(what, error))?.to_vec())
    }

    /// Asks for a file, which begins to arrive before the server knows whether it can end it.
    pub(super) async fn stream(&self, what: &str, statement: Statement) -> Result<Streamed> {
        let Statement { sql, said } = statement.pin(PINNED).pin(STREAMING);
        let response = self.send(what, &said, sql.into_bytes()).await?;
        Ok(Streamed { response, server: self.clone(), what: what.to_owned() })
    }

    /// Inserts rows in `RowBinary`.
    pub(super) async fn insert(&self, what: &str, statement: Statement, rows: Vec<u8>) -> Result<()> {
        let statement = statement.pin(PINNED).pin(IN_TIME).pin(INSERTING).set("wait_end_of_query", "1");
        let Statement { sql, mut said } = statement;
        said.push(("query".to_owned(), format!("{sql} FORMAT RowBinary")));
        let response = self.send(what, &said, rows).await?;
        response.bytes().await.map_err(|error| self.away(what, error))?;
        Ok(())
    }

    async fn send(&self, what: &str, said: &[(String, String)], body: Vec<u8>) -> Result<Response> {
        let mut url = self.url.clone();
        url.query_pairs_mut().extend_pairs(said);
        let request = self.client.post(url).basic_auth(&self.user, Some(&self.password)).body(body);
        let response = request.send().await.map_err(|error| self.away(what, error))?;
        let status = response.status().as_u16();
        let code = response.headers().get("x-clickhouse-exception-code");
        let code = code.and_then(|code| code.to_str().ok()).and_then(|code| code.parse::<i32>().ok());
        if status == 200 && code.is_none() {
            return Ok(response);
        }
        let said = response.text().await.unwrap_or_default();
        Err(fault::of(what, self, status, code, &said))
    }

    fn away(&self, what: &str, error: reqwest::Error) -> Error {
        let message = format!("{what}: ClickHouse at {} gives no answer", self.place());
        Error::unavailable(message, chain(&error.without_url()))
    }
}

/// A file on its way.
pub(super) struct Streamed {
    response: Response,
    server: Server,
    what: String,
}

impl Streamed {
    /// The next piece; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        let piece = self.response.chunk().await.map_err(|error| self.server.away(&self.what, error))?;
        Ok(piece.map(|piece| piece.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_server_and_shows_no_password() {
        let server = Server::of("clickhouse://app:s3cret%2F%26@db.example:9000/reads").unwrap();
        assert_eq!((server.user.as_str(), server.password.as_str()), ("app", "s3cret/&"));
        assert_eq!((server.place().as_str(), server.database()), ("db.example:9000", "reads"));
        assert!(!format!("{server:?}").contains("s3cret"));
        let server = Server::of("clickhouses://db.example").unwrap();
        assert_eq!((server.url.scheme(), server.place().as_str()), ("https", "db.example:8443"));
        assert_eq!((server.user.as_str(), server.database()), ("default", "analytics"));
        for bad in [
            "clickhouse:db",
            "clickhouse://",
            "clickhouse://app:s3cret@db/a-b",
            "clickhouse://app:s3cret@db/a/b",
            "clickhouse://app:s3cret@db/1a",
            "clickhouse://app:s3cret@db/a?x=1",
            "clickhouse://app:s3cret@db:99999/a",
            &format!("clickhouse://app:s3cret@db/{}", "a".repeat(65)),
        ] {
            let message = Server::of(bad).unwrap_err().to_string();
            assert!(message.starts_with("configuration: ") && !message.contains("s3cret"), "{message}");
        }
    }

    /// A request on the wire.
    #[tokio::test]
    async fn t49_an_insert_says_that_it_is_not_asynchronous() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server =
            Server::of(&format!("clickhouse://u:s3cret@{}/x", listener.local_addr().unwrap())).unwrap();
        let received = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (mut received, mut piece) = (Vec::new(), [0; 4096]);
            while !received.ends_with(b"rows") {
                let count = stream.read(&mut piece).await.unwrap();
                assert_ne!(count, 0);
                received.extend_from_slice(&piece[..count]);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
            String::from_utf8(received).unwrap()
        });
        let statement = Statement::new("INSERT INTO x.t").set("insert_deduplication_token", "t");
        server.insert("inserting", statement, b"rows".to_vec()).await.unwrap();
        let line = received.await.unwrap().lines().next().unwrap().to_owned();
        for setting in [
            "?insert_deduplication_token=t&",
            "&async_insert=0&",
            "&insert_deduplicate=1&",
            "&wait_end_of_query=1&",
            "&use_skip_indexes_if_final=0&",
            "&max_execution_time=60&",
            "&optimize_move_to_prewhere_if_final=0&",
        ] {
            assert!(line.contains(setting), "{setting}: {line}");
        }
        assert!(!line.contains("s3cret"), "{line}");
    }

    #[test]
    fn parameters_are_escaped_as_the_server_reads_them() {
        assert_eq!(escaped("a\\b\t\n'\"é"), "a\\\\b\\t\\n'\"é");
    }
}
