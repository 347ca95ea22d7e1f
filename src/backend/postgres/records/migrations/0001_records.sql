-- Records in PostgreSQL: what all modules share. It needs the journal in the same schema.

create table {schema}.records_meta (
  only_row boolean primary key default true check (only_row),
  version  int not null,
  accepts  int not null
);

-- The modules. A schema that is not listed here is not a module, whatever its name.
create table {schema}.record_modules (
  slug        text collate "C" primary key check (slug ~ '^[a-z][a-z0-9_]{0,47}$'),
  maintenance text collate "C", -- the role that may see the records of all tenants, besides their owner
  created_at  timestamptz not null default clock_timestamp()
);

create function {schema}.record_module_exists(p_module text) returns boolean language sql stable
  return exists (select from {schema}.record_modules m where m.slug = p_module);

-- The tenant of this transaction; null if none is set, or if it is not a UUID. A setting that was made in
-- an earlier transaction of the session reads as the empty text, so that means unset too, and no
-- tenant has a value of its own: the nil UUID.
create function {schema}.record_tenant() returns uuid language plpgsql stable parallel safe
set search_path = pg_catalog, pg_temp as $$
begin
  return case when current_setting('hapax.tenant', true) ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$'
    then current_setting('hapax.tenant', true)::uuid end;
end $$;

create function {schema}.record_us(p_at timestamptz) returns bigint language sql stable
  return (extract(epoch from p_at) * 1000000)::bigint;

-- The journal's name for a tenant.
create function {schema}.record_tenant_text(p_tenant uuid) returns text language sql immutable
  return case when p_tenant = '00000000-0000-0000-0000-000000000000'::uuid then '' else p_tenant::text end;

-- Whether a visible row was written by this transaction, also under a savepoint of it. Its writer has
-- committed or is this transaction, and a savepoint's id is later than the transaction's own.
create function {schema}.record_is_own(p_writer xid) returns boolean language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
declare
  v_own bigint := pg_current_xact_id()::text::bigint;
  v_later bigint := ((p_writer::text::bigint - v_own) % 4294967296 + 4294967296) % 4294967296; -- ids wrap around
begin
  return case when v_later < 2147483648 then pg_xact_status((v_own + v_later)::text::xid8) = 'in progress' else false end;
end $$;

-- A record is written in the transaction that appends its event, under the event's seq. So the seq only
-- rises, also when an id is created again, and no event serves twice. Both rows are looked up by key,
-- whatever the statistics say.
create function {schema}.record_guard() returns trigger language plpgsql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set search_path = pg_catalog, pg_temp as $$
declare
  v_tenant uuid := case tg_op when 'DELETE' then old.tenant_id else new.tenant_id end;
  v_aggregate text := substr(tg_table_schema, 8) || '/' || (case tg_op when 'DELETE' then old.id else new.id end)::text;
  v_wanted text := case tg_op when 'INSERT' then 'record.created' when 'UPDATE' then 'record.updated' else 'record.deleted' end;
  v_last bigint;
  v_kind text;
begin
  if tg_op = 'UPDATE' then
    if new.tenant_id <> old.tenant_id or new.id <> old.id then
      raise exception 'a record keeps its tenant and its id';
    elsif new.seq <= old.seq then
      raise exception 'a write of a record must raise its seq: it is %, and % was given', old.seq, new.seq;
    end if;
  end if;
  -- The head too: an event that was put in below it would take a seq that was used before.
  select h.last, case when {schema}.record_is_own(h.xmin) and {schema}.record_is_own(j.xmin) then j.kind end into v_last, v_kind
    from {schema}.journal_head h
    left join {schema}.journal j on j.tenant = h.tenant and j.aggregate = h.aggregate and j.seq = h.last
   where h.tenant = case when v_tenant = '00000000-0000-0000-0000-000000000000' then '' else v_tenant::text end
     and h.aggregate = v_aggregate;
  if tg_op = 'DELETE' then
    if v_kind is distinct from v_wanted or v_last <= old.seq then
      raise exception 'a record is deleted with its event: append it first (% as seq % of %), in this transaction', v_wanted,
        greatest(old.seq, coalesce(v_last, 0)) + 1, v_aggregate;
    end if;
    return old;
  end if;
  if v_kind is distinct from v_wanted or new.seq <> v_last then
    raise exception 'a record is written with its event: its seq is %, and this transaction did not append % as seq % of %', new.seq,
      v_wanted, new.seq, v_aggregate;
  end if;
  return new;
end $$;

create function {schema}.record_no_truncate() returns trigger language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'records are deleted one by one, each with its event; TRUNCATE would leave read models behind';
end $$;

-- Begins a write: sets the transaction's tenant, locks the head of the record's aggregate and reads the
-- record. o_known: whether there is such a module. o_now_us: the time of the write, after that lock.
create function {schema}.record_begin(
  p_module text, p_tenant uuid, p_id uuid,
  out o_known boolean, out o_last bigint, out o_seq bigint, out o_payload text, out o_created_us bigint,
  out o_now_us bigint
) language plpgsql volatile set lock_timeout = '2s' set search_path = pg_catalog, pg_temp as $$
begin
  o_known := {schema}.record_module_exists(p_module);
  if not o_known then
    return;
  end if;
  perform set_config('hapax.tenant', p_tenant::text, true);
  -- The head first: it is the lock of all writers of the record. The record is read after it, to see
  -- what was committed while we waited. A record that never was has no head yet; the append decides
  -- between its creators.
  select h.last into o_last from {schema}.journal_head h
   where h.tenant = {schema}.record_tenant_text(p_tenant) and h.aggregate = p_module || '/' || p_id::text for update;
  o_last := coalesce(o_last, 0);
  execute format('select r.seq, r.payload::text, {schema}.record_us(r.created_at) from %I.records r where r.tenant_id = $1 and r.id = $2',
    'module_' || p_module) into o_seq, o_payload, o_created_us using p_tenant, p_id;
  o_now_us := {schema}.record_us(clock_timestamp());
