-- Scopes that begin while a week is being dropped. Some ledgers of version 2 have the columns.
set local lock_timeout = '5s'; -- claims wait behind this one
alter table {schema}.dropped
  -- The highest scope number that was given out when the week was closed, also to what was not
  -- committed yet.
  add column if not exists scope_given int,
  -- Scopes beyond scope_max for which it was dropped too: they began later, in transactions that did
  -- not see the close.
  add column if not exists scopes_late int[] not null default '{}';

-- Functions whose parameters have changed: they are made again under their names, with the rights
-- that they have here. These stay for statements that have found them already. The comment says whom
-- they belong to: others may have functions in this schema, too.
do $$
declare r record;
begin
  for r in select p.oid, p.oid::regprocedure as it, p.proname as name
             from pg_proc p join pg_class c on c.oid = '{schema}.dropped'::regclass and c.relowner = p.proowner
            where p.pronamespace = '{schema}'::regnamespace and p.proname in ('claim_one', 'week_state') loop
    execute format('alter function %s rename to %I', r.it, r.name || '_before_3');
    execute format('comment on function %s is %L', r.oid::regprocedure, 'hapax: ' || r.name || ' before version 3');
  end loop;
end $$;
