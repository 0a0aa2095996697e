-- Frees locks and looks at nothing else: while their slot is on its way, every script that names
-- another key besides is refused. Who waits finds them free the next time that they ask (W2).
--
-- KEYS  the locks
-- ARGV  the call's number, then the owner of each
-- ->    the call's number, the server's time in µs, then {'gone', 1 or 0} or {'error', text}

local call = redis.call
local time = call('TIME')

local function free(lock, owner)
  if call('GET', lock) ~= owner then
    return { 'gone', 0 }
  end
  call('DEL', lock)
  return { 'gone', 1 }
end

local answers = { tonumber(ARGV[1]), time[1] * 1000000 + time[2] }
for i, lock in ipairs(KEYS) do
  local ok, answer = pcall(free, lock, ARGV[1 + i])
  if not ok then
    answer = { 'error', type(answer) == 'table' and answer.err or tostring(answer) }
  end
  answers[i + 2] = answer
end
return answers
