
-- For any language: appends by name, in the caller's own transaction.

-- The canonical form of a JSON payload, which every hapax hashes: keys ordered by bytes, no white
-- space, numbers as written.
create function {schema}.journal_canonical(p_json jsonb, p_depth int default 128) returns text language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  if p_depth = 0 then
    raise exception 'event is invalid: its payload is nested deeper than 128' using errcode = '22023';
  end if;
  return case jsonb_typeof(p_json)
    when 'object' then '{' || coalesce((select string_agg(to_json(o.key)::text || {schema}.journal_canonical(o.value, p_depth - 1) || ',', ''
                                               order by o.key collate "C") from jsonb_each(p_json) o), '') || '}'
    when 'array' then '[' || coalesce((select string_agg({schema}.journal_canonical(a.value, p_depth - 1) || ',', '' order by a.n)
                                         from jsonb_array_elements(p_json) with ordinality a(value, n)), '') || ']'
    else p_json::text end;
end $$;

-- The first half of a SHA-256 over the immutable part: kind, aggregate and payload, each with a tag
-- and its length.
create function {schema}.journal_fingerprint(p_kind text, p_aggregate text, p_payload jsonb) returns bytea language sql immutable
begin atomic
  select substring(sha256(coalesce('\x01'::bytea || int8send(octet_length(p_kind)) || convert_to(p_kind, 'UTF8'), '')
    || '\x02'::bytea || int8send(octet_length(p_aggregate)) || convert_to(p_aggregate, 'UTF8')
    || '\x04'::bytea || int8send(octet_length(c)) || convert_to(c, 'UTF8')) from 1 for 16)
  from {schema}.journal_canonical(p_payload) c;
end;

-- The key bytes of an id: 16 for a canonical UUID, else the text; a text of 16 bytes gets a
-- trailing zero.
create function {schema}.journal_id_key(p_id text) returns bytea language sql immutable
  return case when p_id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$' then decode(replace(p_id, '-', ''), 'hex')
              when octet_length(p_id) = 16 then convert_to(p_id, 'UTF8') || '\x00'::bytea
              else convert_to(p_id, 'UTF8') end;

create function {schema}.journal_id_text(p_key bytea) returns text language sql immutable
  return case when octet_length(p_key) = 16 then encode(p_key, 'hex')::uuid::text
              when octet_length(p_key) = 17 and get_byte(p_key, 16) = 0 then convert_from(substr(p_key, 1, 16), 'UTF8')
              else convert_from(p_key, 'UTF8') end;

-- Raises an error for an invalid name. Null passes, for names that may be missing.
create function {schema}.journal_name(p_what text, p_text text) returns void language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  if length(p_text) > 255 then
    raise exception '% is invalid: it has % characters; the limit is 255', p_what, length(p_text) using errcode = '22023';
  elsif btrim(p_text, E' \t\n\x0b\f\r\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a'
    || E'\u2028\u2029\u202f\u205f\u3000') = '' then
    raise exception '% is invalid: it is empty or blank', p_what using errcode = '22023';
  end if;
end $$;

-- Appends events to an aggregate in the caller's transaction: they appear when it commits, with
-- everything else it did. p_expected is the aggregate's last seq as the caller knows it: 0 for a
-- new one, null for any. Events: [{"id": …, "payload": …, "kind": …, "time": …, "headers": {…},
-- "trace": …}, …]; only the id is required. A conflict is JC001, other content under a known id
-- JM001. Both change nothing, but abort the transaction like every error: use a savepoint to go on.
create function {schema}.append_in(
  p_aggregate text, p_expected bigint, p_events jsonb, p_tenant text default null,
  out o_id text, out o_seq bigint, out o_position bigint, out o_placing text
) returns setof record language plpgsql volatile set lock_timeout = '2s' set enable_seqscan = off
set search_path = pg_catalog, pg_temp as $$
declare
  e record; r record; v_count int; v_tenant text := coalesce(p_tenant, ''); v_ids text[] := '{}';
  v_keys bytea[] := '{}'; v_prints bytea[] := '{}'; v_kinds text[] := '{}'; v_times bigint[] := '{}';
  v_payloads bytea[] := '{}'; v_names text[] := '{}'; v_values text[] := '{}'; v_traces text[] := '{}';
