-- Sets values if they are newer: for each record a marker with its version, and its value.
-- KEYS: marker and value of each. ARGV[1]: 1 for a fill, which may also put back the value of the version that is marked; 2 for
-- an erasure, for which a marker that is no version is older than any.
-- Then for each: version (20 digits), P (present) or D (deleted), TTL of the marker and of the value in ms (0: no end), value.
-- Versions are compared as texts of one length: a number here is a double, which loses integers above 2^53.
local answers = {}
for n = 1, #KEYS / 2 do
  local marker, value = KEYS[2 * n - 1], KEYS[2 * n]
  local at = 2 + (n - 1) * 5
  local version, kind, marker_ms, value_ms = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local known = redis.pcall('GET', marker)
  if ARGV[1] == '2' and known then
    local is_text = type(known) == 'string' and #known == 21 and string.match(known, '^%d+[PD]$')
    if not is_text or string.sub(known, 1, 20) > '18446744073709551615' then
      redis.call('DEL', marker)
      known = false
    end
  end
  if type(known) == 'table' then
    answers[n] = known.err
  else
    local newer = not known or string.sub(known, 1, 20) < version
    if newer or (ARGV[1] == '1' and known == version .. kind) then
      if marker_ms == '0' then
        redis.call('SET', marker, version .. kind)
      else
        redis.call('SET', marker, version .. kind, 'PX', marker_ms)
      end
      if kind == 'D' then
        redis.call('DEL', value)
      elseif value_ms == '0' then
        redis.call('SET', value, ARGV[at + 4])
      else
        redis.call('SET', value, ARGV[at + 4], 'PX', value_ms)
      end
      answers[n] = 'newer'
    else
      answers[n] = 'stale'
    end
  end
end
return answers
