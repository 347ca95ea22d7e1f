//! Questions. The tenant is in each of them twice: in the predicate, and in a filter that holds for the table.

use uuid::Uuid;

use super::http::{Server, Statement};
use super::schema::tenant_filter;
use super::wire::Answer;
use crate::analytics::{
    Decimal, Field, GROUPS_MAX, Group, Groups, ListPage, Measure, Measured, Pieces, SEQ_MAX, Selection,
    Tally, Version,
};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::records::{Filling, LIST_BYTES_MAX, Listed, ModuleSlug, Payload, RECORD_BYTES, Record};

/// A statement about a selection: `columns` of its rows, then `rest` of the statement.
fn select(server: &Server, of: &Selection, columns: &str, rest: &str) -> Statement {
    // Without FINAL, versions that no merge has met yet are rows too.
    let (last, live) = if of.approximate { ("", " AND _deleted = 0") } else { (" FINAL", "") };
    let since =
        if of.since.is_some() { " AND toUnixTimestamp64Micro(updated_at) >= {since:Int64}" } else { "" };
    let sql = format!(
        "SELECT {columns} FROM {}{last}
         WHERE tenant_id = {{tenant:UUID}} AND module = {{module:String}}{live}{since} {rest}",
        server.records()
    );
    let statement = Statement::new(sql).bind("tenant", of.tenant).bind("module", of.module.as_str());
    let statement = statement.set("additional_table_filters", tenant_filter(server, of.tenant));
    match of.since {
        Some(since) => statement.bind("since", since.as_micros()),
        None => statement,
    }
}

/// A page. The sizes of rows are asked first, so that nothing is read of what does not fit on it.
pub(super) async fn list(server: &Server, of: &Selection, page: ListPage) -> Result<Listed> {
    let what = "listing the rows of a read model";
    let mut after = page.after.map(|id| id.to_string()).unwrap_or_default();
    loop {
        let rest = "AND record_id > {after:String} ORDER BY record_id LIMIT {limit:UInt64}";
        let sizes =
            select(server, of, "record_id, _bytes", rest).bind("after", &after).bind("limit", page.limit + 1);
        let answer = server.ask(what, sizes).await?;
        let Some((last, more)) = page_end(&answer, page.limit)? else {
            return Ok(Filling::new(page.limit).done(false));
        };
        let columns = "record_id, _version, payload, created_at, updated_at";
        let rest = "AND record_id > {after:String} AND record_id <= {last:String} ORDER BY record_id LIMIT {limit:UInt64}";
        let rows = select(server, of, columns, rest).bind("after", &after).bind("last", &last);
        let answer = server.ask(what, rows.bind("limit", page.limit + 1)).await?;
        let (mut answer, mut filling) = (Answer::new(&answer), Filling::new(page.limit));
        let mut any = false;
        while answer.more() {
            if filling.is_full() {
                return Ok(filling.done(true));
            }
            filling.add(record(&mut answer, &of.module)?);
            any = true;
        }
        if any || !more {
            return Ok(filling.done(more));
        }
        after = last; // all of them were deleted meanwhile
    }
}

/// The id of the last row that fits on a page, and whether rows follow it; `None` if there are no rows.
fn page_end(sizes: &[u8], limit: usize) -> Result<Option<(String, bool)>> {
    let (mut answer, mut rows, mut bytes) = (Answer::new(sizes), 0, 0);
    let mut last = None;
    while answer.more() {
        if rows == limit || bytes >= LIST_BYTES_MAX {
            return Ok(last.map(|last: &str| (last.to_owned(), true)));
        }
        last = Some(answer.text()?);
        bytes += RECORD_BYTES + usize::try_from(answer.u64()?).unwrap_or(usize::MAX / 2);
        rows += 1;
    }
    Ok(last.map(|last| (last.to_owned(), false)))
}

fn record(row: &mut Answer<'_>, module: &ModuleSlug) -> Result<Record> {
    let id = Uuid::try_parse(row.text()?)
        .map_err(|_| Error::Corrupt("the id of a row in the read model is not a UUID".into()))?;
    let seq = row.u64()? & SEQ_MAX;
    let payload = Payload::stored(row.text()?)?;
    let (created_at, updated_at) = (Time::from_micros(row.i64()?), Time::from_micros(row.i64()?));
    Ok(Record { id, module: module.clone(), seq, payload, created_at, updated_at })
}

