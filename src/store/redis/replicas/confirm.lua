-- Writes something that comes after what made these owners the holders, in the stream that goes to the replicas, and
-- changes nothing.
--
-- KEYS  the locks
-- ARGV  the owner of each
-- ->    for each 1, the lock is its owner's, or 0

local values = redis.call('MGET', unpack(KEYS))
local answers, written = {}, false
for i, lock in ipairs(KEYS) do
  local ours = values[i] == ARGV[i]
  if ours and not written then
    -- One write is enough for all of them. It says again when the lock ends, and never ends it: nothing is left of one
    -- that ends in this very millisecond.
    local left = redis.call('PTTL', lock)
    ours = left > 0
    written = ours and redis.call('PEXPIRE', lock, left) == 1
  end
  answers[i] = ours and 1 or 0
end
return answers
