//! What a change data capture of the records sees.

use hapax::records::{Delete, Records as _, Update};
use hapax::testing::records::{RecordsHarness as _, create, payload, tenant};
use sqlx::{AssertSqlSafe, Row as _};

use super::{PgRecordsHarness, pool_of};

/// The tuple of a message of pgoutput: the columns that are sent as text; `None` for null and unchanged.
fn columns(mut bytes: &[u8]) -> Vec<Option<String>> {
    let mut take = |count: usize| {
        let (head, rest) = bytes.split_at(count);
        bytes = rest;
        head
    };
    let count = u16::from_be_bytes(take(2).try_into().unwrap());
    let column = |_| match take(1)[0] {
        b't' => {
            let length = u32::from_be_bytes(take(4).try_into().unwrap()) as usize;
            Some(String::from_utf8(take(length).to_vec()).unwrap())
        }
        _ => None,
    };
    (0..count).map(column).collect()
}

/// A slot of the publication, read as Debezium does. Without REPLICA IDENTITY FULL a delete has the key
/// only, and the read model does not know which version it deletes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t208_a_delete_in_the_replication_stream_has_its_tenant_and_seq() {
    let harness = PgRecordsHarness::new().await;
    let records = harness.open().await;
    let of = Some(tenant(0xa));
    // The slot goes with the connection.
    let admin = pool_of("postgres", 1).await;
    let slot = format!("s_{}", harness.schema);
    let slot = &slot[slot.len().saturating_sub(60)..];
    let made = format!("select from pg_create_logical_replication_slot('{slot}', 'pgoutput', true)");
    sqlx::raw_sql(AssertSqlSafe(made)).execute(&admin).await.unwrap();

    let record = records.create(&create(&harness, r#"{"n":1}"#).tenant(of.clone())).await.unwrap();
    let change = Update::new(harness.slug.clone(), record.id, 1, payload(r#"{"n":2}"#)).tenant(of.clone());
    records.update(&change).await.unwrap();
    records.delete(&Delete::new(harness.slug.clone(), record.id, 2).tenant(of)).await.unwrap();

    let changes = format!(
        "select data from pg_logical_slot_get_binary_changes('{slot}', null, null, 'proto_version', '1', \
         'publication_names', 'hapax_records')"
    );
    let rows = sqlx::query(AssertSqlSafe(changes)).fetch_all(&admin).await.unwrap();
    let messages: Vec<Vec<u8>> = rows.iter().map(|row| row.get(0)).collect();
    // Other tests write to other tables of the publication meanwhile: relations are told by their oid.
    let named = format!("module_{}\0records\0", harness.slug);
    let oid = messages
        .iter()
        .find(|message| message[0] == b'R' && message[5..].starts_with(named.as_bytes()))
        .map(|message| message[1..5].to_vec())
        .expect("the publication has the table");
    let of_kind = |kind: u8| -> Vec<&[u8]> {
        let ours = |message: &&Vec<u8>| message[0] == kind && message[1..5] == oid;
        messages.iter().filter(ours).map(|message| &message[5..]).collect()
    };
    let (inserts, updates, deletes) = (of_kind(b'I'), of_kind(b'U'), of_kind(b'D'));
    assert_eq!((inserts.len(), updates.len(), deletes.len()), (1, 1, 1));
    // `O`: the whole old row, as it was; `K` would be its key.
    assert_eq!((inserts[0][0], updates[0][0], deletes[0][0]), (b'N', b'O', b'O'));
    let row = |seq: &str, json: &str| {
        let of = tenant(0xa).as_str().to_owned();
        [record.id.to_string(), of, json.to_owned(), seq.to_owned()].map(Some)
    };
    assert_eq!(columns(&updates[0][1..])[..4], row("1", r#"{"n": 1}"#));
    assert_eq!(columns(&deletes[0][1..])[..4], row("2", r#"{"n": 2}"#));
}
