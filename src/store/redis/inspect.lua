-- Looks at locks and writes nothing.
--
-- KEYS  the lock of each, then the queue of each
-- ARGV  the call's number
-- ->    the call's number, the server's time in µs, then {'sight', value or nil, ms left or
--       negative, tickets} or {'error', text}

local call = redis.call
local time = call('TIME')

local function look(lock, queue)
  return { 'sight', call('GET', lock), call('PTTL', lock), call('ZCARD', queue) }
end

local answers = { tonumber(ARGV[1]), time[1] * 1000000 + time[2] }
local count = #KEYS / 2
for i = 1, count do
  local ok, answer = pcall(look, KEYS[i], KEYS[count + i])
  if not ok then
    answer = { 'error', type(answer) == 'table' and answer.err or tostring(answer) }
  end
  answers[i + 2] = answer
end
return answers
