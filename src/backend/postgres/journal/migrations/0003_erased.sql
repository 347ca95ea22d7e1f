-- An event that was erased has a fingerprint of zeros, which equals any other: its id is a repeat. Else as it was.
create or replace function {schema}.journal_append(
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
    select e.n::int as n, e.append, e.slot, e.expected, e.seq as wanted, k.seq as known, k.position, k.fingerprint in (e.fingerprint, '\x00000000000000000000000000000000') as same
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
