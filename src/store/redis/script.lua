-- All operations on locks. One call runs any number of operations (ops), each on another lock. A failed op does
-- not affect the others: it has done nothing, or it has left a lock whose owner knows of it (S1).
--
-- KEYS  the lock of each op; for R..V, K and I then the queue of each; for R..V and K then the
--       subscribers of each, and the fence; a K may also come with the lock alone
-- ARGV  the call's number; a letter for each op; the last server time at which A, E, L and D are of use
--       (O5); the owner of each op; then the second and the third argument of each op, and its mode: '' for
--       exclusive, 'r' for a reader, '<weight>/<limit>' for a permit. Empty arguments at the end may be left
--       out.
--         A attempt: ttl      R release              Y yield: ttl, new owner        N renew: ttl
--         E enter: ttl, score W withdraw: ttl        D adopt: ttl, present value    F free, without hand-over
--         L subscribe: ttl    U unsubscribe          V raise the fence: epoch, age  I inspect
--         S serve the queue   K keep: ms, nobody's name
--         T take it from whoever the owner is; N without a ttl only looks
--       P probe, alone: KEYS are a lock that never exists and its queue; the owner is a channel or
--       '', the second argument is what to publish there.
-- ->    the call's number, the server's time or '', and for each op one of these; as one text with
--       spaces between, or as an array if a table is among them:
--         won: its epoch     busy:<ms left, or -1>:<score or ''>:<+ if the ticket is new>:<mode>:<others>:<owner>,
--             of the holder whose lease ends first (G8); `others`: how many more readers there are, or how much
--             more is taken. {'busy', the same with '' for the owner, the owner} if it is no plain text
--         R, W, U, F, K, S, T: 1 was held, 0 was not   N: 1 renewed  V: seconds that the server is up, or -1
--         stale  lost  not-old  more: the same op must be sent again
--         and after any of these: &, if more tickets may fit, and an S must be sent
--         I: {'key_status', value or nil, ms left or negative, tickets, the first 100 of these, how much is
--             taken, and of each of the first 100 shared holders the owner, the weight, the limit or '', and
--             the end}, without what is over or dead                           {'error', text}
--
-- An exclusive lock is a string, its owner. A shared one is a sorted set (M1): for a reader its owner, for a permit
-- `<owner> <i>/<limit>` for each i up to its weight, with the ends of the leases as scores.
--
-- Times are in µs, ttls in ms. The code above the shortest path runs in every call. A reply of nested
-- tables costs the server as much as two commands. Creating a closure costs half a command, and as much for
-- each variable that it captures.

-- On a cluster grants go through the shard that has the lock's slot, by a channel for each lock.
local publish, numsub, sharded = 'PUBLISH', 'NUMSUB', false

local try, sub = redis.pcall, string.sub
local ops, of_use, count = ARGV[2], ARGV[3], #ARGV[2]
local fence = KEYS[3 * count + 1]
local clock, now, epoch, reserved

