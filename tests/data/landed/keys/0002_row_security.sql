-- Row security: a transaction sees and changes the keys of the tenant in `hapax.tenant`, and none if that
-- is unset. A setting that an earlier transaction of the session made reads as the empty text, so that
-- means unset too; no tenant is the nil UUID there.
create function {schema}.keys_visible(p_tenant text) returns boolean language sql stable
  return case when p_tenant = '' then current_setting('hapax.tenant', true) = '00000000-0000-0000-0000-000000000000'
    else p_tenant = current_setting('hapax.tenant', true) end;

-- Whether this role looks after the keys of all tenants: it may delete them.
create function {schema}.keys_maintains() returns boolean language sql stable
  return not row_security_active('{schema}.keys'::regclass) or has_table_privilege('{schema}.keys'::regclass, 'DELETE');

alter table {schema}.keys enable row level security;
alter table {schema}.keys force row level security;
create policy keys_tenant on {schema}.keys
  using ({schema}.keys_visible(tenant)) with check ({schema}.keys_visible(tenant));
-- Only when it says so, so that a service that connects as the owner is bound as well.
create policy keys_maintenance on {schema}.keys
  using (current_setting('hapax.maintenance', true) = 'on' and has_table_privilege('{schema}.keys'::regclass, 'DELETE'))
  with check (false);

-- The functions name the tenant that they are called for, and leave the transaction's own as it was.
create function {schema}.keys_enter(p_tenant text) returns text language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
declare v_before text := coalesce(current_setting('hapax.tenant', true), '');
begin
  perform set_config('hapax.tenant', case when p_tenant = '' then '00000000-0000-0000-0000-000000000000' else p_tenant end, true);
  return v_before;
end $$;

alter function {schema}.keys_begin(text, text, text, bytea, text, bigint, bigint, bigint) rename to keys_begin_row;
create function {schema}.keys_begin(
  p_wait text, p_tenant text, p_key text, p_fingerprint bytea, p_parts text, p_nonce bigint, p_lease_us bigint, p_hold_us bigint,
  out o_kind int, out o_token bigint, out o_at timestamptz, out o_mine boolean, out o_parts text, out o_status int, out o_headers text,
  out o_body bytea
) language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare v_before text := {schema}.keys_enter(p_tenant);
begin
  select b.o_kind, b.o_token, b.o_at, b.o_mine, b.o_parts, b.o_status, b.o_headers, b.o_body
    into o_kind, o_token, o_at, o_mine, o_parts, o_status, o_headers, o_body
    from {schema}.keys_begin_row(p_wait, p_tenant, p_key, p_fingerprint, p_parts, p_nonce, p_lease_us, p_hold_us) b;
  perform set_config('hapax.tenant', v_before, true);
end $$;

alter function {schema}.keys_finish(text, text, bigint, int, text, bytea) rename to keys_finish_row;
create function {schema}.keys_finish(
  p_tenant text, p_key text, p_token bigint, p_status int, p_headers text, p_body bytea
) returns boolean language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare v_before text := {schema}.keys_enter(p_tenant); v_stored boolean;
begin
  v_stored := {schema}.keys_finish_row(p_tenant, p_key, p_token, p_status, p_headers, p_body);
  perform set_config('hapax.tenant', v_before, true);
  return v_stored;
end $$;
