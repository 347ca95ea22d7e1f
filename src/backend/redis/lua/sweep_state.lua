-- Records that a sweep begins.
-- KEYS[1]: the ledger. ARGV: the ledger's id, incarnation and last write; the time; until when sweeps
-- delete nothing, or 0.
if is_other_incarnation() then return redis.error_reply('HAPAXSTALE the script was meant for another incarnation of the ledger') end
return redis.call('HSET', KEYS[1] .. ':meta', 'swept_at', ARGV[4], 'paused_until', ARGV[5])
