//! How to reach Kafka and join groups: the settings, and the properties that cannot be set because
//! hapax's guarantees depend on them.

use std::fmt;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use crate::bus::{Start, Subscription};
use crate::error::{Error, Result};

/// How a group distributes its partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupProtocol {
    /// Members agree among themselves (cooperative-sticky). Works with every broker. Gives up: fast
    /// rebalances, since all members must take part in each.
    #[default]
    Classic,
    /// The broker decides (KIP-848). Gives up: brokers older than 4.0, and the subscription's
    /// `session_timeout`, which the broker sets instead (`group.consumer.session.timeout.ms`).
    Consumer,
}

/// Which records are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Isolation {
    /// Records of committed transactions and records outside transactions. Gives up: records behind
    /// a transaction that is still open.
    #[default]
    Committed,
    /// All records. Gives up: the guarantee that a producer's aborted records are never seen.
    Uncommitted,
}

/// How to reach Kafka and join groups.
///
/// ```
/// use hapax::bus::kafka::KafkaSettings;
/// let settings = KafkaSettings::new("127.0.0.1:9092").property("client.rack", "a");
/// assert!(settings.check().is_ok());
/// let refused = settings.property("enable.auto.commit", "true").check().unwrap_err();
/// assert!(refused.to_string().contains("enable.auto.commit"));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct KafkaSettings {
    /// The bootstrap brokers: `host:port`, separated by commas.
    pub brokers: String,
    /// librdkafka properties, passed through (security, compression, sizes …). Those that hapax's
    /// guarantees depend on are refused.
    pub properties: Vec<(String, String)>,
    /// How groups distribute their partitions.
    pub group_protocol: GroupProtocol,
    /// Which records are read.
    pub isolation: Isolation,
    /// The replication factor of new topics. `None` is the broker's default.
    pub replication: Option<i32>,
    /// How long a request to the broker, or a commit, may take.
    pub answer_timeout: Duration,
    /// How long a record may wait for its acknowledgement.
    pub publish_timeout: Duration,
    /// How long a member may go without calling `next` before its partitions go to others.
    pub poll_interval_max: Duration,
    /// How many records this process buffers for `next`, besides those that librdkafka has fetched.
    /// Paused partitions together keep at most eight times as many besides.
    pub buffer_records_max: usize,
    /// How many bytes it buffers. Paused partitions together keep at most three times as much besides.
    pub buffer_bytes_max: usize,
}

impl fmt::Debug for KafkaSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Values may be secrets.
        let names: Vec<&str> = self.properties.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("KafkaSettings")
            .field("brokers", &self.brokers)
            .field("properties", &names)
            .field("group_protocol", &self.group_protocol)
            .field("isolation", &self.isolation)
            .field("replication", &self.replication)
            .field("answer_timeout", &self.answer_timeout)
            .field("publish_timeout", &self.publish_timeout)
            .field("poll_interval_max", &self.poll_interval_max)
            .field("buffer_records_max", &self.buffer_records_max)
            .field("buffer_bytes_max", &self.buffer_bytes_max)
            .finish()
    }
}

/// librdkafka's default.
const BATCH_BYTES: usize = 1_000_000;

/// Properties that hapax sets itself, and why.
const OURS: [(&str, &str); 14] = [
    ("bootstrap.servers", "it is `brokers`"),
    ("metadata.broker.list", "it is `brokers`"),
    ("group.id", "it is the subscription's group"),
    ("group.protocol", "it is `group_protocol`"),
    ("partition.assignment.strategy", "partitions move one by one (cooperative-sticky), never all at once"),
    ("session.timeout.ms", "it is the subscription's `session_timeout`"),
    ("max.poll.interval.ms", "it is `poll_interval_max`"),
    ("auto.offset.reset", "it is the subscription's `start`"),
    ("isolation.level", "it is `isolation`"),
    ("enable.auto.commit", "an offset is committed when its effects are, never by a timer"),
    ("enable.auto.offset.store", "an offset is stored when its effects are, never on delivery"),
    ("enable.partition.eof", "hapax does not use it"),
    ("transactional.id", "records are published one by one, each with its own answer"),
    ("message.timeout.ms", "it is `publish_timeout`"),
];

impl KafkaSettings {
    /// These brokers, with defaults for everything else.
    pub fn new(brokers: impl Into<String>) -> Self {
        KafkaSettings {
            brokers: brokers.into(),
            properties: Vec::new(),
            group_protocol: GroupProtocol::default(),
            isolation: Isolation::default(),
            replication: None,
            answer_timeout: Duration::from_secs(10),
            publish_timeout: Duration::from_secs(30),
            poll_interval_max: Duration::from_secs(300),
            buffer_records_max: 1_000,
            buffer_bytes_max: 16 << 20,
        }
    }

