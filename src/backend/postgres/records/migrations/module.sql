-- One module. {maintenance}: who may see the records of all tenants, when it says so.
create schema module_{slug};

create table module_{slug}.records (
  id         uuid not null,
  tenant_id  uuid not null,
  payload    jsonb not null,
  seq        bigint not null check (seq > 0),
  created_at timestamptz not null,
  updated_at timestamptz not null,
  -- Unique checks see through row security: without the tenant in front, an insert would tell whether
  -- another tenant has the id.
  primary key (tenant_id, id)
);
alter table module_{slug}.records replica identity full;
alter table module_{slug}.records enable row level security;
alter table module_{slug}.records force row level security;
create policy records_tenant on module_{slug}.records
  using (tenant_id = {schema}.record_tenant()) with check (tenant_id = {schema}.record_tenant());
create policy records_maintenance on module_{slug}.records for select to {maintenance}
  using (current_setting('hapax.maintenance', true) = 'on');
create trigger records_guard before insert or update or delete on module_{slug}.records
  for each row execute function {schema}.record_guard();
create trigger records_no_truncate before truncate on module_{slug}.records
  for each statement execute function {schema}.record_no_truncate();
alter table module_{slug}.records enable always trigger records_guard;
alter table module_{slug}.records enable always trigger records_no_truncate;

do $$
begin
  if not exists (select from pg_publication where pubname = 'hapax_records') then
    create publication hapax_records;
  end if;
end $$;
alter publication hapax_records add table module_{slug}.records;
insert into {schema}.record_modules (slug, maintenance) values ('{slug}', {maintenance_name});
