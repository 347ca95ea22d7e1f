-- For any language: claims and settlings by name, in the caller's own transaction or on their own.

-- Whether a text is only white space, by Unicode and whatever the server's locale is.
create function {schema}.is_blank(p_text text) returns boolean language sql immutable
  return btrim(p_text, E' \t\n\x0b\f\r\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a'
    || E'\u2028\u2029\u202f\u205f\u3000') = '';

-- The key bytes of an id: 16 for a canonical UUID, else the text; a text of 16 bytes gets a
-- trailing zero.
create function {schema}.id_key(p_id text) returns bytea language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_id is null or p_id = '' then
    raise exception 'event id is invalid: it is empty; it needs 1 to 255 characters' using errcode = '22023';
  elsif length(p_id) > 255 then
    raise exception 'event id is invalid: it has % characters; the limit is 255', length(p_id) using errcode = '22023';
  elsif {schema}.is_blank(p_id) then
    raise exception 'event id is invalid: it is blank (white space only)' using errcode = '22023';
  end if;
  if p_id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' then
    return decode(replace(p_id, '-', ''), 'hex');
  end if;
  if octet_length(p_id) = 16 then return convert_to(p_id, 'UTF8') || '\x00'::bytea; end if;
  return convert_to(p_id, 'UTF8');
end $$;

create function {schema}.id_text(p_key bytea) returns text language sql immutable
  return case when octet_length(p_key) = 16 then encode(p_key, 'hex')::uuid::text
              when octet_length(p_key) = 17 and get_byte(p_key, 16) = 0 then convert_from(substr(p_key, 1, 16), 'UTF8')
              else convert_from(p_key, 'UTF8') end;

-- The number of the week that contains a moment, Monday 00:00 UTC to Monday 00:00 UTC; 0 (timeless)
-- outside 2000 to 2099.
create function {schema}.week_of(p_us bigint) returns smallint language sql immutable
  return case when p_us >= 946684800000000 and p_us < 4102444800000000
              then ((p_us - 946252800000000) / 604800000000 + 1)::smallint else 0::smallint end;

-- The week an id is kept in: that of the time inside a UUIDv7; 0 for every other id.
create function {schema}.week_of_id(p_key bytea) returns smallint language sql immutable
  return case when octet_length(p_key) = 16 and get_byte(p_key, 6) >> 4 = 7 and get_byte(p_key, 8) >> 6 = 2
              then {schema}.week_of(('x' || encode(substr(p_key, 1, 6), 'hex'))::bit(48)::bigint * 1000)
              else 0::smallint end;

create function {schema}.scope_of(p_tenant text, p_scope text) returns int language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
begin
  if {schema}.is_blank(p_tenant) then
    raise exception 'tenant is invalid: it is blank' using errcode = '22023';
  elsif p_scope is null or {schema}.is_blank(p_scope) then
    raise exception 'scope is invalid: it is blank' using errcode = '22023';
  end if;
  return (select o_number from {schema}.scope_number(coalesce(p_tenant, ''), p_scope));
end $$;

create function {schema}.by_id_alone(p_what text) returns void language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  if (select identity from {schema}.meta) <> 'id' then
    raise exception '% is unsupported: this ledger''s identity is id_and_time, and it takes no time', p_what
      using errcode = '0A000';
  end if;
end $$;

-- Stores who claimed an event, for people to read. Called after the claim, so that a claim that
-- changes nothing registers no name. A name that another open transaction is registering is left
-- out: nobody waits for it.
create function {schema}.name_owner(p_week smallint, p_scope int, p_id bytea, p_name text) returns void
language plpgsql volatile set lock_timeout = '1ms' set enable_seqscan = off set search_path = pg_catalog, pg_temp as $$
declare v int;
begin
  begin
    insert into {schema}.owner (name) values (p_name) on conflict do nothing returning number into v;
  exception when lock_not_available or serialization_failure then
    return;
  end;
  if v is null then select number into v from {schema}.owner where name = p_name; end if;
  update {schema}.entry set owner = v where week = p_week and scope = p_scope and id = p_id;
  update {schema}.held set owner = v where week = p_week and scope = p_scope and id = p_id;
