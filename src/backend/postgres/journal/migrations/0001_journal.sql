-- The hapax journal in PostgreSQL. It shares nothing with a ledger in the same schema.
create schema if not exists {schema};

-- One row: the schema version, the oldest build (by schema version) that may still use it, and the
-- journal's id.
create table {schema}.journal_meta (
  only_row   boolean primary key default true check (only_row),
  version    int not null,
  accepts    int not null,
  journal_id uuid not null default gen_random_uuid()
);

-- Positions are not cached: a session that kept some would insert its events behind those of
-- others.
create sequence {schema}.journal_position as bigint cache 1;
create sequence {schema}.journal_token as bigint;

-- The last seq of each aggregate. A row with 0 is never committed. The empty string means no
-- tenant, because no tenant can have that name. Only the key is indexed and pages have room, so
-- that raising a number stays on its page (HOT).
create table {schema}.journal_head (
  last      bigint not null,
  tenant    text collate "C" not null,
  aggregate text collate "C" not null,
  primary key (tenant, aggregate)
) with (fillfactor = 80);

-- A seq is never given twice: a head only rises, and stays. No append gives a number back.
create function {schema}.journal_head_guard() returns trigger language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'the head of an aggregate only rises, and stays: % % (seq %) of tenant "%"', lower(tg_op), old.aggregate, old.last, old.tenant;
end $$;
create trigger journal_head_rises before update on {schema}.journal_head for each row
  when (new.last <= old.last or new.tenant <> old.tenant or new.aggregate <> old.aggregate)
  execute function {schema}.journal_head_guard();
create trigger journal_head_stays before delete on {schema}.journal_head for each row
  when (old.last > 0) execute function {schema}.journal_head_guard();
alter table {schema}.journal_head enable always trigger journal_head_rises;
alter table {schema}.journal_head enable always trigger journal_head_stays;

-- Events. A position is drawn in the INSERT: a transaction that has drawn one holds a write lock on
-- this table, which readers look for.
create table {schema}.journal (
  position      bigint not null default nextval('{schema}.journal_position'),
  seq           bigint not null,
  at            timestamptz not null,
  time_us       bigint,          -- the event's own time, in microseconds since 1970
  tenant        text collate "C" not null,
  aggregate     text collate "C" not null,
  id            bytea not null,  -- 16 bytes of a UUID, else the text (a 16-byte text gets a trailing zero)
  fingerprint   bytea not null,
  kind          text collate "C",
  trace         text collate "C",
  header_names  bytea[],
  header_values bytea[],
  payload       bytea not null,
  constraint journal_pkey primary key (position),
  constraint journal_seq unique (tenant, aggregate, seq),
  constraint journal_id unique (tenant, id)
);
-- Insert-only: dead rows come from sweeps and rollbacks.
alter table {schema}.journal set (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.02);

-- How far each relay has come, and which process leads.
create table {schema}.journal_relay (
  relay      text collate "C" primary key,
  owner      text,
  until      timestamptz,
  token      bigint not null,
  checkpoint json,
  saved_at   timestamptz
) with (fillfactor = 50);

-- The journal's current time: the clock, not the start of a transaction.
create function {schema}.journal_now() returns timestamptz language sql volatile return clock_timestamp();

