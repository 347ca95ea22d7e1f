//! What a scan shows, for whoever compares a read model with its records.

use super::{ReadModelHarness, apply, block, change, module, scanned};
use crate::analytics::{Change, Row, Uuid, Version};
use crate::records::{LIST_BYTES_MAX, Name, Scan};

const TENANTS: [u128; 3] = [0, 1, u128::MAX >> 1];
const MODULES: [&str; 2] = ["order", "orders"];

/// Ids that an engine could order in another way than their bytes.
fn id(n: u128) -> Uuid {
    Uuid::from_u128(n << 124 | (15 - n))
}

fn name(tenant: u128, slug: &str, n: u128) -> Name {
    Name { tenant: Uuid::from_u128(tenant), module: module(slug), id: id(n) }
}

/// Ten records for each tenant and module; the fifth is deleted, and the seventh updated.
async fn filled<H: ReadModelHarness>(harness: &H) -> H::Model {
    let model = harness.open().await;
    let mut changes = Vec::new();
    for tenant in TENANTS {
        for slug in MODULES {
            for n in 0..10 {
                let of = |seq, json| Change {
                    tenant: Uuid::from_u128(tenant),
                    module: module(slug),
                    id: id(n),
                    ..change(n, seq, json)
                };
                changes.push(of(1, Some(r#"{"n":1}"#)));
                match n {
                    5 => changes.push(of(2, None)),
                    7 => changes.push(of(2, Some(r#"{"n":2}"#))),
                    _ => {}
                }
            }
        }
    }
    apply(&model, block(changes)).await;
    model
}

/// All records of all tenants, whatever the size of a page; deleted ones are not among them.
pub async fn m12_a_scan_shows_every_record_once(harness: &impl ReadModelHarness) {
    let model = filled(harness).await;
    for limit in [1, 7, 1000] {
        let mut shown = scanned(&model, Scan::new(limit)).await;
        for tenant in TENANTS {
            let ids = shown.iter().filter(|row| row.name.tenant == Uuid::from_u128(tenant));
            let of_orders: Vec<_> = ids.filter(|row| row.name.module == module("orders")).collect();
            assert!(of_orders.is_sorted_by_key(|row| row.name.id), "by the bytes of ids");
        }
        shown.sort_by(|a, b| a.name.cmp(&b.name));
        let mut expected = Vec::new();
        for tenant in TENANTS {
            for slug in MODULES {
                let live = (0..10).filter(|n| *n != 5);
                expected.extend(live.map(|n| (name(tenant, slug, n), if n == 7 { 2 } else { 1 })));
            }
        }
        let shown: Vec<_> = shown.into_iter().map(|row| (row.name, row.version.seq())).collect();
        assert_eq!(shown, expected, "in pages of {limit}");
    }
    // A page of large rows is bounded too.
    let large = format!(r#"{{"x":"{}"}}"#, "x".repeat(800 << 10));
    let (model, count) = (harness.open().await, LIST_BYTES_MAX / (800 << 10) + 5);
    for n in 0..count {
        let one = change(n as u128, 1, Some(&large));
        apply(&model, block([Change { module: module("large"), ..one }])).await;
    }
    let of_large = Scan::new(1000).module(Some(module("large")));
    assert_eq!(scanned(&model, of_large).await.len(), count);
}

/// A hash is that of the name, the version, the times and the value that is stored.
pub async fn m12_a_scan_hashes_what_is_stored(harness: &impl ReadModelHarness) {
    let model = harness.open().await;
    let json = r#"{"b":[1.50,-0,1e3],"a":{"é":"\u00e9","n":null}}"#;
    apply(&model, block([change(1, 3, Some(json)), change(2, 1, Some("{}"))])).await;
    let rows = scanned(&model, Scan::new(10)).await;
    let version = Version::new(1, 3).expect("a version");
    let of = change(1, 3, None);
    let times = (of.created_at, of.updated_at);
    let row = |times, json: &str| Row::new(Name::of(&of), version, times, json.as_bytes()).expect("a row");
    let expected = row(times, json);
    assert_eq!(rows.first(), Some(&expected));
    assert_ne!(rows[0].hash, row(times, "{}").hash);
    let later = (times.0, times.1.plus(std::time::Duration::from_micros(1)));
    assert_ne!(rows[0].hash, row(later, json).hash);
    assert_ne!(rows[0].hash, rows[1].hash);
}

/// Only what was asked for, and one record by the id before it.
pub async fn m12_a_scan_of_a_tenant_or_a_module_shows_no_other(harness: &impl ReadModelHarness) {
    let model = filled(harness).await;
    for limit in [4, 1000] {
        for tenant in TENANTS.map(Uuid::from_u128) {
            let of_tenant = Scan::new(limit).tenant(Some(tenant));
            let rows = scanned(&model, of_tenant.clone()).await;
            assert_eq!(rows.len(), 18);
            assert!(rows.iter().all(|row| row.name.tenant == tenant));
            let rows = scanned(&model, of_tenant.module(Some(module("order")))).await;
            assert_eq!(rows.len(), 9);
            assert!(rows.iter().all(|row| row.name.tenant == tenant && row.name.module == module("order")));
        }
        let rows = scanned(&model, Scan::new(limit).module(Some(module("orders")))).await;
        assert_eq!(rows.len(), 27);
        assert!(rows.iter().all(|row| row.name.module == module("orders")));
    }
    for (n, found) in [(0, true), (5, false), (9, true)] {
        let wanted = name(1, "orders", n);
        let rows = crate::analytics::ReadModel::scan(&model, &Scan::one(&wanted)).await.expect("a page");
        assert_eq!(rows.first().is_some_and(|row| row.name == wanted), found, "{n}");
    }
    assert_eq!(scanned(&model, Scan::new(10).tenant(Some(Uuid::max()))).await, []);
}
