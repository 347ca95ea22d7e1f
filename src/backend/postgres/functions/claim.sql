-- Claims. The state machine of src/ledger/transition.rs in SQL; the model test compares the two.
-- Kinds of outcome: 1 first, 2 duplicate, 3 busy, 4 retry later, 5 wait, 6 stale, 7 parked, 8 dead,
-- 9 mismatch, 10 too old.

-- One claim, with the full state machine. Modes: L lease, O at most once, D done, F failed, X
-- refused. p_hold: park an event that would have to wait. p_ask: answer 0 where its bytes would be
-- held, so that the caller sends it again with them. p_in: this is the caller's transaction, which
-- may stay open for long. o_wrote: whether anything was changed; o_row: of the row alone, and not of
-- the head of its aggregate. p_unlocked: the head is only read; the answer is null where it would
-- have to be locked.
create function {schema}.claim_one(
  p_scope int, p_week smallint, p_id bytea, p_nonce bigint, p_fingerprint bytea, p_topic text, p_partition int,
  p_offset bigint, p_metadata jsonb, p_mode "char", p_for bigint, p_flags smallint, p_attempts_max int, p_base bigint,
  p_cap bigint, p_permille int, p_note text, p_owner int, p_check_fingerprint boolean, p_aggregate text, p_seq bigint,
  p_strict boolean, p_baseline bigint, p_gap bigint, p_skip boolean, p_hold boolean,
  p_ask boolean, p_body {schema}.body, p_token bigint, p_in boolean, p_unlocked boolean default false,
  out o_kind int, out o_token bigint, out o_at bigint, out o_attempts int, out o_state text, out o_owner int,
  out o_seq bigint, out o_suspect boolean, out o_reused boolean, out o_wrote boolean, out o_row boolean
) language plpgsql volatile set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare
  e {schema}.entry; n {schema}.entry; h {schema}.head; g {schema}.head;
  v_have boolean; v_in_held boolean; v_left boolean; v_dropped boolean; v_closing boolean; v_now timestamptz; v_on bigint; v_runs int;
  v_lapsed boolean; v_place int;