begin
  perform {schema}.journal_name('tenant', p_tenant);
  perform {schema}.journal_name('aggregate', coalesce(p_aggregate, ''));
  if p_expected < 0 then
    raise exception 'expected is invalid: %; a seq is 0 (a new aggregate) or more, null is any', p_expected using errcode = '22023';
  end if;
  v_count := case when jsonb_typeof(p_events) = 'array' then jsonb_array_length(p_events) else 0 end;
  if v_count not between 1 and 1000 then
    raise exception 'append is invalid: it has % events; an array of 1 to 1000 is needed', v_count using errcode = '22023';
  end if;
  for e in
    select x->>'id' as id, x->>'kind' as kind, coalesce(x->'payload', 'null') as payload, x->>'time' as time, x->'headers' as headers,
           x->>'trace' as trace
      from jsonb_array_elements(p_events) with ordinality a(x, n) order by n
  loop
    perform {schema}.journal_name('event id', coalesce(e.id, ''));
    perform {schema}.journal_name('kind', e.kind);
    if e.id = any(v_ids) then
      raise exception 'event id is invalid: % is there twice in one append', e.id using errcode = '22023';
    elsif octet_length(e.payload::text) + octet_length(coalesce(e.headers::text, '')) > 983040 then
      raise exception 'event is invalid: % has % bytes with its headers; 983040 are allowed', e.id,
        octet_length(e.payload::text) + octet_length(coalesce(e.headers::text, '')) using errcode = '22023';
    elsif e.trace !~ '^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$' then
      raise exception 'traceparent is invalid: it is not version-trace-span-flags in hexadecimal' using errcode = '22023';
    elsif jsonb_typeof(e.headers) <> 'object' or exists (select from jsonb_each_text(case jsonb_typeof(e.headers) when 'object' then e.headers end) h
          where h.key = '' or h.value is null) then
      raise exception 'event is invalid: the headers of % are not an object of texts', e.id using errcode = '22023';
    elsif p_expected is null and e.payload #>> '{metadata,kind}' = 'command'
      and regexp_replace(e.kind, '([[:lower:]])([[:upper:]])', '\1 \2', 'g') ~* '(^|[^[:alpha:]])(update|delete)([^[:alpha:]]|$)' then
      raise exception 'expected is invalid: % is an update or delete command and must say which seq of % it expects', e.id, p_aggregate
        using errcode = '22023';
    end if;
    v_ids := v_ids || e.id; v_keys := v_keys || {schema}.journal_id_key(e.id);
    v_prints := v_prints || {schema}.journal_fingerprint(e.kind, p_aggregate, e.payload);
    v_kinds := v_kinds || e.kind; v_payloads := v_payloads || convert_to(e.payload::text, 'UTF8');
    v_times := v_times || (extract(epoch from e.time::timestamptz) * 1000000)::bigint; v_traces := v_traces || e.trace;
    v_names := v_names || (select array_agg(convert_to(h.key, 'UTF8') order by h.key)::text from jsonb_each_text(e.headers) h);
    v_values := v_values || (select array_agg(convert_to(h.value, 'UTF8') order by h.key)::text from jsonb_each_text(e.headers) h);
  end loop;
  begin
    for r in
      select a.* from {schema}.journal_append('2s', false, array[v_tenant], array[p_aggregate], array_fill(1, array[v_count]),
        array_fill(1, array[v_count]), array_fill(p_expected, array[v_count]), array_fill(v_tenant, array[v_count]),
        array_fill(p_aggregate, array[v_count]), v_keys, v_prints, array_fill(null::bigint, array[v_count]), v_kinds, v_times, v_payloads,
        v_names, v_values, v_traces) a order by a.o_kind > 3 desc, a.o_event
    loop
      if r.o_kind = 4 then
        raise exception 'conflict: expected seq %, found seq %', p_expected, r.o_seq
          using errcode = 'JC001', detail = json_build_object('expected', p_expected, 'actual', r.o_seq)::text;
      elsif r.o_kind = 5 then
        raise exception 'the id was used before: % is in the journal with other content, as seq % of its aggregate', v_ids[r.o_event], r.o_seq
          using errcode = 'JM001';
      end if;
      o_id := v_ids[r.o_event]; o_seq := r.o_seq; o_position := r.o_position; o_placing := case r.o_kind when 1 then 'new' else 'repeat' end;
      return next;
    end loop;
  exception when unique_violation then
    raise exception 'one of the ids is being appended to another aggregate right now' using errcode = '40001';
  end;
end $$;

-- Events in readable form.
create view {schema}.journal_events as
  select j.position, nullif(j.tenant, '') as tenant, j.aggregate, j.seq, {schema}.journal_id_text(j.id) as id, j.kind, j.at,
         case when j.time_us between -62135596800000000 and 253402300799999999
              then timestamptz 'epoch' + j.time_us * interval '1 microsecond' end as time, j.trace, j.payload
    from {schema}.journal j;
