-- The keys of writes in PostgreSQL. They share nothing with a ledger or a journal in the same schema.
create schema if not exists {schema};

-- One row: the schema version, the oldest build (by schema version) that may still use it, the secret
-- under which requests are hashed, and what sweeps have forgotten.
create table {schema}.keys_meta (
  only_row     boolean primary key default true check (only_row),
  version      int not null,
  accepts      int not null,
  secret       bytea not null default sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
  horizon      timestamptz,   -- a UUIDv7 key from before that is not found is expired
  swept_at     timestamptz,
  paused_until timestamptz
);

create sequence {schema}.keys_token as bigint;

-- Keys. The empty string means no tenant, because no tenant can have that name. A key runs until
-- `until`, nobody else may run it until `held_until` (infinity: until a person decides), and it is
-- settled once `settled_at` is there. A row that a caller's transaction inserted has no lease:
-- `until` is its beginning, and it is held. `ended`: its last run was released or decided about, and
-- the nonce of that run begins nothing any more. `bound`: a run of it failed or never ended, and may have
-- done something. A row that has ended and is not bound did nothing: it is free for any request.
create table {schema}.keys (
  token       bigint not null,
  nonce       bigint not null,
  begun_at    timestamptz not null,
  until       timestamptz not null,
  held_until  timestamptz not null,
  ended       boolean not null default false,
  bound       boolean not null default false,
  settled_at  timestamptz,
  aged_from   timestamptz,    -- what the retention counts from
  status      int,
  tenant      text collate "C" not null,
  key         text collate "C" not null,
  fingerprint bytea not null,
  parts       text not null,
  headers     text,
  body        bytea,
  resolved_at  timestamptz,   -- the last decision of a person about it
  resolved_by  text,
  resolved_why text,
  primary key (tenant, key)
) with (fillfactor = 80);
create index keys_aged on {schema}.keys (aged_from) where aged_from is not null;