begin
  if p_in then
    -- What is not changed must stay unlocked: the holder of a lease could neither extend nor settle
    -- it. Undoing a subtransaction releases its locks; the answer stays. A row that is written alone
    -- is written again without its head: that the order has moved past it never changes.
    loop
      begin
        select * into o_kind, o_token, o_at, o_attempts, o_state, o_owner, o_seq, o_suspect, o_reused, o_wrote, o_row
          from {schema}.claim_one(p_scope, p_week, p_id, p_nonce, p_fingerprint, p_topic, p_partition, p_offset, p_metadata, p_mode,
            p_for, p_flags, p_attempts_max, p_base, p_cap, p_permille, p_note, p_owner, p_check_fingerprint, p_aggregate, p_seq,
            p_strict, p_baseline, p_gap, p_skip, p_hold, p_ask, p_body, p_token, false, p_unlocked);
        exit when o_wrote and (p_unlocked or p_aggregate is null or not o_row);
        raise exception using errcode = 'HX001';
      exception when sqlstate 'HX001' then null;
      end;
      exit when not o_wrote and o_kind is not null;
      p_unlocked := not p_unlocked;
    end loop;
    return;
  end if;
  o_suspect := false; o_reused := false;
  <<again>> loop
    o_wrote := false; o_row := false;
    if p_aggregate is not null and p_unlocked then
      select * into h from {schema}.head x where x.scope = p_scope and x.aggregate = p_aggregate;
    elsif p_aggregate is not null then
      h := {schema}.lock_head(p_scope, p_aggregate);
    end if;
    -- Read dropped before the rows: an id that is in neither place after that is nowhere. The sweep
    -- in turn waits for transactions that read dropped before it closed the week.
    v_left := false; v_dropped := false; v_closing := false;
    if p_week > 0 then
      select coalesce(d.scope_max >= p_scope, false) or p_scope = any (d.scopes_late), d.phase is not null into v_dropped, v_closing
        from {schema}.dropped d where d.week = p_week;
      v_left := found; v_dropped := coalesce(v_dropped, false); v_closing := coalesce(v_closing, false) and not v_dropped;
    end if;
    select * into e from {schema}.entry x where x.week = p_week and x.scope = p_scope and x.id = p_id for update;
    v_have := found; v_in_held := false;
    if not v_have and v_left then
      select x.first_at, x.at, x.token, x.nonce, x.scope, x.owner, x.week, x.attempts, x.flags, x.state, x.id,
             x.fingerprint, x.seq, x.aggregate, x.partition, x."offset", x.topic, x.note, x.metadata
        into e from {schema}.held x where x.week = p_week and x.scope = p_scope and x.id = p_id for update;
      v_have := found; v_in_held := found;
    end if;
    -- Nowhere, and its week takes no new rows: busy until the drop is over.
    v_closing := v_closing and not v_have;
    if v_have and (e.flags & 16) <> 0 then
      p_aggregate := null; p_seq := null; o_row := true;
    elsif e.aggregate is not null and e.state in ('L', 'R', 'P') and (e.aggregate is distinct from p_aggregate or e.seq <> p_seq) then
      -- It stays in the order of its first claim, whatever this delivery says: start again with
      -- that head locked.
      if p_aggregate is null then p_strict := false; p_skip := false; end if;
      p_aggregate := e.aggregate; p_seq := e.seq;
      continue again;
    end if;
    v_now := {schema}.ledger_now(); -- after the locks: waiting must not shorten a lease
    p_token := nextval('{schema}.token'); -- after the locks too: a later run has a higher token
    o_state := e.state; o_owner := e.owner; o_at := {schema}.us(e.at); o_attempts := e.attempts; o_token := e.token;
    if v_have then
      -- First: a nonce that is used for other content does not make it the same claim.
      if p_check_fingerprint and e.fingerprint <> p_fingerprint then o_kind := 9; return; end if;
      if e.nonce = p_nonce then
        if p_mode = 'L' and e.state = 'L' and (p_aggregate is null or (h.lease_seq = p_seq and h.lease_token = e.token)) then
          if p_unlocked and p_aggregate is not null then o_kind := null; return; end if;
          e.at := v_now + p_for * interval '1 microsecond'; o_wrote := true;
          perform {schema}.put(e, true, v_in_held, false, null);
          if p_aggregate is not null then
            h.lease_until := e.at; perform {schema}.put_head(h);
          end if;
          o_kind := 1; o_at := {schema}.us(e.at); o_suspect := (e.flags & 8) <> 0; return;
        elsif (p_mode = 'O' and e.state = 'C') or (p_mode = 'D' and e.state = 'D') then
          o_kind := 1; o_suspect := (e.flags & 8) <> 0; return;
        elsif p_mode = 'F' and e.state = 'R' then
          o_kind := 4; return;
        end if;
      end if;
      o_reused := coalesce(e.fingerprint <> p_fingerprint, false);
      -- An entry that is dead or lost and has no held bytes takes them from the next delivery: a
      -- redrive needs them.
      if e.state in ('X', 'O') and not o_reused and (p_ask or p_body.header_names is not null)
         and not exists (select from {schema}.held x where x.scope = p_scope and x.id = p_id and x.week = p_week
                           and x.header_names is not null) then
        if p_ask then o_kind := 0; return; end if;
        if e.topic is null then e.topic := p_topic; e.partition := p_partition; e."offset" := p_offset; end if;
        perform {schema}.put(e, true, v_in_held, true, p_body);
        o_wrote := true; o_row := true;
      end if;
      case e.state
        when 'L' then if e.at > v_now or p_mode = 'X' then o_kind := 3; return; end if;
        when 'R' then if (e.at > v_now and p_mode <> 'F') or p_mode = 'X' then o_kind := 4; return; end if;
        when 'P' then if p_mode = 'X' then o_kind := 7; o_seq := coalesce(h.parked, e.seq, 0); return; end if;
        when 'S' then o_kind := 6; o_seq := coalesce(h.last, e.seq, 0); return;
        when 'X' then o_kind := 8; return;
        else o_kind := 2; return;
      end case;
    end if;

    -- The new row, whatever its state will be. From here on something is written, unless o_wrote is
    -- reset.
    n := e; o_wrote := true;
    n.token := p_token; n.nonce := p_nonce; n.scope := p_scope; n.week := p_week; n.id := p_id; n.at := v_now;
    n.attempts := coalesce(e.attempts, 0); n.first_at := coalesce(e.first_at, v_now); n.owner := p_owner;
    n.flags := coalesce(e.flags & 20, 0)::smallint; n.fingerprint := coalesce(e.fingerprint, p_fingerprint);
    n.seq := p_seq; n.aggregate := p_aggregate; n.note := null;
    if p_topic is not null then n.topic := p_topic; n.partition := p_partition; n."offset" := p_offset; end if;
    n.metadata := coalesce(p_metadata, e.metadata);

    if p_mode = 'X' then -- outside of any order; also in a dropped week: it goes to held
      if v_closing then o_kind := 3; o_wrote := false; return; end if;
      n.state := 'X'; n.note := coalesce(p_note, 'refused'); n.seq := null; n.aggregate := null; o_row := true;
      if not {schema}.put(n, false, v_dropped, false, p_body) then continue again; end if;
      o_kind := 8; o_at := {schema}.us(v_now); o_attempts := 0; return;
    end if;

    if p_aggregate is not null then
      g := h; v_place := 1; v_on := null;
      h := {schema}.head_begin(h, p_seq, p_strict, p_baseline);
      if p_seq <= h.last then v_place := 6; v_on := h.last;
      elsif p_seq > h.parked then v_place := 7; v_on := h.parked;
      elsif h.lease_seq <> p_seq and (h.lease_until > v_now or h.lease_seq < p_seq) then v_place := 5; v_on := h.lease_seq;
      elsif h.lease_seq = p_seq and h.lease_until > v_now then v_place := 5; v_on := h.lease_seq;
      else
        select min(s) into v_on from unnest(h.retrying) s where s < p_seq;
        if v_on is not null then v_place := 5;
        elsif p_strict and p_seq <> coalesce(h.last + 1, 0) then
          v_on := coalesce(h.last + 1, 0); h.gap_at := coalesce(h.gap_at, v_now); v_place := 5;
          if v_now - h.gap_at >= p_gap * interval '1 microsecond' then
            h := {schema}.head_park(h, v_on); v_place := 7;
          end if;
        end if;
      end if;
      if v_place <> 6 and p_unlocked then o_kind := null; o_wrote := false; return; end if;
      o_seq := v_on;
      if v_place = 6 then
        n.state := 'S'; o_row := true;
        -- A dropped week takes no new rows.
        o_wrote := v_have or not (v_dropped or v_closing);
        if o_wrote and not {schema}.put(n, v_have, v_in_held, false, null) then continue again; end if;
        o_kind := 6; return;
      end if;
      if v_dropped and not v_have then o_kind := 10; o_wrote := false; return; end if;
      if v_closing then o_kind := 3; o_wrote := false; return; end if;
      if (v_place = 7 or (v_place = 5 and p_hold)) and p_mode <> 'F' then
        n.state := 'P';
        if not {schema}.put(n, v_have, v_in_held, false, p_body) then continue again; end if;
        perform {schema}.put_head({schema}.head_owe(h, p_seq));
        o_kind := 7; return;
      elsif v_place = 5 and p_mode <> 'F' then
        o_wrote := h is distinct from g;
        if o_wrote then perform {schema}.put_head(h); end if;
        o_kind := 5; return;
      end if;
      h := {schema}.head_begin(g, p_seq, p_strict, p_baseline);
    end if;

    if v_dropped and not v_have then o_kind := 10; o_wrote := false; return; end if;
    if v_closing then o_kind := 3; o_wrote := false; return; end if;

    v_lapsed := v_have and e.state = 'L';
    v_runs := case when not v_have then 0 when e.state = 'L' and (e.flags & 1) = 0 then greatest(e.attempts - 1, 0)
              else e.attempts end;
    if (p_mode = 'F' and v_runs + 1 >= p_attempts_max) or (p_mode = 'L' and v_lapsed and v_runs >= p_attempts_max) then
      if p_ask then o_kind := 0; o_wrote := false; return; end if;
      n.state := 'X'; n.attempts := least(v_runs + (p_mode = 'F')::int, 32767);
      n.note := case when p_mode = 'F' then coalesce(p_note, 'failed')
                else format('its process died or stopped answering in each of %s runs', v_runs) end;
      if not {schema}.put(n, v_have, v_in_held, false, p_body) then continue again; end if;
      if p_aggregate is not null then perform {schema}.put_head({schema}.head_die(h, p_seq, e.token, p_skip)); end if;
      o_kind := 8; o_at := {schema}.us(v_now); o_attempts := n.attempts; return;
    end if;
    n.attempts := least(v_runs + 1, 32767);
    if p_mode = 'F' then
      n.state := 'R'; n.note := p_note;
      n.at := v_now + trunc(least(p_base::numeric * 2 ^ least(v_runs, 30), p_cap) * p_permille / 1000)::bigint * interval '1 microsecond';
      if not p_hold then p_body := null; end if;
      if not {schema}.put(n, v_have, v_in_held, p_body.header_names is not null, p_body) then continue again; end if;
      if p_aggregate is not null then
        perform {schema}.put_head({schema}.head_owe({schema}.head_let_go(h, p_seq, e.token), p_seq));
      end if;
      o_kind := 4; o_at := {schema}.us(n.at); o_attempts := n.attempts; return;
    end if;
    n.state := case p_mode when 'L' then 'L' when 'O' then 'C' else 'D' end;
    n.flags := n.flags | p_flags | case when v_lapsed then 8 else 0 end;
    n.at := v_now + p_for * interval '1 microsecond';
    if not {schema}.put(n, v_have, v_in_held, false, null) then continue again; end if;
    if (n.flags & 2) <> 0 and n.state = 'C' then
      insert into {schema}.awaited (at, token, scope, week, id) values (n.at, p_token, p_scope, p_week, p_id);
    end if;
    if p_aggregate is not null then
      if h.lease_seq <> p_seq then h := {schema}.head_owe(h, h.lease_seq); end if;
      if p_mode = 'L' then
        h.retrying := array_remove(h.retrying, p_seq);
        h.lease_seq := p_seq; h.lease_token := p_token; h.lease_until := n.at;
      else
        h.lease_seq := null; h.lease_token := null; h.lease_until := null;
        h := {schema}.head_advance(h, p_seq);
      end if;
      perform {schema}.put_head(h);
    end if;
    o_kind := 1; o_token := p_token; o_at := {schema}.us(n.at); o_attempts := n.attempts; o_suspect := v_lapsed;
    o_state := n.state; o_owner := p_owner;
    return;
  end loop;
