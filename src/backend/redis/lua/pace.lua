-- Notes that a sweep begins. KEYS[1]: the ledger. ARGV: when; until when sweeps forget nothing, or 0.
return redis.call('HSET', KEYS[1] .. ':meta', 'swept_at', ARGV[1], 'paused_until', ARGV[2])