/// Numbers about records, computed by the server.
pub(super) async fn tally(server: &Server, of: &Selection, what: &Tally) -> Result<Groups> {
    let mut columns = vec!["count()".to_owned()];
    for (at, measure) in what.measures.iter().enumerate() {
        let field = format!("{{field{at}:String}}");
        let number = format!("toDecimal256(numbers[{field}], 9)");
        columns.push(format!("countIf(mapContains(numbers, {field}))"));
        columns.push(format!("countIf(mapContains(fields, {field}) AND NOT mapContains(numbers, {field}))"));
        columns.push(format!("{}If({number}, mapContains(numbers, {field}))", measure.name()));
    }
    let rest = match &what.group_by {
        Some(_) => {
            columns.insert(0, "fields[{group:String}] AS key".to_owned());
            format!("GROUP BY key ORDER BY key LIMIT {}", GROUPS_MAX + 1)
        }
        None => String::new(),
    };
    let mut statement = select(server, of, &columns.join(", "), &rest);
    for (at, measure) in what.measures.iter().enumerate() {
        statement = statement.bind(&format!("field{at}"), measure.field());
    }
    if let Some(field) = &what.group_by {
        statement = statement.bind("group", field);
    }
    let answer = server.ask("computing numbers of a read model", statement).await?;
    let (mut answer, mut groups) = (Answer::new(&answer), Vec::new());
    while answer.more() {
        groups.push(group(&mut answer, what)?);
    }
    let more = groups.len() > GROUPS_MAX;
    groups.truncate(GROUPS_MAX);
    Ok(Groups::new(groups, more))
}

fn group(row: &mut Answer<'_>, what: &Tally) -> Result<Group> {
    // A value that groups is never empty.
    let key = match &what.group_by {
        Some(_) => Some(row.text()?.to_owned()).filter(|key| !key.is_empty()),
        None => None,
    };
    let count = row.u64()?;
    let measures = what.measures.iter().map(|measure| measured(row, measure)).collect::<Result<_>>()?;
    Ok(Group { key, count, measures })
}

fn measured(row: &mut Answer<'_>, measure: &Measure) -> Result<Measured> {
    let (numbers, left_out, value) = (row.u64()?, row.u64()?, row.i256()?);
    let too_large = |field: &Field| {
        Error::invalid("question", format!("the sum of {field} has more digits than an answer can have"))
    };
    let value = value.ok_or_else(|| too_large(measure.field()))?;
    Ok(Measured { value: (numbers > 0).then(|| Decimal::from_units(value)), left_out })
}

/// The version of a record, also of a deleted one.
pub(super) async fn version(
    server: &Server,
    tenant: Uuid,
    module: &ModuleSlug,
    id: Uuid,
) -> Result<Option<Version>> {
    let sql = format!(
        "SELECT max(_version) FROM {}
         WHERE tenant_id = {{tenant:UUID}} AND module = {{module:String}} AND record_id = {{id:String}}",
        server.records()
    );
    let statement = Statement::new(sql).bind("tenant", tenant).bind("module", module.as_str()).bind("id", id);
    let statement = statement.set("additional_table_filters", tenant_filter(server, tenant));
    let answer = server.ask("reading a version", statement).await?;
    match Answer::new(&answer).u64()? {
        0 => Ok(None),
        version => Version::from_u64(version).map(Some),
    }
}

/// The server's clock.
pub(super) async fn now(server: &Server) -> Result<Time> {
    let statement = Statement::new("SELECT toUnixTimestamp64Micro(now64(6))");
    let answer = server.ask("reading the time of a read model", statement).await?;
    Ok(Time::from_micros(Answer::new(&answer).i64()?))
}

/// How every Parquet file ends.
const PARQUET_END: &[u8] = b"PAR1";