end $$;

-- A batch of claims without order, in key order: one multi-row INSERT, and the full state machine
-- only for ids that already had a row. Row 0 of the answer applies to every claim that was first;
-- further rows are the others, by their place in the arrays. p_fresh: the caller expects all ids to
-- be new. A plain INSERT is then tried first, which costs a third less than one that can skip; it
-- changes no outcome. p_bodies: a claim whose bytes would be held is answered 0, so that the caller
-- sends it again with them.
create function {schema}.claim_batch(
  p_scope int[], p_week smallint[], p_id bytea[], p_nonce bigint[], p_fingerprint bytea[], p_topic text[],
  p_partition int[], p_offset bigint[], p_metadata jsonb[], p_weeks smallint[], p_mode "char", p_for bigint,
  p_flags smallint, p_attempts_max int, p_owner int, p_check_fingerprint boolean, p_fresh boolean default false,
  p_bodies boolean default false, p_in boolean default false
) returns table (o_i int, o_kind int, o_token bigint, o_at bigint, o_attempts int, o_state text, o_owner text,
                 o_seq bigint, o_suspect boolean, o_reused boolean)
language plpgsql volatile
set lock_timeout = '{lock_timeout}' set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set search_path = pg_catalog, pg_temp as $$
declare
  v_token bigint := nextval('{schema}.token');
  v_now   timestamptz;
  v_at    timestamptz;
  v_new   "char" := case p_mode when 'L' then 'L' when 'O' then 'C' else 'D' end;
  v_count bigint := 0;
  r record; o record;
