-- Makes locks last longer. Names the lock keys alone, so that leases survive the migration of
-- their slot, in which every script over several keys is refused.
--
-- KEYS  the locks
-- ARGV  the call's number, then owner and ttl in ms of each
-- ->    the call's number, the server's time in µs, then {'renewed'}, {'lost'} or {'error', text}

local call = redis.call
local time = call('TIME')

-- A renewal never brings a deadline forward (D1).
local function renew(lock, owner, ttl)
  if call('GET', lock) ~= owner then
    return { 'lost' }
  end
  if call('PTTL', lock) < tonumber(ttl) then
    call('PEXPIRE', lock, ttl)
  end
  return { 'renewed' }
end

local answers = { tonumber(ARGV[1]), time[1] * 1000000 + time[2] }
for i, lock in ipairs(KEYS) do
  local ok, answer = pcall(renew, lock, ARGV[2 * i], ARGV[2 * i + 1])
  if not ok then
    answer = { 'error', type(answer) == 'table' and answer.err or tostring(answer) }
  end
  answers[i + 2] = answer
end
return answers
