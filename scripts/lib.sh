# shellcheck shell=bash disable=SC2034
# Shared by the scripts of this directory: where things are, and how missing packages are installed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }
die() { say "${0##*/}: $*"; exit 1; }

# The TypeScript client needs this one (its package.json says so).
node_min=20.4

need_node() {
  local version major minor
  version=$(node --version) || die "node is not installed: $node_min or later is needed"
  IFS=. read -r major minor _ <<<"${version#v}"
  ((major > ${node_min%.*} || (major == ${node_min%.*} && minor >= ${node_min#*.}))) \
    || die "node is $version: $node_min or later is needed"
}

# PostgreSQL refuses to run as root: as root, servers run as the user `postgres` if there is one, else `nobody`.
service_user() {
  if [ "$(id -u)" != 0 ]; then id -un; else id -un postgres 2>/dev/null || echo nobody; fi
}

as_user() { # USER COMMAND…
  local user=$1; shift
  if [ "$(id -u)" = 0 ] && [ "$user" != root ]; then
    setpriv --reuid="$user" --regid="$(id -g "$user")" --clear-groups env HOME=/ "$@"
  else
    "$@"
  fi
}

# A checkout below a private directory (such as root's home) is out of reach for that user: then both directories are
# below /tmp, always the same ones for the same checkout. Sets $services, $cache and, if so, $moved.
locate() {
  local user tmp
  services=${HAPAX_SERVICES_DIR:-$root/.services} cache=${HAPAX_CACHE:-$root/.cache} moved=
  user=$(service_user)
  if ! as_user "$user" test -x "$root"; then
    tmp=${TMPDIR:-/tmp}
    as_user "$user" test -x "$tmp" || tmp=/tmp
    tmp=$tmp/hapax-$(id -u)-$(printf %s "$root" | cksum | cut -d' ' -f1)
    [ -n "${HAPAX_SERVICES_DIR:-}" ] || { services=$tmp/services; moved=$tmp; }
    [ -n "${HAPAX_CACHE:-}" ] || { cache=$tmp/cache; moved=$tmp; }
  fi
  mkdir -p "$services" "$cache"
  services=$(cd "$services" && pwd -P) cache=$(cd "$cache" && pwd -P)
  local dir
  for dir in "$services" "$cache"; do
    [ -O "$dir" ] || die "$dir must belong to $(id -un)"
    as_user "$user" test -x "$dir" \
      || die "the user $user, who runs the servers, cannot reach $dir: choose another with HAPAX_SERVICES_DIR and HAPAX_CACHE"
  done
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif sudo -n true 2>/dev/null; then sudo -n "$@"
  else die "needs root: $*"; fi
}

# The package lists are fetched only when a package is unknown to the ones that are there.
apt_lists_know() {
  command -v apt-get >/dev/null || die "not here, and there is no apt-get to install it: $*"
  apt-cache show "$@" >/dev/null 2>&1 || as_root apt-get update -qq >&2
}

apt_install() { # PACKAGE…
  (
    exec 9>"$cache/apt.lock"; flock 9
    apt_lists_know "$@"
    say "installing $* (apt)"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-upgrade --no-install-recommends \
      -o DPkg::Lock::Timeout=300 "$@" >"$cache/apt.log" 2>&1 9>&- && exit
    # Lists may be older than the mirror: once more with fresh ones.
    as_root apt-get update -qq >>"$cache/apt.log" 2>&1
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-upgrade --no-install-recommends \
      -o DPkg::Lock::Timeout=300 "$@" >>"$cache/apt.log" 2>&1 9>&- \
      || { tail -5 "$cache/apt.log" >&2; die "apt could not install $*"; }
  )
}

# Not `ldd | grep -q`: grep leaves at the first line, ldd dies of it, and with `pipefail` nothing was missing.
missing_libraries() { # BINARY…
  local needed
  needed=$(ldd "$@" 2>&1) || true
  [[ $needed == *'not found'* ]]
}

# The binary with everything and the example, of the same build as the tests: other features would build all of it once more. Each
# time, since a plain `cargo run` leaves another binary in the same place.
build_full() { cargo build -q --workspace --all-features --bin hapax --example outbox; }

seconds_since() { # START (as of $EPOCHREALTIME)
  awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }'
}

psql_path() {
  local found=("$cache"/postgresql-*/bin/psql)
  command -v psql || echo "${found[-1]}"
}
