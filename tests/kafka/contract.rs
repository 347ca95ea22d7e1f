//! Kafka passes the conformance suite of buses, with both group protocols.
#![cfg(all(feature = "testing", feature = "kafka"))]

use hapax::bus::kafka::GroupProtocol;
use hapax::testing::kafka::KafkaBusHarness;

hapax::bus_conformance!(classic, KafkaBusHarness::new(GroupProtocol::Classic));
hapax::bus_conformance!(consumer, KafkaBusHarness::new(GroupProtocol::Consumer));
