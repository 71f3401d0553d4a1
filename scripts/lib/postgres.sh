# A disposable PostgreSQL instance.
# shellcheck shell=bash disable=SC2154 # scripts/test and the other files set the variables

postgres_bin=""
postgres_dir=""

find_postgres() {
  local found
  found=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -1)
  [ -x "$found/initdb" ] && postgres_bin="$found"
}

# Runs a command as a user that PostgreSQL accepts: not root.
as_postgres() {
  if [ "$(id -u)" = 0 ]; then
    setpriv --reuid postgres --regid postgres --init-groups "$@"
  else
    "$@"
  fi
}

# Starts an instance on a free port and sets TOOLCRIB_TEST_POSTGRES_URL to a superuser's URL of it.
setup_postgres() {
  step "PostgreSQL, a disposable instance"
  find_postgres || { install_packages postgresql && find_postgres; }
  postgres_dir="$scratch/postgres"
  mkdir -p "$postgres_dir"
  if [ "$(id -u)" = 0 ]; then
    chown postgres "$postgres_dir"
    chmod 755 "$scratch"
  fi
  local port password="toolcrib-test"
  port=$(free_port)
  printf '%s\n' "$password" >"$scratch/password"
  chmod 644 "$scratch/password"
  as_postgres "$postgres_bin/initdb" -D "$postgres_dir/data" -U toolcrib --auth=scram-sha-256 \
    --pwfile="$scratch/password" --no-sync -E UTF8 --locale=C >/dev/null
  as_postgres "$postgres_bin/pg_ctl" -D "$postgres_dir/data" -w -l "$postgres_dir/log" \
    -o "-p $port -c listen_addresses=127.0.0.1 -c unix_socket_directories=$postgres_dir -c fsync=off -c max_connections=300" \
    start >/dev/null
  export TOOLCRIB_TEST_POSTGRES_URL="postgres://toolcrib:$password@127.0.0.1:$port/postgres"
  echo "listening on 127.0.0.1:$port"
}

stop_postgres() {
  if [ -n "$postgres_dir" ] && [ -f "$postgres_dir/data/postmaster.pid" ]; then
    as_postgres "$postgres_bin/pg_ctl" -D "$postgres_dir/data" -m immediate stop >/dev/null 2>&1 || true
  fi
}