begin
  if not exists (select from {schema}.dropped d where d.week = any (p_weeks)) then
    v_now := {schema}.ledger_now();
    v_at := v_now + p_for * interval '1 microsecond';
    if cardinality(p_id) = 1 then -- a lone claim: no arrays to unnest
      p_fresh := false;
      insert into {schema}.entry (first_at, at, token, nonce, scope, owner, week, attempts, flags, state, id, fingerprint,
                                  topic, partition, "offset", metadata)
      values (v_now, v_at, v_token, p_nonce[1], p_scope[1], p_owner, p_week[1], 1, p_flags, v_new, p_id[1],
              p_fingerprint[1], p_topic[1], p_partition[1], p_offset[1], p_metadata[1])
      on conflict do nothing;
      get diagnostics v_count = row_count;
    elsif p_fresh then
      begin
        insert into {schema}.entry (first_at, at, token, nonce, scope, owner, week, attempts, flags, state, id, fingerprint,
                                    topic, partition, "offset", metadata)
        select v_now, v_at, v_token, u.nonce, u.scope, p_owner, u.week, 1, p_flags, v_new, u.id, u.fingerprint,
               u.topic, u.partition, u."offset", u.metadata
          from unnest(p_scope, p_week, p_id, p_nonce, p_fingerprint, p_topic, p_partition, p_offset, p_metadata)
            as u(scope, week, id, nonce, fingerprint, topic, partition, "offset", metadata);
        v_count := cardinality(p_id);
      exception when unique_violation then
        p_fresh := false; -- not all of them are new; nothing of this try remains
      end;
    end if;
    if not p_fresh and cardinality(p_id) > 1 then
      insert into {schema}.entry (first_at, at, token, nonce, scope, owner, week, attempts, flags, state, id, fingerprint,
                                  topic, partition, "offset", metadata)
      select v_now, v_at, v_token, u.nonce, u.scope, p_owner, u.week, 1, p_flags, v_new, u.id, u.fingerprint,
             u.topic, u.partition, u."offset", u.metadata
        from unnest(p_scope, p_week, p_id, p_nonce, p_fingerprint, p_topic, p_partition, p_offset, p_metadata)
          as u(scope, week, id, nonce, fingerprint, topic, partition, "offset", metadata)
      on conflict do nothing;
      get diagnostics v_count = row_count;
    end if;
    -- A repeat does not keep a week alive: only weeks that got a row are touched.
    if v_count > 0 and (cardinality(p_weeks) = 1 or v_count = cardinality(p_id)) then
      perform {schema}.touch_weeks(p_weeks, v_now);
    elsif v_count > 0 then
      perform {schema}.touch_weeks(array(
        select distinct u.week from unnest(p_scope, p_week, p_id) as u(scope, week, id)
        cross join lateral (select from {schema}.entry e
          where e.week = u.week and e.scope = u.scope and e.id = u.id and e.token = v_token) x), v_now);
    end if;
    if (p_flags & 2) <> 0 then
      insert into {schema}.awaited (at, token, scope, week, id)
      select v_at, v_token, u.scope, u.week, u.id from unnest(p_scope, p_week, p_id) as u(scope, week, id);
    end if;
    o_i := 0; o_kind := 1; o_token := v_token; o_at := {schema}.us(v_at); o_attempts := 1; o_state := v_new; o_suspect := false;
    o_reused := false;
    return next;
    if v_count = cardinality(p_id) then return; end if;
  end if;
  for r in
    select u.i, u.scope, u.week, u.id, u.nonce, u.fingerprint, u.topic, u.partition, u."offset", u.metadata,
           x.state, x.at, x.nonce as x_nonce, x.attempts, x.token as x_token, x.fingerprint as x_fingerprint, x.name
      from unnest(p_scope, p_week, p_id, p_nonce, p_fingerprint, p_topic, p_partition, p_offset, p_metadata)
        with ordinality as u(scope, week, id, nonce, fingerprint, topic, partition, "offset", metadata, i)
      left join lateral (
        select e.state, e.at, e.nonce, e.attempts, e.token, e.fingerprint, w.name
          from {schema}.entry e left join {schema}.owner w on w.number = e.owner
         where e.week = u.week and e.scope = u.scope and e.id = u.id) x on true
     where x.token is distinct from v_token
     order by u.i
  loop
    o_i := r.i; o_attempts := r.attempts; o_owner := r.name; o_seq := null; o_suspect := false; o_state := r.state; o_token := r.x_token;
    o_reused := coalesce(r.x_fingerprint <> r.fingerprint, false);
    if r.state in ('D', 'C', 'F', 'O') and not (r.state = 'O' and p_bodies) and r.x_nonce <> r.nonce
       and (not p_check_fingerprint or (r.x_fingerprint = r.fingerprint) is not false) then
      o_kind := 2; o_at := {schema}.us(r.at);
    elsif r.x_nonce <> r.nonce and (not p_check_fingerprint or (r.x_fingerprint = r.fingerprint) is not false)
       and r.state in ('L', 'R') and r.at > {schema}.ledger_now() then
      -- Leased, or too early to retry: answered without locking the row.
      o_kind := case r.state when 'L' then 3 else 4 end; o_at := {schema}.us(r.at);
    else
      select * into o from {schema}.claim_one(r.scope, r.week, r.id, r.nonce, r.fingerprint, r.topic, r.partition,
        r."offset", r.metadata, p_mode, p_for, p_flags, p_attempts_max, 0, 0, 0, null, p_owner, p_check_fingerprint,
        null, null, false, null, 0, false, false, p_bodies, null, v_token, p_in);
      o_kind := o.o_kind; o_token := o.o_token; o_at := o.o_at; o_attempts := o.o_attempts; o_state := o.o_state;
      o_seq := o.o_seq; o_suspect := o.o_suspect; o_reused := o.o_reused;
      select name into o_owner from {schema}.owner where number = o.o_owner;
    end if;
    return next;
  end loop;