    /// Parses `kafka://HOST:PORT[,HOST:PORT][?PROPERTY=VALUE&…]`. Properties are librdkafka's,
    /// percent-encoded where needed; `group.protocol`, `isolation.level`, `max.poll.interval.ms`
    /// and `message.timeout.ms` are accepted too.
    ///
    /// ```
    /// use hapax::bus::kafka::{GroupProtocol, KafkaSettings};
    /// let settings = KafkaSettings::from_url("kafka://a:9092,b:9092?group.protocol=consumer&client.rack=x%20y").unwrap();
    /// assert_eq!(settings.brokers, "a:9092,b:9092");
    /// assert_eq!(settings.group_protocol, GroupProtocol::Consumer);
    /// assert_eq!(settings.properties, [("client.rack".to_owned(), "x y".to_owned())]);
    /// let settings = KafkaSettings::from_url("kafka://a:9092?max.poll.interval.ms=60000&message.timeout.ms=5000").unwrap();
    /// assert_eq!((settings.poll_interval_max.as_secs(), settings.publish_timeout.as_secs()), (60, 5));
    /// assert!(KafkaSettings::from_url("kafka://a:9092?message.timeout.ms=soon").is_err());
    /// ```
    pub fn from_url(url: &str) -> Result<Self> {
        let bad = |problem: String| {
            Error::Config(format!(
                "{problem}; a Kafka URL is kafka://HOST:PORT[,HOST:PORT][?PROPERTY=VALUE&…]"
            ))
        };
        let rest =
            url.strip_prefix("kafka://").ok_or_else(|| bad("it does not begin with kafka://".into()))?;
        let (brokers, query) = rest.split_once('?').unwrap_or((rest, ""));
        let brokers = brokers.trim_end_matches('/');
        if brokers.contains(['/', '@']) {
            return Err(bad(
                "brokers are names and ports only (users and passwords are properties: sasl.username, \
                            sasl.password)"
                    .into(),
            ));
        }
        let mut settings = KafkaSettings::new(brokers);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| bad(format!("the property {pair:?} has no value")))?;
            let value = percent_encoding::percent_decode_str(value)
                .decode_utf8()
                .map_err(|_| bad(format!("the value of {name} is not UTF-8")))?;
            let time = || {
                let millis = value.parse().map(Duration::from_millis);
                millis.map_err(|_| bad(format!("{name} is a number of milliseconds, not {value:?}")))
            };
            match (name, &*value) {
                ("max.poll.interval.ms", _) => settings.poll_interval_max = time()?,
                ("message.timeout.ms", _) => settings.publish_timeout = time()?,
                ("group.protocol", "classic") => settings.group_protocol = GroupProtocol::Classic,
                ("group.protocol", "consumer") => settings.group_protocol = GroupProtocol::Consumer,
                ("isolation.level", "read_committed") => settings.isolation = Isolation::Committed,
                ("isolation.level", "read_uncommitted") => settings.isolation = Isolation::Uncommitted,
                ("group.protocol", _) => {
                    return Err(bad(format!("group.protocol is classic or consumer, not {value:?}")));
                }
                ("isolation.level", _) => {
                    return Err(bad(format!(
                        "isolation.level is read_committed or read_uncommitted, not {value:?}"
                    )));
                }
                _ => settings = settings.property(name, value),
            }
        }
        settings.check()?;
        Ok(settings)
    }

    /// Adds a property of librdkafka.
    #[must_use]
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.push((name.into(), value.into()));
        self
    }

    /// Refuses settings that would break hapax's guarantees. [`connect`](super::KafkaBus::connect)
    /// calls this first.
    pub fn check(&self) -> Result<()> {
        if self.brokers.split(',').any(|broker| broker.trim().is_empty()) {
            return Err(Error::Config(format!(
                "brokers of Kafka are host:port, separated by commas; {:?} has an empty one",
                self.brokers
            )));
        }
        for (name, value) in &self.properties {
            self.check_property(name.trim(), value.trim())?;
        }
        for (what, time) in [
            ("answer_timeout", self.answer_timeout),
            ("publish_timeout", self.publish_timeout),
            ("poll_interval_max", self.poll_interval_max),
        ] {
            if time < Duration::from_millis(100) || time > Duration::from_secs(86_400) {
                return Err(Error::Config(format!(
                    "{what} of Kafka is {time:?}; it must be 100 ms to a day"
                )));
            }
        }
        if self.buffer_records_max == 0 || self.buffer_bytes_max == 0 {
            return Err(Error::Config(
                "the buffer of a Kafka member needs room for 1 record at least".into(),
            ));
        }
        Ok(())
    }

    fn check_property(&self, name: &str, value: &str) -> Result<()> {
        let refused = |reason: &str| {
            Err(Error::Config(format!("the Kafka property {name}={value} is refused: {reason}")))
        };
        if let Some((_, reason)) = OURS.iter().find(|(ours, _)| *ours == name) {
            return refused(reason);
        }
        match name {
            "enable.idempotence" if value != "true" => {
                refused("without it a retry inside the client could publish a record twice or out of order")
            }
            "acks" | "request.required.acks" if value != "all" && value != "-1" => {
                refused("a record counts as published when all replicas in sync have it (acks=all)")
            }
            "max.in.flight" | "max.in.flight.requests.per.connection" if value != "1" => {
                refused("a batch that overtakes a refused one could be acknowledged in its place")
            }
            "heartbeat.interval.ms" | "group.protocol.type"
                if self.group_protocol == GroupProtocol::Consumer =>
            {
                refused("in the `consumer` group protocol the broker decides that")
            }
            _ => Ok(()),
        }
    }

    /// Configuration common to all clients.
    fn base(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set_log_level(RDKafkaLogLevel::Info);
        config.set("bootstrap.servers", &self.brokers).set("client.id", "hapax");
        // Caps librdkafka's backoff, so that a broker that comes back is noticed soon.
        config.set("reconnect.backoff.max.ms", "2000");
        config
    }

    /// Adds the user's properties except those foreign to this kind of client, which librdkafka
    /// would warn about at every start.
    fn with_properties(&self, mut config: ClientConfig, foreign: &[&str]) -> ClientConfig {
        for (name, value) in &self.properties {
            if !foreign.contains(&name.trim()) {
                config.set(name.trim(), value.trim());
            }
        }
        config
    }

    /// The most bytes of a batch, if the topic allows it.
    pub(super) fn batch_bytes(&self) -> usize {
        let own = self.properties.iter().rev().find(|(name, _)| name.trim() == "batch.size");
        own.and_then(|(_, value)| value.trim().parse().ok()).unwrap_or(BATCH_BYTES)
    }

    pub(super) fn producer(&self, batch_bytes: usize) -> ClientConfig {
        let mut config = self.base();
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            // A partition that does not know this producer yet accepts any sequence number. If it
            // refuses the first batch (no leader yet) and takes the second, librdkafka concludes
            // that the first was stored, and reports it as delivered: it is lost. So the second is
            // sent after the first is acknowledged. A broker handles one request of a connection at
            // a time anyway.
            .set("max.in.flight.requests.per.connection", "1")
            .set("message.timeout.ms", millis(self.publish_timeout))
            // As Java producers do, so that all publishers agree on a key's partition.
            .set("partitioner", "murmur2_random")
            .set("queue.buffering.max.messages", "20000")
            .set("queue.buffering.max.kbytes", "65536")
            // Callers publish many records at a time and wait for the answers, so lingering for
            // more only costs time.
            .set("linger.ms", "0")
            // The topic decides what is too large.
            .set("message.max.bytes", "16777216");
        let not_ours = ["heartbeat.interval.ms", "group.instance.id", "group.remote.assignor"];
        let mut config = self.with_properties(config, &not_ours);
        config.set("batch.size", batch_bytes.to_string());
        config
    }

    /// A client that queries the brokers and belongs to no group.
    pub(super) fn reader(&self) -> ClientConfig {
        let mut config = self.base();
        config.set("isolation.level", self.isolation.word()).set("enable.auto.commit", "false");
        self.with_properties(config, PRODUCERS_OWN)
    }

    pub(super) fn member(&self, subscription: &Subscription) -> ClientConfig {
        let mut config = self.base();
        config
            .set("group.id", subscription.group.as_ref())
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("enable.partition.eof", "false")
            .set("isolation.level", self.isolation.word())
            .set("max.poll.interval.ms", millis(self.poll_interval(subscription)))
            .set(
                "auto.offset.reset",
                match subscription.start {
                    // The start of `Latest` is determined at assignment. A group that has started
                    // continues with what is left.
                    Start::Earliest | Start::Latest => "earliest",
                    Start::Refuse => "error",
                },
            )
            // Limits prefetching.
            .set("queued.max.messages.kbytes", "16384")
            .set("queued.min.messages", "5000")
            .set("fetch.max.bytes", "16777216")
            // When that limit was reached, look again soon, not after a second.
            .set("fetch.queue.backoff.ms", "50");
        match self.group_protocol {
            GroupProtocol::Classic => config
                .set("group.protocol", "classic")
                .set("partition.assignment.strategy", "cooperative-sticky")
                .set("session.timeout.ms", millis(subscription.session_timeout))
                .set("heartbeat.interval.ms", millis((subscription.session_timeout / 3).min(HEARTBEAT_MAX))),
            GroupProtocol::Consumer => config.set("group.protocol", "consumer"),
        };
        self.with_properties(config, PRODUCERS_OWN)
    }

    /// How long a member may go without polling. Kafka requires at least the session timeout.
    pub(super) fn poll_interval(&self, subscription: &Subscription) -> Duration {
        match self.group_protocol {
            GroupProtocol::Classic => self.poll_interval_max.max(subscription.session_timeout),
            GroupProtocol::Consumer => self.poll_interval_max,
        }
    }

    /// How long to wait for a revoked partition. The broker waits for no member longer than the
    /// poll interval.
    pub(super) fn revoke_timeout(&self, subscription: &Subscription) -> Duration {
        subscription.revoke_timeout.min(self.poll_interval(subscription) * 9 / 10)
    }
}

