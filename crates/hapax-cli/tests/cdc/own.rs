//! A pipeline of a test's own, with a read model in ClickHouse.
#![cfg(feature = "clickhouse")]

use std::process::Command;

use hapax::analytics::Uuid;

use crate::Deployment;
use crate::common::serve::Server;
use crate::common::{Ran, run};

const SLOT: &str = "hapax_test_generations";

/// A connector, a slot, topics and a read model in ClickHouse of this test's own. The model goes when this is dropped.
pub struct Own {
    id: String,
    /// The server, and the database on it.
    model: (String, String),
}

impl Drop for Own {
    fn drop(&mut self) {
        let (host, database) = &self.model;
        let drop = format!("DROP DATABASE IF EXISTS {database} SYNC");
        let _ =
            Command::new("curl").args(["-sS", &format!("http://{host}/"), "--data-binary", &drop]).status();
    }
}

fn run_with(world: &Deployment, args: &[&str], settings: &[String]) -> Ran {
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    run(&world.dir, &[args, &settings].concat())
}

impl Own {
    pub fn new() -> Self {
        let url = std::env::var("HAPAX_TEST_CLICKHOUSE_URL").expect("scripts/services up clickhouse");
        let id = Uuid::now_v7().simple().to_string();
        let host = url.strip_prefix("clickhouse://").unwrap().to_owned();
        let model = (host, format!("hapax_cdc_{id}"));
        Own { id, model }
    }

    /// The settings of a generation, with a connector and a slot of these names.
    fn settings(&self, generation: u16, connector: &str, slot: &str) -> Vec<String> {
        let settings = [
            format!("analytics.url=clickhouse://{}/{}", self.model.0, self.model.1),
            format!("analytics.generation={generation}"),
            format!("cdc.topic=cdc-{}-{generation}", self.id),
            format!("cdc.connector=hapax-test-{connector}"),
            format!("cdc.slot={slot}"),
        ];
        settings.into_iter().flat_map(|setting| ["--set".to_owned(), setting]).collect()
    }

    pub fn run(&self, world: &Deployment, args: &[&str], generation: u16, connector: &str) -> Ran {
        run_with(world, args, &self.settings(generation, connector, SLOT))
    }

    pub fn serve(&self, world: &Deployment, generation: u16) -> Server {
        let settings = self.settings(generation, "first", SLOT);
        world.serve_with(&settings.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The answer of ClickHouse to a statement; `DB` in it is the database of the read model.
    pub fn sql(&self, sql: &str) -> String {
        let (host, database) = &self.model;
        let sql = sql.replace("DB.", &format!("{database}."));
        let url = format!("http://{host}/");
        let done = Command::new("curl")
            .args(["-sS", "--fail-with-body", &url, "--data-binary", &sql])
            .output()
            .unwrap();
        let answer = String::from_utf8_lossy(&done.stdout).trim_end().to_owned();
        assert!(done.status.success(), "{sql}: {answer}");
        answer
    }

    /// Has a connector of its own publish everything since a slot was copied, and removes both.
    pub fn publish_again(&self, world: &Deployment, slot: &str) {
        let settings = self.settings(1, "copy", slot);
        let again = |args: &[&str]| run_with(world, args, &settings).code(0);
        again(&["cdc", "apply", "--with", "snapshot.mode=no_data"]);
        again(&["cdc", "remove", "--slot"]);
    }
}
