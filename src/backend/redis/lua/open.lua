-- Opens the ledger, and creates it if it is missing and may be created. The first caller after a
-- start of the server, or one that misses a write, begins the next incarnation: this stores its number, a
-- unique name, and the last write before it. Tokens continue above the clock's microseconds, so
-- that none is reused, whatever the server has lost.
-- KEYS[1]: the ledger. ARGV: version; oldest version that may work on it; identity rule; a fresh
-- id; whether it may be created; then, if the caller had opened it before: the ledger's id, the
-- incarnation, the last write and the highest token that the caller knows.
-- Returns nothing if there is no ledger; 'gone' or 'older' if the caller's writes are missing; else
-- 'ok', version, oldest version, identity rule, id, incarnation, and the last write before that incarnation.
local p = KEYS[1]
local meta, incarnations = p .. ':meta', p .. ':lives'
local known, incarnation, seen, token = ARGV[6], ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
if redis.call('EXISTS', meta) == 0 then
  if known ~= '' then return { 'gone' } end
  if ARGV[5] ~= '1' then return {} end
  redis.call('HSET', meta, 'version', ARGV[1], 'accepts', ARGV[2], 'identity', ARGV[3], 'ledger', ARGV[4],
    'token', 0, 'stamp', 0, 'weeks', 1, 'scopes', 0, 'life', '0:', 'run', '')
  redis.call('HSET', p .. ':weeks', '0', '0:0')
end
local is = redis.call('HMGET', meta, 'ledger', 'life', 'run', 'stamp', 'token')
if known ~= '' and is[1] ~= known then return { 'gone' } end
if is[3] ~= running() or tonumber(is[4]) < seen then
  is[2] = string.format('%d:%s', tonumber(string.match(is[2], '^%d+')) + 1, ARGV[4])
  redis.call('HSET', meta, 'life', is[2], 'run', running(),
    'token', string.format('%.0f', math.max(tonumber(is[5]), token, present())))
  redis.call('HSET', incarnations, string.match(is[2], '^%d+'), is[4] .. ':' .. is[2])
end
-- An incarnation is identified by its name: two incarnations with the same number diverged at a backup.
local function incarnation_of(number) return redis.call('HGET', incarnations, string.format('%d', number)) or '' end
if incarnation ~= '' then
  local number = tonumber(string.match(incarnation, '^%d+'))
  if string.match(incarnation_of(number), '^%d+:(.*)$') ~= incarnation then return { 'older' } end
  local after = string.match(incarnation_of(number + 1), '^%d+')
  if after and tonumber(after) < seen then return { 'older' } end
end
local base = string.match(incarnation_of(tonumber(string.match(is[2], '^%d+'))), '^%d+')
local says = redis.call('HMGET', meta, 'version', 'accepts', 'identity')
return { 'ok', says[1], says[2], says[3], is[1], is[2], base }
