-- Everything that PostgreSQL has built in, once more in public: each operator of two values and each function of plain types
-- writes down who ran it, and does what the true one does.
do $do$
declare
  v_types regtype[] := array['text', 'int8', 'int4', 'int2', 'numeric', 'timestamptz', 'interval', 'uuid', 'bool', 'float8', 'oid',
    'name', 'bytea', 'regclass', 'text[]', 'int8[]', 'jsonb', 'json', 'xid', 'xid8'];
  v_call text;
  r record;
begin
  for r in select o.oid, o.oprname, o.oprleft::regtype as a, o.oprright::regtype as b, o.oprresult::regtype as result
             from pg_operator o where o.oprnamespace = 'pg_catalog'::regnamespace and o.oprleft = any(v_types)
              and o.oprright = any(v_types)
  loop
    execute format('create function public.shadow_%s(%s, %s) returns %s language plpgsql volatile as '
      '$f$ begin perform public.catch(%L); return $1 operator(pg_catalog.%s) $2; end $f$',
      r.oid, r.a, r.b, r.result, format('%s %s %s', r.a, r.oprname, r.b), r.oprname);
    execute format('create operator public.%s (function = public.shadow_%s, leftarg = %s, rightarg = %s)', r.oprname, r.oid, r.a, r.b);
  end loop;
  for r in select p.oid, p.proname, p.proretset, p.prorettype::regtype as result, x.args, x.values
             from pg_proc p, lateral (
               select coalesce(string_agg(t::regtype::text, ', ' order by n), '') as args,
                      coalesce(string_agg('$' || n, ', ' order by n), '') as values
                 from unnest(p.proargtypes::oid[]) with ordinality u(t, n)) x
            where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and p.proargmodes is null and p.provariadic = 0
              and p.proname !~ '(in|out|recv|send|typmod)$' -- of types
              and not exists (select from pg_type t
                               where t.oid = any(p.proargtypes::oid[] || p.prorettype) and t.typtype = 'p' and t.typname <> 'void')
  loop
    v_call := format('pg_catalog.%I(%s)', r.proname, r.values);
    execute format('create function public.%I(%s) returns %s %s language plpgsql volatile as '
      '$f$ begin perform public.catch(%L); %s; end $f$',
      r.proname, r.args, case when r.proretset then 'setof' else '' end, r.result, format('%s(%s)', r.proname, r.args),
      case when r.result = 'void'::regtype then 'perform ' || v_call
           when r.proretset then 'return query select ' || v_call else 'return ' || v_call end);
  end loop;
end $do$;