/// Members learn of a rebalance from the answer to a heartbeat, and the partitions of a member that
/// is gone wait for the slowest of them.
const HEARTBEAT_MAX: Duration = Duration::from_millis(500);

const PRODUCERS_OWN: &[&str] = &[
    "enable.idempotence",
    "acks",
    "request.required.acks",
    "linger.ms",
    "queue.buffering.max.ms",
    "queue.buffering.max.messages",
    "queue.buffering.max.kbytes",
    "batch.size",
    "batch.num.messages",
    "compression.type",
    "compression.codec",
    "compression.level",
    "partitioner",
    "request.timeout.ms",
    "retries",
    "message.send.max.retries",
    "sticky.partitioning.linger.ms",
    "enable.gapless.guarantee",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
];

impl Isolation {
    fn word(self) -> &'static str {
        match self {
            Isolation::Committed => "read_committed",
            Isolation::Uncommitted => "read_uncommitted",
        }
    }
}

fn millis(time: Duration) -> String {
    time.as_millis().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_promise_rests_on_is_refused_with_a_sentence() {
        for (name, value) in [
            ("enable.auto.commit", "true"),
            ("enable.auto.offset.store", "true"),
            ("enable.idempotence", "false"),
            ("acks", "1"),
            ("request.required.acks", "0"),
            ("max.in.flight", "5"),
            ("max.in.flight.requests.per.connection", "2"),
            ("isolation.level", "read_uncommitted"),
            (" group.id ", "other"),
        ] {
            let error = KafkaSettings::new("b:1").property(name, value).check().unwrap_err();
            assert_eq!(error.code(), "config", "{name}");
            assert!(error.to_string().contains(name.trim()), "{error}");
        }
        for (name, value) in
            [("acks", "all"), ("acks", "-1"), ("enable.idempotence", "true"), ("linger.ms", "5")]
        {
            KafkaSettings::new("b:1").property(name, value).check().unwrap();
        }
        KafkaSettings::new("b:1,,c:2").check().unwrap_err();
    }

    #[test]
    fn urls_are_read_and_secrets_are_not_shown() {
        let settings = KafkaSettings::from_url("kafka://a:1,b:2/?sasl.password=p%26w&acks=all").unwrap();
        assert_eq!(settings.brokers, "a:1,b:2");
        assert_eq!(settings.properties[0].1, "p&w");
        assert!(!format!("{settings:?}").contains("p&w"));
        for bad in [
            "http://a",
            "kafka://",
            "kafka://a:1,",
            "kafka://me:pw@a:1",
            "kafka://a:1?acks",
            "kafka://a:1?acks=0",
            "kafka://a:1?group.protocol=new",
            "kafka://a:1?isolation.level=none",
            "kafka://a:1?enable.auto.commit=true",
        ] {
            let error = KafkaSettings::from_url(bad).unwrap_err();
            assert_eq!(error.code(), "config", "{bad}");
            assert!(!error.to_string().contains("pw"), "{error}");
        }
    }

    #[test]
    fn the_broker_decides_on_sessions_in_the_consumer_protocol() {
        let subscription = Subscription::new("g", [crate::Topic::new("t").unwrap()]).unwrap();
        let mut settings = KafkaSettings::new("b:1");
        let classic = settings.member(&subscription);
        assert_eq!(classic.get("session.timeout.ms"), Some("45000"));
        assert_eq!(classic.get("partition.assignment.strategy"), Some("cooperative-sticky"));
        settings.group_protocol = GroupProtocol::Consumer;
        let consumer = settings.member(&subscription);
        for name in ["session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"] {
            assert_eq!(consumer.get(name), None, "{name}");
        }
        settings.property("heartbeat.interval.ms", "100").check().unwrap_err();
    }
}
