-- Removes records of a lower version than the given one, if they still have it.
-- KEYS: marker and value of each. ARGV[1]: the lowest version that stays (20 digits). Versions are compared as texts of one length. A
-- value without a marker goes too; what is no version, and so was never written by a projection, stays.
local removed = 0
for n = 1, #KEYS / 2 do
  local marker, value = KEYS[2 * n - 1], KEYS[2 * n]
  local known = redis.pcall('GET', marker)
  local is_older = not known
  if type(known) == 'string' then
    local digits = string.sub(known, 1, 20)
    is_older = string.match(digits, '^%d+$') and #digits == 20 and digits < ARGV[1]
  end
  if is_older and redis.call('DEL', marker, value) > 0 then
    removed = removed + 1
  end
end
return removed
