-- Writes something that comes after what made these owners the holders, in the stream that goes to the replicas, and
-- changes nothing.
--
-- KEYS  the locks
-- ARGV  the owner of each
-- ->    for each 1, the lock is its owner's, or 0

local answers, written = {}, false
for i, lock in ipairs(KEYS) do
  local left = redis.call('GET', lock) == ARGV[i] and redis.call('PTTL', lock) or 0
  -- One write is enough for all of them. It says again when the lock ends, and never ends it: nothing is left of one
  -- that ends in this very millisecond.
  written = written or left > 0 and redis.call('PEXPIRE', lock, left)
  answers[i] = left > 0 and 1 or 0
end
return answers