-- Appends to many aggregates in one step; a refused append does not affect the others. Columns have
-- one element per event; the events of an append are adjacent, and no id occurs twice. p_tenants
-- and p_aggregates: each aggregate once, sorted by bytes, so that all callers lock in one order.
-- Kinds of answer: 1 stored, 2 a repeat, 3 the original is kept; and for a whole append, at the
-- event that decided: 4 conflict (o_seq: the last seq), 5 mismatch (o_seq: the original's), 6
-- another seq is next (o_seq).
create function {schema}.journal_append(
  p_wait text, p_warn boolean, p_tenants text[], p_aggregates text[],
  p_append int[], p_slot int[], p_expected bigint[], p_tenant text[], p_aggregate text[], p_id bytea[], p_fingerprint bytea[],
  p_seq bigint[], p_kind text[], p_time bigint[], p_payload bytea[], p_names text[], p_values text[], p_trace text[]
) returns table (o_event int, o_kind int, o_seq bigint, o_position bigint)
language plpgsql volatile set lock_timeout = '2s' set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set search_path = pg_catalog, pg_temp as $$
declare
  r record; v_made bigint; v_last bigint[]; v_now timestamptz;
  v_seq bigint[] := array_fill(null::bigint, array[cardinality(p_id)]);
  v_append int := 0; v_first int; v_head bigint; v_next bigint; v_refused boolean; v_new int := 0; v_at int := 0;
begin
  -- Lasts until the function ends: its SET clause restores the old value.
  perform set_config('lock_timeout', p_wait, true);
  -- Missing heads first, then all locks: a transaction that waits here for another's new head holds
  -- nothing that the other could need.
  insert into {schema}.journal_head (tenant, aggregate, last)
  select x.t, x.a, 0 from unnest(p_tenants, p_aggregates) with ordinality x(t, a, n)
   where not exists (select from {schema}.journal_head h where h.tenant = x.t and h.aggregate = x.a)
   order by x.n on conflict do nothing;
  get diagnostics v_made = row_count;
  select array_agg(q.last order by q.n) into v_last from (
    select x.n, h.last from unnest(p_tenants, p_aggregates) with ordinality x(t, a, n)
      join {schema}.journal_head h on h.tenant = x.t and h.aggregate = x.a order by x.n for update of h) q;
  if cardinality(v_last) <> cardinality(p_tenants) then
    raise exception 'the head of an aggregate is being made' using errcode = '40001';
  end if;
  -- After the locks, to see what was committed while we waited.
  for r in
    select e.n::int as n, e.append, e.slot, e.expected, e.seq as wanted, k.seq as known, k.position, k.fingerprint = e.fingerprint as same
      from unnest(p_append, p_slot, p_expected, p_tenant, p_id, p_fingerprint, p_seq) with ordinality
           e(append, slot, expected, tenant, id, fingerprint, seq, n)
      left join {schema}.journal k on k.tenant = e.tenant and k.id = e.id order by e.n
  loop
    if r.append <> v_append then
      v_append := r.append; v_first := r.n; v_head := v_last[r.slot]; v_next := v_head; v_refused := false;
    end if;
    continue when v_refused;
    o_event := r.n; o_seq := r.known; o_position := r.position;
    if r.known is not null then
      o_kind := case when r.same then 2 when p_warn then 3 else 5 end;
      return next;
    elsif v_next = v_head and r.expected <> v_head then -- a repeat was checked when it was stored
      o_kind := 4; o_seq := v_head; return next;
    elsif r.wanted <> v_next + 1 then
      o_kind := 6; o_seq := v_next + 1; return next;
    else
      v_next := v_next + 1; v_seq[r.n] := v_next; v_last[r.slot] := v_next; v_new := v_new + 1;
      continue;
    end if;
    if o_kind > 3 then
      v_refused := true; v_last[r.slot] := v_head;
      for i in v_first .. r.n loop
        if v_seq[i] is not null then v_seq[i] := null; v_new := v_new - 1; end if;
      end loop;
    end if;
  end loop;
  if v_new > 0 then
    update {schema}.journal_head h set last = x.last from unnest(p_tenants, p_aggregates, v_last) x(t, a, last)
     where h.tenant = x.t and h.aggregate = x.a and h.last <> x.last;
    v_now := {schema}.journal_now();
    for r in
      insert into {schema}.journal as j (seq, at, time_us, tenant, aggregate, id, fingerprint, kind, trace, header_names, header_values, payload)
      select e.seq, v_now, e.time, e.tenant, e.aggregate, e.id, e.fingerprint, e.kind, e.trace, e.names::bytea[], e.values::bytea[], e.payload
        from unnest(v_seq, p_time, p_tenant, p_aggregate, p_id, p_fingerprint, p_kind, p_trace, p_names, p_values, p_payload) with ordinality
             e(seq, time, tenant, aggregate, id, fingerprint, kind, trace, names, values, payload, n)
       where e.seq is not null order by e.n returning j.position, j.seq
    loop
      loop v_at := v_at + 1; exit when v_seq[v_at] is not null; end loop;
      o_event := v_at; o_kind := 1; o_seq := r.seq; o_position := r.position;
      return next;
    end loop;
  end if;
  if v_made > 0 then -- a refused append leaves no head behind
    delete from {schema}.journal_head h using unnest(p_tenants, p_aggregates) x(t, a)
     where h.tenant = x.t and h.aggregate = x.a and h.last = 0;
  end if;
end $$;

-- Appends one event by the same rules; all but the simple case goes to journal_append.
create function {schema}.journal_append_one(
  p_wait text, p_warn boolean, p_expected bigint, p_tenant text, p_aggregate text, p_id bytea, p_fingerprint bytea, p_seq bigint,
  p_kind text, p_time bigint, p_payload bytea, p_names text, p_values text, p_trace text
) returns table (o_event int, o_kind int, o_seq bigint, o_position bigint)
language plpgsql volatile set lock_timeout = '2s' set enable_seqscan = off set enable_bitmapscan = off
set search_path = pg_catalog, pg_temp as $$
begin
  perform set_config('lock_timeout', p_wait, true);
  -- A head never goes back, so whatever could refuse the event is looked at before its head is raised.
  -- If any seq is expected, the lock comes first: then a repeat that waited for the original finds it.
  if p_expected is null then
    perform from {schema}.journal_head h where h.tenant = p_tenant and h.aggregate = p_aggregate for update;
  end if;
  if not exists (select from {schema}.journal k where k.tenant = p_tenant and k.id = p_id) then
    if p_expected is null or p_expected > 0 then
      update {schema}.journal_head h set last = h.last + 1
       where h.tenant = p_tenant and h.aggregate = p_aggregate and (p_expected is null or h.last = p_expected)
         and (p_seq is null or h.last + 1 = p_seq)
      returning h.last into o_seq;
    end if;
    if o_seq is null and coalesce(p_expected, 0) = 0 and coalesce(p_seq, 1) = 1 then
      insert into {schema}.journal_head as h (tenant, aggregate, last) values (p_tenant, p_aggregate, 1)
      on conflict do nothing returning h.last into o_seq;
    end if;
    if o_seq is not null then
      insert into {schema}.journal as j (seq, at, time_us, tenant, aggregate, id, fingerprint, kind, trace, header_names, header_values, payload)
      values (o_seq, {schema}.journal_now(), p_time, p_tenant, p_aggregate, p_id, p_fingerprint, p_kind, p_trace, p_names::bytea[], p_values::bytea[], p_payload)
      on conflict (tenant, id) do nothing returning j.position into o_position;
      if o_position is null then
        raise exception 'its id was appended to another aggregate meanwhile' using errcode = '40001';
      end if;
      o_event := 1; o_kind := 1; return next; return;
    end if;
  end if;
  return query select * from {schema}.journal_append(p_wait, p_warn, array[p_tenant], array[p_aggregate], array[1], array[1],
    array[p_expected], array[p_tenant], array[p_aggregate], array[p_id], array[p_fingerprint], array[p_seq], array[p_kind],
    array[p_time], array[p_payload], array[p_names], array[p_values], array[p_trace]);
end $$;

-- Reads. They are functions, because a plan that was cached while the table was small must not scan
-- or sort it when it is large.
create function {schema}.journal_read(p_after bigint, p_limit bigint) returns setof {schema}.journal
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set search_path = pg_catalog, pg_temp as $$
begin
  return query select * from {schema}.journal j where j.position > p_after order by j.position limit p_limit;
end $$;

create function {schema}.journal_read_aggregate(p_tenant text, p_aggregate text, p_from bigint, p_limit bigint)
returns setof {schema}.journal
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set search_path = pg_catalog, pg_temp as $$
begin
  return query select * from {schema}.journal j where j.tenant = p_tenant and j.aggregate = p_aggregate and j.seq >= p_from
    order by j.seq limit p_limit;
end $$;

create function {schema}.journal_find(p_tenant text, p_id bytea) returns setof {schema}.journal
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set search_path = pg_catalog, pg_temp as $$
begin
  return query select * from {schema}.journal j where j.tenant = p_tenant and j.id = p_id;
end $$;

-- The first position after p_after that has an event, or null.
create function {schema}.journal_next(p_after bigint) returns bigint
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set search_path = pg_catalog, pg_temp as $$
begin
  return (select j.position from {schema}.journal j where j.position > p_after order by j.position limit 1);
end $$;

-- How many positions were drawn, and then which transactions could still commit one of them: those
-- that hold a write lock on the journal. The order matters: a transaction takes the lock before it
-- draws, so any that drew up to o_drawn is among o_writers or has ended. A prepared transaction has
-- no process; its name begins with p. A server in recovery does not show the writers of its
-- primary. It cannot tell what is decided, and returns null as o_drawn.
create function {schema}.journal_horizon(out o_drawn bigint, out o_writers text[]) language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
begin
  if pg_is_in_recovery() then
    o_writers := '{}';
    return;
  end if;
  select case when s.is_called then s.last_value else 0 end into o_drawn from {schema}.journal_position s;
  select coalesce(array_agg(distinct case when l.pid is null then 'p' else '' end || l.virtualtransaction), '{}') into o_writers
    from pg_locks l
   where l.locktype = 'relation' and l.relation = '{schema}.journal'::regclass and l.mode = 'RowExclusiveLock' and l.granted
     and l.database = (select d.oid from pg_database d where d.datname = current_database());
end $$;
