# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck source-path=SCRIPTDIR source=common/daemon
. "$here/services.d/common/daemon"

about="ClickHouse 26.9: its engine (chDB) behind its HTTP interface"
port=25523
version=26.9.0

# The engine from PyPI, a Python extension without dependencies; unpacked and never installed.
fetch() {
  command -v curl >/dev/null || apt_install curl # by which it is seen to be ready
  engine=$cache/chdb-$version
  (
    exec 8>"$engine.lock"; flock 8
    [ ! -e "$engine/ok" ] || exit 0
    say "downloading ClickHouse's engine $version"
    rm -rf "$engine"; mkdir -p "$engine"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d "$engine" "chdb-core==$version" >&2
    python3 -m zipfile -e "$engine"/chdb_core-*.whl "$engine"
    rm "$engine"/chdb_core-*.whl
    chmod -R a+rX "$engine"
    touch "$engine/ok"
  )
}

start() {
  mkdir -p "$dir/data"
  [ "$(id -u)" != 0 ] || chown "$(service_user)" "$dir/data"
  # The servers' user may not be able to read the repository.
  cp "$here/services.d/common/clickhouse_http.py" "$dir/"
  chmod a+r "$dir/clickhouse_http.py"
  cd "$dir/data" || return
  daemon env PYTHONPATH="$engine" PYTHONDONTWRITEBYTECODE=1 python3 "$dir/clickhouse_http.py" "$port" "$dir/data"
  ready_within 60 answers
}

answers() { [ "$(curl -sS -m 5 "http://127.0.0.1:$port/?query=SELECT%201" 2>/dev/null)" = 1 ]; }

exports() { echo "export HAPAX_TEST_CLICKHOUSE_URL=clickhouse://127.0.0.1:$port"; }

hint() { echo "$name: http://127.0.0.1:$port, user default without a password"; }
