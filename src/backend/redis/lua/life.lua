-- The server process that runs this. It changes with every start, and with every failover.
local function running() return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') end
-- The ledger and the life that a script was meant for: ARGV[1] and ARGV[2].
local function is_other_life()
  local is = redis.call('HMGET', KEYS[1] .. ':meta', 'ledger', 'life', 'run')
  return is[1] ~= ARGV[1] or is[2] ~= ARGV[2] or is[3] ~= running()
end
