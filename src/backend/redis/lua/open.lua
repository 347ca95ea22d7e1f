-- Makes the ledger if it is not there and may be made. KEYS[1]: the ledger. ARGV: version, oldest version that may work on it,
-- identity rule, a fresh id, whether it may be made. Returns version, oldest version, identity rule; nothing if it is not there.
local meta = KEYS[1] .. ':meta'
if redis.call('EXISTS', meta) == 0 then
  if ARGV[5] ~= '1' then return {} end
  redis.call('HSET', meta, 'version', ARGV[1], 'accepts', ARGV[2], 'identity', ARGV[3], 'ledger', ARGV[4],
    'token', 0, 'stamp', 0, 'weeks', 1, 'scopes', 0)
  redis.call('HSET', KEYS[1] .. ':weeks', '0', '0:0')
end
return redis.call('HMGET', meta, 'version', 'accepts', 'identity')
