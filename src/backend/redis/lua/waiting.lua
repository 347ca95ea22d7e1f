-- Reads part of an index, by time: the start of each row, which includes its order, and the heads
-- of the rows' aggregates. Changes nothing. Payloads stay on the server: they may be large, and few
-- of the waiting rows are needed.
-- KEYS[1]: the ledger. ARGV: the ledger's id, incarnation and last write; the index; the scope's number;
-- the latest time; how many members to skip; how many to return at most; how many bytes of a row to
-- return before and after its aggregate.
-- Returns how many members there were, rows as (member, start), heads as (aggregate, head), and the
-- rows' times.
if is_other_incarnation() then return redis.error_reply('HAPAXSTALE the script was meant for another incarnation of the ledger') end
local p = KEYS[1]
local found = redis.call('ZRANGEBYSCORE', p .. ARGV[4], '-inf', ARGV[6], 'WITHSCORES', 'LIMIT', ARGV[7], ARGV[8])
local before, behind = tonumber(ARGV[9]), tonumber(ARGV[10])
local rows, heads, times, seen = {}, {}, {}, {}
for n = 1, #found, 2 do
  local member = found[n]
  local week, scope, id = string.match(member, '^(%-?%d+):(%d+):(.*)$')
  local row = redis.call('HGET', p .. ':w:' .. week .. ':' .. scope, id) or redis.call('HGET', p .. ':kept', member)
  if row then
    local length = string.byte(row, before - 1) * 256 + string.byte(row, before)
    times[#times + 1] = found[n + 1]
    rows[#rows + 1] = member
    rows[#rows + 1] = string.sub(row, 1, before + length + behind)
    local aggregate = string.sub(row, before + 1, before + length)
    if length > 0 and not seen[aggregate] then
      seen[aggregate] = true
      heads[#heads + 1] = aggregate
      heads[#heads + 1] = redis.call('HGET', p .. ':h:' .. ARGV[5], aggregate) or ''
    end
  end
end
return { #found / 2, rows, heads, times }
