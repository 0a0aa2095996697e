-- Proves, before a connection is used, that its server takes writes and that pushes arrive (O4).
--
-- KEYS  a key that never exists
-- ARGV  the call's number, a channel or '', and what to publish there
-- ->    the call's number, the server's time in µs, then {'published'} or {'error', text}

local time = redis.call('TIME')

local function text(err)
  return type(err) == 'table' and err.err or tostring(err)
end

-- A replica refuses even a delete of nothing. Asked for here, so that a connection to one never
-- counts as standing: its answers about locks are of yesterday. What else may hinder writes just
-- now is each op's own affair.
local ok, err = pcall(redis.call, 'DEL', KEYS[1])
if not ok and text(err):find('READONLY', 1, true) then
  error(err, 0)
end

local answer = { 'published' }
if ARGV[2] ~= '' then
  ok, err = pcall(redis.call, 'PUBLISH', ARGV[2], ARGV[3])
  if not ok then
    answer = { 'error', text(err) }
  end
end
return { tonumber(ARGV[1]), time[1] * 1000000 + time[2], answer }
