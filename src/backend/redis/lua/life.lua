-- The server process that runs this, and the history that it writes. The first changes with every start and every failover, the
-- second when the process takes over what another one has, or stops following it.
local function running()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') .. ':'
    .. (string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or '')
end
-- A script is meant for a ledger, a life, and the writes that its sender was told of: ARGV[1], ARGV[2], and the last of these writes in
-- ARGV[3]. If that one is missing, somebody put an older copy in place, and the life is over.
local function is_other_life()
  local is = redis.call('HMGET', KEYS[1] .. ':meta', 'ledger', 'life', 'run', 'stamp')
  return is[1] ~= ARGV[1] or is[2] ~= ARGV[2] or is[3] ~= running() or tonumber(is[4]) < tonumber(ARGV[3])
end
