//! The view for BI tools, whatever their settings are.

use hapax::analytics::{ReadModel as _, Uuid};
use hapax::testing::analytics::{apply, block, change};

use crate::engine::Database;

/// Somebody added a skip index for a dashboard, and the profile of its user lets FINAL use it: the index leaves out what
/// holds the current version, and the replaced one, which fits the filter, would be shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t437_the_view_shows_no_replaced_version_whatever_the_profile_says() {
    let database = Database::new();
    let model = database.model();
    apply(&model, block([])).await; // makes the tables
    for sql in [
        "SYSTEM STOP MERGES DB.data_records",
        "ALTER TABLE DB.data_records ADD INDEX paid (payload) TYPE set(0) GRANULARITY 1",
    ] {
        database.sql(sql);
    }
    apply(&model, block([change(1, 1, Some(r#"{"status":"open"}"#))])).await;
    apply(&model, block([change(1, 2, Some(r#"{"status":"paid"}"#))])).await;
    assert_eq!(database.rows(), 2, "both versions are there");
    let count = |of: &str, settings: &str| {
        let filter = r#"payload = '{"status":"open"}'"#;
        database.sql(&format!("SELECT count() FROM {of} WHERE {filter} SETTINGS {settings}"))
    };
    let settings = "use_skip_indexes_if_final = 1, use_skip_indexes_if_final_exact_mode = 0";
    assert_eq!(count("DB.data_records FINAL", settings), "1", "such a profile shows replaced versions");
    let view = format!("DB.records(tenant = '{}')", Uuid::nil());
    for settings in [
        settings,
        "optimize_move_to_prewhere_if_final = 1",
        "do_not_merge_across_partitions_select_final = 1",
    ] {
        assert_eq!(count(&view, settings), "0", "{settings}");
    }
}

/// A view that an earlier build made has no settings. Whoever may make tables replaces it, and who only asks does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t466_the_view_of_an_earlier_build_is_replaced() {
    let database = Database::new();
    apply(&database.model(), block([change(1, 1, Some("{}"))])).await;
    let text = || {
        database.sql(&format!(
            "SELECT create_table_query FROM system.tables WHERE database = '{}' AND name = 'records'",
            database.name
        ))
    };
    let made = text();
    assert!(made.contains("use_skip_indexes_if_final = 0"), "{made}");
    let as_before = "CREATE OR REPLACE VIEW DB.records AS SELECT module, record_id, payload, fields, numbers, created_at, updated_at, \
                     bitAnd(_version, 281474976710655) AS seq FROM DB.data_records FINAL WHERE tenant_id = {tenant:UUID} \
                     COMMENT 'hapax read model, version 1'";
    database.sql(as_before);
    let existing = hapax::backend::clickhouse::ClickHouseReadModel::open_existing(&database.url()).unwrap();
    existing.partitions().await.unwrap();
    assert!(!text().contains("use_skip_indexes_if_final"), "who only asks changes nothing");
    apply(&database.model(), block([change(1, 2, Some("{}"))])).await;
    assert_eq!(text(), made);
    let view = format!("DB.records(tenant = '{}')", Uuid::nil());
    assert_eq!(database.sql(&format!("SELECT seq FROM {view}")), "2");
    // One of a later build stays.
    let later = made.replace("build 2", "build 3").replace("\\'", "'");
    let later = later.replacen("CREATE VIEW", "CREATE OR REPLACE VIEW", 1);
    database.sql(&later);
    apply(&database.model(), block([change(1, 3, Some("{}"))])).await;
    assert!(text().contains("build 3"));
}
