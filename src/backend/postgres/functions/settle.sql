-- Settling and extending: only the current token has an effect.

-- One settling, with the full state machine. o_kind: 1 recorded (now or before), 0 fenced. p_in,
-- o_wrote: as in claim_one.
create function {schema}.settle_one(
  p_scope int, p_week smallint, p_id bytea, p_token bigint, p_state "char", p_after bigint, p_counted boolean, p_note text,
  p_metadata jsonb, p_aggregate text, p_skip boolean, p_advance bigint, p_body {schema}.body, p_in boolean,
  out o_kind int, out o_at bigint, out o_state text, out o_wrote boolean
) language plpgsql volatile set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare e {schema}.entry; h {schema}.head; v_in_held boolean := false; v_now timestamptz;
begin
  if p_in then
    begin
      select * into o_kind, o_at, o_state, o_wrote from {schema}.settle_one(p_scope, p_week, p_id, p_token, p_state, p_after,
        p_counted, p_note, p_metadata, p_aggregate, p_skip, p_advance, p_body, false);
      if not o_wrote then raise exception using errcode = 'HX001'; end if;
    exception when sqlstate 'HX001' then null;
    end;
    return;
  end if;
  o_kind := 0; o_wrote := false;
  if p_aggregate is not null then h := {schema}.lock_head(p_scope, p_aggregate); end if;
  select * into e from {schema}.entry x where x.week = p_week and x.scope = p_scope and x.id = p_id for update;
  if not found then
    select x.first_at, x.at, x.token, x.nonce, x.scope, x.owner, x.week, x.attempts, x.flags, x.state, x.id,
           x.fingerprint, x.seq, x.aggregate, x.partition, x."offset", x.topic, x.note, x.metadata
      into e from {schema}.held x where x.week = p_week and x.scope = p_scope and x.id = p_id for update;
    if not found then return; end if;
    v_in_held := true;
  end if;
  if e.aggregate is not null and e.aggregate is distinct from p_aggregate then
    h := {schema}.lock_head(p_scope, e.aggregate); -- a settling that came without its order
  end if;
  v_now := {schema}.ledger_now();
  o_state := e.state; o_at := {schema}.us(e.at);
  if e.token <> p_token then return; end if;
  if not ((e.state = 'L' and p_state in ('D', 'R', 'X')) or (e.state = 'C' and p_state in ('F', 'O', 'R'))) then
    if e.state = p_state or (e.state = 'O' and p_state = 'R' and e.seq is not null) then o_kind := 1; end if;
    return;
  end if;
  if e.state = 'L' and (h.lease_seq = e.seq and h.lease_token = p_token) is not true and e.seq is not null then return; end if;
  o_kind := 1; o_wrote := true;
  if e.state = 'C' and not v_in_held then
    v_in_held := {schema}.take_out(e, p_state = 'R' and e.seq is null);
  end if;
  if e.state = 'C' and e.seq is not null and p_state = 'R' then
    e.state := 'O'; e.at := v_now; e.note := 'given back after its aggregate had moved on';
    perform {schema}.put(e, true, v_in_held, false, null);
    o_at := {schema}.us(v_now); return;
  end if;
  e.state := p_state; e.at := v_now;
  if p_state in ('D', 'F') then
    e.metadata := coalesce(p_metadata, e.metadata); e.note := null;
    if e.seq is not null then
      h := {schema}.head_advance(h, greatest(e.seq, p_advance));
      -- The lease is this event's own. After an at-most-once run it would be a later event's.
      if p_state = 'D' then h.lease_seq := null; h.lease_token := null; h.lease_until := null; end if;
    end if;
  elsif p_state = 'R' then
    e.at := v_now + p_after * interval '1 microsecond';
    if not p_counted then e.attempts := greatest(e.attempts - 1, 0); end if;
    e.note := coalesce(p_note, e.note);
    if e.seq is not null then
      h.lease_seq := null; h.lease_token := null; h.lease_until := null;
      h := {schema}.head_owe(h, e.seq);
    end if;
  elsif p_state = 'X' then
    e.note := p_note;
    if e.seq is not null then h := {schema}.head_die(h, e.seq, p_token, p_skip); end if;
  else
    e.note := p_note;
  end if;
  perform {schema}.put(e, true, v_in_held, p_body.header_names is not null, p_body);
  if e.seq is not null then perform {schema}.put_head(h); end if;
  o_at := {schema}.us(e.at);
end $$;

