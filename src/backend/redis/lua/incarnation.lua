-- Identifies the server process that runs this, and the replication history it writes. The first
-- changes with every start and every failover, the second when the process starts or stops
-- following another.
local function running()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') .. ':'
    .. (string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or '')
end
-- Checks that the script runs where its sender expects: ARGV[1] is the ledger, ARGV[2] its incarnation,
-- ARGV[3] the last write acknowledged to the sender. If that write is missing, an older copy was
-- put in place, and the incarnation is over.
local function is_other_incarnation()
  local is = redis.call('HMGET', KEYS[1] .. ':meta', 'ledger', 'life', 'run', 'stamp')
  return is[1] ~= ARGV[1] or is[2] ~= ARGV[2] or is[3] ~= running() or tonumber(is[4]) < tonumber(ARGV[3])
end
