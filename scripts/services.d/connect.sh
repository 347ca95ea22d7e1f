# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck source-path=SCRIPTDIR source=common/daemon
. "$here/services.d/common/daemon"

about="Kafka Connect 4.3 with Debezium 3.6 for PostgreSQL; started only by its name"
port=25543
needs="kafka"
by_name=yes # few tests need it, and it takes longer than all others

# The jars of the worker and of the plugin come from Maven, once for each content of the lists.
jars() {
  local sum
  sum=$(cksum < "$here/services.d/common/connect-pom.xml")
  libs=$cache/connect-${sum%% *}
  sum=$(cksum < "$here/services.d/common/debezium-pom.xml")
  plugins=$cache/connect-plugins-${sum%% *} # a directory of directories, one for each plugin
}

fetch() {
  command -v java >/dev/null || apt_install openjdk-17-jdk-headless
  jars
  fetch_jars connect-pom.xml "$libs" "Kafka Connect"
  fetch_jars debezium-pom.xml "$plugins/debezium-postgres" Debezium
}

fetch_jars() ( # POM DIRECTORY WHAT
  mkdir -p "$(dirname "$2")"
  exec 8>"$cache/connect.lock"; flock 8
  [ ! -e "$2/ok" ] || exit 0
  command -v mvn >/dev/null || apt_install maven
  say "downloading $3"
  rm -rf "$2"
  mvn -B -q -f "$here/services.d/common/$1" org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$2" >&2
  chmod -R a+rX "$(dirname "$2")" "$2"
  touch "$2/ok"
)

start() {
  cd "$dir" || return # the servers' user may not be able to be where we are
  settings > worker.properties
  cat > log4j2.xml <<'XML'
<Configuration status="WARN">
  <Appenders><Console name="out"><PatternLayout pattern="%d{ISO8601} %p %c{1} %m%n"/></Console></Appenders>
  <Loggers><Root level="INFO"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
XML
  # C1 only: a worker that lives for a minute pays more for better code than it gains.
  daemon java -Xms64m -Xmx320m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError -Djava.awt.headless=true \
    "-Dlog4j2.configurationFile=$dir/log4j2.xml" -cp "$libs/*" org.apache.kafka.connect.cli.ConnectDistributed "$dir/worker.properties"
  ready_within 120 answers
}

# Connectors and offsets are in topics of the broker, so they outlive a kill. A worker that was killed stays in the group
# until its session ends: that is short here, so that its successor begins soon.
settings() {
  cat <<CONF
bootstrap.servers=127.0.0.1:$(with kafka service_port)
listeners=http://127.0.0.1:$port
rest.advertised.host.name=127.0.0.1
rest.advertised.port=$port
plugin.path=$plugins
plugin.discovery=service_load
key.converter=org.apache.kafka.connect.json.JsonConverter
value.converter=org.apache.kafka.connect.json.JsonConverter
config.providers=file
config.providers.file.class=org.apache.kafka.common.config.provider.FileConfigProvider
offset.flush.interval.ms=1000
group.id=hapax-connect
config.storage.topic=hapax-connect-configs
config.storage.replication.factor=1
offset.storage.topic=hapax-connect-offsets
offset.storage.replication.factor=1
offset.storage.partitions=1
status.storage.topic=hapax-connect-status
status.storage.replication.factor=1
status.storage.partitions=1
session.timeout.ms=6000
heartbeat.interval.ms=1000
scheduled.rebalance.max.delay.ms=0
CONF
}

# The list of connectors comes from the config topic, so the worker has read it, and speaks to the broker.
answers() { [ "$(curl -s -o /dev/null -w '%{http_code}' -m 3 "http://127.0.0.1:$port/connectors" 2>/dev/null)" = 200 ]; }

exports() { echo "export HAPAX_TEST_CONNECT=http://127.0.0.1:$port"; }

hint() { echo "$name: REST at http://127.0.0.1:$port; \`hapax cdc apply --connect http://127.0.0.1:$port\`"; }
