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

-- The ledger's current time: the clock, not the start of a transaction.
create function {schema}.ledger_now() returns timestamptz language sql volatile return clock_timestamp();

create function {schema}.us(t timestamptz) returns bigint language sql immutable
  return (extract(epoch from t) * 1000000)::bigint;

create function {schema}.scope_number(p_tenant text, p_scope text) returns table (o_number int, o_fresh boolean)
language plpgsql volatile set lock_timeout = '2s' set search_path = pg_catalog, pg_temp as $$
begin
  if btrim(p_scope, E' \t\r\n') = '' or length(p_scope) > 255 or length(p_tenant) > 255 then
    raise exception 'scope and tenant need 1 to 255 characters and must not be blank' using errcode = '22023';
  end if;
  -- Fresh: the row may still be rolled back, because this transaction inserted it, maybe in an
  -- earlier statement. A row that is older than every running transaction is certainly committed.
  select s.number, age(s.xmin) <= age((pg_snapshot_xmin(pg_current_snapshot())::text::bigint & 4294967295)::text::xid)
    into o_number, o_fresh from {schema}.scope s where s.tenant = p_tenant and s.scope = p_scope;
  if o_number is null then
    insert into {schema}.scope (tenant, scope, began) values (p_tenant, p_scope, {schema}.ledger_now())
      on conflict do nothing returning number into o_number;
    o_fresh := true;
    if o_number is null then -- another transaction inserted it and committed while we waited
      select s.number into o_number from {schema}.scope s where s.tenant = p_tenant and s.scope = p_scope;
    end if;
  end if;
  return next;
end $$;

create function {schema}.owner_number(p_name text) returns int language plpgsql volatile set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp as $$
declare v int;
begin
  if p_name is null then return null; end if;
  select number into v from {schema}.owner where name = p_name;
  if v is null then
    insert into {schema}.owner (name) values (p_name) on conflict do nothing returning number into v;
    if v is null then select number into v from {schema}.owner where name = p_name; end if;
  end if;
  return v;
end $$;

-- Called after the write. Reads the clock itself: a wait before the write must not make the touch
-- look older.
create function {schema}.touch_weeks(p_weeks smallint[], p_now timestamptz) returns void language sql volatile
begin atomic
  insert into {schema}.touch (week, at)
  select w, greatest(p_now, n.now) from unnest(p_weeks) w cross join (select {schema}.ledger_now() as now offset 0) n
  where w > 0 and not exists (select from {schema}.touch t where t.week = w and t.at > n.now - interval '1 hour');
end;

