//! Routing: by key, or round robin. Also which names and partition counts a topic may have, so that
//! what works on one bus works on the others.

use super::TopicSettings;
use crate::error::{Error, Result};
use crate::id::{Tenant, Topic};

/// The longest topic name, in characters. The same limit as Kafka's.
const TOPIC_CHARS_MAX: usize = 249;
/// The most partitions a topic may have.
const PARTITIONS_MAX: i32 = 1000;

/// The key of an aggregate's records, prefixed with the tenant if there is one.
pub(crate) fn aggregate_key(tenant: Option<&Tenant>, aggregate: &str) -> String {
    match tenant {
        Some(tenant) => {
            let tenant =
                percent_encoding::utf8_percent_encode(tenant.as_str(), percent_encoding::NON_ALPHANUMERIC);
            format!("{tenant}/{aggregate}")
        }
        None => aggregate.to_owned(),
    }
}

/// The partition of a key: murmur2 of its bytes with the sign bit cleared, modulo the number of
/// partitions. Kafka's Java client does the same, so a topic that moves to Kafka keeps its keys
/// together.
pub(crate) fn partition_of(key: &[u8], partitions: i32) -> i32 {
    (murmur2(key) & 0x7fff_ffff).cast_signed() % partitions.max(1)
}

/// 32-bit `MurmurHash2` with Kafka's seed.
fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c_u32 ^ (data.len() as u32);
    let mut words = data.chunks_exact(4);
    for word in &mut words {
        let mut k = u32::from_le_bytes([word[0], word[1], word[2], word[3]]).wrapping_mul(M);
        k = (k ^ (k >> 24)).wrapping_mul(M);
        hash = hash.wrapping_mul(M) ^ k;
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        for (at, byte) in rest.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * at);
        }
        hash = hash.wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

/// Checks a topic's name.
pub(crate) fn check_name(topic: &Topic) -> Result<()> {
    let name = topic.as_str();
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if !plain || name.len() > TOPIC_CHARS_MAX || matches!(name, "." | "..") {
        return Err(Error::invalid(
            "topic",
            format!(
                "{topic} is not a valid name: it needs 1 to {TOPIC_CHARS_MAX} of the characters A-Z a-z 0-9 . _ -, \
                 and is neither . nor .."
            ),
        ));
    }
    Ok(())
}

/// Checks that a topic with this name and these settings can be created.
pub(crate) fn check_topic(topic: &Topic, settings: &TopicSettings) -> Result<()> {
    check_name(topic)?;
    if !(1..=PARTITIONS_MAX).contains(&settings.partitions) {
        return Err(Error::invalid(
            "partitions",
            format!("{} for the topic {topic}; a topic has 1 to {PARTITIONS_MAX}", settings.partitions),
        ));
    }
    Ok(())
}

pub(crate) fn no_topic(topic: &Topic) -> Error {
    Error::NotFound(format!("there is no topic {topic} on this bus; create it first"))
}

pub(crate) fn no_partition(partition: &super::Partition) -> Error {
    Error::NotFound(format!("the topic {} has no partition {}", partition.topic, partition.number))
}

/// Checks that an offset to commit lies within the partition.
pub(crate) fn check_offset(partition: &super::Partition, offset: i64, end: i64) -> Result<()> {
    if (0..=end).contains(&offset) {
        return Ok(());
    }
    Err(Error::invalid("offset", format!("{offset} of {partition}; its offsets are 0 to {end}")))
}

/// The error for a commit under an epoch that is over.
pub(crate) fn fenced(assigned: &super::Assignment) -> Error {
    Error::Fenced {
        what: format!("{} is not this member's under epoch {} any more", assigned.partition, assigned.epoch),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_go_where_kafkas_java_client_sends_them() {
        for (key, hash) in [
            ("21", -973_932_308_i32),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()).cast_signed(), hash, "{key}");
        }
        assert_eq!(partition_of(b"abc", 1), 0);
    }

    #[test]
    fn names_that_kafka_would_refuse_are_refused() {
        let check = |name: &str, n| check_topic(&Topic::new(name).unwrap(), &TopicSettings::new(n));
        assert!(check("orders.v1_a-b", 3).is_ok());
        for bad in [".", "..", "a b", "ä", "a/b", &"x".repeat(250)] {
            assert!(check(bad, 1).is_err(), "{bad}");
        }
        assert!(check("orders", 0).is_err());
        assert!(check("orders", 1001).is_err());
    }
}
