//! `hapax.toml` with every setting, commented out at its default.

use std::fmt::Write as _;

use super::kind::Kind;
use super::load::Sources;
use super::table::{ATTEMPTS_OF_SCOPE, SETTINGS, Setting};

/// Prose wraps here.
const COLUMNS: usize = 100;

const HEAD: &str = "\
# hapax.toml: every setting, commented out at its default. To change one, remove the # before it.
#
# hapax reads ./hapax.toml, or the file that --config or HAPAX_CONFIG names.
# Precedence: flags, HAPAX_* variables, older variables, this file.
# `hapax config show` prints what is in effect, and where it comes from.
";

/// An example of `hapax.toml`: every setting of the [table](SETTINGS) with its description, what it
/// takes, its variables and its default. As it stands it sets nothing.
///
/// ```
/// use hapax::config::{Config, Sources, example};
/// assert!(Config::load(&Sources::new().toml("hapax.toml", example())).is_ok());
/// ```
pub fn example() -> String {
    let (defaults, _) = Sources::new().values();
    let mut text = HEAD.to_owned();
    let mut group = "";
    for (setting, default) in SETTINGS.iter().zip(&defaults) {
        let (table, name) = setting.key.split_once('.').unwrap_or(("", setting.key));
        if table != group {
            // The last one of the table before: one setting that each scope can override.
            end_of(group, &mut text);
            let _ = write!(text, "\n[{table}]\n"); // a String takes all
            group = table;
        }
        describe(setting, setting.doc, &variables(setting), &mut text);
        // An unset place follows data.dir, which a text here would not. What any other default comes to is its value.
        let default = if setting.default.is_empty() { "" } else { default.text() };
        let _ = writeln!(text, "#{name} = {}", literal(setting.kind, default)); // a String takes all
    }
    end_of(group, &mut text);
    text
}

fn end_of(group: &str, text: &mut String) {
    let setting = &ATTEMPTS_OF_SCOPE;
    let of_group = setting.key.strip_prefix(group).and_then(|rest| rest.strip_prefix('.'));
    if let Some(name) = of_group.filter(|_| !group.is_empty()) {
        let doc = format!("{}; for the scope billing:", setting.doc);
        describe(setting, &doc, &setting.env(), text);
        let _ = writeln!(text, "#{} = 5", name.replace("<scope>", "billing")); // a String takes all
    }
}

/// The lines above a setting.
fn describe(setting: &Setting, doc: &str, variables: &str, text: &mut String) {
    let unset = if setting.default.is_empty() && setting.unset != "none" && !doc.contains("unset") {
        format!(" (unset: {})", setting.unset)
    } else {
        String::new()
    };
    let flag = setting.flag.map_or_else(String::new, |flag| format!("; flag {flag}"));
    text.push('\n');
    wrap(&format!("{doc}{unset}"), text);
    wrap(&format!("{}; {variables}{flag}", setting.kind.range()), text);
}

/// Every variable of a setting.
fn variables(setting: &Setting) -> String {
    let mut names = vec![setting.env()];
    if setting.secret {
        names.push(format!("{}_FILE (a file that has it)", setting.env()));
    }
    names.extend(setting.older_env.iter().map(|&older| older.to_owned()));
    names.join(", ")
}

/// A value as TOML.
fn literal(kind: Kind, value: &str) -> String {
    match kind {
        Kind::Int { .. } | Kind::Bool if !value.is_empty() => value.to_owned(),
        // Defaults are plain text, and their escapes are those of TOML.
        _ => format!("{value:?}"),
    }
}

/// Adds prose as comment lines. `# ` with a space is prose, `#` alone hides a setting.
fn wrap(prose: &str, text: &mut String) {
    let mut line = String::from("#");
    for word in prose.split_whitespace() {
        if line.len() > 1 && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            text.push_str(&line);
            text.push('\n');
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&line);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Place, Sources};

    /// The example with every setting in effect.
    fn uncommented() -> String {
        let lines = example();
        let lines = lines.lines().map(|line| match line.strip_prefix('#') {
            Some(setting) if setting.starts_with(|c: char| c.is_ascii_lowercase()) => setting,
            _ => line,
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    fn load(text: String) -> Config {
        Config::load(&Sources::new().toml("hapax.toml", text)).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn the_example_sets_nothing() {
        let (example, defaults) = (load(example()), load(String::new()));
        for (value, default) in example.values().iter().zip(defaults.values()) {
            assert_eq!(
                (value.text(), &value.place),
                (default.text(), &default.place),
                "{}",
                value.setting.key
            );
        }
    }

    /// Every setting is in it, at its default.
    #[test]
    fn the_example_uncommented_is_the_defaults() {
        let (all, defaults) = (load(uncommented()), load(String::new()));
        assert_eq!(all.values().len(), SETTINGS.len());
        for (value, default) in all.values().iter().zip(defaults.values()) {
            // Some defaults follow from other settings; named, they are what they are.
            let is_the_default = [default.text(), value.setting.default].contains(&value.text());
            assert!(is_the_default, "{} is {:?}", value.setting.key, value.text());
            assert!(matches!(value.place, Place::File(..)), "{} is not in the example", value.setting.key);
        }
        let billing = crate::Scope::new("billing").unwrap();
        assert_eq!(all.attempts_max(&billing).unwrap(), 5);
        assert_eq!(all.scoped_values().count(), 1);
    }

    #[test]
    fn the_example_can_be_read() {
        let text = example();
        for line in text.lines() {
            let short = line.chars().count() <= COLUMNS || !line.contains(' ');
            assert!(short, "{} columns: {line}", line.chars().count());
        }
        for setting in SETTINGS {
            let unwrapped = text.replace("\n# ", " ");
            for part in [setting.env(), setting.doc.to_owned(), setting.kind.range()] {
                assert!(unwrapped.contains(&part), "{part:?} of {} is missing", setting.key);
            }
        }
    }
}