-- Why a missing week may not be made; null if it may. Current weeks may always be made: odd ids
-- cannot keep them out. Any other week (of years ago, or far ahead) counts against the p_weeks_max
-- of the tenant whose event needs it. The last weeks that the ledger has room for are shared out: a
-- tenant that has made many gets none of them.
create function {schema}.week_refused(p_week int, p_days_ahead int, p_weeks_max int, p_tenant text, out o_why text, out o_detail text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_monday timestamptz := timestamptz '1999-12-27 00:00:00+00' + (p_week - 1) * interval '168 hours';
  v_now    timestamptz := {schema}.ledger_now();
  v_all    int;
  v_own    int;
begin
  if v_monday > v_now + least(p_days_ahead, 3660) * interval '24 hours' then
    o_why := format('its time lies in the week of %s, more than %s days after the ledger''s present',
      to_char(v_monday at time zone 'UTC', 'YYYY-MM-DD'), p_days_ahead);
    o_detail := 'ahead';
  elsif v_monday < v_now - interval '336 hours' or v_monday > v_now + interval '672 hours' then
    select count(*), count(*) filter (where o.tenant = coalesce(p_tenant, '')) into v_all, v_own
      from {schema}.odd_week o
      join (select split_part(c.relname::text, '_', 2) as week from pg_inherits i join pg_class c on c.oid = i.inhrelid
             where i.inhparent = '{schema}.entry'::regclass) p on p.week = o.week::text;
    if v_own >= least(p_weeks_max, 1000 - v_all) then
      o_why := format('its week would be one more than the %s weeks of other times than the present that a tenant may use',
        least(p_weeks_max, 1000 - v_all));
      o_detail := 'weeks_max';
    else
      o_detail := 'odd';
    end if;
  end if;
end $$;

-- Makes a week. It is bounded, so that the runtime role may call it without owning the tables. A
-- week that begins with leases leaves half of each page free for settles, so that they stay on the
-- page (HOT) and touch no index; other weeks are packed.
create function {schema}.make_week(
  p_week int, p_days_ahead int, p_weeks_max int, p_leased boolean default false, p_tenant text default null
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
  v_name   text;
  v_barred int;
  v_phase  text;
  v_not    record;
begin
  if p_week < 1 or p_week > 5218 then
    raise exception 'week % is out of range', p_week using errcode = '22023';
  end if;
  perform pg_advisory_xact_lock(hashtext('hapax.make_week.' || {schema_literal}));
  if exists (select from pg_inherits i join pg_class c on c.oid = i.inhrelid
             where i.inhparent = '{schema}.entry'::regclass and c.relname like format('entry\_%s\_%%', p_week)) then
    return false;
  end if;
  select scope_max, phase into v_barred, v_phase from {schema}.dropped where week = p_week;
  if v_phase is not null then return false; end if; -- it is being dropped, and claims report that
  select * into v_not from {schema}.week_refused(p_week, p_days_ahead, p_weeks_max, p_tenant);
  if v_not.o_why is not null then
    raise exception '%', v_not.o_why using errcode = '22023', detail = v_not.o_detail;
  end if;
  delete from {schema}.odd_week where week = p_week;
  insert into {schema}.odd_week (week, tenant) select p_week, coalesce(p_tenant, '') where v_not.o_detail = 'odd';
  v_name := format('entry_%s_%s', p_week, nextval('{schema}.week_number'));
  execute format('create table %I.%I (like {schema}.entry including defaults) with (fillfactor = %s)', {schema_literal}, v_name,
    case when p_leased then 50 else 100 end);
  execute format('create unique index %I on %I.%I (scope, id)', v_name || '_key', {schema_literal}, v_name);
  if v_barred is not null then
    execute format('alter table %I.%I add check (scope > %s)', {schema_literal}, v_name, v_barred);
  end if;
  execute format('alter table {schema}.entry attach partition %I.%I for values from (%s) to (%s)',
    {schema_literal}, v_name, p_week, p_week + 1);
  -- The owner of the ledger owns the partition; a role that may write to the ledger may write to
  -- the week.
  insert into {schema}.touch (week, at) values (p_week, {schema}.ledger_now());
  return true;
end $$;

-- What a claim in a caller's transaction needs to know about its week: whether it exists, whether
-- it is being dropped (which the claim reports), up to which scope it was dropped, and why it may
-- not be made.
create function {schema}.week_state(
  p_week int, p_days_ahead int, p_weeks_max int, p_tenant text,
  out o_there boolean, out o_leaves boolean, out o_barred int, out o_refused text
) language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  o_there := exists (select from pg_inherits i join pg_class c on c.oid = i.inhrelid
    where i.inhparent = '{schema}.entry'::regclass and c.relname like format('entry\_%s\_%%', p_week));
  select phase is not null, scope_max into o_leaves, o_barred from {schema}.dropped where week = p_week;
  o_leaves := coalesce(o_leaves, false);
  if not o_there and not o_leaves then
    select o_why into o_refused from {schema}.week_refused(p_week, p_days_ahead, p_weeks_max, p_tenant);
  end if;
end $$;

-- Raises an error that asks for a retry in a new transaction: a locked row is no longer where it
-- was found.
create function {schema}.lost_sight(p_week smallint) returns void language plpgsql
set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'a row of week % is no longer where it was found', p_week using errcode = '40001';
end $$;

-- Stores a row where it was found (its week, or held once it was moved there), or inserts it;
-- returns false if another transaction inserted it first. An update that reaches no row is an
-- error, never a success. Keeps held consistent: parked and dead entries are in it; entries that
-- have ended are not, and need no bytes any more.
create function {schema}.put(
  e {schema}.entry, p_have boolean, p_in_held boolean, p_hold boolean, p_body {schema}.body, p_bare boolean default false
) returns boolean language plpgsql volatile
set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare v_held boolean := (e.flags & 4) <> 0 or p_in_held; v_bare boolean := p_bare or e.state in ('D', 'F', 'S');
begin
  if p_hold or e.state in ('P', 'X') then
    e.flags := e.flags | 4;
  elsif v_bare and not p_in_held then
    e.flags := e.flags & ~4;
  end if;
  if p_in_held and not p_have then
    insert into {schema}.held
    select (e).*, p_body.payload, p_body.header_names, p_body.header_values, p_body.key, p_body.stamp on conflict do nothing;
    return found;
  elsif p_in_held then
    null;
  elsif p_have then
    update {schema}.entry x set at = e.at, token = e.token, nonce = e.nonce, owner = e.owner, attempts = e.attempts,
      flags = e.flags, state = e.state, fingerprint = e.fingerprint, seq = e.seq, aggregate = e.aggregate,
      partition = e.partition, "offset" = e."offset", topic = e.topic, note = e.note, metadata = e.metadata
    where x.week = e.week and x.scope = e.scope and x.id = e.id;
    if not found then perform {schema}.lost_sight(e.week); end if;
  else
    insert into {schema}.entry select (e).* on conflict do nothing;
    if not found then return false; end if;
  end if;
  if not p_in_held and e.week > 0 then
    perform {schema}.touch_weeks(array[e.week], {schema}.ledger_now());
  end if;
  if (e.flags & 4) <> 0 or p_in_held then
    insert into {schema}.held
    select (e).*, p_body.payload, p_body.header_names, p_body.header_values, p_body.key, p_body.stamp
    on conflict (scope, id, week) do update set
      at = excluded.at, token = excluded.token, nonce = excluded.nonce, owner = excluded.owner,
      attempts = excluded.attempts, flags = excluded.flags, state = excluded.state, fingerprint = excluded.fingerprint,
      seq = excluded.seq, aggregate = excluded.aggregate, partition = excluded.partition, "offset" = excluded."offset",
      topic = excluded.topic, note = excluded.note, metadata = excluded.metadata;
    if v_bare or p_body.header_names is not null then
      update {schema}.held h set payload = p_body.payload, header_names = p_body.header_names,
        header_values = p_body.header_values, key = p_body.key, stamp = p_body.stamp
      where h.scope = e.scope and h.id = e.id and h.week = e.week and (h.header_names is not null or p_body.header_names is not null);
    end if;
  elsif v_held then
    delete from {schema}.held h where h.scope = e.scope and h.id = e.id and h.week = e.week;
  end if;
  return true;
end $$;

-- Moves a locked row that has ended from a week that is being dropped to held, before it is settled
-- or reopened: the sweep may have moved everything it has to, and later writes to the week would be
-- dropped with it. Returns false if the row stays where it is. While the week is only closed, a
-- transaction that has not seen that would not look for the row in held. A row that ends then
-- stays, and the sweep moves it; a row that is reopened (p_opens) must be tried again.
create function {schema}.take_out(e {schema}.entry, p_opens boolean) returns boolean language plpgsql volatile
set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare v_phase text;
begin
  select d.phase into v_phase from {schema}.dropped d where d.week = e.week;
  if v_phase is null or (v_phase = 'closed' and not p_opens) then return false; end if;
  if v_phase = 'closed' then
    raise exception 'week % is being closed', e.week using errcode = '55006';
  end if;
  delete from {schema}.entry x where x.week = e.week and x.scope = e.scope and x.id = e.id;
  if not found then perform {schema}.lost_sight(e.week); end if;
  insert into {schema}.held select (e).* on conflict (scope, id, week) do nothing;
  return true;
end $$;

-- Moves up to p_max rows that must outlive their week from the partition to held: open rows, and
-- rows that ended within the retention, as of when the week was closed. One statement deletes and
-- inserts a row, so it is in one place at any moment. Locked rows are left for the next call. Rows
-- that ended earlier stay in the partition, and lose their bytes in held. The lock on the drop keeps
-- its phase: every move is committed before the wait for older readers begins.
create function {schema}.move_rows(p_week smallint, p_number bigint, p_max int) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  v_table text := format('{schema}.entry_%s_%s', p_week, p_number);
  v_since timestamptz;
  v_moved bigint;
begin
  select since into v_since from {schema}.dropped
   where week = p_week and number = p_number and phase in ('moving', 'empty') for no key update;
  if not found then return 0; end if;
  execute format('with ended as (
      update %1$s set flags = flags & ~4 where ctid = any (array(select ctid from %1$s
        where (flags & 4) <> 0 and state not in (''L'', ''R'', ''X'', ''P'') and at < $1 limit $2 for update skip locked))
      returning week, scope, id)
    delete from {schema}.held h using ended e where h.week = e.week and h.scope = e.scope and h.id = e.id', v_table)
    using v_since, p_max;
  execute format('with gone as (
      delete from %1$s where ctid = any (array(select ctid from %1$s
        where state in (''L'', ''R'', ''X'', ''P'') or at >= $1 limit $2 for update skip locked))
      returning *)
    insert into {schema}.held select * from gone order by scope, id
    on conflict (scope, id, week) do update set first_at = excluded.first_at,
      at = excluded.at, token = excluded.token, nonce = excluded.nonce, owner = excluded.owner,
      attempts = excluded.attempts, flags = excluded.flags, state = excluded.state, fingerprint = excluded.fingerprint,
      seq = excluded.seq, aggregate = excluded.aggregate, partition = excluded.partition, "offset" = excluded."offset",
      topic = excluded.topic, note = excluded.note, metadata = excluded.metadata', v_table)
    using v_since, p_max;
  get diagnostics v_moved = row_count;
  if v_moved > 0 then
    update {schema}.dropped set held = held + v_moved where week = p_week and number = p_number;
  end if;
  return v_moved;
end $$;

-- The i-th of bodies that came column by column. Headers are flat; the first p_at belong to earlier
-- bodies.
create function {schema}.body_of(
  p_payload bytea[], p_header_names bytea[], p_header_values bytea[], p_header_count int[], p_key bytea[], p_stamp bigint[],
  i int, p_at int
) returns {schema}.body language sql immutable
  return case when p_header_count[i] is not null then row(p_payload[i],
    p_header_names[p_at + 1 : p_at + p_header_count[i]], p_header_values[p_at + 1 : p_at + p_header_count[i]], p_key[i],
    timestamptz 'epoch' + p_stamp[i] * interval '1 microsecond')::{schema}.body end;

-- Locks and returns the head of an aggregate. Heads are locked before entries, everywhere: one
-- global order.
create function {schema}.lock_head(p_scope int, p_aggregate text) returns {schema}.head language plpgsql volatile
set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare h {schema}.head;
begin
  select * into h from {schema}.head x where x.scope = p_scope and x.aggregate = p_aggregate for update;
  if not found then
    insert into {schema}.head (scope, aggregate) values (p_scope, p_aggregate) on conflict do nothing;
    select * into h from {schema}.head x where x.scope = p_scope and x.aggregate = p_aggregate for update;
  end if;
  return h;
end $$;

-- Stores a locked head. An update that reaches no row is an error, never a success.
create function {schema}.put_head(h {schema}.head) returns void language plpgsql volatile
set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
begin
  update {schema}.head x set last = h.last, lease_seq = h.lease_seq, lease_token = h.lease_token,
    lease_until = h.lease_until, retrying = h.retrying, parked = h.parked, gap_at = h.gap_at
  where x.scope = h.scope and x.aggregate = h.aggregate;
  if not found then
    raise exception 'the head of aggregate % in scope % is missing', h.aggregate, h.scope using errcode = 'XX001';
  end if;
end $$;

-- Transitions of a head, as in src/ledger/transition.rs.
create function {schema}.head_advance(h {schema}.head, p_seq bigint) returns {schema}.head language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  h.last := greatest(h.last, p_seq);
  if h.lease_seq = p_seq then h.lease_seq := null; h.lease_token := null; h.lease_until := null; end if;
  -- An event that the order has moved past can never run, so nothing may wait for it.
  h.retrying := array(select s from unnest(h.retrying) s where s > h.last order by s);
  if h.parked <= h.last then h.parked := null; end if;
  h.gap_at := null;
  return h;
end $$;

create function {schema}.head_owe(h {schema}.head, p_seq bigint) returns {schema}.head language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  if (p_seq <= h.last) is not true and not p_seq = any (h.retrying) then h.retrying := h.retrying || p_seq; end if;
  return h;
end $$;

create function {schema}.head_let_go(h {schema}.head, p_seq bigint, p_token bigint) returns {schema}.head
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if h.lease_seq = p_seq and h.lease_token = p_token then
    h.lease_seq := null; h.lease_token := null; h.lease_until := null;
  end if;
  return h;
end $$;

create function {schema}.head_park(h {schema}.head, p_seq bigint) returns {schema}.head language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  if p_seq <= h.last then return h; end if;
  h.retrying := array_remove(h.retrying, p_seq);
  if h.parked <> p_seq then h := {schema}.head_owe(h, greatest(h.parked, p_seq)); end if;
  h.parked := least(h.parked, p_seq);
  return h;
end $$;

create function {schema}.head_die(h {schema}.head, p_seq bigint, p_token bigint, p_skip boolean) returns {schema}.head
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  h := {schema}.head_let_go(h, p_seq, p_token);
  if p_skip then return {schema}.head_advance(h, p_seq); end if;
  return {schema}.head_park(h, p_seq);
end $$;

create function {schema}.head_begin(h {schema}.head, p_seq bigint, p_strict boolean, p_baseline bigint)
returns {schema}.head language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare v_first bigint; v_gap timestamptz := h.gap_at;
begin
  if h.last is not null or not p_strict then return h; end if;
  v_first := coalesce(p_baseline, least(p_seq, h.lease_seq, (select min(s) from unnest(h.retrying) s), h.parked));
  if v_first > 0 then
    h := {schema}.head_advance(h, v_first - 1);
    h.gap_at := v_gap;
  end if;
  return h;
end $$;
