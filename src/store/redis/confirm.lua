-- Writes something that changes nothing. In the replication stream it comes after the writes that made these owners
-- the holders.
--
-- KEYS  the locks
-- ARGV  the owner of each; of a permit, the first of its members
-- ->    for each 1, the lock is its owner's, or 0

local answers, written = {}, false
for i, lock in ipairs(KEYS) do
  local value = redis.pcall('GET', lock)
  local is_held = value == ARGV[i] or type(value) == 'table' and type(redis.pcall('ZSCORE', lock, ARGV[i])) == 'string'
  local left = is_held and redis.call('PTTL', lock) or 0
  -- One write is enough for all of them. It sets the lock's expiry to its present value, and never ends the lock:
  -- one that expires in this millisecond is left alone.
  written = written or left > 0 and redis.call('PEXPIRE', lock, left)
  answers[i] = left > 0 and 1 or 0
end
return answers
