//! Pages of rows of all tenants, to compare them with their records.

use uuid::Uuid;

use super::http::{Server, Statement};
use super::index::Index;
use super::wire::Answer;
use crate::analytics::{Row, Version};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::records::{LIST_BYTES_MAX, ModuleSlug, Name, Payload, RECORD_BYTES, Scan};

const WHAT: &str = "scanning a read model";
/// All that is stored of a row beside its name.
const COLUMNS: &str = "_version, payload, created_at, updated_at, fields, numbers";

/// A page. The sizes of rows are asked first, so that nothing is read of what does not fit on it.
pub(super) async fn rows(server: &Server, scan: &Scan) -> Result<Vec<Row>> {
    let mut scan = scan.clone();
    loop {
        let sizes = server.ask(WHAT, select(server, &scan, "_bytes")).await?;
        let mut sizes = Answer::new(&sizes);
        let (mut count, mut bytes) = (0, 0);
        let mut last = None;
        while sizes.more() && bytes < LIST_BYTES_MAX {
            last = Some(name(&mut sizes)?);
            bytes += RECORD_BYTES + usize::try_from(sizes.u64()?).unwrap_or(usize::MAX / 2);
            count += 1;
        }
        let Some(last) = last else { return Ok(Vec::new()) };
        let page = Scan { limit: count, ..scan.clone() };
        let answer = server.ask(WHAT, select(server, &page, COLUMNS)).await?;
        let (mut answer, mut rows) = (Answer::new(&answer), Vec::new());
        while answer.more() {
            rows.push(row(&mut answer)?);
        }
        if !rows.is_empty() {
            return Ok(rows);
        }
        scan.after = Some(last); // all of them were deleted meanwhile
    }
}

/// A row. What answers are computed from must be what its payload says.
fn row(answer: &mut Answer<'_>) -> Result<Row> {
    let (name, version, payload) = (name(answer)?, Version::from_u64(answer.u64()?)?, answer.bytes()?);
    let times = (Time::from_micros(answer.i64()?), Time::from_micros(answer.i64()?));
    let mut stored = Vec::new();
    for _ in 0..answer.count()? {
        stored.push((answer.bytes()?, answer.bytes()?));
    }
    let mut numbers = Vec::new();
    for _ in 0..answer.count()? {
        numbers.push((answer.bytes()?, answer.i128()?));
    }
    let row = Row::new(name, version, times, payload)?;
    let index = std::str::from_utf8(payload).ok().and_then(|json| Payload::stored(json).ok());
    let Some(index) = index.as_ref().and_then(Index::of) else { return Ok(row.damaged()) };
    let mut fields: Vec<_> = index.fields.iter().map(|(at, text)| (at.as_bytes(), text.as_bytes())).collect();
    let mut of_payload: Vec<_> = index.numbers.iter().map(|(at, n)| (at.as_bytes(), n.units())).collect();
    for pairs in [&mut fields, &mut stored] {
        pairs.sort_unstable(); // a map has no order
    }
    for pairs in [&mut of_payload, &mut numbers] {
        pairs.sort_unstable();
    }
    Ok(if fields == stored && of_payload == numbers { row } else { row.damaged() })
}

/// The first rows of a scan: their names and these columns. The row by which the filter of tenants is tried has
/// no module.
fn select(server: &Server, scan: &Scan, columns: &str) -> Statement {
    let mut conditions = vec!["module != ''".to_owned()];
    if scan.tenant.is_some() {
        conditions.push("tenant_id = {tenant:UUID}".to_owned());
    }
    if scan.module.is_some() {
        conditions.push("module = {module:String}".to_owned());
    }
    if let Some(buckets) = scan.buckets_text() {
        conditions.push(format!("reinterpretAsUInt8(substring(SHA256(record_id), 1, 1)) IN ({buckets})"));
    }
    if scan.after.is_some() {
        // Written out, because the key finds no tuple.
        conditions.push(
            "(tenant_id > {after_tenant:UUID} OR tenant_id = {after_tenant:UUID} AND (module > {after_module:String} OR \
             module = {after_module:String} AND record_id > {after_id:String}))"
                .to_owned(),
        );
    }
    let sql = format!(
        "SELECT tenant_id, toString(module), record_id, {columns} FROM {} FINAL WHERE {}
         ORDER BY tenant_id, module, record_id LIMIT {{limit:UInt64}}",
        server.records(),
        conditions.join(" AND ")
    );
    let mut statement = Statement::new(sql).bind("limit", scan.limit);
    if let Some(tenant) = scan.tenant {
        statement = statement.bind("tenant", tenant);
    }
    if let Some(module) = &scan.module {
        statement = statement.bind("module", module);
    }
    if let Some(Name { tenant, module, id }) = &scan.after {
        statement = statement.bind("after_tenant", tenant).bind("after_module", module).bind("after_id", id);
    }
    statement
}

fn name(row: &mut Answer<'_>) -> Result<Name> {
    let (tenant, module, id) = (row.uuid()?, ModuleSlug::new(row.text()?)?, row.text()?);
    let id = Uuid::try_parse(id)
        .map_err(|_| Error::Corrupt("the id of a row in the read model is not a UUID".into()))?;
    Ok(Name { tenant, module, id })
}
