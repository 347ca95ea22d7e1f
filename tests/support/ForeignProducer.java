// Writes what Kafka's own Java client can write, for a consumer that uses another client. Run as a single file:
// java -cp "LIBS/*" ForeignProducer.java BROKERS TOPIC PARTITIONS
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.Random;
import java.util.concurrent.Future;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class ForeignProducer {
    static final String[] CODECS = {"none", "gzip", "snappy", "lz4", "zstd"};
    static final long LONG_AGO = 1000; // milliseconds since 1970
    static String topic;
    static int partitions;

    static KafkaProducer<byte[], byte[]> producer(String brokers, String codec, String transactionalId) {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", brokers);
        properties.put("key.serializer", ByteArraySerializer.class.getName());
        properties.put("value.serializer", ByteArraySerializer.class.getName());
        properties.put("compression.type", codec);
        properties.put("linger.ms", "20");
        properties.put("max.request.size", "4194304");
        if (transactionalId != null) properties.put("transactional.id", transactionalId);
        return new KafkaProducer<>(properties);
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static ProducerRecord<byte[], byte[]> record(String id, int number, String value) {
        byte[] payload = value == null ? null : bytes(value);
        ProducerRecord<byte[], byte[]> record =
            new ProducerRecord<>(topic, number % partitions, LONG_AGO, bytes("k-" + number), payload);
        record.headers().add("eventId", bytes(id));
        record.headers().add("nothing", null);
        return record;
    }

    static void send(KafkaProducer<byte[], byte[]> producer, List<ProducerRecord<byte[], byte[]>> records) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (ProducerRecord<byte[], byte[]> record : records) sent.add(producer.send(record));
        producer.flush();
        for (Future<RecordMetadata> one : sent) one.get();
    }

    static List<ProducerRecord<byte[], byte[]>> some(String name, int count) {
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (int n = 0; n < count; n++) {
            records.add(record(name + "-" + n, n, "{\"from\":\"" + name + "\",\"text\":\"" + "abc ".repeat(50) + "\"}"));
        }
        return records;
    }

    public static void main(String[] args) throws Exception {
        String brokers = args[0];
        topic = args[1];
        partitions = Integer.parseInt(args[2]);
        for (String codec : CODECS) {
            try (KafkaProducer<byte[], byte[]> producer = producer(brokers, codec, null)) {
                send(producer, some(codec, 2 * partitions));
                // Random letters: hardly any codec makes them smaller than three quarters.
                char[] letters = new char[1_000_000];
                Random random = new Random(codec.hashCode());
                for (int n = 0; n < letters.length; n++) letters[n] = (char) ('0' + random.nextInt(64));
                for (int n = 0; n < letters.length; n++) if (letters[n] == '\\') letters[n] = '~';
                send(producer, List.of(record("large-" + codec, 7, new String(letters))));
                send(producer, List.of(record("tombstone-" + codec, 11, null)));
            }
        }
        try (KafkaProducer<byte[], byte[]> producer = producer(brokers, "zstd", "foreign-" + topic)) {
            producer.initTransactions();
            for (int round = 0; round < 3; round++) {
                for (String name : new String[] {"aborted", "committed"}) {
                    producer.beginTransaction();
                    send(producer, some(name + round, partitions));
                    if (name.equals("aborted")) producer.abortTransaction();
                    else producer.commitTransaction();
                }
            }
        }
        System.out.println("written");
    }
}
