//! Reads, tenants, modules and bad input.

#![allow(missing_docs, reason = "the name of a case says what it shows")]

use super::{RecordsHarness, create, events, payload, tenant, value};
use crate::error::Error;
use crate::id::Tenant;
use crate::records::{
    Create, Delete, LIST_BYTES_MAX, LIST_MAX, List, ModuleSlug, PAYLOAD_BYTES_MAX, Payload, Records, Update,
    Uuid,
};

/// HOLES 4: with row security alone, a unique index still tells one tenant what another has.
pub async fn r5_two_tenants_never_meet(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let (a, b) = (tenant(0xa), tenant(0xb));
    let of_a = create(harness, r#"{"of":"a"}"#).tenant(Some(a.clone()));
    records.create(&of_a).await.unwrap();
    let (id, module) = (of_a.id, of_a.module.clone());
    for other in [Some(&b), None] {
        let other_tenant = || other.cloned();
        assert_eq!(records.get(other, &module, id).await.unwrap(), None);
        let list = records.list(&List::new(module.clone()).tenant(other_tenant())).await.unwrap();
        assert!(list.records.is_empty(), "{list:?}");
        for expected in [0, 1, 2] {
            let update = Update::new(module.clone(), id, expected, payload("{}")).tenant(other_tenant());
            assert_eq!(records.update(&update).await.unwrap_err().code(), "not-found");
            let delete = Delete::new(module.clone(), id, expected).tenant(other_tenant());
            assert_eq!(records.delete(&delete).await.unwrap_err().code(), "not-found");
        }
        // The same id is free for the other, and begins at 1.
        let own = create(harness, r#"{"of":"other"}"#).id(id).tenant(other_tenant());
        assert_eq!(records.create(&own).await.unwrap().seq, 1);
        let gone = Delete::new(module.clone(), id, 1).tenant(other_tenant());
        assert_eq!(value(&records.delete(&gone).await.unwrap().payload)["of"], "other");
    }
    let still = records.get(Some(&a), &module, id).await.unwrap().unwrap();
    assert_eq!((still.seq, still.payload.as_str()), (1, r#"{"of":"a"}"#));
    assert_eq!(events(harness, Some(&a), id).await.len(), 1);
}

pub async fn r6_an_unknown_module_is_not_found_and_not_made(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let unknown = ModuleSlug::new(format!("no_{}", &Uuid::new_v4().simple().to_string()[..12])).unwrap();
    let first = Create::new(unknown.clone(), payload("{}"));
    let id = first.id;
    let errors = [
        records.create(&first).await.unwrap_err(),
        records.update(&Update::new(unknown.clone(), id, 1, payload("{}"))).await.unwrap_err(),
        records.delete(&Delete::new(unknown.clone(), id, 1)).await.unwrap_err(),
        records.get(None, &unknown, id).await.unwrap_err(),
        records.list(&List::new(unknown.clone())).await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.code() == "not-found" && error.to_string().contains(unknown.as_str()), "{error}");
    }
    assert!(harness.modules().await.iter().all(|module| module.slug != unknown));
}

pub async fn r6_a_module_is_made_once_and_listed(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let slug = ModuleSlug::new(format!("m_{}", &Uuid::new_v4().simple().to_string()[..12])).unwrap();
    assert!(harness.make(&slug).await);
    assert!(!harness.make(&slug).await, "it is there already");
    for of in [None, Some(tenant(1)), Some(tenant(2))] {
        records.create(&Create::new(slug.clone(), payload("{}")).tenant(of)).await.unwrap();
    }
    let modules = harness.modules().await;
    let found = modules.iter().find(|module| module.slug == slug).expect("it is listed");
    assert_eq!((found.records, found.problems.as_slice()), (Some(3), [].as_slice()));
}

pub async fn r7_a_list_is_ordered_and_paged(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let (of, other) = (tenant(1), tenant(2));
    let mut ids: Vec<Uuid> = (0..11).map(|_| Uuid::new_v4()).collect();
    ids.push(Uuid::from_u128(1));
    ids.push(Uuid::max());
    for id in &ids {
        for tenant in [&of, &other] {
            records.create(&create(harness, "{}").id(*id).tenant(Some(tenant.clone()))).await.unwrap();
        }
    }
    ids.sort();
    let list = List::new(harness.module()).tenant(Some(of.clone()));
    let all = records.list(&list).await.unwrap();
    assert_eq!(all.records.iter().map(|record| record.id).collect::<Vec<_>>(), ids);
    assert_eq!(all.next, None);
    for limit in [1, 5, 13, 14] {
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let page = records.list(&list.clone().limit(limit).after(after)).await.unwrap();
            assert!(page.records.len() <= limit);
            seen.extend(page.records.iter().map(|record| record.id));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen, ids, "in pages of {limit}");
    }
    let rest = records.list(&list.after(Some(ids[4]))).await.unwrap();
    assert_eq!(rest.records.len(), ids.len() - 5);
}

/// A thousand records of the largest size would be a page of a gigabyte. They compress well, so that a store
/// which counts what is on its disk finds them small.
pub async fn r7_a_page_of_large_records_is_bounded(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let large = format!(r#"{{"x":"{}"}}"#, "x".repeat(880_000));
    let mut ids: Vec<Uuid> = Vec::new();
    for _ in 0..12 {
        ids.push(records.create(&create(harness, &large)).await.unwrap().id);
    }
    ids.push(records.create(&create(harness, "{}")).await.unwrap().id);
    ids.sort();
    let list = List::new(harness.module()).limit(LIST_MAX);
    let (mut seen, mut pages, mut after) = (Vec::new(), Vec::new(), None);
    loop {
        let page = records.list(&list.clone().after(after)).await.unwrap();
        let bytes: usize = page.records.iter().map(|record| record.payload.as_str().len()).sum();
        assert!(bytes < LIST_BYTES_MAX + PAYLOAD_BYTES_MAX, "{bytes} bytes");
        seen.extend(page.records.iter().map(|record| record.id));
        pages.push(page.records.len());
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, ids);
    assert_eq!(pages, [10, 3], "the one that reaches the limit is the last of its page");
    let one = records.list(&list.limit(1)).await.unwrap();
    assert_eq!((one.records.len(), one.next), (1, Some(ids[0])), "one always fits");
}

#[allow(clippy::float_cmp, reason = "the same number is the same double")]
pub async fn r8_payloads_come_back_as_they_were(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    for json in [
        "{}",
        r#"{"text": "\" \\ / \n \u001f é 😀 \ud83d\ude00", "": null, "b": [true, false, [], {}]}"#,
        r#"{"z": 1, "a": {"z": -0.5, "a": [1, 2.50, 100000000000000000000]}}"#,
        r#"{"'; drop table x; --": "$1 {s} %I"}"#,
        &format!("{}1{}", r#"{"a":"#.repeat(127), "}".repeat(127)), // as deep as a payload may be
    ] {
        let first = create(harness, json);
        let created = records.create(&first).await.unwrap();
        let read = records.get(None, &first.module, first.id).await.unwrap().unwrap();
        assert_eq!(value(&read.payload), value(&payload(json)));
        assert_eq!(value(&created.payload), value(&payload(json)));
    }
    // Numbers at the ends of a double, as long as a number may be, and with the largest exponents: a
    // store may write them out, and must be able to read what it wrote.
    let longest = format!("0.{}", "123456789".repeat(6));
    for number in ["1e100", "-1e308", "1.7976931348623157e308", "5e-324", "1e-400", "0e400", "-0", &longest] {
        let first = create(harness, &format!(r#"{{"a":{number}}}"#));
        let number_in = |payload: &Payload| {
            let text = payload.as_str();
            text[5..text.len() - 1].parse::<f64>().unwrap()
        };
        let wanted = number_in(&first.payload);
        let created = records.create(&first).await.unwrap();
        let read = records.get(None, &first.module, first.id).await.unwrap().unwrap();
        assert_eq!(number_in(&read.payload), wanted, "{number}");
        // What was read can be written again.
        let update = Update::new(first.module.clone(), first.id, created.seq, first.payload.clone());
        let updated = records.update(&update).await.unwrap();
        assert_eq!(number_in(&updated.payload), wanted, "{number}");
        let list = List::new(first.module.clone()).limit(LIST_MAX);
        assert!(records.list(&list).await.unwrap().records.iter().any(|record| record.id == first.id));
        let delete = Delete::new(first.module.clone(), first.id, updated.seq);
        let deleted = records.delete(&delete).await.unwrap();
        assert_eq!(number_in(&deleted.payload), wanted, "{number}");
    }
    // Digit for digit: a double would round these.
    let exact = create(harness, r#"{"n":12345678901234567890.123456789}"#);
    records.create(&exact).await.unwrap();
    let read = records.get(None, &exact.module, exact.id).await.unwrap().unwrap();
    assert_eq!(read.payload.as_str(), exact.payload.as_str());
    let large = format!(r#"{{"x":"{}"}}"#, "é".repeat(400_000));
    let first = create(harness, &large);
    records.create(&first).await.unwrap();
    let read = records.get(None, &first.module, first.id).await.unwrap().unwrap();
    assert_eq!(read.payload.as_str(), large);
}

pub async fn r9_bad_input_is_refused_with_a_sentence(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let module = harness.module();
    let upper = "0190D3A0-5B7E-7C3A-9F51-2F6F1F3B7C10";
    for bad in ["acme", upper, "0190d3a05b7e7c3a9f512f6f1f3b7c10", &Uuid::nil().to_string()] {
        let of = Some(Tenant::new(bad).unwrap());
        let errors = [
            records.create(&create(harness, "{}").tenant(of.clone())).await.unwrap_err(),
            records.get(of.as_ref(), &module, Uuid::now_v7()).await.unwrap_err(),
            records.list(&List::new(module.clone()).tenant(of.clone())).await.unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(&error, Error::Invalid { what: "tenant", .. }), "{bad}: {error}");
            assert!(error.to_string().contains("UUID"), "{error}");
        }
    }
    for limit in [0, LIST_MAX + 1, usize::MAX] {
        let error = records.list(&List::new(module.clone()).limit(limit)).await.unwrap_err();
        assert!(error.to_string().contains("1 to 1000"), "{error}");
    }
    let nil = records.create(&create(harness, "{}").id(Uuid::nil())).await.unwrap_err();
    assert!(nil.to_string().contains("nil"), "{nil}");
    assert!(records.list(&List::new(module)).await.unwrap().records.is_empty(), "nothing was changed");
    assert_eq!(harness.journal().await.stat().await.unwrap().events, 0);
}

pub async fn r10_times_are_the_stores_own(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let journal = harness.journal().await;
    let before = journal.now().await.unwrap();
    let created = records.create(&create(harness, "{}")).await.unwrap();
    let between = journal.now().await.unwrap();
    let change = Update::new(created.module.clone(), created.id, 1, payload(r#"{"n":1}"#));
    let updated = records.update(&change).await.unwrap();
    let after = journal.now().await.unwrap();
    assert_eq!(created.created_at, created.updated_at);
    assert!(before <= created.created_at && created.created_at <= between);
    assert!(between <= updated.updated_at && updated.updated_at <= after);
    assert_eq!(updated.created_at, created.created_at);
    assert_eq!(records.get(None, &created.module, created.id).await.unwrap(), Some(updated));
}
