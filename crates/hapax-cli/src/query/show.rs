//! Prints answers of the read model.

use std::io::{IsTerminal as _, Write as _};

use hapax::analytics::{Answer, Field, ListPage, Measure, Meta, ReadModel, RecordsQuery};
use hapax::records::Record;
use hapax::words::counted;
use serde_json::{Value, json};

use super::Format;
use crate::cli::Global;
use crate::failure::Failure;
use crate::ledger::look::or_dash;
use crate::print;
use crate::serve::analytics::{MetaBody, groups_of};

/// What people read about how current an answer is.
fn as_of(meta: &Meta) -> String {
    let mut text = match meta.last_sync_text() {
        Some(at) => format!("complete up to {at}"),
        None => "it is not known up to when it is complete".to_owned(),
    };
    if meta.stale {
        text.push_str(" (stale: is `hapax serve` running?)");
    }
    if let Some(wrong) = meta.approximate {
        text.extend(["; approximate: ", wrong]);
    }
    text
}

pub async fn list(query: RecordsQuery, page: ListPage, all: bool, format: Format) -> Result<u8, Failure> {
    let pages = query.pages().await?;
    let mut listed = pages.list(page).await?;
    match format {
        Format::Table => {
            let rows: Vec<_> = listed.records.iter().map(row).collect();
            print::table(["id", "seq", "updated", "payload"], &rows)?;
            let count = counted(rows.len() as u64, "record", "records");
            print::line(&format!("{count}; {}", as_of(pages.meta())))?;
            if let Some(next) = listed.next {
                print::line(&format!("more: --cursor {next}"))?;
            }
        }
        Format::Json => {
            let records: Vec<_> = listed.records.iter().map(record_json).collect::<Result<_, _>>()?;
            let next = listed.next.map(|id| id.to_string());
            // Not as a Value: numbers keep their digits.
            let meta = serde_json::to_string(&MetaBody::from(pages.meta().clone())).map_err(internal)?;
            let next = Value::from(next);
            print::line(&format!(r#"{{"records":[{}],"next":{next},"meta":{meta}}}"#, records.join(",")))?;
        }
        Format::Csv | Format::Parquet => {
            print::line("id,seq,created_at,updated_at,payload")?;
            loop {
                for record in &listed.records {
                    print::line(&csv(record))?;
                }
                let Some(next) = listed.next.filter(|_| all) else { break };
                listed = pages.list(ListPage::new(Some(next), page.limit)?).await?;
            }
            eprintln!("hapax: {}", as_of(pages.meta()));
        }
    }
    Ok(0)
}

/// All records as a Parquet file on standard output, as they arrive.
pub async fn parquet(query: RecordsQuery) -> Result<u8, Failure> {
    let mut out = std::io::stdout();
    if out.is_terminal() {
        let message =
            "a Parquet file is not for a terminal: send it to a file, as `--format parquet > orders.parquet`";
        return Err(Failure::config(message));
    }
    let meta = query.export_parquet(&mut |piece: &[u8]| out.write_all(piece)).await?;
    out.flush().map_err(|error| hapax::Error::unavailable("writing the Parquet file", error))?;
    eprintln!("hapax: {}", as_of(&meta));
    Ok(0)
}

pub fn schema(global: &Global, model: &dyn ReadModel) -> Result<u8, Failure> {
    let statements = model.schema();
    if global.json {
        print::json(&json!({"statements": statements}))?;
        return Ok(0);
    }
    for statement in statements {
        print::line(&format!("{statement};"))?;
    }
    Ok(0)
}

fn row(record: &Record) -> [String; 4] {
    let payload = record.payload.as_str().to_owned();
    [record.id.to_string(), record.seq.to_string(), record.updated_at.to_string(), payload]
}

fn record_json(record: &Record) -> Result<String, Failure> {
    let payload = &record.payload;
    let text = json!({
        "id": record.id.to_string(), "module": record.module.as_str(), "seq": record.seq,
        "created_at": record.created_at.to_string(), "updated_at": record.updated_at.to_string(),
    });
    let text = serde_json::to_string(&text).map_err(internal)?;
    let about = text.strip_suffix('}').unwrap_or(&text);
    Ok(format!(r#"{about},"payload":{}}}"#, payload.as_str()))
}

/// A line of RFC 4180. The payload is quoted always, and begins with a brace: no program takes it for a
/// formula.
fn csv(record: &Record) -> String {
    let payload = record.payload.as_str().replace('"', "\"\"");
    format!("{},{},{},{},\"{payload}\"", record.id, record.seq, record.created_at, record.updated_at)
}

#[allow(clippy::needless_pass_by_value)] // as map_err hands it over
fn internal(error: serde_json::Error) -> Failure {
    Failure::from(hapax::Error::Corrupt(format!("an answer cannot be written as JSON: {error}")))
}

pub async fn tally(
    mut query: RecordsQuery,
    measures: Vec<Measure>,
    group_by: Option<&Field>,
    format: Format,
) -> Result<u8, Failure> {
    for measure in &measures {
        query = query.measure(measure.clone())?;
    }
    if let Some(field) = group_by {
        query = query.group_by(field.as_str())?;
    }
    let Answer { value, meta, .. } = query.tally().await?;
    let more = value.more;
    let groups = groups_of(value, &measures);
    if format == Format::Json {
        let groups = serde_json::to_string(&groups).map_err(internal)?;
        let meta = serde_json::to_string(&MetaBody::from(meta)).map_err(internal)?;
        print::line(&format!(r#"{{"groups":{groups},"more":{more},"meta":{meta}}}"#))?;
        return Ok(0);
    }
    let mut heads: Vec<String> = group_by.iter().map(ToString::to_string).collect();
    heads.push("count".to_owned());
    heads.extend(measures.iter().map(|measure| format!("{} {}", measure.name(), measure.field())));
    let mut rows = Vec::new();
    let mut left_out = 0;
    for group in &groups {
        let mut cells: Vec<String> = group_by.iter().map(|_| group.key_text()).collect();
        cells.push(group.count().to_string());
        cells.extend(group.values().map(|value| or_dash(value)));
        left_out += group.left_out();
        rows.push(cells);
    }
    if format == Format::Csv {
        let quoted = |cells: &[String]| -> String {
            let cells: Vec<_> =
                cells.iter().map(|cell| format!("\"{}\"", cell.replace('"', "\"\""))).collect();
            cells.join(",")
        };
        print::line(&quoted(&heads))?;
        for row in &rows {
            print::line(&quoted(row))?;
        }
        eprintln!("hapax: {}", as_of(&meta));
        return Ok(0);
    }
    print::line(&columns(&heads, &rows))?;
    print::line(&as_of(&meta))?;
    if more {
        print::line("there are more groups; these are the first by their values")?;
    }
    if left_out > 0 {
        let what = counted(
            left_out,
            "value is not a number that fits, and is",
            "values are not numbers that fit, and are",
        );
        print::line(&format!("{what} left out of the numbers"))?;
    }
    Ok(0)
}

/// Rows in columns whose number is known only now.
fn columns(heads: &[String], rows: &[Vec<String>]) -> String {
    let all: Vec<&[String]> = std::iter::once(heads).chain(rows.iter().map(Vec::as_slice)).collect();
    let shown: Vec<Vec<String>> =
        all.iter().map(|row| row.iter().map(|cell| print::escaped(cell)).collect()).collect();
    let width = |at: usize| shown.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..heads.len()).map(|at| width(at).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| -> String {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    shown.iter().map(line).collect::<Vec<_>>().join("\n")
}

pub async fn status(global: &Global, model: &dyn ReadModel) -> Result<u8, Failure> {
    let (partitions, rejected, unfinished) =
        tokio::try_join!(model.partitions(), model.rejected(1000), model.unfinished())?;
    let code = u8::from(!rejected.is_empty());
    if global.json {
        let partitions: Vec<_> = partitions
            .iter()
            .map(|one| {
                json!({
                    "topic": one.partition.topic.as_str(), "partition": one.partition.number, "offset": one.offset,
                    "pulse": one.pulse.map(|pulse| pulse.to_string()),
                })
            })
            .collect();
        let rejected: Vec<_> = rejected
            .iter()
            .map(|entry| {
                let origin = &entry.rejected.origin;
                json!({
                    "topic": origin.topic.as_str(), "partition": origin.partition, "offset": origin.offset,
                    "tenant": entry.rejected.tenant.map(|tenant| tenant.to_string()), "reason": entry.rejected.reason,
                })
            })
            .collect();
        print::json(&json!({"partitions": partitions, "rejected": rejected, "unfinished": unfinished}))?;
        return Ok(code);
    }
    let rows: Vec<_> = partitions
        .iter()
        .map(|one| [one.partition.to_string(), or_dash(one.offset.as_ref()), or_dash(one.pulse.as_ref())])
        .collect();
    print::table(["partition", "offset", "complete up to"], &rows)?;
    if let Some(unfinished) = unfinished {
        print::line(&unfinished)?;
    }
    for entry in &rejected {
        let origin = &entry.rejected.origin;
        print::line(&format!(
            "rejected: {}[{}] offset {}: {}; `hapax query drop --topic {} --partition {} --offset {}` gives it up",
            origin.topic,
            origin.partition,
            origin.offset,
            entry.rejected.reason,
            origin.topic,
            origin.partition,
            origin.offset
        ))?;
    }
    Ok(code)
}
