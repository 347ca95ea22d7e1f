use super::*;

fn load(sources: &Sources) -> Result<Config> {
    Config::load(sources)
}

fn problem(sources: &Sources) -> String {
    match load(sources) {
        Ok(_) => panic!("it was accepted"),
        Err(error) => {
            assert_eq!(error.code(), "config");
            error.to_string()
        }
    }
}

#[test]
fn defaults_are_what_the_documentation_says() {
    let config = load(&Sources::new()).unwrap();
    assert_eq!(config.ledger.url, "sqlite:hapax-data/ledger.db");
    assert_eq!(config.ledger.retention, Duration::from_secs(7 * 86_400));
    assert_eq!(config.ledger.pool_max, 50);
    assert_eq!(config.ledger.acquire_timeout, Duration::from_secs(10));
    assert_eq!(config.lease.timeout, Duration::from_secs(900));
    assert_eq!(config.lease.heartbeat, Duration::from_secs(30));
    assert!(config.dedup.enabled);
    assert!(config.dedup.default_scope.is_none());
    assert!(config.window.url.is_none() && config.window("1").unwrap().is_none());
    assert_eq!(config.window.ttl, Duration::from_secs(24 * 3600));
    assert_eq!(config.window.outage, OnOutage::PassThrough);
    assert!(config.values().iter().all(|value| matches!(value.place, Place::Default | Place::Because(_))));
    assert_eq!(config.journal.event_bytes_max, crate::journal::JournalSettings::default().event_bytes_max);
    assert_eq!(config.values().len(), SETTINGS.len());
}

#[test]
fn flags_beat_variables_beat_the_file() {
    let file = Sources::new().toml("hapax.toml", "[lease]\ntimeout_s = 100\n[retry]\nattempts_max = 2");
    assert_eq!(load(&file).unwrap().lease.timeout.as_secs(), 100);
    let older = file.env([("PROCESSED_EVENT_LEASE_TIMEOUT_SECONDS", "200")]);
    assert_eq!(load(&older).unwrap().lease.timeout.as_secs(), 200);
    let flag = older.flag("lease.timeout_s", "--set", "300");
    let config = load(&flag).unwrap();
    assert_eq!(config.lease.timeout.as_secs(), 300);
    assert_eq!(config.retry.attempts_max, 2);
    let place = |key| config.values().iter().find(|v| v.setting.key == key).unwrap().place.to_string();
    assert_eq!(place("lease.timeout_s"), "flag --set");
    assert_eq!(place("retry.attempts_max"), "hapax.toml retry.attempts_max");
}

