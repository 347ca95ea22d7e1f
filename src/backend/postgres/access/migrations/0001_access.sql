-- API tokens and audit rows in PostgreSQL. They share nothing with a ledger, a journal or keys in the
-- same schema.
create schema if not exists {schema};

-- One row: the schema version, the oldest build (by schema version) that may still use it, and when
-- audit rows were last swept.
create table {schema}.access_meta (
  only_row     boolean primary key default true check (only_row),
  version      int not null,
  accepts      int not null,
  swept_at     timestamptz,
  paused_until timestamptz
);

-- Tokens, by id. The empty string means no tenant, because no tenant can have that name. No scopes
-- mean all; otherwise a JSON array. Only hashes are here, never a secret. Rows are never deleted: a
-- store that had tokens must not look as if it had none.
create table {schema}.access_token (
  id             text collate "C" primary key,
  name           text not null,
  tenant         text collate "C" not null,
  scopes         text,
  role           text not null,
  hash           bytea not null,
  previous_hash  bytea,          -- the secret before the last rotation,
  previous_until timestamptz,    -- good until then
  rotations      int not null,
  created_at     timestamptz not null,
  expires_at     timestamptz,
  revoked_at     timestamptz,
  last_used_at   timestamptz,
  made_by        text collate "C" -- the token that made it, if one did
);
create index access_token_made_by on {schema}.access_token (made_by) where made_by is not null;

-- Who did what, and why. `note` makes a repeated insert harmless.
create table {schema}.access_audit (
  number  bigint generated always as identity primary key,
  note    bytea not null unique,
  at      timestamptz not null,
  who     text not null,
  action  text collate "C" not null,
  target  text not null,
  reason  text not null,
  details text not null
);
create index access_audit_at on {schema}.access_audit (at);

-- The current time: the clock, not the start of a transaction.
create function {schema}.access_now() returns timestamptz language sql volatile return clock_timestamp();

-- Audit rows are never changed, whoever asks.
create function {schema}.access_audit_is_final() returns trigger language plpgsql
set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'audit rows are only ever added, and swept after their retention' using errcode = '42501';
end $$;
create trigger access_audit_is_final before update or truncate on {schema}.access_audit
  for each statement execute function {schema}.access_audit_is_final();

-- The shortest retention is a day: who may sweep cannot remove what was done today.
create function {schema}.access_audit_is_fresh() returns trigger language plpgsql
set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'audit rows are kept for at least a day' using errcode = '42501';
end $$;
create trigger access_audit_is_fresh before delete on {schema}.access_audit for each row
  when (old.at > {schema}.access_now() - interval '1 day') execute function {schema}.access_audit_is_fresh();
