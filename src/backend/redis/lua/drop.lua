-- Drops a week that was not written to since it was scanned, and keeps its open rows.
-- KEYS[1]: the ledger. ARGV: the ledger's id, incarnation and last write; the week; its note when it was
-- scanned; the number of open rows, each (scope, id); then the index entries of rows that go, each
-- (index, member).
-- Returns nothing, or how many rows the week had and how many of them are kept.
if is_other_incarnation() then return redis.error_reply('HAPAXSTALE the script was meant for another incarnation of the ledger') end
local p = KEYS[1]
local at = 3
local function take()
  at = at + 1
  return ARGV[at]
end
local week, noted = take(), take()
if redis.call('HGET', p .. ':weeks', week) ~= noted then return {} end
local kept = 0
for _ = 1, tonumber(take()) do
  local scope, id = take(), take()
  local row = redis.call('HGET', p .. ':w:' .. week .. ':' .. scope, id)
  if row then
    redis.call('HSET', p .. ':kept', week .. ':' .. scope .. ':' .. id, row)
    kept = kept + 1
  end
end
while at < #ARGV do redis.call('ZREM', p .. take(), take()) end
local scopes = tonumber(redis.call('HGET', p .. ':meta', 'scopes') or '0')
local rows = 0
for scope = 1, scopes do
  local key = p .. ':w:' .. week .. ':' .. string.format('%d', scope)
  rows = rows + redis.call('HLEN', key)
  redis.call('UNLINK', key)
end
redis.call('HDEL', p .. ':weeks', week)
-- A week without rows forgets nothing: it bars no scope that was not barred before. Scopes count from 1.
local barred = scopes
if rows == 0 then barred = tonumber(string.match(redis.call('HGET', p .. ':dropped', week) or '', ':(%d+)$') or '0') end
redis.call('HSET', p .. ':dropped', week, string.format('%.0f:%d', present(), barred))
redis.call('HINCRBY', p .. ':meta', 'weeks', 1)
return { rows, kept }