end $$;

-- A lone claim that is the first of its id, tried before anything else: no arrays, no state
-- machine. An answer without a token means that it is not, or might not be, the first; nothing was
-- changed, and the full state machine must decide. It is a function and not a plain statement, so
-- that its lock_timeout covers the table locks: a plain statement takes those before it can set
-- anything.
create function {schema}.claim_lone(
  p_for bigint, p_nonce bigint, p_scope int, p_owner int, p_week smallint, p_flags smallint, p_state "char", p_id bytea,
  p_fingerprint bytea, p_topic text, p_partition int, p_offset bigint, p_metadata jsonb, out o_token bigint, out o_at bigint
) language plpgsql volatile set lock_timeout = '{lock_timeout}' set search_path = pg_catalog, pg_temp as $$
declare v_now timestamptz := {schema}.ledger_now();
begin
  insert into {schema}.entry (first_at, at, token, nonce, scope, owner, week, attempts, flags, state, id, fingerprint,
                              topic, partition, "offset", metadata)
  select v_now, v_now + p_for * interval '1 microsecond', nextval('{schema}.token'), p_nonce, p_scope, p_owner, p_week, 1, p_flags,
         p_state, p_id, p_fingerprint, p_topic, p_partition, p_offset, p_metadata
   where not exists (select from {schema}.dropped d where d.week = p_week)
  on conflict do nothing returning token, {schema}.us(at) into o_token, o_at;
  if found and p_week > 0 then perform {schema}.touch_weeks(array[p_week], v_now); end if;
