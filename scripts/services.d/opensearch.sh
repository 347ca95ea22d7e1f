# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck source-path=SCRIPTDIR source=common/daemon
. "$here/services.d/common/daemon"

about="OpenSearch 2.19, one node; started only by its name"
port=25520
by_name=yes # few tests need it, and it takes more memory than all others

# The jars come from Maven, once for each content of the list.
jars() {
  local sum; sum=$(cksum < "$here/services.d/common/opensearch-pom.xml")
  libs=$cache/opensearch-${sum%% *}
}

# With a compiler: the node is started by a program that is run from its source.
fetch() {
  command -v javac >/dev/null || apt_install openjdk-17-jdk-headless
  jars
  (
    exec 8>"$libs.lock"; flock 8
    [ ! -e "$libs/ok" ] || exit 0
    command -v mvn >/dev/null || apt_install maven
    say "downloading OpenSearch"
    rm -rf "$libs"
    mvn -B -q -f "$here/services.d/common/opensearch-pom.xml" \
      org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$libs" >&2
    chmod -R a+rX "$libs"
    touch "$libs/ok"
  )
}

start() {
  local owner; owner=$(service_user)
  mkdir -p "$dir/home/config" "$dir/data" "$dir/logs" "$dir/tmp"
  [ "$(id -u)" != 0 ] || chown -R "$owner" "$dir/home" "$dir/data" "$dir/logs" "$dir/tmp"
  cp "$here/services.d/common/OpenSearchNode.java" "$dir/" # the servers' user may not reach the repository
  cd "$dir" || return
  cat > log4j2.xml <<'END'
<Configuration status="WARN">
  <Appenders><Console name="out"><PatternLayout pattern="%d{ISO8601} %p %c{1} %m%n"/></Console></Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
END
  # C1 only: a node that lives for a minute pays more for better code than it gains.
  daemon java -Xms512m -Xmx512m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError -Djava.awt.headless=true \
    -Djava.io.tmpdir="$dir/tmp" -Dlog4j2.configurationFile="$dir/log4j2.xml" -Dlog4j2.disable.jmx=true \
    -Dopensearch.set.netty.runtime.available.processors=false -cp "$libs/*" OpenSearchNode.java \
    path.home="$dir/home" path.data="$dir/data" path.logs="$dir/logs" cluster.name=hapax node.name=hapax \
    discovery.type=single-node network.host=127.0.0.1 http.port="$port" transport.port=0 transport.type=netty4 http.type=netty4 \
    cluster.routing.allocation.disk.threshold_enabled=false
  ready_within 180 answers
}

answers() {
  local line=
  { exec 3<>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null || return 1
  printf 'GET /_cluster/health?wait_for_status=yellow&timeout=1s HTTP/1.0\r\n\r\n' >&3
  read -r -t 3 line <&3 || true
  exec 3>&-
  [[ $line == 'HTTP/1.0 200 '* || $line == 'HTTP/1.1 200 '* ]]
}

exports() { echo "export HAPAX_TEST_OPENSEARCH_URL=http://127.0.0.1:$port"; }

hint() { echo "$name: http://127.0.0.1:$port, no security"; }
