-- The hapax ledger in PostgreSQL, as `hapax ledger schema` prints it.
create schema if not exists {schema};

-- One row: the schema version, and the oldest binary (by schema version) that may still use it.
create table {schema}.meta (
  only_row  boolean primary key default true check (only_row),
  version   int not null,
  accepts   int not null,
  ledger_id uuid not null default gen_random_uuid(),
  identity  text not null check (identity in ('id', 'id_and_time')), -- what makes an identity; never changes
  swept_at     timestamptz, -- when the last sweep began
  paused_until timestamptz  -- sweeps remove nothing before this time: the clock jumped
);

-- Fencing tokens: one sequence for the whole ledger, never reset.
create sequence {schema}.token as bigint;

-- Every key has a number instead of (tenant, scope). The empty string means no tenant, because no
-- tenant can have that name.
create table {schema}.scope (
  number int generated always as identity primary key,
  tenant text collate "C" not null,
  scope  text collate "C" not null,
  began  timestamptz not null,
  unique (tenant, scope)
);

-- Owners' names, for humans.
create table {schema}.owner (
  number int generated always as identity primary key,
  name   text collate "C" not null unique
);

-- Entries, one partition per week (0 is timeless). Columns are ordered by width, so that nothing is
-- lost to padding. Each partition has its own unique index on (scope, id), which need not contain
-- the week. There is no index on state or time, so that settles are HOT updates.
create table {schema}.entry (
  first_at    timestamptz not null,
  at          timestamptz not null,
  token       bigint not null,
  nonce       bigint not null,
  scope       int not null,
  owner       int,
  week        smallint not null,
  attempts    smallint not null,
  -- 1 runs alone, 2 end is tracked, 4 has a row in held, 8 previous run died, 16 order removed
  flags       smallint not null,
  state       "char" not null,   -- L leased, D done, R retry, X dead, C claimed, F finished, O lost, P parked, S stale
  id          bytea not null,    -- 16 bytes of a UUID, else the text (a 16-byte text gets a trailing zero)
  fingerprint bytea,
  seq         bigint,
  aggregate   text collate "C",
  partition   int,
  "offset"    bigint,
  topic       text collate "C",
  note        text,
  metadata    jsonb
) partition by range (week);

create table {schema}.entry_0 (like {schema}.entry including defaults) with (fillfactor = 90);
create unique index entry_0_key on {schema}.entry_0 (scope, id);
alter table {schema}.entry attach partition {schema}.entry_0 for values from (0) to (1);

-- Entries that wait or are dead, with their bytes; and entries that were moved out of a dropped
-- week.
create table {schema}.held (
  like {schema}.entry including defaults,
  payload       bytea,       -- null: the record had none (a tombstone)
  header_names  bytea[],     -- null: its bytes are not held
  header_values bytea[],
  key           bytea,
  stamp         timestamptz, -- the record's timestamp
  copied        bigint,      -- the token under which a dead event was published
  reserved      timestamptz, -- until when a dead event belongs to whoever publishes it
  primary key (scope, id, week)
);
create index held_due on {schema}.held (scope, at) where header_names is not null and state in ('L', 'R', 'P');
create index held_out on {schema}.held (scope, at) where header_names is not null and state = 'X' and copied is distinct from token;

-- An event's bytes.
create type {schema}.body as (payload bytea, header_names bytea[], header_values bytea[], key bytea, stamp timestamptz);

-- The last offset of a partition that was given to transactional batches, and the offsets that were
-- being tried again after a process died: the batch size, then their distances.
create table {schema}.marker (
  scope     text collate "C" not null,
  topic     text collate "C" not null,
  partition int not null,
  last      bigint not null,
  tried     text not null,
  at        timestamptz not null,
  primary key (scope, topic, partition)
);

-- The progress of each aggregate, per scope.
create table {schema}.head (
  scope       int not null,
  aggregate   text collate "C" not null,
  last        bigint,
  lease_seq   bigint,
  lease_token bigint,
  lease_until timestamptz,
  retrying    bigint[] not null default '{}',
  parked      bigint,
  gap_at      timestamptz,
  primary key (scope, aggregate)
) with (fillfactor = 80);

-- At-most-once claims whose end is awaited, so that a sweep finds overdue ones without scanning
-- every entry. Claims only insert. The sweep deletes what is due, whatever became of the claim.
create table {schema}.awaited (
  at    timestamptz not null,
  token bigint not null,
  scope int not null,
  week  smallint not null,
  id    bytea not null
);
create index awaited_at on {schema}.awaited (at);

-- When a week was last written to, to the hour. Writers only insert, and only if this hour has no
-- row, so that no transaction waits for another here.
create table {schema}.touch (week smallint not null, at timestamptz not null);
create index touch_week on {schema}.touch (week, at);

-- Weeks that were not current when they were made, and the tenant whose events needed them.
create table {schema}.odd_week (week smallint primary key, tenant text collate "C" not null);

-- Weeks that were dropped or are being dropped. A week made again admits only scopes newer than its
-- drop.
create table {schema}.dropped (
  week      smallint primary key,
  at        timestamptz not null,
  since     timestamptz, -- rows that ended after this outlive the week
  scope_max int,    -- the highest scope number for which it was dropped; null: for none, it was empty
  scope_closed int, -- the highest scope number when the week was closed
  number    bigint, -- the number in the partition's name
  -- how far the drop is; null: it is over
  phase     text check (phase in ('closed', 'moving', 'moved', 'empty')),
  waits     text[], -- the transactions to wait for; null: not listed yet
  held      bigint not null default 0, -- rows moved to held
  rows      bigint not null default 0  -- rows the week had, those included
);

-- Numbers of partitions: a week that is made again gets another name, which no late statement about
-- the old one can hit.
create sequence {schema}.week_number as bigint;

create table {schema}.audit (
  number   bigint generated always as identity primary key,
  at       timestamptz not null,
  by       text not null,
  what     text not null,
  identity text not null,
  why      text not null
);