#[test]
fn disagreeing_variables_are_named() {
    let both = |a, b| {
        Sources::new().env([("HAPAX_LEASE_TIMEOUT_S", a), ("PROCESSED_EVENT_LEASE_TIMEOUT_SECONDS", b)])
    };
    assert_eq!(load(&both("60", "60")).unwrap().lease.timeout.as_secs(), 60);
    let text = problem(&both("60", "61"));
    for part in ["HAPAX_LEASE_TIMEOUT_S", "PROCESSED_EVENT_LEASE_TIMEOUT_SECONDS", "60", "61"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn the_older_property_is_understood() {
    for toml in [
        "[im2be.dedup]\ndefault-scope-id = 'billing'",
        "'im2be.dedup.default-scope-id' = 'billing'",
        "[dedup]\ndefault_scope_id = 'billing'",
    ] {
        let config = load(&Sources::new().toml("hapax.toml", toml)).unwrap();
        assert_eq!(config.dedup.default_scope.unwrap().as_str(), "billing");
    }
    let env = load(&Sources::new().env([("IM2BE_DEDUP_DEFAULT_SCOPE_ID", "billing")])).unwrap();
    assert_eq!(env.dedup.default_scope.unwrap().as_str(), "billing");
    let blank = load(&Sources::new().env([("IM2BE_DEDUP_DEFAULT_SCOPE_ID", "  ")])).unwrap();
    assert!(blank.dedup.default_scope.is_none());
    let both = "[im2be.dedup]\ndefault-scope-id = 'a'\n[dedup]\ndefault_scope_id = 'b'";
    assert!(problem(&Sources::new().toml("hapax.toml", both)).contains("disagree"));
}

#[test]
fn registry_switch() {
    for (text, enabled) in [("true", true), ("FALSE", false), ("0", false), ("on", true)] {
        let config = load(&Sources::new().env([("ENABLE_PROCESSED_EVENT_REGISTRY", text)])).unwrap();
        assert_eq!(config.dedup.enabled, enabled, "{text}");
    }
    let text = problem(&Sources::new().env([("ENABLE_PROCESSED_EVENT_REGISTRY", "maybe")]));
    assert!(text.contains("ENABLE_PROCESSED_EVENT_REGISTRY") && text.contains("true or false"), "{text}");
}

#[test]
fn impossible_values_name_the_place_and_the_range() {
    let cases: [(&str, &str, &[&str]); 12] = [
        ("EVENT_DEDUP_TTL_HOURS", "0", &["window.ttl_hours", "1 to 720"]),
        ("EVENT_DEDUP_TTL_HOURS", "721", &["1 to 720"]),
        ("HAPAX_WINDOW_OUTAGE", "ignore", &["pass_through, pause"]),
        ("HAPAX_LEDGER_RETENTION_DAYS", "0", &["1 to 36500"]),
        ("HAPAX_RETRY_ATTEMPTS_MAX", "0", &["1 to 32767"]),
        ("HAPAX_RETRY_ATTEMPTS_MAX", "32768", &["1 to 32767"]),
        ("HAPAX_LEDGER_POOL_MAX", "-1", &["1 to 10000"]),
        ("HAPAX_LEDGER_MIGRATE", "perhaps", &["auto, check"]),
        ("HAPAX_LEASE_HEARTBEAT_S", "900", &["shorter than", "lease.timeout_s = 900"]),
        ("HAPAX_RETRY_BACKOFF_BASE_MS", "300001", &["not be longer", "retry.backoff_max_ms = 300000"]),
        ("HAPAX_LEDGER_SCHEMA", "drop table; --", &["a-z"]),
        ("HAPAX_LEASE_OWNER", "a\0b", &["no NUL"]),
    ];
    for (name, value, parts) in cases {
        let text = problem(&Sources::new().env([(name, value)]));
        assert!(text.contains(name), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn a_window_is_configured() {
    let sources = Sources::new().env([
        ("EVENT_DEDUP_TTL_HOURS", "720"),
        ("HAPAX_WINDOW_URL", "memory:"),
        ("HAPAX_WINDOW_OUTAGE", "pause"),
    ]);
    let config = load(&sources).unwrap();
    assert_eq!(config.window.ttl, crate::window::WindowSettings::TTL_MAX);
    assert_eq!(config.window.outage, OnOutage::Pause);
    assert!(config.window("1").unwrap().is_some());
    assert!(config.window("").is_err(), "a window needs an epoch");
    let text = problem(&Sources::new().env([("HAPAX_WINDOW_URL", "memcached://u:s3cret@h")]));
    assert!(text.contains("window.url takes memory: or redis://") && !text.contains("s3cret"), "{text}");
    let both = Sources::new().env([("EVENT_DEDUP_TTL_HOURS", "24"), ("HAPAX_WINDOW_TTL_HOURS", "25")]);
    assert!(problem(&both).contains("disagree"));
}

#[test]
fn unknown_names_are_errors() {
    let text = problem(&Sources::new().env([("HAPAX_LEDGER_ULR", "memory:")]));
    assert!(text.contains("HAPAX_LEDGER_ULR"), "{text}");
    for name in ["PROCESSED_EVENT_LEASE_TIMEOUT_SECOND", "PROCESSED_EVENT_OWNERS", "PROCESSED_EVENT_"] {
        let text = problem(&Sources::new().env([(name, "60")]));
        assert!(text.contains(name), "{text}");
    }
    let text = problem(&Sources::new().env([("HAPAX_LEASE_OWNER_FILE", "x")]));
    assert!(text.contains("only secrets"), "{text}");
    let text = problem(&Sources::new().toml("my.toml", "[ledger]\nulr = 'x'"));
    assert!(text.contains("my.toml") && text.contains("ledger.ulr"), "{text}");
    let text = problem(&Sources::new().toml("my.toml", "[ledger]\npool_max = [1]"));
    assert!(text.contains("ledger.pool_max") && text.contains("array"), "{text}");
    assert!(problem(&Sources::new().toml("my.toml", "= =")).contains("my.toml"));
    assert!(problem(&Sources::new().flag("ledger.ulr", "--set", "x")).contains("ledger.ulr"));
    assert!(load(&Sources::new().env([("HAPAX_TEST_POSTGRES", "x"), ("HAPAXES", "y")])).is_ok());
}

#[test]
fn e_a_mistake_in_a_name_is_reported_with_what_was_probably_meant() {
    let text = problem(&Sources::new().env([("HAPAX_LEDGER_URI", "memory:")]));
    assert!(text.contains("did you mean HAPAX_LEDGER_URL?"), "{text}");
    let text = problem(&Sources::new().env([("PROCESSED_EVENT_OWNRE", "me")]));
    assert!(text.contains("did you mean PROCESSED_EVENT_OWNER?"), "{text}");
    let text = problem(&Sources::new().toml("my.toml", "[ledger]\nulr = 'x'"));
    assert!(text.contains("did you mean ledger.url?") && text.len() < 200, "{text}");
    let text = problem(&Sources::new().flag("colour", "--set", "red"));
    assert!(!text.contains("did you mean") && text.len() < 200, "{text}");
}

/// The likeliest guesses are the names of the flags, and half of a name.
#[test]
fn t98_a_variable_that_is_named_after_its_flag_is_reported_with_the_right_one() {
    for (name, meant) in [
        ("HAPAX_LEDGER", "HAPAX_LEDGER_URL"),
        ("HAPAX_JOURNAL", "HAPAX_JOURNAL_URL"),
        ("HAPAX_BUS", "HAPAX_BUS_URL"),
        ("HAPAX_DATA", "HAPAX_DATA_DIR"),
        ("HAPAX_ATTEMPTS_MAX", "HAPAX_RETRY_ATTEMPTS_MAX"),
    ] {
        let text = problem(&Sources::new().env([(name, "x")]));
        assert!(text.contains(&format!("did you mean {meant}?")), "{text}");
    }
    for (key, meant) in [("attempts_max", "retry.attempts_max"), ("ledger", "ledger.url"), ("bus", "bus.url")]
    {
        let text = problem(&Sources::new().flag(key, "--set", "3"));
        assert!(text.contains(&format!("did you mean {meant}?")), "{text}");
    }
    let text = problem(&Sources::new().flag("url", "--set", "x"));
    assert!(!text.contains("did you mean"), "several could be meant: {text}");
}

/// The tools of this repository run the binary with their own variables set.
#[test]
fn t98_the_variables_of_the_repositorys_tools_are_no_mistakes() {
    fn look(dir: &Path, names: &mut std::collections::BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                look(&path, names);
                continue;
            }
            let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            let words = text.match_indices("HAPAX_").map(|(at, _)| &text[at..]);
            names.extend(words.map(|from| from.split(|c| !is_part(c)).next().unwrap().to_owned()));
        }
    }
    let mut names = std::collections::BTreeSet::new();
    look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts"), &mut names);
    assert!(names.contains("HAPAX_README_RELEASE") && names.len() > 20, "{names:?}");
    names.extend(["HAPAX_MUTANT", "HAPAX_CHILD", "HAPAX_FILE", "HAPAX_CRASH_POINT_CHILD"].map(str::to_owned));
    let (_, problems) = Sources::new().env(names.into_iter().map(|name| (name, "1"))).values();
    assert!(problems.is_empty(), "{problems:?}");
    problem(&Sources::new().env([("HAPAX_SEEDS", "1")]));
}

#[test]
fn e_a_mistake_in_the_file_is_reported_with_its_line() {
    let text = problem(&Sources::new().toml("my.toml", "[retry]\nattempts_max = 3\n[ledger]\nurl = \n"));
    assert!(text.contains("my.toml line 4: "), "{text}");
    let text = problem(&Sources::new().toml("my.toml", "[retry\n"));
    assert!(text.contains("my.toml line 1: "), "{text}");
}

/// Errors as a reader needs them to find the place.
#[test]
fn t98_a_key_of_the_file_that_is_wrong_is_reported_with_its_line_and_once() {
    for (toml, wanted) in [
        ("[retry]\n\n[ledger]\nulr = 'x'", "configuration: my.toml line 4: \"ledger.ulr\" is not a setting;"),
        ("[ledger]\npool_max = [1]", "configuration: my.toml line 2: ledger.pool_max is an array; it takes"),
        ("# a\n[retry]\nattempts_max = 0", "my.toml line 3: retry.attempts_max = \"0\" is not allowed"),
        (
            "[consumer.x]\nmax_attempts = 1.5",
            "my.toml line 2: consumer.x.max_attempts is a number with a frac",
        ),
        (
            "ledger.url = 5",
            "my.toml line 1: ledger.url (not shown: it may be a password) is not allowed: it takes",
        ),
    ] {
        let text = problem(&Sources::new().toml("my.toml", toml));
        assert!(text.contains(wanted) && text.matches("configuration").count() == 1, "{text}");
    }
    let text = problem(&Sources::new().toml("my.toml", "# a\nserve.listen = 'nowhere'"));
    assert!(text.contains("my.toml line 2: serve.listen = \"nowhere\" is not an ADDRESS:PORT"), "{text}");
    for (key, wanted) in [
        ("keys.retention_days", "--set keys.retention_days=0 is not allowed: it takes a whole number"),
        ("consumer.a.max_attempts", "--set consumer.a.max_attempts=0 is not allowed: "),
    ] {
        let text = problem(&Sources::new().flag(key, "--set", "0"));
        assert!(text.contains(wanted), "{text}");
    }
    let listen =
        |key, flag| Sources::new().flag("serve.listen", flag, "127.0.0.1:70").flag(key, flag, "localhost:70");
    let text = problem(&listen("serve.admin_listen", "--set"));
    assert!(
        text.contains("serve.listen and serve.admin_listen are the same address (127.0.0.1:70)"),
        "{text}"
    );
    let hex = load(&Sources::new().toml("my.toml", "retry.attempts_max = 0x1_0")).unwrap();
    assert_eq!(hex.retry.attempts_max, 16);
}

#[test]
fn t98_the_name_of_a_file_is_reported_as_a_url() {
    for (key, text, meant) in [
        ("ledger.url", "ledger.db", "did you mean sqlite:ledger.db?"),
        ("journal.url", "a/b.sqlite", "did you mean sqlite:a/b.sqlite?"),
        ("bus.url", "bus.db", "did you mean embedded:bus.db?"),
    ] {
        let message = problem(&Sources::new().flag(key, "--set", text));
        assert!(message.contains(meant) && !message.contains("***"), "{message}");
    }
    let message = problem(&Sources::new().flag("ledger.url", "--ledger", "host=db password=s3cret.db"));
    assert!(message.contains("flag --ledger (not shown: it may be a password) is not allowed"), "{message}");
    assert!(!message.contains("s3cret"), "{message}");
    for (key, url) in [("ledger.url", "sqlite:"), ("ledger.url", "sqlite://"), ("journal.url", "dir:")] {
        assert!(problem(&Sources::new().flag(key, "--set", url)).contains("is not allowed"), "{url}");
    }
}

#[test]
fn e_what_is_no_url_of_the_kind_is_refused_before_anything_is_opened() {
    for (key, url) in [
        ("ledger.url", "5"),
        ("ledger.url", "mysql://app:s3cret@db/orders"),
        ("ledger.url", "ledger.db"),
        ("journal.url", "redis://h"),
        ("window.url", "sqlite:x"),
        ("journal.allocator_url", "sqlite:x"),
        ("bus.url", "amqp://h"),
        ("bus.url", "kafka"),
    ] {
        let text = problem(&Sources::new().flag(key, "--set", url));
        assert!(text.contains("is not allowed") && text.contains(key) && !text.contains("s3cret"), "{text}");
    }
    assert!(problem(&Sources::new().toml("my.toml", "[ledger]\nurl = 5")).contains("sqlite:FILE"));
    for (key, url) in [
        ("ledger.url", "postgresql://db/x"),
        ("ledger.url", "valkey://h"),
        ("bus.url", "embedded"),
        ("bus.url", "embedded:"),
        ("bus.url", "embedded:a.db"),
        ("bus.url", "memory:"),
        ("bus.url", "kafka://a:1,b:2"),
        ("journal.url", "s3://b/p"),
    ] {
        load(&Sources::new().flag(key, "--set", url)).unwrap();
    }
}

#[test]
fn e_defaults_are_shown_with_what_they_come_to() {
    let config = load(&Sources::new().env([("HAPAX_DATA_DIR", "d")])).unwrap();
    let of = |key: &str| config.values().iter().find(|value| value.setting.key == key).unwrap();
    assert_eq!(
        (of("ledger.url").shown().as_str(), of("ledger.url").place.to_string().as_str()),
        ("sqlite:d/ledger.db", "default: in data.dir")
    );
    assert_eq!(of("journal.url").shown(), "sqlite:d/journal.db");
    assert_eq!(of("keys.url").shown(), "sqlite:d/journal.db");
    assert_eq!(of("keys.url").place.to_string(), "default: the journal's database");
    assert_eq!(of("relay.flush_max").shown(), "1000");
    assert_eq!(of("lease.owner").unset(), Some("host and process"));
    assert_eq!(of("consumer.dead_topic").unset(), Some("<topic>.dead"));
    assert_eq!(of("window.url").unset(), Some("none"));
    assert_eq!(of("bus.url").unset(), None);
}

#[test]
fn e_what_is_right_is_shown_although_something_is_wrong() {
    let sources = Sources::new()
        .env([
            ("HAPAX_LEDGER_URI", "memory:"),
            ("HAPAX_LEASE_TIMEOUT_S", "60"),
            ("HAPAX_RETRY_ATTEMPTS_MAX", "no"),
        ])
        .toml("my.toml", "= =");
    let (values, problems) = sources.values();
    assert_eq!((values.len(), problems.len()), (SETTINGS.len(), 3), "{problems:?}");
    assert!(values.iter().any(|value| value.setting.key == "lease.timeout_s" && value.text() == "60"));
}

/// One mistake hides neither other mistakes nor the values in force.
#[test]
fn t98_every_mistake_is_reported_and_all_else_is_as_it_would_be() {
    let file = "[ledger]\nulr = 'x'\nschema = 5\nidentity = 'no'\n[retry]\nattempts_max = 3";
    let sources = Sources::new()
        .flag("data.dir", "--data", "d")
        .flag("leger.url", "--set", "x")
        .problem("--set \"x\" is not KEY=VALUE")
        .env([
            ("HAPAX_LEASE_TIMEOUT", "1"),
            ("HAPAX_LEASE_OWNRE", "1"),
            ("HAPAX_CONSUMER_X_MAX_ATTEMPTS", "0"),
        ])
        .toml("my.toml", file);
    let (values, problems) = sources.values();
    assert_eq!(problems.len(), 8, "{problems:?}");
    let of = |key: &str| values.iter().find(|value| value.setting.key == key).unwrap();
    assert_eq!(of("ledger.url").shown(), "sqlite:d/ledger.db");
    assert_eq!(of("journal.url").shown(), "sqlite:d/journal.db");
    assert_eq!(of("retry.attempts_max").shown(), "3");
    let (values, problems) =
        Sources::new().flag("data.dir", "--data", "d").toml_file(Path::new("nowhere/at/all.toml")).values();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(values.iter().any(|value| value.setting.key == "data.dir" && value.text() == "d"));
    let (values, problems) = Sources::new().env([("HAPAX_RETRY_ATTEMPTS_MAX", "no")]).values();
    assert_eq!(problems.len(), 1, "{problems:?}");
    let wrong = values.iter().find(|value| value.setting.key == "retry.attempts_max").unwrap();
    assert_eq!(wrong.place.to_string(), "default: what was given cannot be used");
}

#[test]
fn secrets_come_from_files_and_are_not_printed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("url");
    std::fs::write(&path, "postgres://app:s3cret@db/orders\n").unwrap();
    let sources = Sources::new().env([("HAPAX_LEDGER_URL_FILE", path.to_str().unwrap())]);
    let config = load(&sources).unwrap();
    assert_eq!(config.ledger.url, "postgres://app:s3cret@db/orders");
    let shown: String = config.values().iter().map(Value::shown).collect();
    assert!(!shown.contains("s3cret") && shown.contains("postgres://app:***@db/orders"));
    let text = problem(&sources.clone().env([("HAPAX_LEDGER_URL", "postgres://app:0ther@db/orders")]));
    assert!(text.contains("HAPAX_LEDGER_URL_FILE") && !text.contains("0ther") && !text.contains("s3cret"));
    let text = problem(&Sources::new().env([("HAPAX_LEDGER_URL_FILE", "/nowhere/at/all")]));
    assert!(text.contains("HAPAX_LEDGER_URL_FILE") && text.contains("/nowhere/at/all"), "{text}");
}

#[test]
fn passwords_are_hidden_in_hostile_urls() {
    for url in [
        "postgres://u:s3cret@h/d",
        "postgres://u:a/s3cret@h/d",
        "postgres://u:a@s3cret@h/d",
        "postgres://u:s3cret?x@h/d",
        "postgres://h/d?sslmode=require&password=s3cret",
        "host=h password=s3cret",
        "s3cret",
    ] {
        assert!(!hide_password(url).contains("s3cret"), "{url}: {}", hide_password(url));
    }
}

#[test]
fn any_scope_may_have_its_own_number_of_runs() {
    let scope = |name: &str| Scope::new(name).unwrap();
    let file = Sources::new()
        .toml("hapax.toml", "[consumer]\nconcurrency = 8\n[consumer.billing]\nmax_attempts = 3");
    let config = load(&file).unwrap();
    assert_eq!(config.consumer_settings(scope("mailer"), Vec::new()).unwrap().concurrency, 8);
    assert_eq!(config.attempts_max(&scope("billing")).unwrap(), 3);
    assert_eq!(config.attempts_max(&scope("mailer")).unwrap(), 5);
    assert_eq!(config.consumer_settings(scope("billing"), Vec::new()).unwrap().attempts_max, 3);
    let env = file.env([("HAPAX_CONSUMER_BILLING_MAX_ATTEMPTS", "4")]);
    assert_eq!(load(&env).unwrap().attempts_max(&scope("billing")).unwrap(), 4);
    let flag = env.flag("consumer.billing.max_attempts", "--set", "6");
    assert_eq!(load(&flag).unwrap().attempts_max(&scope("billing")).unwrap(), 6);
}

#[test]
fn the_workers_have_their_own_variables() {
    for (name, variable) in [
        ("instance_worker", "INSTANCE_WORKER_MAX_RETRY_ATTEMPTS"),
        ("ontology_worker", "ONTOLOGY_WORKER_MAX_RETRY_ATTEMPTS"),
        ("projection_worker", "PROJECTION_WORKER_MAX_RETRIES"),
    ] {
        let scope = Scope::new(name).unwrap();
        assert_eq!(load(&Sources::new()).unwrap().attempts_max(&scope).unwrap(), 5);
        let config = load(&Sources::new().env([(variable, "9")])).unwrap();
        assert_eq!(config.attempts_max(&scope).unwrap(), 9);
        let text = problem(&Sources::new().env([(variable, "0")]));
        assert!(text.contains(variable) && text.contains("1 to 32767"), "{text}");
        let own = format!("HAPAX_CONSUMER_{}_MAX_ATTEMPTS", name.to_ascii_uppercase());
        let both = load(&Sources::new().env([(variable, "9"), (&own, "8")])).unwrap();
        let text = both.attempts_max(&scope).unwrap_err().to_string();
        assert!(text.contains(variable) && text.contains(&own), "{text}");
    }
    assert!(problem(&Sources::new().env([("HAPAX_CONSUMER_MAX_ATTEMPTS", "1")])).contains("unknown"));
    assert!(
        problem(&Sources::new().toml("hapax.toml", "[consumer.x]\nmax_attempts = [1]")).contains("array")
    );
}

/// The allocator shown is the one used.
#[test]
fn the_allocator_that_is_shown_is_the_one_that_numbers() {
    let shown = |sources: Sources| {
        let config = load(&sources).unwrap();
        let value = config.values().iter().find(|value| value.setting.key == "journal.allocator").unwrap();
        assert_eq!(value.shown(), config.journal.allocator.mode().to_string());
        format!("{} {}", value.shown(), value.place)
    };
    assert_eq!(shown(Sources::new()), "s3 default: no PostgreSQL is named");
    for name in ["HAPAX_LEDGER_URL", "HAPAX_JOURNAL_ALLOCATOR_URL"] {
        assert_eq!(shown(Sources::new().env([(name, "postgres://db/x")])), "postgres default");
    }
    let said = |mode| shown(Sources::new().env([("EVENT_STORE_SEQUENCE_ALLOCATOR_MODE", mode)]));
    assert_eq!(said("off"), "off environment EVENT_STORE_SEQUENCE_ALLOCATOR_MODE");
    // Refused when the journal is opened: no database is named.
    assert_eq!(said("postgres"), "postgres environment EVENT_STORE_SEQUENCE_ALLOCATOR_MODE");
}

#[test]
fn keys_are_where_the_journal_is_if_it_has_transactions() {
    let url = |journal: &str| {
        let sources =
            Sources::new().flag("data.dir", "--data", "d").flag("journal.url", "--journal", journal);
        load(&sources).unwrap().keys.url
    };
    assert_eq!(url("postgres://localhost/app"), "postgres://localhost/app");
    assert_eq!(url("sqlite:a.db"), "sqlite:a.db");
    assert_eq!(url("dir:events"), "sqlite:d/server.db");
    let days = load(&Sources::new().env([("DATA_IDEMPOTENCY_KEY_RETENTION_DAYS", "7")])).unwrap();
    assert_eq!(days.keys.retention, Duration::from_secs(7 * 86_400));
    assert_eq!(load(&Sources::new()).unwrap().keys.retention, crate::keyed::RETENTION);
    let zero = problem(&Sources::new().env([("DATA_IDEMPOTENCY_KEY_RETENTION_DAYS", "0")]));
    assert!(zero.contains("DATA_IDEMPOTENCY_KEY_RETENTION_DAYS") && zero.contains("1 to 36500"), "{zero}");
}

/// Each is printed alone, so two with the same description do not name their subjects.
#[test]
fn a_description_is_of_one_setting() {
    for (at, setting) in SETTINGS.iter().enumerate() {
        let twin = SETTINGS[at + 1..].iter().find(|other| other.doc == setting.doc);
        assert!(twin.is_none(), "{} and {}: {}", setting.key, twin.unwrap().key, setting.doc);
        let nameless = ["where it", "how often it", "how long it", "how many of them", "what its"];
        assert!(
            !nameless.iter().any(|words| setting.doc.contains(words)),
            "{}: {}",
            setting.key,
            setting.doc
        );
    }
}