end $$;

-- Ends a write, after its event was appended as p_seq: 1 create, 2 update, 3 delete. p_before is the
-- seq and p_now_us the time that record_begin answered: the event has them too.
create function {schema}.record_store(
  p_module text, p_kind int, p_tenant uuid, p_id uuid, p_payload text, p_before bigint, p_seq bigint,
  p_now_us bigint
) returns void language plpgsql volatile set lock_timeout = '2s' set search_path = pg_catalog, pg_temp as $$
declare v_now timestamptz := timestamptz 'epoch' + p_now_us * interval '1 microsecond'; v_rows bigint;
begin
  if p_kind = 1 then
    execute format('insert into %I.records (tenant_id, id, payload, seq, created_at, updated_at) values ($1, $2, $3::jsonb, $4, $5, $5)',
      'module_' || p_module) using p_tenant, p_id, p_payload, p_seq, v_now;
  elsif p_kind = 2 then
    execute format('update %I.records r set payload = $3::jsonb, seq = $4, updated_at = $5
      where r.tenant_id = $1 and r.id = $2 and r.seq = $6', 'module_' || p_module)
      using p_tenant, p_id, p_payload, p_seq, v_now, p_before;
  else
    execute format('delete from %I.records r where r.tenant_id = $1 and r.id = $2 and r.seq = $3', 'module_' || p_module)
      using p_tenant, p_id, p_before;
  end if;
  get diagnostics v_rows = row_count;
  if v_rows <> 1 then
    raise exception 'the write of one record reached % rows', v_rows using errcode = '40001';
  end if;
end $$;

create function {schema}.record_must_exist(p_module text) returns void language plpgsql stable
set search_path = pg_catalog, pg_temp as $$
begin
  if not {schema}.record_module_exists(p_module) then
    raise exception 'there is no module %', p_module using errcode = 'undefined_table';
  end if;
end $$;

-- Reads. Each sets the tenant for its own transaction.
create function {schema}.record_get(p_module text, p_tenant uuid, p_id uuid)
returns table (o_id uuid, o_seq bigint, o_payload text, o_created_us bigint, o_updated_us bigint)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform {schema}.record_must_exist(p_module);
  perform set_config('hapax.tenant', p_tenant::text, true);
  return query execute format('select r.id, r.seq, r.payload::text, {schema}.record_us(r.created_at), {schema}.record_us(r.updated_at)
    from %I.records r where r.tenant_id = $1 and r.id = $2', 'module_' || p_module) using p_tenant, p_id;
end $$;

-- A page: up to p_limit records, and none after the one that reaches p_bytes (each counts 256 more). If
-- there is another record, it follows without its payload.
create function {schema}.record_list(p_module text, p_tenant uuid, p_after uuid, p_limit bigint, p_bytes bigint)
returns table (o_id uuid, o_seq bigint, o_payload text, o_created_us bigint, o_updated_us bigint)
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set search_path = pg_catalog, pg_temp as $$
declare r record; v_count bigint := 0; v_bytes bigint := 0;
begin
  perform {schema}.record_must_exist(p_module);
  perform set_config('hapax.tenant', p_tenant::text, true);
  -- A payload is read when it is turned to text, so the rows that were fetched ahead cost little.
  for r in execute format('select r.id, r.seq, r.payload, r.created_at, r.updated_at from %I.records r
    where r.tenant_id = $1 and ($2::uuid is null or r.id > $2) order by r.id limit $3', 'module_' || p_module)
    using p_tenant, p_after, p_limit + 1
  loop
    o_id := r.id; o_seq := r.seq; o_payload := null;
    o_created_us := {schema}.record_us(r.created_at); o_updated_us := {schema}.record_us(r.updated_at);
    if v_count >= p_limit or v_bytes >= p_bytes then
      return next;
      return;
    end if;
    o_payload := r.payload::text;
    v_count := v_count + 1; v_bytes := v_bytes + 256 + octet_length(o_payload);
    return next;
  end loop;
end $$;

-- How many records a module has, of all tenants; null for a role that may not see them all, and if the
-- table does not exist.
create function {schema}.record_count(p_module text) returns bigint language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
declare v_table oid; v_count bigint;
begin
  select c.oid into v_table from pg_class c join pg_namespace n on n.oid = c.relnamespace
   where n.nspname = 'module_' || p_module and c.relname = 'records' and c.relkind = 'r'
     and has_schema_privilege(n.oid, 'USAGE') and has_table_privilege(c.oid, 'SELECT');
  if v_table is null or (row_security_active(v_table) and not exists (
       select from pg_policy p, unnest(p.polroles) r
        where p.polrelid = v_table and p.polname = 'records_maintenance' and pg_has_role(r, 'USAGE'))) then
    return null;
  end if;
  perform set_config('hapax.maintenance', 'on', true);
  execute format('select count(*) from %I.records', 'module_' || p_module) into v_count;
  perform set_config('hapax.maintenance', '', true);
  return v_count;
end $$;
