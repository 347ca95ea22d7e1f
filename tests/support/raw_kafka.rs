//! A Produce request by hand: records that no client library would write.
#![allow(dead_code)] // each test binary uses its part

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// A record with headers whose names may be any bytes.
pub struct RawRecord<'r> {
    pub key: &'r [u8],
    pub value: &'r [u8],
    pub headers: &'r [(&'r [u8], &'r [u8])],
}

/// Writes records to partition 0 of a topic, as one batch. Blocks.
pub fn produce(broker: &str, topic: &str, records: &[RawRecord<'_>]) {
    let batch = batch(records);
    let mut body = Vec::new();
    body.extend([0, 0, 0, 7]); // Produce, version 7
    body.extend(1_i32.to_be_bytes()); // correlation
    body.extend((-1_i16).to_be_bytes()); // no client id
    body.extend((-1_i16).to_be_bytes()); // no transaction
    body.extend((-1_i16).to_be_bytes()); // acks=all
    body.extend(10_000_i32.to_be_bytes()); // timeout
    body.extend(1_i32.to_be_bytes()); // topics
    body.extend((topic.len() as i16).to_be_bytes());
    body.extend(topic.as_bytes());
    body.extend(1_i32.to_be_bytes()); // partitions
    body.extend(0_i32.to_be_bytes());
    body.extend((batch.len() as i32).to_be_bytes());
    body.extend(batch);
    // A topic that was just made has no leader at first: 3 and 6 mean "ask again".
    let end = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let error = send(broker, &body, topic);
        if error == 0 {
            return;
        }
        let again = matches!(error, 3 | 6) && std::time::Instant::now() < end;
        assert!(again, "the broker's error code is {error}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The broker's error code.
fn send(broker: &str, body: &[u8], topic: &str) -> i16 {
    let mut stream = TcpStream::connect(broker).expect("the broker");
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(&(body.len() as i32).to_be_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("an answer");
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer).expect("an answer");
    // correlation, one topic, its name, one partition, its number: then the error.
    let at = 4 + 4 + 2 + topic.len() + 4 + 4;
    i16::from_be_bytes([answer[at], answer[at + 1]])
}

fn batch(records: &[RawRecord<'_>]) -> Vec<u8> {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64;
    let mut rest = Vec::new(); // what the checksum covers
    rest.extend(0_i16.to_be_bytes()); // attributes: not compressed
    rest.extend((records.len() as i32 - 1).to_be_bytes());
    rest.extend(now.to_be_bytes());
    rest.extend(now.to_be_bytes());
    rest.extend((-1_i64).to_be_bytes()); // no producer id, epoch, sequence
    rest.extend((-1_i16).to_be_bytes());
    rest.extend((-1_i32).to_be_bytes());
    rest.extend((records.len() as i32).to_be_bytes());
    for (number, record) in records.iter().enumerate() {
        let mut one = vec![0]; // attributes
        varint(&mut one, 0); // time
        varint(&mut one, number as i64);
        bytes(&mut one, record.key);
        bytes(&mut one, record.value);
        varint(&mut one, record.headers.len() as i64);
        for (name, value) in record.headers {
            bytes(&mut one, name);
            bytes(&mut one, value);
        }
        bytes(&mut rest, &one);
    }
    let mut batch = Vec::new();
    batch.extend(0_i64.to_be_bytes()); // base offset
    batch.extend((rest.len() as i32 + 9).to_be_bytes());
    batch.extend((-1_i32).to_be_bytes()); // leader epoch
    batch.push(2); // magic
    batch.extend(crc32c(&rest).to_be_bytes());
    batch.extend(rest);
    batch
}

fn bytes(into: &mut Vec<u8>, bytes: &[u8]) {
    varint(into, bytes.len() as i64);
    into.extend(bytes);
}

fn varint(into: &mut Vec<u8>, number: i64) {
    let mut left = ((number << 1) ^ (number >> 63)) as u64;
    while left >= 0x80 {
        into.push(left as u8 | 0x80);
        left >>= 7;
    }
    into.push(left as u8);
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 },
        )
    })
}