end $$;

-- Claims an event in the caller's transaction. 'claimed': run the effect in this very transaction
-- and commit; the claim rolls back with it. 'duplicate': it took effect before. Any other word: not
-- now (see docs/sql.md).
create function {schema}.claim_in(
  p_scope text, p_id text, p_tenant text default null, p_metadata jsonb default null, p_fingerprint bytea default null,
  p_topic text default null, p_partition int default null, p_offset bigint default null, p_owner text default null,
  p_event_time timestamptz default null, p_nonce bigint default null,
  out outcome text, out token bigint, out since timestamptz
) language plpgsql volatile set lock_timeout = '{lock_timeout}' set enable_seqscan = off
set search_path = pg_catalog, pg_temp as $$
declare
  v_scope int; v_key bytea := {schema}.id_key(p_id); v_week smallint; o record;
  v_owner int := (select number from {schema}.owner where name = p_owner);
begin
  if p_metadata is not null and octet_length(p_metadata::text) > 16384 then
    raise exception 'metadata is invalid: it has % bytes; the limit is 16384', octet_length(p_metadata::text)
      using errcode = '22023';
  end if;
  begin -- a scope that another transaction locks must not abort the caller's
    v_scope := {schema}.scope_of(p_tenant, p_scope);
  exception when lock_not_available then
    outcome := 'busy'; return;
  end;
  if (select identity from {schema}.meta) = 'id' then
    v_week := {schema}.week_of_id(v_key); -- whatever the delivery's time is
  elsif p_event_time is null then
    raise exception 'event time is invalid: it is missing, and this ledger''s identity is id_and_time' using errcode = '22023';
  else
    v_week := {schema}.week_of({schema}.us(p_event_time));
  end if;
  begin -- an id that another transaction locks must not abort the caller's
    select * into o from {schema}.claim_one(v_scope, v_week, v_key,
      coalesce(p_nonce, ('x' || substr(md5(gen_random_uuid()::text), 1, 16))::bit(64)::bigint), p_fingerprint, p_topic,
      p_partition, p_offset, p_metadata, 'D', 0, 0::smallint, 0, 0, 0, 0, null, v_owner, true, null, null,
      false, null, 0, false, false, false, null, nextval('{schema}.token'), true);
  exception
    when lock_not_available then
      outcome := 'busy'; return;
    when check_violation then
      raise exception 'no partition yet for week %: call {schema}.make_week(%, 28, 260%) in a transaction of its own, then try again',
        v_week, v_week, coalesce(', p_tenant => ' || quote_literal(p_tenant), '') using errcode = '55000', detail = 'week-missing';
  end;
  if o.o_kind = 1 and v_owner is null and p_owner is not null then
    perform {schema}.name_owner(v_week, v_scope, v_key, p_owner);
  end if;
  outcome := (array['claimed', 'duplicate', 'busy', 'retry_later', 'wait', 'stale', 'parked', 'dead', 'mismatch', 'too_old'])[o.o_kind];
  token := o.o_token;
  since := timestamptz 'epoch' + o.o_at * interval '1 microsecond';
end $$;

-- Leases an event in a transaction of its own. 'claimed' comes with the token that settles it.
create function {schema}.lease(
  p_scope text, p_id text, p_seconds int default 900, p_tenant text default null, p_owner text default null,
  p_attempts_max int default 5, p_nonce bigint default null,
  out outcome text, out token bigint, out until timestamptz, out attempt int
) language plpgsql volatile set lock_timeout = '{lock_timeout}' set enable_seqscan = off
set search_path = pg_catalog, pg_temp as $$
declare
  v_scope int; v_key bytea := {schema}.id_key(p_id); v_week smallint; o record;
  v_owner int := (select number from {schema}.owner where name = p_owner);
