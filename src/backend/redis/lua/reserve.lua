-- Reserves dead letters that nobody has reserved: their score becomes the end of the reservation.
-- Any other write to a row sets its score anew, which ends the reservation. A reservation that is
-- lost with the server costs one more copy.
-- KEYS[1]: the ledger. ARGV: the ledger's id, incarnation and last write; for how many microseconds; then
-- (index, member) of each.
-- Returns the members that were reserved.
if is_other_incarnation() then return redis.error_reply('HAPAXSTALE the script was meant for another incarnation of the ledger') end
local now = present()
local mine = {}
for n = 5, #ARGV, 2 do
  local index = KEYS[1] .. ARGV[n]
  local score = redis.call('ZSCORE', index, ARGV[n + 1])
  if score and tonumber(score) <= now then
    redis.call('ZADD', index, string.format('%.0f', now + tonumber(ARGV[4])), ARGV[n + 1])
    mine[#mine + 1] = ARGV[n + 1]
  end
end
return mine
