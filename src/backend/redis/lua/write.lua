-- Writes a decision, if nothing it was based on has changed and little time has passed.
-- KEYS[1]: the ledger. ARGV: the ledger's id, incarnation and last write; when it was decided; the version
-- of the weeks; the number of scopes, if one is new; the highest token; the number of checks, each
-- (key, field, stamp or nothing); then the actions.
-- Returns 'ok' and the number of the write, or why nothing was written.
if is_other_incarnation() then return redis.error_reply('HAPAXSTALE the script was meant for another incarnation of the ledger') end
local p = KEYS[1]
local at = 3
local function take()
  at = at + 1
  return ARGV[at]
end
local meta = p .. ':meta'
local decided, weeks, scopes, token = tonumber(take()), take(), take(), tonumber(take())
local now = present()
-- A caller that paused for too long decides again: leases may have expired since.
if math.abs(now - decided) > 1000000 then return { 'late' } end
if (redis.call('HGET', meta, 'weeks') or '0') ~= weeks then return { 'changed' } end
if scopes ~= '' and (redis.call('HGET', meta, 'scopes') or '0') ~= scopes then return { 'changed' } end
for _ = 1, tonumber(take()) do
  local key, field, stamp = take(), take(), take()
  local value = redis.call('HGET', p .. key, field)
  if string.sub(value or '', 1, 6) ~= stamp then return { 'changed' } end
end

-- Every write has its own number, so a value that is written again still differs.
local turn = redis.call('HINCRBY', meta, 'stamp', 1)
local stamp, rest = '', turn
for _ = 1, 6 do
  stamp = string.char(rest % 256) .. stamp
  rest = math.floor(rest / 256)
end
if token > tonumber(redis.call('HGET', meta, 'token') or '0') then
  redis.call('HSET', meta, 'token', string.format('%.0f', token))
end
local touched = string.format('%.0f:%.0f', decided, turn)
local act = {
  set = function() redis.call('HSET', p .. take(), take(), stamp .. take()) end,
  note = function() redis.call('HSET', p .. take(), take(), take()) end,
  del = function() redis.call('HDEL', p .. take(), take()) end,
  zadd = function() redis.call('ZADD', p .. take(), take(), take()) end,
  zrem = function() redis.call('ZREM', p .. take(), take()) end,
  touch = function() redis.call('HSET', p .. ':weeks', take(), touched) end,
  week = function()
    redis.call('HSET', p .. ':weeks', take(), touched)
    redis.call('HINCRBY', meta, 'weeks', 1)
  end,
  -- Voids all earlier decisions that are not written yet.
  fence = function() redis.call('HINCRBY', meta, 'weeks', 1) end,
  scope = function()
    redis.call('HSET', p .. ':scopes', take(), take())
    redis.call('HINCRBY', meta, 'scopes', 1)
  end,
  audit = function() redis.call('LPUSH', p .. ':audit', take()) end,
}
while at < #ARGV do act[take()]() end
return { 'ok', string.format('%.0f', turn) }
