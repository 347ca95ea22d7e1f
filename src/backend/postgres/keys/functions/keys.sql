-- The current time: the clock, not the start of a transaction.
create function {schema}.keys_now() returns timestamptz language sql volatile return clock_timestamp();

-- When a UUIDv7 was made; null for any other key.
create function {schema}.key_time(p_key text) returns timestamptz language sql immutable
  return case when p_key ~* '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$' then
    timestamptz 'epoch' + ('x0000' || substr(p_key, 1, 8) || substr(p_key, 10, 4))::bit(64)::bigint * interval '1 millisecond' end;

-- The advisory lock of a key that a caller's open transaction has begun. Nobody waits for it: it is how
-- a look at the key sees a row that is not committed.
create function {schema}.keys_lock(p_tenant text, p_key text) returns bigint language sql immutable
  return hashtextextended(p_tenant || E'\n' || p_key, hashtextextended('{schema}', 0));

-- Whether a caller's open transaction has begun the key.
create function {schema}.keys_is_open(p_tenant text, p_key text) returns boolean language sql volatile
  return exists (select from pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and (l.classid::bigint << 32) | l.objid::bigint = {schema}.keys_lock(p_tenant, p_key));

-- Begins a request. Kinds: 1 first, 2 running, 3 done, 4 mismatch, 5 expired, 6 outcome unknown, 7 ahead.
-- p_lease_us is null in a caller's transaction. p_hold_us: how long after the lease nobody runs it
-- again; null for ever. o_at: when a lease ends, an answer was stored, or a run began; or the present.
create function {schema}.keys_begin_row(
  p_wait text, p_tenant text, p_key text, p_fingerprint bytea, p_parts text, p_nonce bigint, p_lease_us bigint, p_hold_us bigint,
  out o_kind int, out o_token bigint, out o_at timestamptz, out o_mine boolean, out o_parts text, out o_status int, out o_headers text,
  out o_body bytea
) language plpgsql volatile set lock_timeout = '100ms' set enable_seqscan = off set enable_bitmapscan = off
set search_path = pg_catalog, pg_temp as $$
declare
  r record; v_now timestamptz; v_until timestamptz; v_held timestamptz; v_time timestamptz := {schema}.key_time(p_key); v_horizon timestamptz;
  v_own boolean; v_free boolean;
