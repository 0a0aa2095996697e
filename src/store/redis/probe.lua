-- Proves, before a connection is used, that its server takes writes and lets us do whatever the
-- scripts do, and that pushes arrive (O4).
--
-- KEYS  a lock that never exists, and its queue
-- ARGV  the call's number, a channel or '', and what to publish there
-- ->    the call's number, the server's time in µs, then {'published'} or {'error', text}

local function text(err)
  return type(err) == 'table' and err.err or tostring(err)
end

-- Every command of every script but PUBLISH, in a form that changes nothing. Servers do not say
-- which command of a script they refused, or only when it is too late: so each is tried beforehand,
-- and those that are missing are named, all at once.
local lock, queue = KEYS[1], KEYS[2]
local needed = {
  { 'TIME' },
  { 'GET', lock },
  { 'MGET', lock },
  { 'SET', lock, '', 'XX' },
  { 'DEL', lock },
  { 'PTTL', lock },
  { 'PEXPIRE', lock, 1 },
  { 'EXISTS', queue },
  { 'ZADD', queue, 'XX', 0, '' },
  { 'ZREM', queue, '' },
  { 'ZRANGE', queue, 0, 0 },
  { 'ZSCORE', queue, '' },
  { 'ZSCAN', queue, 0 },
  { 'ZCARD', queue },
  { 'PUBSUB', 'NUMSUB' },
}

local function is_missing(refusal)
  return refusal:find("can't run this command", 1, true)
    or refusal:find('no permissions to run', 1, true)
end

local missing = {}
for _, command in ipairs(needed) do
  local ok, err = pcall(redis.call, unpack(command))
  if not ok then
    err = text(err)
    if is_missing(err) then
      local name = command[1] == 'PUBSUB' and 'pubsub|numsub' or command[1]:lower()
      missing[#missing + 1] = "'" .. name .. "'"
    elseif err:find('READONLY', 1, true) then
      -- A replica refuses even a delete of nothing. Asked for here, so that a connection to one
      -- never counts as standing: its answers about locks are of yesterday. What else may hinder
      -- writes just now is each op's own affair.
      return redis.error_reply("READONLY You can't write against a read only replica.")
    end
  end
end
if #missing > 0 then
  return redis.error_reply('NOPERM the user has no right to ' .. table.concat(missing, ', '))
end

local time = redis.call('TIME')
local answer = { 'published' }
if ARGV[2] ~= '' then
  local ok, err = pcall(redis.call, 'PUBLISH', ARGV[2], ARGV[3])
  if not ok then
    err = text(err)
    answer = { 'error', is_missing(err) and "NOPERM the user has no right to 'publish'" or err }
  end
end
return { tonumber(ARGV[1]), time[1] * 1000000 + time[2], answer }
