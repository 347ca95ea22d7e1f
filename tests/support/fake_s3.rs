//! A server that speaks enough of S3 for a journal, and lacks what a test wants it to lack. It knows nothing of signatures.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use hapax::backend::object::S3Settings;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// What it does about `If-None-Match: *`, and about listings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Creates {
    /// What S3 does.
    Once,
    /// That, but it lists from the beginning whatever name is asked for.
    OnceAndListsAll,
    /// That, but it lists the last name first.
    OnceAndListsBackwards,
    /// It does not know the header, and writes.
    Always,
    /// It says that the name is taken, and writes.
    Overwrites,
    /// It says that it does not know the header.
    Refuses,
    /// It says that all is well, and keeps nothing.
    Forgets,
}

type Kept = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// The server. It serves as long as its runtime.
pub struct FakeS3 {
    endpoint: String,
    kept: Kept,
}

impl FakeS3 {
    pub async fn new(creates: Creates) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let kept = Kept::default();
        let all = Arc::clone(&kept);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, creates, Arc::clone(&all)));
            }
        });
        FakeS3 { endpoint, kept }
    }

    pub fn settings(&self) -> S3Settings {
        let mut settings = S3Settings::new("bucket", "key", "secret");
        settings.endpoint = Some(self.endpoint.clone());
        settings
    }

    /// The names of its objects.
    pub fn names(&self) -> Vec<String> {
        self.kept.lock().unwrap().keys().cloned().collect()
    }
}

/// One connection: requests until the client goes.
async fn serve(client: TcpStream, creates: Creates, kept: Kept) {
    let (from, mut to) = client.into_split();
    let mut from = BufReader::new(from);
    loop {
        let (mut line, mut length, mut once) = (String::new(), 0, false);
        if from.read_line(&mut line).await.unwrap_or(0) == 0 {
            return;
        }
        let (method, target) = line.split_once(' ').unwrap();
        let (method, target) = (method.to_owned(), target.split(' ').next().unwrap().to_owned());
        loop {
            let mut header = String::new();
            from.read_line(&mut header).await.unwrap();
            let header = header.trim().to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length: ") {
                length = value.parse().unwrap();
            }
            once |= header == "if-none-match: *";
        }
        let mut body = vec![0; length];
        from.read_exact(&mut body).await.unwrap();
        let (status, answer) = answer(&method, &target, creates, once, body, &kept);
        let now = jiff::Timestamp::now();
        let date = jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&now).unwrap();
        let head = format!(
            "HTTP/1.1 {status}\r\nDate: {date}\r\nLast-Modified: {date}\r\nETag: \"x\"\r\nContent-Length: {}\r\n\r\n",
            answer.len()
        );
        if to.write_all(&[head.as_bytes(), &answer].concat()).await.is_err() {
            return;
        }
    }
}

fn answer(
    method: &str,
    target: &str,
    creates: Creates,
    once: bool,
    body: Vec<u8>,
    kept: &Kept,
) -> (&'static str, Vec<u8>) {
    let mut kept = kept.lock().unwrap();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let name = path.strip_prefix("/bucket").unwrap().trim_start_matches('/').to_owned();
    match method {
        "GET" if name.is_empty() => ("200 OK", list(query, creates, &kept)),
        "GET" => kept.get(&name).map_or(("404 Not Found", Vec::new()), |body| ("200 OK", body.clone())),
        "POST" if query == "delete" => {
            let body = String::from_utf8(body).unwrap();
            let names: Vec<_> =
                body.split("<Key>").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
            let deleted = |name: &&str| format!("<Deleted><Key>{name}</Key></Deleted>");
            let message: String = names.iter().map(deleted).collect();
            kept.retain(|name, _| !names.contains(&name.as_str()));
            ("200 OK", format!("<DeleteResult>{message}</DeleteResult>").into())
        }
        "PUT" if !once => {
            kept.insert(name, body);
            ("200 OK", Vec::new())
        }
        "PUT" => match creates {
            Creates::Refuses => ("501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>".into()),
            Creates::Forgets => ("200 OK", Vec::new()),
            Creates::Once | Creates::OnceAndListsAll | Creates::OnceAndListsBackwards
                if kept.contains_key(&name) =>
            {
                ("412 Precondition Failed", Vec::new())
            }
            Creates::Overwrites if kept.contains_key(&name) => {
                kept.insert(name, body);
                ("412 Precondition Failed", Vec::new())
            }
            _ => {
                kept.insert(name, body);
                ("200 OK", Vec::new())
            }
        },
        _ => ("405 Method Not Allowed", Vec::new()),
    }
}

fn list(query: &str, creates: Creates, kept: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let of = |name: &str| {
        let value =
            query.split('&').find_map(|part| part.strip_prefix(&format!("{name}="))).unwrap_or_default();
        value.replace("%2F", "/")
    };
    let (prefix, after, max) = (of("prefix"), of("start-after"), of("max-keys"));
    let mut names: Vec<_> = kept
        .keys()
        .filter(|name| name.starts_with(&prefix) && (after.is_empty() || **name > after))
        .collect();
    if creates == Creates::OnceAndListsAll {
        names = kept.keys().filter(|name| name.starts_with(&prefix)).collect();
    }
    if creates == Creates::OnceAndListsBackwards {
        names.reverse();
    }
    let wanted = max.parse().unwrap_or(1000);
    let more = names.len() > wanted;
    names.truncate(wanted);
    let token = if more { "<NextContinuationToken>more</NextContinuationToken>" } else { "" };
    let at = jiff::Timestamp::now();
    let object = |name: &&String| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>{at}</LastModified><ETag>x</ETag><Size>1</Size></Contents>"
        )
    };
    let contents = names.iter().map(object).collect::<Vec<_>>().concat();
    format!("<ListBucketResult>{token}{contents}</ListBucketResult>").into()
}