begin
  -- Lasts until the function ends: its SET clause restores the old value.
  perform set_config('lock_timeout', p_wait, true);
  for v_try in 1 .. 10 loop
    -- Read without a lock: whoever changes nothing keeps nothing from its holder.
    select * into r from {schema}.keys k where k.tenant = p_tenant and k.key = p_key;
    v_now := {schema}.keys_now();
    v_until := v_now + coalesce(p_lease_us, 0) * interval '1 microsecond';
    v_held := case when p_lease_us is null or p_hold_us is null then 'infinity' else v_until + p_hold_us * interval '1 microsecond' end;
    o_mine := false;
    if r.token is null then
      begin
        insert into {schema}.keys (token, nonce, begun_at, until, held_until, tenant, key, fingerprint, parts)
        values (nextval('{schema}.keys_token'), p_nonce, v_now, v_until, v_held, p_tenant, p_key, p_fingerprint, p_parts)
        on conflict (tenant, key) do nothing returning token into o_token;
        -- The horizon is looked at after the insert: a sweep commits it before it deletes, so an insert that
        -- got past the deletion of this very key finds the horizon. It is compared with the key's own time,
        -- whatever the clock says: that may have been set back since the sweep.
        -- Nothing of keys_meta stays locked, so a sweep never waits for a request.
        if o_token is not null and v_time is not null then
          select m.horizon into v_horizon from {schema}.keys_meta m;
          -- A snapshot may be older than the horizon: a lock on a row that was changed since is refused
          -- (40001). It is let go at once. A sweep during this transaction keeps a day, so it concerns no
          -- younger key.
          if v_time < v_now - interval '1 day' and current_setting('transaction_isolation') <> 'read committed' then
            begin
              select m.horizon into v_horizon from {schema}.keys_meta m for share;
              raise exception using errcode = 'KX002';
            exception when sqlstate 'KX002' then null;
            end;
          end if;
          if v_time < v_horizon then
            raise exception using errcode = 'KX001'; -- undoes the insert
          elsif v_time > v_now + interval '672 hours' then
            raise exception using errcode = 'KX003'; -- it could not be kept until it is old
          end if;
        end if;
      exception
        when lock_not_available then
          o_kind := 2; o_token := null; -- an open transaction holds it
          return;
        when sqlstate 'KX001' then
          o_kind := 5; o_token := null;
          return;
        when sqlstate 'KX003' then
          o_kind := 7; o_token := null; o_at := v_now;
          return;
      end;
      if o_token is not null then
        o_kind := 1; o_at := v_until;
        if p_lease_us is null then
          perform pg_advisory_xact_lock_shared({schema}.keys_lock(p_tenant, p_key));
        end if;
        return;
      end if;
      continue; -- it has just been committed
    end if;
    v_free := r.ended and not r.bound and r.settled_at is null; -- it did nothing
    if r.fingerprint <> p_fingerprint and not v_free then
      o_kind := 4; o_parts := r.parts;
      return;
    end if;
    v_own := r.nonce = p_nonce;
    o_token := r.token; o_mine := v_own and not r.ended;
    if r.settled_at is not null then
      o_kind := 3; o_at := r.settled_at; o_parts := r.parts; o_status := r.status; o_headers := r.headers; o_body := r.body;
      return;
    end if;
    -- A transaction that committed without an answer has no lease to renew.
    if o_mine and r.until > r.begun_at then
      update {schema}.keys k set until = v_until, held_until = v_held
       where k.tenant = p_tenant and k.key = p_key and k.token = r.token and k.settled_at is null;
    elsif v_now < r.until and not v_free then
      o_kind := 2; o_at := r.until;
      return;
    elsif v_now < r.held_until and not v_free then
      o_kind := 6; o_at := r.begun_at;
      return;
    elsif v_own and r.ended then
      o_kind := 2; o_at := r.until; -- a late copy of the begin whose run has ended: nobody waits for it
      return;
    else
      begin
        update {schema}.keys k set token = nextval('{schema}.keys_token'), nonce = p_nonce, begun_at = v_now, until = v_until,
               held_until = v_held, fingerprint = p_fingerprint, parts = p_parts, bound = k.bound or not k.ended, ended = false
         where k.tenant = p_tenant and k.key = p_key and k.token = r.token and k.settled_at is null
        returning k.token into o_token;
      exception when lock_not_available then
        o_kind := 2;
        return;
      end;
    end if;
    if found then
      o_kind := 1; o_at := v_until;
      if p_lease_us is null then
        perform pg_advisory_xact_lock_shared({schema}.keys_lock(p_tenant, p_key));
      end if;
      return;
    end if;
  end loop;
  raise exception 'the key is being changed by others' using errcode = '40001';
end $$;

-- Stores an answer. Whether it is stored under this token, by this call or by the same one before.
create function {schema}.keys_finish_row(
  p_tenant text, p_key text, p_token bigint, p_status int, p_headers text, p_body bytea
) returns boolean language plpgsql volatile set lock_timeout = '2s' set enable_seqscan = off set enable_bitmapscan = off
set search_path = pg_catalog, pg_temp as $$
declare v_now timestamptz := {schema}.keys_now();
begin
  -- A key from a clock that is ahead stays until its own time is old, so that it is expired, and
  -- never new, once it is forgotten.
  update {schema}.keys k
     set settled_at = v_now, status = p_status, headers = p_headers, body = p_body,
         aged_from = greatest(v_now, {schema}.key_time(p_key))
   where k.tenant = p_tenant and k.key = p_key and k.token = p_token and k.settled_at is null;
  return found or exists (select from {schema}.keys k
                           where k.tenant = p_tenant and k.key = p_key and k.token = p_token and k.settled_at is not null);
end $$;

-- For any language.

-- Raises an error for an invalid key or tenant.
create function {schema}.keys_check(p_key text, p_tenant text) returns void language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  if p_key is null or p_key !~ '^[\x21-\x7e]{1,255}$' then
    raise exception 'Idempotency-Key is invalid: it needs 1 to 255 visible ASCII characters' using errcode = '22023';
  elsif p_tenant = '00000000-0000-0000-0000-000000000000' then
    raise exception 'tenant is invalid: it is the nil UUID, which stands for no tenant; name none' using errcode = '22023';
  elsif length(p_tenant) > 255 or btrim(p_tenant, E' \t\n\x0b\f\r') = '' then
    raise exception 'tenant is invalid: it needs 1 to 255 characters and is not blank' using errcode = '22023';
  end if;
