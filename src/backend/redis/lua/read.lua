-- Reads what a decision needs, in one snapshot, and changes nothing.
-- KEYS[1]: the ledger. ARGV: the ledger's id, incarnation and last write; names of scopes; weeks; rows as
-- (scope, week, id); heads as (scope, aggregate). A length precedes each list. A scope is its index
-- among the names or, if negative, its number.
if is_other_incarnation() then return redis.error_reply('HAPAXSTALE the script was meant for another incarnation of the ledger') end
local p = KEYS[1]
local at = 3
local function take()
  at = at + 1
  return ARGV[at]
end
local meta = redis.call('HMGET', p .. ':meta', 'token', 'weeks', 'scopes')

local numbers, scopes = {}, {}
for n = 1, tonumber(take()) do
  local known = redis.call('HGET', p .. ':scopes', take()) or ''
  scopes[n] = known
  numbers[n] = string.match(known, '^(%d+):')
end
local function number(scope)
  scope = tonumber(scope)
  if scope < 0 then return string.format('%d', -scope) end
  return numbers[scope]
end

local weeks, dropped = {}, {}
for n = 1, tonumber(take()) do
  local week = take()
  weeks[2 * n - 1] = redis.call('HGET', p .. ':weeks', week) or ''
  dropped[week] = redis.call('HGET', p .. ':dropped', week) or ''
  weeks[2 * n] = dropped[week]
end

-- A row starts with its stamp (6 bytes), its state (1), its aggregate's length (2) and its
-- aggregate.
local function head_of(scope, row)
  local length = string.byte(row, 8) * 256 + string.byte(row, 9)
  if length == 0 then return '' end
  return redis.call('HGET', p .. ':h:' .. scope, string.sub(row, 10, 9 + length)) or ''
end

local rows = {}
for n = 1, tonumber(take()) do
  local scope, week, id = number(take()), take(), take()
  local where, row, head = '', '', ''
  if scope then
    row = redis.call('HGET', p .. ':w:' .. week .. ':' .. scope, id) or ''
    where = 'w'
    if row == '' and dropped[week] ~= '' then
      row = redis.call('HGET', p .. ':kept', week .. ':' .. scope .. ':' .. id) or ''
      where = 'k'
    end
    if row == '' then where = '' else head = head_of(scope, row) end
  end
  rows[3 * n - 2], rows[3 * n - 1], rows[3 * n] = where, row, head
end

local heads = {}
for n = 1, tonumber(take()) do
  local scope, aggregate = number(take()), take()
  heads[n] = scope and redis.call('HGET', p .. ':h:' .. scope, aggregate) or ''
end

return {
  string.format('%.0f', present()), meta[1] or '0', meta[2] or '0', redis.call('HLEN', p .. ':weeks'), meta[3] or '0',
  scopes, weeks, rows, heads,
}
