#!/bin/sh
# A role without rights over others, which owns its database: hapax refuses one that bypasses row security, as a superuser does.
set -eu
psql -v ON_ERROR_STOP=1 -v password="$(cat /run/secrets/database_password)" --username "${POSTGRES_USER:-postgres}" <<'SQL'
create role hapax login nosuperuser nobypassrls password :'password';
create database hapax owner hapax;
SQL