local function read_clock()
  local time = redis.call('TIME')
  clock = time[1] .. string.sub('00000', #time[2]) .. time[2]
  now = tonumber(clock)
end

if ops == 'P' then
  -- O4: servers do not say in advance which commands they refuse in a script. So each command is tried in
  -- a form that changes nothing, and all that are refused are named at once.
  local needed = [[time,get L,mget L,set L x XX,del L,pttl L,pexpire L 1,exists Q,zadd Q XX 0 x,zrem Q x,
    zrange Q 0 0,zscore Q x,zcard Q,zcount L 1 0,zremrangebyscore L 1 0,pexpireat L 1,pubsub|]] .. numsub:lower()
  local meant = { L = KEYS[1], Q = KEYS[2], C = ARGV[4], M = ARGV[5] }
  local rights, missing = 'NOPERM the user has no right to ', {}
  local function refusal(command)
    local words = {}
    for word in command:gmatch('[^%s|]+') do
      words[#words + 1] = meant[word] or word
    end
    local result = try(unpack(words))
    local err = type(result) == 'table' and result.err or ''
    if err:find("can't run this command", 1, true) or err:find('no permissions to run', 1, true) then
      missing[#missing + 1] = "'" .. command:match('%S+') .. "'"
    end
    return err
  end
  for command in needed:gmatch('[^,]+') do
    if refusal(command):find('READONLY', 1, true) then
      -- A replica never counts as connected: what it knows of locks may be old.
      return redis.error_reply("READONLY You can't write against a read only replica.")
    end
  end
  if missing[1] then
    return redis.error_reply(rights .. table.concat(missing, ', '))
  end
  read_clock()
  local err = ARGV[4] ~= '' and refusal(publish:lower() .. ' C M') or ''
  return { ARGV[1], clock, err == '' and '1' or { 'error', missing[1] and rights .. missing[1] or err } }
end

if of_use ~= '' then
  read_clock()
end
-- All keys of a call are read by one or two commands. An op reads what these do not show.
local found = fence and (count > 1 or ops == 'R' or of_use ~= '') and try('EXISTS', unpack(KEYS, 1, 3 * count))

-- The shortest path: one lock that is free or released, and an empty queue. F1, F3: as in `next_epoch`.
if found == 0 and count == 1 and (ops == 'A' or ops == 'E' or ops == 'L') and not ARGV[7] and clock <= of_use then
  local last = try('SET', fence, clock, 'KEEPTTL', 'GET')
  local is_later = not last or (tonumber(last) or 9e15) < now
  if is_later and try('SET', KEYS[1], ARGV[4], 'PX', ARGV[5]).ok then
    return ARGV[1] .. ' ' .. clock .. ' +'
  elseif not is_later then
    try('SET', fence, last, 'KEEPTTL')
  end
elseif found == 1 and ops == 'R' and try('GET', KEYS[1]) == ARGV[4] and try('DEL', KEYS[1]) == 1 then
  return ARGV[1] .. '  1'
elseif ops == 'W' and fence and not ARGV[7] then
  -- Of a lock that somebody else has: many may give up at once (G3).
  local value = try('GET', KEYS[1])
  if type(value) == 'string' and value ~= ARGV[4] and tonumber(try('ZREM', KEYS[2], ARGV[4] .. ' ' .. ARGV[5])) then
    return ARGV[1] .. '  0'
  end
end

-- F1: the fence is written before the first lock that takes its epoch from it is set, with room for
-- every op. A double is exact up to 2^53. KEEPTTL: a key that is no fence is left as it was.
-- F3: `n .. ''` would lose the last digits of a number of 16. Formatting one costs more than reusing `clock`.
local function next_epoch()
  if not epoch then
    local last = count == 1 and clock or string.format('%d', now + count - 1)
    local old = redis.call('SET', fence, last, 'KEEPTTL', 'GET')
    local held = tonumber(old or 0)
    if not (held and held < 9e15) then
      redis.call('SET', fence, old, 'KEEPTTL')
      error('WRONGTYPE the fence ' .. fence .. ' holds no number to go on from', 0)
    elseif held >= now then
      redis.call('SET', fence, string.format('%d', held + count))
    end
    epoch = math.max(held, now - 1)
    reserved = epoch + count
  end
  epoch = epoch + 1
  if epoch > reserved then
    -- A call on shared locks may have many winners.
    reserved = epoch + 63
    redis.call('SET', fence, string.format('%d', reserved))
  end
  return epoch == now and clock or string.format('%d', epoch)
end

local reply, values = { ARGV[1], clock or '' }, found ~= 0 and count > 1 and try('MGET', unpack(KEYS, 1, count)) or {}

-- Answers with a table cannot be joined into one text.
local function finish()
  local is_flat, text = pcall(table.concat, reply, ' ')
  return is_flat and text or reply
end

-- The same for many locks, before the functions that other ops need are created.
if fence and count > 1 then
  local held, free, freed = 0, {}, {}
  for i = 1, count do
    held = values[i] and held + 1 or held
  end
  for i = 1, count do
    local op, value = sub(ops, i, i), values[i]
    local releases = op == 'R' and value == ARGV[3 + i]
    if
      (releases or not value and (op == 'A' or op == 'E' or op == 'L') and clock <= of_use)
      and (ARGV[3 + 3 * count + i] or '') == ''
      and (found == held or try('EXISTS', KEYS[i], KEYS[count + i], KEYS[2 * count + i]) == (value and 1 or 0))
    then
      if releases then
        freed[#freed + 1] = KEYS[i]
        reply[2 + i] = '1'
      else
        free[#free + 1] = i
      end
    end
  end
  -- First, since it frees memory (S1). If it is refused, nothing was deleted.
  if freed[1] and try('DEL', unpack(freed)) ~= #freed then
    freed, reply = {}, { ARGV[1], clock or '' }
  end
  for n = 1, free[1] and pcall(next_epoch) and #free or 0 do
    local i = free[n]
    local set = try('SET', KEYS[i], ARGV[3 + i], 'PX', ARGV[3 + count + i])
    epoch = n == 1 and epoch or epoch + 1
    reply[2 + i] = set.err and { 'error', set.err } or epoch == now + n - 1 and '+' or string.format('%d', epoch)
  end
  if #free + #freed == count and (epoch or not free[1]) then
    return finish()
  end
end

if not now then
  read_clock()
  reply[2] = clock
end
local prefix = string.match(KEYS[1], '^[^:]*')

-- Inspections: all ops of the call are. Nothing is written.
if sub(ops, 1, 1) == 'I' then
  local live = {}

  -- How many tickets are in a queue, and the first 100. Those of registries that are gone are left out, as far as the
  -- first 1,000 are looked at.
  local function tickets(queue)
    local total, shown, start = redis.call('ZCARD', queue), {}, 0
    while #shown < 100 and start < 1000 do
      local page = redis.call('ZRANGE', queue, tostring(start), tostring(start + 99))
      for _, ticket in ipairs(page) do
        local instance = string.match(ticket, '^([^%s:]+):%d+ ')
        local channel = (sharded and sub(queue, 1, -9) or prefix) .. ':~grant:' .. (instance or '')
        if instance and live[channel] == nil then
          live[channel] = redis.call('PUBSUB', numsub, channel)[2] > 0
        end
        if not live[channel] then
          total = total - 1
        elseif #shown < 100 then
          shown[#shown + 1] = ticket
        end
      end
      start = #page < 100 and 1000 or start + 100
    end
    return total, shown
  end

  -- The first 100 holders of a shared lock. The members of a permit follow each other: they have one score, and begin
  -- with its owner.
  local function holders(lock)
    local shown, start, last = {}, 0, nil
    repeat
      local page =
        redis.call('ZRANGE', lock, '(' .. clock, '+inf', 'BYSCORE', 'LIMIT', tostring(start), '200', 'WITHSCORES')
      for n = 1, #page, 2 do
        local owner, limit = string.match(page[n], '^(%S+) %d+/(%d+)$')
        owner = owner or page[n]
        if owner == last then
          shown[#shown - 2] = shown[#shown - 2] + 1
        elseif #shown == 400 then
          return shown
        else
          for _, field in ipairs({ owner, 1, limit or '', page[n + 1] }) do
            shown[#shown + 1] = field
          end
          last = owner
        end
      end
      start = start + 200
    until #page < 400
    return shown
  end

  local function look(lock, queue)
    local value, taken, shown = try('GET', lock), 0, {}
    if type(value) ~= 'table' then
      taken = value and 1 or 0
    else
      local first = redis.call('ZRANGE', lock, '0', '0')[1]
      if not string.match(first, '^[^%s:]+:%d+$') and not string.match(first, '^[^%s:]+:%d+ %d+/%d+$') then
        error('WRONGTYPE the sorted set ' .. lock .. ' is no lock', 0)
      end
      value, taken, shown = false, redis.call('ZCOUNT', lock, '(' .. clock, '+inf'), holders(lock)
    end
    local total, queued = tickets(queue)
    return { 'key_status', value, redis.call('PTTL', lock), total, queued, taken, shown }
  end

  for i = 1, count do
    local ok, result = pcall(look, KEYS[i], KEYS[count + i])
    reply[2 + i] = ok and result or { 'error', result.err or result }
  end
  return reply
end

-- G3: how many tickets and subscribers of dead registries one call removes.
local clears = 100
local TICKET, LISTENER = '^(([^%s:]+):%d+) ([1-9]%d*)$', '^(([^%s:]+):%d+)$'
local SHARED_TICKET = '^(([^%s:]+):%d+) ([1-9]%d*) (%S+)$'

-- The first member of a queue, or of the subscribers, whose registry is alive: its channel is subscribed to.
-- (The result of PUBLISH proves nothing: replicas pass messages on, and pattern subscriptions count, too.)
-- Members before it are dropped, and nothing is published to them (S2).
local function first_live(op, set, pattern)
  while true do
    local head = redis.call('ZRANGE', set, '0', '0', 'WITHSCORES')
    if not head[1] then
      return nil
    end
    local owner, instance, ttl = string.match(head[1], pattern)
    local mode = ''
    if not owner and pattern == TICKET then
      owner, instance, ttl, mode = string.match(head[1], SHARED_TICKET)
      owner = (mode == 'r' or mode and string.match(mode, '^[1-9]%d*/[1-9]%d*$')) and owner
    end
    local channel = owner and (sharded and string.sub(op.queue, 1, -9) or prefix) .. ':~grant:' .. instance
    if channel and redis.call('PUBSUB', numsub, channel)[2] > 0 then
      if mode ~= '' and not op.is_mixed then
        error({ 'mixed' }, 0)
      end
      return head, owner, ttl, channel, mode
    elseif clears == 0 then
      error({ 'more' }, 0)
    end
    clears = clears - 1
    redis.call('ZREM', set, head[1])
  end
end

-- Adds a ticket or a subscriber, or leaves it where it is (K1). Its earlier score is kept, unless the clock
-- has been set back behind it (K2). Removing the last member deletes a set and its expiry, so each ZADD
-- sets the expiry again: 60 s more than the lock lasts, never shorter (K3). One more second saves the next
-- ZADD that write.
local added
local function stand(set, member, place, left)
  if not place or place > now then
    local last = redis.call('ZRANGE', set, '-1', '-1', 'WITHSCORES')[2]
    place = last and math.max(now, last + 1) or now
  end
  local score = place == now and clock or string.format('%d', place)
  added = redis.call('ZADD', set, 'NX', score, member) == 1 and member
  score = added and score or string.format('%d', redis.call('ZSCORE', set, member))
  local expiry = math.max(left, 0) + 60000
  if redis.call('PTTL', set) < expiry then
    redis.call('PEXPIRE', set, expiry + 1000)
  end
  return score
end

-- S2: gives the lock to the first ticket, and adds `member` to `set`. The ticket is removed first, since
-- that frees memory: a full server refuses a script whose first write needs memory. State first,
-- publish last: a lock whose owner cannot be told is free (S1).
local function hand_over(op, head, owner, ttl, channel, set, member, place)
  op.head, added = head, nil
  redis.call('ZREM', op.queue, head[1])
  local grant = '1 ' .. head[1] .. ' ' .. next_epoch() .. ' ' .. clock .. ' ' .. string.sub(op.lock, #prefix + 2)
  place = member and stand(set, member, place, ttl)
  redis.call('SET', op.lock, owner, 'PX', ttl)
  local told = redis.pcall(publish, channel, grant)
  if type(told) == 'table' then
    redis.call('DEL', op.lock)
    error(told)
  end
  return place
end

-- Serves the first ticket, or else frees the lock if it was held. W7: then the first subscriber is notified,
-- and the lock is kept for it for 100 ms, the time that it may take to ask.
local function let_go(op, held)
  local head, owner, ttl, channel = first_live(op, op.queue, TICKET)
  if head then
    return hand_over(op, head, owner, ttl, channel)
  end
  head, owner, ttl, channel = first_live(op, op.listeners, LISTENER)
  if held then
    redis.call('DEL', op.lock)
  end
  if head then
    redis.call('ZREM', op.listeners, head[1])
    redis.pcall('SET', op.lock, owner, 'NX', 'PX', 100)
    if type(redis.pcall(publish, channel, 'freed ' .. string.sub(op.lock, #prefix + 2))) == 'table' then
      redis.call('DEL', op.lock)
    end
  end
end

-- A winner leaves queue and subscribers. Errors of these sets do not concern the lock's owner.
local function wait_no_more(op)
  redis.pcall('ZREM', op.queue, op.owner .. ' ' .. op.ttl)
  redis.pcall('ZREM', op.listeners, op.owner)
end

-- A renewal never brings a deadline forward (D1).
local function lengthen(op)
  if redis.call('PTTL', op.lock) < tonumber(op.ttl) then
    redis.call('PEXPIRE', op.lock, op.ttl)
  end
end

-- One function for all letters: creating one for each would cost every call more than its op.
local function perform(op, letter, known)
  local owner = op.owner
  -- A key that MGET shows as nil may be of another type.
  local value = type(known) == 'string' and known or try('GET', op.lock)
  if type(value) == 'table' then
    error({ 'mixed' }, 0)
  end
  local held = value == owner
  if not held and (letter == 'N' or letter == 'V') then
    return 'lost'
  elseif letter == 'N' then
    if (op.ttl or '') ~= '' then
      lengthen(op)
    end
    return '1'
  elseif letter == 'V' then
    -- The next `next_epoch` of this call continues from there, too.
    local least = tonumber(op.ttl)
    if least >= 9e15 then
      error('ERR no fence can go on from there', 0)
    elseif least > tonumber(redis.call('GET', fence) or 0) then
      redis.call('SET', fence, op.ttl)
    end
    epoch = nil
    local info = op.more == '1' and redis.pcall('INFO', 'server')
    return type(info) == 'string' and info:match('uptime_in_seconds:(%d+)') or '-1'
  end
  local listens, is_yield = letter == 'L' or letter == 'U', letter == 'Y'
  local set = listens and op.listeners or op.queue
  local winner = is_yield and op.more or owner
  local member = letter ~= 'A' and letter ~= 'R' and winner .. (listens and '' or ' ' .. op.ttl)
  if letter == 'R' or letter == 'W' or letter == 'U' then
    local left = member and redis.pcall('ZREM', set, member)
    op.answer = type(left) == 'table' and { 'error', left.err } or held and '1' or '0'
    if held or not value then
      op.frees = held
      let_go(op, held)
    end
    return op.answer
  elseif not is_yield and clock > of_use then
    return 'stale' -- O5: whoever sent this has given it up
  elseif is_yield and not held or letter == 'D' and not held and value ~= op.more then
    return 'not-old'
  elseif not is_yield and held then
    -- S3: a win is proved by the very command that reports it.
    wait_no_more(op)
    local taken = next_epoch()
    lengthen(op)
    return taken
  end
  local place, left, holder = letter == 'E' and tonumber(op.more or ''), nil, value
  if value and not is_yield and letter ~= 'D' then
    left = redis.call('PTTL', op.lock)
    place = member and stand(set, member, place, left)
  else
    -- Whoever knows the owner's name may take its lock, and the queue stays.
    local head, first, ttl, channel
    if letter ~= 'D' then
      head, first, ttl, channel = first_live(op, op.queue, TICKET)
    end
    -- K2: before the connection broke, ours may have been in front of all present tickets.
    if not head or first == owner or place and place <= now and place < tonumber(head[2]) then
      local taken = next_epoch()
      redis.call('SET', op.lock, winner, 'PX', op.ttl)
      wait_no_more(op)
      return taken
    end
    left, place, holder = ttl, hand_over(op, head, first, ttl, channel, set, member, place), first
  end
  local answer = string.format('busy:%d:', left) .. (place or '') .. (place and added and ':+:::' or '::::')
  -- A foreign lock may have anything in it, and of any length.
  if #holder > 400 or string.find(holder, "[^!-$%%'-~]") then
    return { 'busy', answer, string.sub(holder, 1, 400) }
  end
  return answer .. holder
end

-- The same for locks and queues in which there are shared leases or tickets, and for what is done seldom: F, K, S and T.
-- Its functions are created only where they are needed.
local function mixed()
  -- M4: how many grants this call has made, whatever its keys.
  local granted = 0

  -- M1: what the lock must be if it is not free: 'r' for a reader, 'p' for a permit of whatever limit, or for an
  -- exclusive mode 'x', which cannot be joined.
  local function kind_of(mode)
    return mode == '' and 'x' or string.find(mode, '/', 1, true) and 'p' or 'r'
  end

  local function members(owner, mode)
    local weight, limit = string.match(mode, '^(%d+)/(%d+)$')
    local names = { not weight and owner or nil }
    for i = 1, tonumber(weight or 0) do
      names[i] = owner .. ' ' .. i .. '/' .. limit
    end
    return names
  end

  -- The mode of an owner that may have the lock, or ''. The members of a permit follow each other.
  local function mode_of(op, owner)
    if not string.match(owner, '^[^%s:]+:%d+$') then
      return ''
    elseif redis.call('ZSCORE', op.lock, owner) then
      return 'r'
    end
    local weight, limit, head = 0, nil, owner .. ' '
    for start = 0, op.count - 1, 1000 do
      for _, member in ipairs(redis.call('ZRANGE', op.lock, tostring(start), tostring(start + 999))) do
        if sub(member, 1, #head) == head then
          weight, limit = weight + 1, string.match(member, '/(%d+)$')
        elseif limit then
          return weight .. '/' .. limit
        end
      end
    end
    return limit and weight .. '/' .. limit or ''
  end

  -- Whether an owner has the lock in just this mode: a text that was made up names no greater weight.
  local function has(op, owner, mode)
    local weight, limit = string.match(mode, '^(%d+)/(%d+)$')
    local last, next = owner, nil
    if weight then
      last = owner .. ' ' .. weight .. '/' .. limit
      next = owner .. ' ' .. string.format('%d', weight + 1) .. '/' .. limit
    end
    return redis.call('ZSCORE', op.lock, last) and not (next and redis.call('ZSCORE', op.lock, next))
  end

  -- How many members must leave before one with this mode may have the lock; nil if all must. A permit counts all that
  -- is taken against its own limit.
  local function missing(op, mode)
    if not op.kind then
      return 0
    elseif mode == '' or op.kind ~= kind_of(mode) then
      return nil
    end
    local weight, limit = string.match(mode, '^(%d+)/(%d+)$')
    return weight and math.max(0, op.count + weight - limit) or 0
  end

  -- A shared lock expires with the last of its leases. That is set once, however many leases have changed.
  local function set_expiry(op)
    local last = op.is_changed and not op.is_string and try('ZRANGE', op.lock, '-1', '-1', 'WITHSCORES')[2]
    if last then
      redis.call('PEXPIREAT', op.lock, string.format('%d', math.ceil(last / 1000)))
    end
    op.is_changed = false
  end

  -- Gives the lock to an owner, or prolongs its lease. A shared lease never ends earlier by that (D1).
  local function take(op, owner, ttl, mode)
    if mode == '' then
      redis.call('SET', op.lock, owner, 'PX', ttl)
    else
      if op.is_string then
        redis.call('DEL', op.lock)
      end
      local ends, scored = string.format('%d', now + ttl * 1000), {}
      for _, member in ipairs(members(owner, mode)) do
        scored[#scored + 1] = ends
        scored[#scored + 1] = member
      end
      op.count = op.count + redis.call('ZADD', op.lock, 'GT', unpack(scored))
    end
    op.first, op.holder = nil, owner
    op.is_string, op.kind, op.is_changed = mode == '', kind_of(mode), true
  end

  local function drop(op, owner, mode)
    op.is_changed = true
    if op.is_string then
      op.is_string, op.kind = false, nil
      return redis.call('DEL', op.lock)
    end
    local dropped = redis.call('ZREM', op.lock, unpack(members(owner, mode)))
    op.count = op.count - dropped
    op.kind = op.count > 0 and op.kind or nil
    return dropped
  end

  -- S2: as in `hand_over`. The last grant of an op that has made all that it may tells its registry to serve the rest,
  -- too (M4).
  local function give(op, head, owner, ttl, channel, mode)
    redis.call('ZREM', op.queue, head[1])
    local format = mode == '' and '1 ' or op.served == op.most - 1 and '3 ' or '2 '
    local grant = format .. head[1] .. ' ' .. next_epoch() .. ' ' .. clock .. ' ' .. string.sub(op.lock, #prefix + 2)
    take(op, owner, ttl, mode)
    local told = redis.pcall(publish, channel, grant)
    if type(told) == 'table' then
      drop(op, owner, mode)
      error(told)
    end
    op.served, granted = op.served + 1, granted + 1
  end

  -- M3: serves tickets from the front as long as they fit, up to that of `owner`, or to one that `place` is before.
  -- Returns the ticket that is in the way.
  local function serve(op, owner, place)
    while op.kind ~= 'x' do
      local ok, head, first, ttl, channel, mode = pcall(first_live, op, op.queue, TICKET)
      if not ok and not op.is_changed then
        error(head, 0)
      elseif not ok or not head then
        op.is_unserved = not ok
        return head
      elseif first == owner or place and place < tonumber(head[2]) then
        return nil
      elseif missing(op, mode) ~= 0 then
        return head, mode
      elseif op.served == op.most then
        op.is_unserved = true
        return head, mode
      elseif not pcall(give, op, head, first, ttl, channel, mode) then
        -- S1: the ticket is back, and its owner finds the lock by asking (W2).
        pcall(stand, op.queue, head[1], tonumber(head[2]), 0)
        return head, mode
      end
    end
    return op.kind
  end

  -- M5: when the ticket in front may have the lock, or else one with `mode`.
  local function may_fit_in(op, mode)
    local head = redis.call('ZRANGE', op.queue, '0', '0')[1]
    local wish = head and string.match(head, '^%S+ %d+ ?(%S*)$') or mode
    local count = missing(op, wish)
    if not count or count == 0 then
      return redis.call('PTTL', op.lock)
    end
    local nth = string.format('%d', count - 1)
    local known = count == 1 and op.served == 0 and op.first_end
    local last = known or redis.call('ZRANGE', op.lock, nth, nth, 'WITHSCORES')[2]
    return math.max(0, math.ceil((last - now) / 1000))
  end

  -- The answer that it is busy, and who has it (G8).
  local function busy(op, mode, place)
    local answer = string.format('busy:%d:', may_fit_in(op, mode)) .. place .. (added and ':+:' or '::')
    local holder, of, others = op.is_string and op.holder or '', '', ''
    local first = op.kind and not op.is_string and (op.first or redis.call('ZRANGE', op.lock, '0', '0')[1])
    if first then
      local permit, limit = string.match(first, '^(%S+) %d+/(%d+)$')
      local weight, members = 1, {}
      if permit and op.count > 1 then
        -- The members of a permit have one score, so they stand together.
        local last = string.format('%d', math.min(op.count, 255) - 1)
        members = redis.call('ZRANGE', op.lock, '0', last)
      end
      while members[weight + 1] and sub(members[weight + 1], 1, #permit + 1) == permit .. ' ' do
        weight = weight + 1
      end
      holder, of, others = permit or first, limit and weight .. '/' .. limit or 'r', op.count - weight
    end
    answer = answer .. of .. ':' .. others .. ':'
    if #holder > 400 or string.find(holder, "[^!-$%%'-~]") then
      return { 'busy', answer, sub(holder, 1, 400) }
    end
    return answer .. holder
  end

  local function run(op, letter)
    local owner, mode = op.owner, op.mode
    local value, held = nil, nil
    op.is_mixed, op.served, op.count = true, 0, 0
    op.most = math.max(1, 64 - granted)
    local first = try('ZRANGE', op.lock, '0', '0', 'WITHSCORES')
    if first.err then
      -- It raises the error if this is no string either.
      value = redis.call('GET', op.lock)
      op.is_string, op.kind, held, op.holder = true, 'x', mode == '' and value == owner, value
    elseif first[1] then
      if not string.match(first[1], '^[^%s:]+:%d+$') and not string.match(first[1], '^[^%s:]+:%d+ %d+/%d+$') then
        error('WRONGTYPE the sorted set ' .. op.lock .. ' is no lock', 0)
      end
      -- M7: a full server refuses a script whose first write needs memory. So a renewal begins with this, and one
      -- that asks does not.
      if letter == 'N' or tonumber(first[2]) <= now then
        if clock <= of_use then
          next_epoch()
        end
        redis.call('ZREMRANGEBYSCORE', op.lock, '-inf', clock)
        first = redis.call('ZRANGE', op.lock, '0', '0', 'WITHSCORES')
      end
      op.kind, op.first, op.first_end = first[1] and kind_of(first[1]), first[1], first[2]
      op.count = op.kind and redis.call('ZCARD', op.lock) or 0
      if letter == 'T' then
        mode = mode_of(op, owner)
      end
      held = mode ~= '' and op.kind and redis.call('ZSCORE', op.lock, members(owner, mode)[1])
    end
    if letter == 'T' then
      letter = 'R'
    end
    if letter == 'N' or letter == 'V' then
      if held and (op.ttl or '') ~= '' then
        take(op, owner, op.ttl, mode)
      end
      return held and '1' or 'lost'
    elseif letter == 'F' then
      -- For a slot that is being moved, where a call with keys besides the lock is refused.
      return held and drop(op, owner, mode) > 0 and '1' or '0'
    elseif letter == 'K' then
      if held then
        -- First, since it frees memory.
        drop(op, owner, mode)
        take(op, op.more, op.ttl, mode)
        -- M8: the end of the lock has moved, and the first in the queue is told. If it cannot be told, it asks by W2.
        local _, _, _, _, channel = pcall(first_live, op, op.queue, TICKET)
        if channel then
          try(publish, channel, 'freed ' .. string.sub(op.lock, #prefix + 2))
        end
      end
      return held and '1' or '0'
    elseif letter == 'D' then
      local is_shared = mode ~= '' and op.kind and not op.is_string
      local old = held and owner or is_shared and has(op, op.more, mode) and op.more
      if not old or clock > of_use then
        return old and 'stale' or 'not-old'
      end
      local taken = next_epoch()
      if old ~= owner then
        drop(op, old, mode)
      end
      take(op, owner, op.ttl, mode)
      return taken
    end
    local place, is_yield = letter == 'E' and tonumber(op.more or ''), letter == 'Y'
    local winner = is_yield and op.more or owner
    local ticket = winner .. ' ' .. (op.ttl or '') .. (mode == '' and '' or ' ' .. mode)
    if letter == 'R' or letter == 'W' or letter == 'U' or letter == 'S' then
      local left = letter == 'W' and try('ZREM', op.queue, ticket) or letter == 'U' and try('ZREM', op.listeners, owner)
      held = held and letter ~= 'S'
      if held then
        drop(op, owner, mode)
      end
      if not serve(op) and not op.kind then
        pcall(let_go, op, false)
      end
      return type(left) == 'table' and { 'error', left.err } or held and '1' or '0'
    elseif is_yield and not held then
      return 'not-old'
    elseif not is_yield and clock > of_use then
      return 'stale'
    elseif is_yield then
      op.kind = nil
    end
    place = place and place <= now and place
    if held and not is_yield or not serve(op, owner, place) and missing(op, mode) == 0 then
      local taken = next_epoch()
      try('ZREM', op.queue, ticket)
      try('ZREM', op.listeners, owner)
      take(op, winner, op.ttl, mode)
      serve(op)
      return taken
    end
    set_expiry(op)
    if letter == 'A' then
      added = nil
      return busy(op, mode, '')
    end
    local set, member = op.queue, ticket
    if letter == 'L' then
      set, member = op.listeners, owner
    end
    place = stand(set, member, place, redis.call('PTTL', op.lock))
    -- With its own ticket where it stands, perhaps in front again.
    return busy(op, mode, place)
  end

  return function(op, letter)
    local ok, result = pcall(run, op, letter)
    set_expiry(op)
    if not ok then
      error(result, 0)
    end
    return result
  end
end

local perform_mixed
for i = 1, count do
  if not reply[2 + i] then
    local op = { lock = KEYS[i], queue = KEYS[count + i], listeners = KEYS[2 * count + i] }
    op.owner, op.ttl, op.more = ARGV[3 + i], ARGV[3 + count + i], ARGV[3 + 2 * count + i]
    op.mode = ARGV[3 + 3 * count + i] or ''
    local ok, result = false, { 'mixed' }
    if op.mode == '' and not string.find('FKST', sub(ops, i, i), 1, true) then
      ok, result = pcall(perform, op, sub(ops, i, i), values[i])
    end
    if not ok and result[1] == 'mixed' then
      perform_mixed, op.answer = perform_mixed or mixed(), nil
      ok, result = pcall(perform_mixed, op, sub(ops, i, i))
    end
    if not ok and op.head then
      -- S1: a failed hand-over is undone, and the ticket is back.
      if added then
        try('ZREM', op.queue, added)
        try('ZREM', op.listeners, added)
      end
      pcall(stand, op.queue, op.head[1], tonumber(op.head[2]), 0)
    end
    if not ok and op.answer and not result[1] then
      -- An error in the hand-over neither keeps the lock locked nor fails the op: waiters find it free by
      -- asking (W2).
      local freed = op.frees and try('DEL', op.lock)
      ok = type(freed) ~= 'table'
      result = ok and op.answer or freed
    end
    -- Servers raise their errors as tables or texts; a field of a text is nil.
    if op.is_unserved and type(result) == 'string' then
      result = result .. '&'
    end
    reply[2 + i] = ok and result or result[1] or { 'error', result.err or result }
  end
end
return finish()