/// All records of a selection as one Parquet file, piece by piece.
pub(super) async fn parquet(server: &Server, of: &Selection, to: Pieces<'_>) -> Result<()> {
    let what = "exporting records";
    let columns = "record_id AS id, bitAnd(_version, {mask:UInt64}) AS seq, created_at, updated_at, payload";
    let statement = select(server, of, columns, "ORDER BY record_id FORMAT Parquet").bind("mask", SEQ_MAX);
    let mut file = server.stream(what, statement).await?;
    let mut end = Vec::new();
    while let Some(piece) = file.next().await? {
        to(&piece)
            .map_err(|error| Error::unavailable(format!("{what}: the file cannot be written"), error))?;
        end.extend_from_slice(&piece[piece.len().saturating_sub(PARQUET_END.len())..]);
        end.drain(..end.len().saturating_sub(PARQUET_END.len()));
    }
    // A server that fails half-way has said 200 already.
    if end != PARQUET_END {
        let message = format!("{what}: ClickHouse at {} did not finish the file", server.place());
        return Err(Error::Unavailable { what: message, source: None });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::mpsc;
    use tokio::task::JoinHandle;

    use super::*;

    /// A server that answers one request with these pieces, and waits before each but the first until the test continues it.
    /// It returns the first line of the request.
    async fn sends(pieces: &'static [&'static [u8]]) -> (Server, mpsc::Sender<()>, JoinHandle<String>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server::of(&format!("clickhouse://{}/x", listener.local_addr().unwrap())).unwrap();
        let (go_on, mut goes_on) = mpsc::channel(1);
        let serving = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (mut received, mut piece) = (Vec::new(), [0; 4096]);
            while !received.ends_with(b"FORMAT Parquet") {
                let count = stream.read(&mut piece).await.unwrap();
                assert_ne!(count, 0);
                received.extend_from_slice(&piece[..count]);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
            for (n, piece) in pieces.iter().enumerate() {
                if n > 0 {
                    goes_on.recv().await;
                }
                stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).await.unwrap();
                stream.write_all(piece).await.unwrap();
                stream.write_all(b"\r\n").await.unwrap();
            }
            stream.write_all(b"0\r\n\r\n").await.unwrap();
            String::from_utf8(received).unwrap().lines().next().unwrap().to_owned()
        });
        (server, go_on, serving)
    }

    async fn exported(server: &Server, mut to: impl FnMut(&[u8]) + Send) -> Result<()> {
        let of = Selection {
            tenant: Uuid::nil(),
            module: ModuleSlug::new("orders").unwrap(),
            since: None,
            approximate: false,
        };
        parquet(server, &of, &mut |piece: &[u8]| {
            to(piece);
            Ok(())
        })
        .await
    }

    /// A file arrives piece by piece: the server sends the second when the first is there. And it may take longer than any
    /// other statement.
    #[tokio::test]
    async fn a_file_arrives_while_it_is_made_and_may_take_its_time() {
        let (server, go_on, serving) = sends(&[b"PAR1first", b"second", b"PAR1"]).await;
        let (mut arrived, mut pieces) = (Vec::new(), 0);
        let keep = |piece: &[u8]| {
            arrived.extend_from_slice(piece);
            pieces += 1;
            let _ = go_on.try_send(()); // after the last one nobody waits
        };
        exported(&server, keep).await.unwrap();
        assert_eq!((arrived.as_slice(), pieces), (&b"PAR1firstsecondPAR1"[..], 3));
        let line = serving.await.unwrap();
        assert!(line.contains("&max_execution_time=0 ") || line.contains("&max_execution_time=0&"), "{line}");
        assert!(!line.contains("max_execution_time=60"), "{line}");
    }

    /// A server that fails half-way has said 200 already, and may even end its answer properly.
    #[tokio::test]
    async fn a_file_that_was_cut_off_is_an_error() {
        const CUT_OFF: [&[&[u8]]; 2] =
            [&[b"PAR1first", b"PAR"], &[b"PAR1", b"Code: 241. MEMORY_LIMIT_EXCEEDED"]];
        for pieces in CUT_OFF {
            let (server, go_on, serving) = sends(pieces).await;
            let go_on = |_: &[u8]| {
                let _ = go_on.try_send(()); // after the last one nobody waits
            };
            let error = exported(&server, go_on).await.unwrap_err();
            assert!(error.is_retryable() && error.to_string().contains("did not finish the file"), "{error}");
            serving.await.unwrap();
        }
    }
}
