-- The pulses of change data capture: one row for each partition of the topic, stamped each second and carried to the
-- topic by Debezium like the rows of modules. The number of partitions is in the key: a row stays in its partition.
create table if not exists {schema}.record_pulse (
  partitions int not null,
  n          int not null,
  at         timestamptz not null,
  primary key (partitions, n)
);

do $$
begin
  -- Only if it must: it would wait for a snapshot that reads the table, and every pulse would wait for it.
  if exists (select from pg_class where oid = '{schema}.record_pulse'::regclass and relreplident <> 'f') then
    alter table {schema}.record_pulse replica identity full;
  end if;
  if not exists (select from pg_publication where pubname = 'hapax_records') then
    create publication hapax_records;
  end if;
  if not exists (select from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
                  where p.pubname = 'hapax_records' and r.prrelid = '{schema}.record_pulse'::regclass) then
    alter publication hapax_records add table {schema}.record_pulse;
  end if;
end $$;
