//! Erases replaced versions for good. A merge would drop them too, at a time that nobody knows, and a version that
//! is inserted again would come back: so deletions, which are versions, stay.

use super::http::{Server, Statement};
use super::schema::{Found, RECORDS, REJECTED, found};
use super::wire::Answer;
use crate::analytics::{SEQ_BITS, SEQ_MAX};
use crate::erase::Subject;
use crate::error::Result;

const WHAT: &str = "erasing replaced versions";
/// What a rejected change that was erased says.
const ERASED: &str = "its content was erased";

/// The rows of the subject.
fn rows(of: &Subject) -> &'static str {
    match of.record {
        Some(_) => "tenant_id = {tenant:UUID} AND module = {module:String} AND record_id = {id:String}",
        None => "tenant_id = {tenant:UUID}",
    }
}

/// Versions that a higher one replaces. The question inside is asked when the rows are looked at: a record that was
/// written again meanwhile has a higher version then, and keeps that.
fn replaced(table: &str, of: &Subject) -> String {
    let rows = rows(of);
    format!(
        "{rows} AND (module, record_id, _version) NOT IN (SELECT module, record_id, max(_version) FROM {table} WHERE {rows}
         GROUP BY module, record_id)"
    )
}

/// Rejected changes of the subject that have content. One whose tenant could not be read is the subject's if it names
/// it.
fn rejected(of: &Subject) -> &'static str {
    match of.record {
        Some(_) => {
            "tenant IN ('', {tenant_text:String}) AND position(payload, {mark:String}) > 0
             AND (payload != '' OR reason != {erased:String})"
        }
        None => {
            "(tenant = {tenant_text:String} OR tenant = '' AND position(payload, {mark:String}) > 0)
             AND (payload != '' OR reason NOT IN ('', {erased:String}))"
        }
    }
}

/// A statement about the subject; `None` if its tenant has no records.
fn about(of: &Subject, sql: String) -> Option<Statement> {
    let tenant = of.tenant_id()?;
    let mut statement = Statement::new(sql).bind("tenant", tenant).bind("tenant_text", tenant);
    if let Some((module, id)) = &of.record {
        statement = statement.bind("module", module).bind("id", id);
    }
    Some(statement.bind("mark", of.mark()).bind("erased", ERASED))
}

/// All tables of rows: a rebuild that runs, or did not end, has one of its own.
async fn tables(server: &Server) -> Result<Vec<Found>> {
    Ok(found(server).await?.into_iter().filter(Found::is_of_rows).collect())
}

fn full_name(server: &Server, table: &Found) -> String {
    format!("{}.{}", server.database(), table.name)
}

/// Gives a second table the deletions that the first one has of records whose content it has: deletions are applied
/// to the first one only, and whoever fills the second one may never go on.
async fn bury(server: &Server, of: &Subject, second: &Found) -> Result<()> {
    let (first, name, rows) = (server.records(), full_name(server, second), rows(of));
    // A table takes versions of its own generation.
    let version = match second.about(server)?.generation {
        Some(generation) => format!("bitOr({}, bitAnd(last, {SEQ_MAX}))", u64::from(generation) << SEQ_BITS),
        None => "last".to_owned(),
    };
    let sql = format!(
        "INSERT INTO {name} (tenant_id, module, record_id, created_at, updated_at, _version, _deleted)
         SELECT tenant_id, module, record_id, created, updated, {version}, 1
         FROM (SELECT tenant_id, module, record_id, max(_version) AS last, argMax(_deleted, _version) AS gone,
                 argMax(created_at, _version) AS created, argMax(updated_at, _version) AS updated
               FROM {first} WHERE {rows} GROUP BY tenant_id, module, record_id)
         WHERE gone = 1 AND (module, record_id) IN (SELECT module, record_id FROM {name} WHERE {rows} AND _deleted = 0)"
    );
    let Some(statement) = about(of, sql) else { return Ok(()) };
    server.ask(WHAT, statement.set("insert_deduplicate", "0")).await?;
    Ok(())
}

async fn number(server: &Server, of: &Subject, sql: String) -> Result<u64> {
    let Some(statement) = about(of, sql) else { return Ok(0) };
    Answer::new(&server.ask("counting what is to be erased", statement).await?).u64()
}

/// How many versions have content, replaced or not, and how many rejected changes.
pub(super) async fn count(server: &Server, of: &Subject) -> Result<u64> {
    let held = format!("SELECT count() FROM {}.{REJECTED} WHERE {}", server.database(), rejected(of));
    let mut count = number(server, of, held).await?;
    for table in tables(server).await? {
        let table = full_name(server, &table);
        let telling = format!("SELECT count() FROM {table} WHERE {} AND _deleted = 0", rows(of));
        count += number(server, of, telling).await?;
    }
    Ok(count)
}

/// Removes them, and answers when all of it is done on every replica.
pub(super) async fn erase(server: &Server, of: &Subject) -> Result<u64> {
    let (database, mut count) = (server.database(), 0);
    for table in tables(server).await? {
        if table.name != RECORDS {
            bury(server, of, &table).await?;
        }
        let table = full_name(server, &table);
        let replaced = replaced(&table, of);
        let found = number(server, of, format!("SELECT count() FROM {table} WHERE {replaced}")).await?;
        if found > 0 {
            alter(server, of, format!("ALTER TABLE {table} DELETE WHERE {replaced}")).await?;
        }
        count += found;
    }
    crate::crash_point!("erase.clickhouse");
    let condition = rejected(of);
    let held =
        number(server, of, format!("SELECT count() FROM {database}.{REJECTED} WHERE {condition}")).await?;
    if held > 0 {
        let sql = format!(
            "ALTER TABLE {database}.{REJECTED} UPDATE payload = '', reason = {{erased:String}} WHERE {condition}"
        );
        alter(server, of, sql).await?;
    }
    Ok(count + held)
}

async fn alter(server: &Server, of: &Subject, sql: String) -> Result<()> {
    let Some(statement) = about(of, sql) else { return Ok(()) };
    server.ask(WHAT, statement.set("mutations_sync", "2")).await?;
    Ok(())
}
