//! Pages of rows of all tenants, in the order of a table's key.

use rusqlite::types::Value;

use crate::records::{Name, Scan};

/// The end of a statement that reads a page, from its conditions on, and its values. `key`: tenant, module
/// and id in the order of the table's key. Columns that a scan fixes are not compared, so that the key finds
/// the first row of the page.
pub(super) fn page(scan: &Scan, key: [&str; 3]) -> (String, Vec<Value>) {
    let fixed = |column: &str| match column {
        "tenant" => scan.tenant.map(|tenant| Value::Blob(tenant.into_bytes().to_vec())),
        "module" => scan.module.as_ref().map(|module| Value::Text(module.as_str().to_owned())),
        _ => None,
    };
    let (mut conditions, mut values) = (vec!["payload IS NOT NULL".to_owned()], Vec::new());
    for column in key {
        if let Some(value) = fixed(column) {
            conditions.push(format!("{column} = ?"));
            values.push(value);
        }
    }
    if let Some(after) = &scan.after {
        let free: Vec<&str> = key.into_iter().filter(|column| fixed(column).is_none()).collect();
        conditions.push(format!("({}) > ({})", free.join(", "), vec!["?"; free.len()].join(", ")));
        values.extend(free.iter().map(|column| value(after, column)));
    }
    values.push(Value::Integer(i64::try_from(scan.limit).unwrap_or(i64::MAX)));
    (format!("WHERE {} ORDER BY {} LIMIT ?", conditions.join(" AND "), key.join(", ")), values)
}

fn value(name: &Name, column: &str) -> Value {
    match column {
        "tenant" => Value::Blob(name.tenant.into_bytes().to_vec()),
        "module" => Value::Text(name.module.as_str().to_owned()),
        _ => Value::Blob(name.id.into_bytes().to_vec()),
    }
}