-- Settles many as done, in key order, without order or bytes: one UPDATE that touches no index. Its
-- plan must not depend on statistics, because a new week has none: planned for given values, it
-- would search by scope alone and filter the ids. The full state machine runs only for rows that
-- the UPDATE did not reach, and for at-most-once claims of weeks that are being dropped, which it
-- moves out of them. Row 0 of the answer applies to all; further rows are the exceptions.
create function {schema}.settle_done(
  p_scope int[], p_week smallint[], p_id bytea[], p_token bigint[], p_metadata jsonb[], p_weeks smallint[],
  p_from "char", p_to "char"
) returns table (o_i int, o_kind int, o_at bigint, o_state text)
language plpgsql volatile
set lock_timeout = '{lock_timeout}' set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set search_path = pg_catalog, pg_temp as $$
declare v_now timestamptz := {schema}.ledger_now(); v_leaving smallint[] := '{}'; v_count bigint; r record; o record;
begin
  if p_from = 'C' then
    v_leaving := array(select d.week from {schema}.dropped d where d.week = any (p_weeks) and d.phase is not null);
  end if;
  update {schema}.entry x set state = p_to, at = v_now, metadata = coalesce(u.metadata, x.metadata), note = null
    from unnest(p_scope, p_week, p_id, p_token, p_metadata) as u(scope, week, id, token, metadata)
   where x.week = u.week and x.scope = u.scope and x.id = u.id and x.token = u.token and x.state = p_from
     and x.seq is null and (x.flags & 4) = 0 and x.week <> all (v_leaving);
  get diagnostics v_count = row_count;
  if v_count > 0 and (cardinality(p_weeks) = 1 or v_count = cardinality(p_id)) then
    perform {schema}.touch_weeks(p_weeks, v_now);
  elsif v_count > 0 then
    perform {schema}.touch_weeks(array(
      select distinct u.week from unnest(p_scope, p_week, p_id, p_token) as u(scope, week, id, token)
      cross join lateral (select from {schema}.entry e where e.week = u.week and e.scope = u.scope and e.id = u.id
        and e.token = u.token and e.state = p_to and e.at = v_now) x), v_now);
  end if;
  o_i := 0; o_kind := 1; o_at := {schema}.us(v_now); o_state := p_to;
  return next;
  if v_count = cardinality(p_id) then return; end if;
  for r in
    select u.i, u.scope, u.week, u.id, u.token, u.metadata
      from unnest(p_scope, p_week, p_id, p_token, p_metadata) with ordinality as u(scope, week, id, token, metadata, i)
      left join lateral (select e.state, e.token, e.at from {schema}.entry e
                          where e.week = u.week and e.scope = u.scope and e.id = u.id) x on true
     where not coalesce(x.state = p_to and x.token = u.token and x.at = v_now, false)
     order by u.i
  loop
    select * into o from {schema}.settle_one(r.scope, r.week, r.id, r.token, p_to, 0, true, null, r.metadata, null, false,
      null, null, false);
    o_i := r.i; o_kind := o.o_kind; o_at := o.o_at; o_state := o.o_state;
    return next;
  end loop;
end $$;

-- Settlings one by one, with the full state machine.
create function {schema}.settle_each(
  p_scope int[], p_week smallint[], p_id bytea[], p_token bigint[], p_state text[], p_after bigint[], p_counted boolean[],
  p_note text[], p_metadata jsonb[], p_aggregate text[], p_skip boolean[], p_advance bigint[],
  p_payload bytea[], p_header_names bytea[], p_header_values bytea[], p_header_count int[], p_key bytea[], p_stamp bigint[],
  p_in boolean default false
) returns table (o_i int, o_kind int, o_at bigint, o_state text)
language plpgsql volatile set lock_timeout = '{lock_timeout}' set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare o record; i int; a text; v_at int := 0;
begin
  for a, i in select distinct x.a collate "C", x.s from unnest(p_aggregate, p_scope) x(a, s)
               where x.a is not null and not p_in order by 1, 2 loop
    perform {schema}.lock_head(i, a);
  end loop;
  for i in 1 .. cardinality(p_id) loop
    select * into o from {schema}.settle_one(p_scope[i], p_week[i], p_id[i], p_token[i], p_state[i]::"char", p_after[i],
      p_counted[i], p_note[i], p_metadata[i], p_aggregate[i], p_skip[i], p_advance[i],
      {schema}.body_of(p_payload, p_header_names, p_header_values, p_header_count, p_key, p_stamp, i, v_at), p_in);
    v_at := v_at + coalesce(p_header_count[i], 0);
    o_i := i; o_kind := o.o_kind; o_at := o.o_at; o_state := o.o_state;
    return next;
  end loop;
end $$;