end $$;

-- Locks the heads of aggregates: all of them first, in one order, so that two batches never
-- deadlock. A transaction that waits for a head being inserted holds only heads that it inserted
-- itself, which come before it in that order.
create function {schema}.lock_heads(p_scope int[], p_aggregate text[]) returns void language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set search_path = pg_catalog, pg_temp as $$
begin
  insert into {schema}.head (scope, aggregate)
  select distinct x.s, x.a collate "C" from unnest(p_scope, p_aggregate) x(s, a) where x.a is not null order by 2, 1
  on conflict do nothing;
  perform from (select distinct x.s, x.a from unnest(p_scope, p_aggregate) x(s, a) where x.a is not null) x
    join {schema}.head h on h.scope = x.s and h.aggregate = x.a order by h.aggregate, h.scope for update of h;
end $$;

-- Ordered claims of done events whose heads are locked, for the common case: all are new, each is
-- next in its aggregate's order, and no event there runs, waits or is parked. One INSERT for the
-- rows, one UPDATE for the heads. An answer without a row means that this is not the case; nothing
-- was changed, and the full state machine must decide.
create function {schema}.claim_next(
  p_scope int[], p_week smallint[], p_id bytea[], p_nonce bigint[], p_fingerprint bytea[], p_topic text[],
  p_partition int[], p_offset bigint[], p_metadata jsonb[], p_aggregate text[], p_seq bigint[], p_flags smallint,
  p_owner int, p_strict boolean
) returns table (o_token bigint, o_at timestamptz)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
set search_path = pg_catalog, pg_temp as $$
declare v_weeks smallint[] := array(select distinct w from unnest(p_week) w);
begin
  if exists (select from {schema}.dropped d where d.week = any (v_weeks)) then return; end if;
  if exists (
    select from (select x.s, x.a, x.q, lag(x.q) over (partition by x.s, x.a order by x.i) as before
                   from unnest(p_scope, p_aggregate, p_seq) with ordinality x(s, a, q, i)) u
      join {schema}.head h on h.scope = u.s and h.aggregate = u.a
     where h.lease_seq is not null or h.parked is not null or h.gap_at is not null or h.retrying <> '{}'
        or case when p_strict then u.q is distinct from coalesce(u.before, h.last) + 1
           else u.q <= coalesce(u.before, h.last) end)
  then return; end if;
  o_at := {schema}.ledger_now(); -- after the locks, like the token: a later run has a higher one
  o_token := nextval('{schema}.token');
  begin
    insert into {schema}.entry (first_at, at, token, nonce, scope, owner, week, attempts, flags, state, id, fingerprint,
                                seq, aggregate, topic, partition, "offset", metadata)
    select o_at, o_at, o_token, u.nonce, u.scope, p_owner, u.week, 1, p_flags, 'D', u.id, u.fingerprint,
           u.seq, u.aggregate, u.topic, u.partition, u."offset", u.metadata
      from unnest(p_scope, p_week, p_id, p_nonce, p_fingerprint, p_topic, p_partition, p_offset, p_metadata, p_aggregate, p_seq)
        as u(scope, week, id, nonce, fingerprint, topic, partition, "offset", metadata, aggregate, seq);
  exception when unique_violation then
    return; -- not all of them are new; nothing of this try remains
  end;
  update {schema}.head h set last = m.q
    from (select x.s, x.a, max(x.q) as q from unnest(p_scope, p_aggregate, p_seq) x(s, a, q) group by x.s, x.a) m
   where h.scope = m.s and h.aggregate = m.a;
  perform {schema}.touch_weeks(v_weeks, o_at);
  return next;
