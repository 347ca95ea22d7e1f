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
-- that they have here, and these go.
do $$
declare r record;
begin
  for r in select p.oid::regprocedure as it, p.proname as name from pg_proc p
            where p.pronamespace = '{schema}'::regnamespace and p.proname in ('claim_one', 'week_state') loop
    execute format('alter function %s rename to %I', r.it, r.name || '_before');
  end loop;
end $$;