begin
  if p_seconds < 1 or p_seconds > 86400 then
    raise exception 'lease is invalid: % seconds; allowed are 1 to 86400', p_seconds using errcode = '22023';
  end if;
  perform {schema}.by_id_alone('lease');
  begin -- a scope that another transaction locks must not abort the caller's
    v_scope := {schema}.scope_of(p_tenant, p_scope);
  exception when lock_not_available then
    outcome := 'busy'; return;
  end;
  v_week := {schema}.week_of_id(v_key);
  for i in 1 .. 2 loop
    begin -- an id that another transaction locks must not abort the caller's
      select * into o from {schema}.claim_one(v_scope, v_week, v_key,
        coalesce(p_nonce, ('x' || substr(md5(gen_random_uuid()::text), 1, 16))::bit(64)::bigint), null, null, null, null, null,
        'L', p_seconds * 1000000::bigint, 1::smallint, p_attempts_max, 0, 0, 0, null, v_owner, true,
        null, null, false, null, 0, false, false, false, null, nextval('{schema}.token'), true);
      exit;
    exception
      when lock_not_available then
        outcome := 'busy'; return;
      when check_violation then -- its week does not exist
        if i = 2 then raise; end if;
    end;
    perform {schema}.make_week(v_week, 28, 260, true, p_tenant);
  end loop;
  if o.o_kind = 1 and v_owner is null and p_owner is not null then
    perform {schema}.name_owner(v_week, v_scope, v_key, p_owner);
  end if;
  outcome := (array['claimed', 'duplicate', 'busy', 'retry_later', 'wait', 'stale', 'parked', 'dead', 'mismatch', 'too_old'])[o.o_kind];
  token := o.o_token; attempt := o.o_attempts;
  until := timestamptz 'epoch' + o.o_at * interval '1 microsecond';
end $$;

-- Settles a lease: 'done', or 'retry' after some seconds, or 'dead'. Returns true if it is
-- recorded; false if the token is stale and nothing was changed.
create function {schema}.settle(
  p_scope text, p_id text, p_token bigint, p_how text, p_after_seconds int default 0, p_note text default null,
  p_tenant text default null, p_metadata jsonb default null
) returns boolean language plpgsql volatile set lock_timeout = '{lock_timeout}' set enable_seqscan = off
set search_path = pg_catalog, pg_temp as $$
declare v_scope int; v_key bytea := {schema}.id_key(p_id); v_state "char"; o record;
begin
  v_state := case p_how when 'done' then 'D' when 'retry' then 'R' when 'dead' then 'X' end;
  if v_state is null then
    raise exception 'settling is invalid: % is none of done, retry, dead', p_how using errcode = '22023';
  end if;
  perform {schema}.by_id_alone('settle');
  v_scope := {schema}.scope_of(p_tenant, p_scope);
  select * into o from {schema}.settle_one(v_scope, {schema}.week_of_id(v_key), v_key, p_token, v_state,
    p_after_seconds * 1000000::bigint, true, p_note, p_metadata, null, false, null, null, true);
  return o.o_kind = 1;
end $$;

-- Entries in readable form: those of the weeks, and those that outlived their week or wait with
-- their bytes.
create view {schema}.entries as
  select nullif(s.tenant, '') as tenant, s.scope, {schema}.id_text(e.id) as id,
         case e.state when 'L' then 'leased' when 'D' then 'done' when 'R' then 'retry' when 'X' then 'dead'
                      when 'C' then 'claimed' when 'F' then 'finished' when 'O' then 'lost' when 'P' then 'parked'
                      when 'S' then 'stale' end as state,
         e.attempts, e.token, e.first_at, e.at, w.name as owner, e.aggregate, e.seq, e.topic, e.partition, e."offset",
         e.metadata, e.note, e.week
    from (select e.* from {schema}.entry e
          union all
          select h.first_at, h.at, h.token, h.nonce, h.scope, h.owner, h.week, h.attempts, h.flags, h.state, h.id,
                 h.fingerprint, h.seq, h.aggregate, h.partition, h."offset", h.topic, h.note, h.metadata
            from {schema}.held h
           where not exists (select from {schema}.entry x where x.week = h.week and x.scope = h.scope and x.id = h.id)) e
         join {schema}.scope s on s.number = e.scope left join {schema}.owner w on w.number = e.owner;
