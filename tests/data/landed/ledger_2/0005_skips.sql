
-- The log of skipped deliveries. An identity has one of a fixed number of slots, so that nothing that
-- arrives makes it grow. Flushes of all processes go one after the other, under an advisory lock; no
-- claim touches it.
create table {schema}.skip (
  slot    int primary key,
  tenant  text not null, -- empty: none
  scope   text not null,
  id      text not null,
  count   bigint not null,
  skips   text not null, -- JSON: the first and the last few
  last_at bigint not null -- microseconds
);

-- Effects that were not done twice, by day; of kind `unlogged`: skips that the log does not have.
create table {schema}.prevented (
  day    int not null, -- since 1970-01-01, UTC
  kind   text not null,
  tenant text not null, -- empty: none
  scope  text not null, -- empty: scopes beyond the limit of that day
  count  bigint not null,
  valued bigint not null,
  value  text not null, -- an exact decimal
  primary key (day, kind, tenant, scope)
);
