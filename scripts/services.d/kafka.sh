# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck source-path=SCRIPTDIR source=common/daemon
. "$here/services.d/common/daemon"
# shellcheck source-path=SCRIPTDIR source=common/certificates
. "$here/services.d/common/certificates"

about="Apache Kafka 4.3, one broker (KRaft), also with TLS and SASL; topics must be created"
port=25592 # its controller takes the next one, its listener with TLS and SASL the one after that
user=hapax password='hapax: a test' # of that listener

# The jars come from Maven, once for each content of the list.
jars() {
  local sum; sum=$(cksum < "$here/services.d/common/kafka-pom.xml")
  libs=$cache/kafka-${sum%% *}
}

# With a compiler: a test has Kafka's Java client write records, by a program that is run from its source.
fetch() {
  local pom=$here/services.d/common/kafka-pom.xml
  command -v javac >/dev/null || apt_install openjdk-17-jdk-headless
  jars
  (
    exec 8>"$libs.lock"; flock 8
    [ ! -e "$libs/ok" ] || exit 0
    command -v mvn >/dev/null || apt_install maven
    say "downloading Kafka"
    rm -rf "$libs"
    mvn -B -q -f "$pom" org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
      -DincludeScope=runtime -DoutputDirectory="$libs" >&2
    chmod -R a+rX "$libs"
    touch "$libs/ok"
  )
}

start() {
  local owner; owner=$(service_user)
  cd "$dir" || return # the servers' user may not be able to be where we are
  [ -e tls/ok ] || certificates "$dir/tls"
  cat tls/server.key tls/server.pem tls/ca.pem > tls/keystore.pem
  chmod 600 tls/keystore.pem
  [ "$(id -u)" != 0 ] || chown "$owner" tls/keystore.pem
  settings > server.properties
  cat > log4j2.xml <<'END'
<Configuration status="WARN">
  <Appenders><Console name="out"><PatternLayout pattern="%d{ISO8601} %p %c{1} %m%n"/></Console></Appenders>
  <Loggers><Root level="INFO"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
END
  local log=-Dlog4j2.configurationFile=$dir/log4j2.xml
  if [ ! -e formatted-with-scram ]; then
    # An unfinished format is useless to anyone: from the beginning.
    rm -rf data; mkdir data
    [ "$(id -u)" != 0 ] || chown "$owner" data
    # A cluster's id is a UUID in URL-safe base64, which must not begin with '-'.
    as_user "$owner" java -Xmx128m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC "$log" -cp "$libs/*" kafka.tools.StorageTool \
      format --standalone -t "A$(head -c 16 /dev/urandom | base64 | tr '+/' '-_' | cut -c2-22)" -c "$dir/server.properties" \
      --add-scram "SCRAM-SHA-256=[name=$user,password=\"$password\"]" \
      >format.log 2>&1 || { cat format.log >&2; return 1; }
    touch formatted-with-scram
  fi
  daemon java -Xms64m -Xmx256m -XX:+UseG1GC -XX:MaxGCPauseMillis=20 -XX:+ExitOnOutOfMemoryError -Djava.awt.headless=true \
    "$log" -cp "$libs/*" kafka.Kafka "$dir/server.properties"
  ready_within 90 answers
}

# Small and quick, for tests: clients may ask for short sessions, groups begin at once, compaction runs every second.
settings() {
  cat <<END
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:$((port + 1))
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$((port + 1)),SECURE://127.0.0.1:$((port + 2))
advertised.listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$((port + 1)),SECURE://127.0.0.1:$((port + 2))
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL
listener.name.secure.ssl.keystore.type=PEM
listener.name.secure.ssl.keystore.location=$dir/tls/keystore.pem
listener.name.secure.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256
listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_$user="$password";
listener.name.secure.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs=$dir/data
auto.create.topics.enable=false
num.partitions=1
default.replication.factor=1
min.insync.replicas=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=4
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.session.timeout.ms=6000
group.consumer.min.heartbeat.interval.ms=200
group.consumer.heartbeat.interval.ms=500
log.cleaner.backoff.ms=1000
log.cleaner.dedupe.buffer.size=16777216
num.network.threads=2
num.io.threads=4
# A broker that was killed is let in again only when its old session is over. A short session makes that quick, but a busy
# machine then costs a living broker its session, and every partition its leader for a moment.
broker.session.timeout.ms=${HAPAX_SERVICES_KAFKA_SESSION_MS:-18000}
broker.heartbeat.interval.ms=500
END
}

# An open port says little: a broker is ready when it answers a Metadata request (version 1) with one broker in it.
answers() {
  local hex
  hex=$( {
    exec 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
    # size 16, api 3, version 1, correlation 1, client "up", no topics
    printf '\0\0\0\020\0\003\0\001\0\0\0\001\0\002up\0\0\0\0' >&3
    timeout 2 head -c 12 <&3 | od -An -v -tx1 | tr -d ' \n'
  } 2>/dev/null) || return 1
  [ "${hex:8:16}" = 0000000100000001 ]
}

exports() {
  jars
  echo "export HAPAX_TEST_KAFKA=127.0.0.1:$port"
  printf 'export HAPAX_TEST_KAFKA_LIBS=%q\n' "$libs"
  echo "export HAPAX_TEST_KAFKA_TLS=127.0.0.1:$((port + 2))"
  printf 'export HAPAX_TEST_KAFKA_CA=%q\n' "$dir/tls/ca.pem"
  printf 'export HAPAX_TEST_KAFKA_USER=%q HAPAX_TEST_KAFKA_PASSWORD=%q\n' "$user" "$password"
}

hint() {
  echo "$name: bootstrap server 127.0.0.1:$port, no security; topics are not made by themselves"
  echo "$name with TLS and SASL (PLAIN, SCRAM-SHA-256): 127.0.0.1:$((port + 2)), CA $dir/tls/ca.pem, user $user, password '$password'"
}
