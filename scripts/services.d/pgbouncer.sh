# shellcheck shell=bash disable=SC2034,SC2154
about="PgBouncer in front of postgres18, transaction pooling"
port=25532
needs=postgres18

# Unpacked, not installed: Debian's package would start a daemon of its own.
fetch() {
  bouncer=$(command -v pgbouncer || PATH=/usr/sbin command -v pgbouncer || true)
  [ -z "$bouncer" ] || return 0
  local to=$cache/pgbouncer
  bouncer=$to/usr/sbin/pgbouncer
  if [ ! -e "$to/ok" ]; then
    apt_lists_know pgbouncer
    rm -rf "$to"; mkdir -p "$to"
    say "downloading PgBouncer"
    (cd "$to" && apt-get download -qq pgbouncer 2>"$dir/apt.log") || { cat "$dir/apt.log" >&2; return 1; }
    dpkg-deb -x "$to"/*.deb "$to"
    chmod -R a+rX "$to"
    touch "$to/ok"
  fi
  # Each time: a cache may be older than the machine.
  # shellcheck disable=SC2046 # a list of packages
  ! missing_libraries "$bouncer" || apt_install $(dpkg-deb -f "$to"/*.deb Depends | grep -oE '\blib[a-z0-9.+-]+')
  ! missing_libraries "$bouncer" || die "libraries are missing: see ldd $bouncer"
}

start() {
  local user behind
  user=$(service_user) behind=$(with postgres18 service_port)
  touch "$dir/log" "$dir/pid"
  [ "$(id -u)" != 0 ] || chown "$user" "$dir" "$dir/log" "$dir/pid"
  echo '"postgres" ""' > "$dir/users"
  # Drivers send extra_float_digits when they connect; PgBouncer refuses what it does not know.
  cat > "$dir/pgbouncer.ini" <<END
[databases]
* = host=127.0.0.1 port=$behind auth_user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $port
unix_socket_dir =
auth_type = trust
auth_file = $dir/users
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
ignore_startup_parameters = extra_float_digits
logfile = $dir/log
pidfile = $dir/pid
END
  rm -f "$dir/pid"
  cd "$dir" || return
  as_user "$user" "$bouncer" -d "$dir/pgbouncer.ini" >"$dir/start.log" 2>&1 || { cat "$dir/start.log" >&2; return 1; }
  until_true 20 answers || { tail -20 "$dir/log" >&2; return 1; }
}

answers() { # through it, PostgreSQL; hung, neither says a word
  [ "$(PGCONNECT_TIMEOUT=3 timeout 5 "$(psql_path)" -XAtc 'select 1' \
    "postgres://postgres@127.0.0.1:$port/postgres" 2>/dev/null)" = 1 ]
}

exports() { echo "export HAPAX_TEST_PGBOUNCER_URL=postgres://postgres@127.0.0.1:$port/postgres"; }

hint() { echo "$name: $(psql_path) postgres://postgres@127.0.0.1:$port/postgres"; }