end $$;

-- Begins a request under a client's key: in your transaction, which then also does the work and calls
-- key_finish; or on its own with p_lease_seconds, for work elsewhere. p_fingerprint is a hash of
-- whatever makes two requests the same (who asks, method, path, query and body). Outcomes: 'first'
-- (run it), 'running', 'done' (with the answer), 'mismatch', 'expired', 'outcome-unknown', 'ahead' (a
-- UUIDv7 from a clock that is more than 28 days ahead).
create function {schema}.key_begin(
  p_key text, p_fingerprint bytea, p_tenant text default null, p_nonce bigint default null, p_lease_seconds int default null,
  p_hold boolean default false,
  out outcome text, out token bigint, out mine boolean, out status int, out headers jsonb, out body bytea
) language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare r record;
begin
  perform {schema}.keys_check(p_key, p_tenant);
  if p_fingerprint is null or octet_length(p_fingerprint) not between 8 and 64 then
    raise exception 'fingerprint is invalid: it needs 8 to 64 bytes' using errcode = '22023';
  elsif p_lease_seconds not between 1 and 86400 then
    raise exception 'lease is invalid: % seconds; it needs 1 to 86400', p_lease_seconds using errcode = '22023';
  end if;
  r := {schema}.keys_begin('100ms', coalesce(p_tenant, ''), p_key, p_fingerprint, '[]',
    coalesce(p_nonce, (random() * 9007199254740991)::bigint), p_lease_seconds * 1000000::bigint, case when p_hold then null else 0 end);
  outcome := (array['first', 'running', 'done', 'mismatch', 'expired', 'outcome-unknown', 'ahead'])[r.o_kind];
  mine := r.o_mine;
  if outcome = 'first' then
    token := r.o_token;
  elsif outcome = 'done' then
    token := r.o_token; status := r.o_status; headers := r.o_headers::jsonb; body := r.o_body;
  end if;
end $$;

-- Stores the answer under the token of key_begin. Headers: an array of [name, value]. It never says
-- "not stored" by its result, which many callers do not look at: it raises KF001, and a transaction
-- that did the work cannot be committed without its answer.
create function {schema}.key_finish(
  p_key text, p_token bigint, p_status int, p_body bytea default '', p_headers jsonb default '[]', p_tenant text default null
) returns boolean language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform {schema}.keys_check(p_key, p_tenant);
  if p_status is null or p_status not between 200 and 599 then
    raise exception 'answer is invalid: its status is %; 200 to 599 are statuses of answers', p_status using errcode = '22023';
  elsif p_body is null or octet_length(p_body) > 16777216 then
    raise exception 'answer is invalid: its body needs 0 to 16777216 bytes' using errcode = '22023';
  elsif p_headers is null or jsonb_typeof(p_headers) <> 'array' or exists (select from jsonb_array_elements(
        case jsonb_typeof(p_headers) when 'array' then p_headers else '[]' end) h
        where jsonb_typeof(h) <> 'array' or jsonb_array_length(case jsonb_typeof(h) when 'array' then h else '[]' end) <> 2
          or jsonb_typeof(h->0) <> 'string' or jsonb_typeof(h->1) <> 'string') then
    raise exception 'answer is invalid: its headers are not an array of [name, value]' using errcode = '22023';
  elsif exists (select from jsonb_array_elements(p_headers) h where lower(h->>0) not in
        ('content-type', 'content-encoding', 'content-language', 'location', 'etag', 'last-modified', 'link')) then
    raise exception 'answer is invalid: a header is not among those that are kept' using errcode = '22023';
  elsif p_token is null then
    raise exception 'token is invalid: it is null; key_begin returns one with the outcome first' using errcode = '22023';
  elsif not {schema}.keys_finish(coalesce(p_tenant, ''), p_key, p_token, p_status,
        (select coalesce(jsonb_agg(jsonb_build_array(lower(h->>0), h->>1)), '[]')::text from jsonb_array_elements(p_headers) h), p_body) then
    raise exception 'key % is not held under token %; nothing was stored', p_key, p_token using errcode = 'KF001',
      hint = 'This transaction did not begin the key, or rolled back since, or the lease was lost: roll back.';
  end if;
  return true;
end $$;