-- Extends leases, heads first and then entries in key order.
create function {schema}.extend_batch(
  p_scope int[], p_week smallint[], p_id bytea[], p_token bigint[], p_for bigint[]
) returns table (o_i int, o_kind int, o_at bigint, o_state text)
language plpgsql volatile
set lock_timeout = '{lock_timeout}' set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set search_path = pg_catalog, pg_temp as $$
declare r record; h {schema}.head; e {schema}.entry; v_now timestamptz; v_in_held boolean;
begin
  for r in
    select distinct on (x.aggregate, x.scope) x.aggregate, x.scope
      from unnest(p_scope, p_week, p_id) as u(scope, week, id)
      cross join lateral (select y.aggregate, y.scope from {schema}.entry y
                           where y.week = u.week and y.scope = u.scope and y.id = u.id and y.aggregate is not null
                          union all
                          select y.aggregate, y.scope from {schema}.held y
                           where y.week = u.week and y.scope = u.scope and y.id = u.id and y.aggregate is not null) x
     order by x.aggregate, x.scope
  loop
    perform {schema}.lock_head(r.scope, r.aggregate);
  end loop;
  for r in select u.* from unnest(p_scope, p_week, p_id, p_token, p_for)
             with ordinality as u(scope, week, id, token, us, i) order by u.i
  loop
    o_i := r.i; o_kind := 0; o_state := null; o_at := null; v_in_held := false;
    select * into e from {schema}.entry x where x.week = r.week and x.scope = r.scope and x.id = r.id for update;
    if not found then
      select x.first_at, x.at, x.token, x.nonce, x.scope, x.owner, x.week, x.attempts, x.flags, x.state, x.id,
             x.fingerprint, x.seq, x.aggregate, x.partition, x."offset", x.topic, x.note, x.metadata
        into e from {schema}.held x where x.week = r.week and x.scope = r.scope and x.id = r.id for update;
      v_in_held := found;
    end if;
    if found then
      o_state := e.state; o_at := {schema}.us(e.at);
      if e.token = r.token and e.state = 'L' then
        v_now := {schema}.ledger_now();
        e.at := v_now + r.us * interval '1 microsecond';
        if e.aggregate is not null then
          h := {schema}.lock_head(r.scope, e.aggregate);
          if (h.lease_seq = e.seq and h.lease_token = r.token) is not true then return next; continue; end if;
          h.lease_until := e.at;
          perform {schema}.put_head(h);
        end if;
        perform {schema}.put(e, true, v_in_held, false, null);
        o_kind := 1; o_at := {schema}.us(e.at);
      end if;
    end if;
    return next;
  end loop;
end $$;

-- Stores the decision of an intervention; a null state removes the entry.
create function {schema}.store(
  p_scope int, p_week smallint, p_id bytea, p_state "char", p_token bigint, p_attempts int, p_at bigint, p_note text,
  p_bare boolean, p_unordered boolean
) returns void language plpgsql volatile set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare e {schema}.entry; v_in_held boolean := false;
begin
  if p_state is null then
    delete from {schema}.entry x where x.week = p_week and x.scope = p_scope and x.id = p_id;
    v_in_held := not found;
    delete from {schema}.held x where x.week = p_week and x.scope = p_scope and x.id = p_id;
    if v_in_held and not found then perform {schema}.lost_sight(p_week); end if;
    return;
  end if;
  select * into e from {schema}.entry x where x.week = p_week and x.scope = p_scope and x.id = p_id for update;
  if not found then
    v_in_held := true;
    select x.first_at, x.at, x.token, x.nonce, x.scope, x.owner, x.week, x.attempts, x.flags, x.state, x.id,
           x.fingerprint, x.seq, x.aggregate, x.partition, x."offset", x.topic, x.note, x.metadata
      into e from {schema}.held x where x.week = p_week and x.scope = p_scope and x.id = p_id for update;
    if not found then perform {schema}.lost_sight(p_week); end if;
  elsif e.state not in ('L', 'R', 'X', 'P') and p_state in ('L', 'R', 'X', 'P') then
    v_in_held := {schema}.take_out(e, true);
  end if;
  e.state := p_state; e.token := p_token; e.attempts := p_attempts; e.note := p_note;
  e.at := timestamptz 'epoch' + p_at * interval '1 microsecond';
  if p_unordered then e.flags := e.flags | 16; e.seq := null; e.aggregate := null; end if;
  perform {schema}.put(e, true, v_in_held, false, null, p_bare);
end $$;

-- Marks at-most-once claims as lost when their end is overdue, up to p_max of the awaited ones. A
-- row may be moved between the two updates, but never past both.
create function {schema}.mark_lost(p_max int) returns table (o_due bigint, o_lost bigint) language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
set search_path = pg_catalog, pg_temp as $$
declare
  v_week smallint[]; v_scope int[]; v_id bytea[]; v_token bigint[]; v_at timestamptz[]; v_count bigint; v_both bigint;
begin
  with a as (delete from {schema}.awaited where ctid = any (array(select ctid from {schema}.awaited
    where at <= {schema}.ledger_now() order by at limit p_max for update skip locked)) returning *)
  select count(*), array_agg(a.week), array_agg(a.scope), array_agg(a.id), array_agg(a.token), array_agg(a.at)
    into o_due, v_week, v_scope, v_id, v_token, v_at from (select * from a order by scope, id) a;
  with m as (update {schema}.entry x set state = 'O', note = 'its end was never reported'
      from unnest(v_week, v_scope, v_id, v_token, v_at) as a(week, scope, id, token, at)
     where x.week = a.week and x.scope = a.scope and x.id = a.id and x.token = a.token and x.state = 'C' and x.at = a.at
     returning x.flags)
  select count(*), count(*) filter (where (m.flags & 4) <> 0) into v_count, v_both from m;
  update {schema}.held x set state = 'O', note = 'its end was never reported'
    from unnest(v_week, v_scope, v_id, v_token, v_at) as a(week, scope, id, token, at)
   where x.week = a.week and x.scope = a.scope and x.id = a.id and x.token = a.token and x.state = 'C' and x.at = a.at;
  get diagnostics o_lost = row_count;
  o_lost := o_lost + v_count - v_both;
  return next;
end $$;