end $$;

-- Claims one by one with the full state machine: ordered claims and counted failures.
create function {schema}.claim_each(
  p_scope int[], p_week smallint[], p_id bytea[], p_nonce bigint[], p_fingerprint bytea[], p_topic text[],
  p_partition int[], p_offset bigint[], p_metadata jsonb[], p_note text[], p_aggregate text[], p_seq bigint[],
  p_mode "char", p_for bigint, p_flags smallint, p_attempts_max int, p_base bigint, p_cap bigint,
  p_permille int, p_owner int, p_check_fingerprint boolean, p_strict boolean, p_baseline bigint, p_gap bigint, p_skip boolean,
  p_hold boolean, p_payload bytea[], p_header_names bytea[], p_header_values bytea[], p_header_count int[], p_key bytea[],
  p_stamp bigint[], p_in boolean default false
) returns table (o_i int, o_kind int, o_token bigint, o_at bigint, o_attempts int, o_state text, o_owner text,
                 o_seq bigint, o_suspect boolean, o_reused boolean)
language plpgsql volatile
set lock_timeout = '{lock_timeout}' set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare v_token bigint := nextval('{schema}.token'); o record; i int; v_at int := 0; v_all boolean := false;
begin
  if p_aggregate is not null then
    begin
      perform {schema}.lock_heads(p_scope, p_aggregate);
      if p_mode = 'D' and cardinality(p_id) > 1 and array_position(p_aggregate, null::text) is null then
        select * into o from {schema}.claim_next(p_scope, p_week, p_id, p_nonce, p_fingerprint, p_topic, p_partition, p_offset,
          p_metadata, p_aggregate, p_seq, p_flags, p_owner, p_strict);
        v_all := found;
      end if;
      -- In the caller's transaction each claim locks its own head, and releases one that it does
      -- not change.
      if p_in and not v_all then raise exception using errcode = 'HX001'; end if;
    exception when sqlstate 'HX001' then null;
    end;
  end if;
  if v_all then -- row 0 applies to all of them
    o_i := 0; o_kind := 1; o_token := o.o_token; o_at := {schema}.us(o.o_at); o_attempts := 1; o_state := 'D';
    o_suspect := false; o_reused := false;
    return next;
    return;
  end if;
  for i in 1 .. cardinality(p_id) loop
    select * into o from {schema}.claim_one(p_scope[i], p_week[i], p_id[i], p_nonce[i], p_fingerprint[i], p_topic[i],
      p_partition[i], p_offset[i], p_metadata[i], p_mode, p_for, p_flags, p_attempts_max, p_base, p_cap, p_permille,
      p_note[i], p_owner, p_check_fingerprint, p_aggregate[i], p_seq[i], p_strict, p_baseline, p_gap, p_skip, p_hold,
      false, {schema}.body_of(p_payload, p_header_names, p_header_values, p_header_count, p_key, p_stamp, i, v_at), v_token, p_in);
    v_at := v_at + coalesce(p_header_count[i], 0);
    o_i := i; o_kind := o.o_kind; o_token := o.o_token; o_at := o.o_at; o_attempts := o.o_attempts; o_state := o.o_state;
    o_seq := o.o_seq; o_suspect := o.o_suspect; o_reused := o.o_reused;
    select name into o_owner from {schema}.owner where number = o.o_owner;
    return next;
  end loop;
end $$;

-- Which of these took effect before: their places, from 1. Reads only, never claims.
create function {schema}.known(p_scope int[], p_week smallint[], p_id bytea[]) returns setof bigint
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set search_path = pg_catalog, pg_temp as $$
begin
  return query
    select u.i from unnest(p_scope, p_week, p_id) with ordinality as u(scope, week, id, i)
    cross join lateral (
      select from {schema}.entry e
       where e.week = u.week and e.scope = u.scope and e.id = u.id and e.state in ('D', 'F')) x
    union all
    select u.i from unnest(p_scope, p_week, p_id) with ordinality as u(scope, week, id, i)
    cross join lateral (
      select from {schema}.held h
       where h.week = u.week and h.scope = u.scope and h.id = u.id and h.state in ('D', 'F')) y
     where u.week > 0;
end $$;
