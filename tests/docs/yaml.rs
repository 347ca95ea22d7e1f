//! YAML as JSON, which tests look into: aliases and merges (`<<`) are resolved, as readers of the files do.
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

use serde_json::{Map, Value};
use yaml_rust2::{Yaml, YamlLoader};

/// The one document of a text.
pub fn parse(text: &str) -> Value {
    let documents = YamlLoader::load_from_str(text).expect("YAML");
    let [document] = documents.as_slice() else { panic!("{} documents", documents.len()) };
    json(document)
}

fn json(of: &Yaml) -> Value {
    match of {
        Yaml::String(text) => Value::String(text.clone()),
        Yaml::Integer(number) => Value::from(*number),
        Yaml::Real(number) => Value::String(number.clone()),
        Yaml::Boolean(is) => Value::Bool(*is),
        Yaml::Null => Value::Null,
        Yaml::Array(list) => list.iter().map(json).collect(),
        Yaml::Hash(fields) => {
            let mut object = Map::new();
            let is_merge = |name: &Yaml| name.as_str() == Some("<<");
            // What a mapping says itself comes last, and so wins.
            for (_, merged) in fields.iter().filter(|(name, _)| is_merge(name)) {
                let Value::Object(merged) = json(merged) else { panic!("<< merges no mapping") };
                object.extend(merged);
            }
            for (name, value) in fields.iter().filter(|(name, _)| !is_merge(name)) {
                let name = name.as_str().unwrap_or_else(|| panic!("{name:?} is not a name"));
                object.insert(name.to_owned(), json(value));
            }
            Value::Object(object)
        }
        Yaml::Alias(_) | Yaml::BadValue => panic!("{of:?} has no value"),
    }
}

#[test]
fn merges_and_aliases_are_resolved() {
    let parsed = parse("a: &a { x: 1, y: 2 }\nb:\n  <<: *a\n  y: '3'\nc: [*a, no]\n");
    assert_eq!(parsed["b"], serde_json::json!({"x": 1, "y": "3"}));
    assert_eq!(parsed["c"][0]["x"], 1);
}
