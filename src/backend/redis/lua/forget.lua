-- Removes rows that have not changed since they were read.
-- KEYS[1]: the ledger. ARGV: the ledger's id, incarnation and last write; rows as (key, field, stamp,
-- index or nothing, member).
-- Returns how many were removed.
if is_other_incarnation() then return redis.error_reply('HAPAXSTALE the script was meant for another incarnation of the ledger') end
local p = KEYS[1]
local gone = 0
for n = 4, #ARGV, 5 do
  local key = p .. ARGV[n]
  if string.sub(redis.call('HGET', key, ARGV[n + 1]) or '', 1, 6) == ARGV[n + 2] then
    redis.call('HDEL', key, ARGV[n + 1])
    if ARGV[n + 3] ~= '' then redis.call('ZREM', p .. ARGV[n + 3], ARGV[n + 4]) end
    gone = gone + 1
  end
end
return gone
