-- The rest of batch.lua, behind which it is sent: every op that did not go plainly, in full.

local function in_full()
  local prefix = KEYS[1]:match('^(.*):~fence')
  local channels = prefix .. ':~grant:'

  local function channel_of(instance, queue)
    return (sharded and sub(queue, 1, -#':~queue1' - 1) .. ':~grant:' or channels) .. instance
  end

  -- F3: `n .. ''` would lose the last digits of a number of 16.
  local function text(n)
    return n == now and clock or string.format('%.0f', n)
  end

  local function know_fence()
    if not fence then
      fence = as_fence(call('GET', KEYS[1]))
      if not fence then
        error('WRONGTYPE the fence ' .. KEYS[1] .. ' holds no number to go on from', 0)
      end
      drawn = fence
    end
  end

  -- F1. Written with room for every op of the call, before the first lock that draws from it is set.
  local function draw()
    know_fence()
    if drawn == fence then
      local before = max(fence, now - 1)
      call('SET', KEYS[1], text(before + count))
      drawn, fence = before, before + count
    end
    drawn = drawn + 1
    return drawn
  end

  -- K3: taking the last ticket deletes the queue and its expiry with it, so this follows every
  -- ZADD. Never shorter; 60 s more than the lock, since waiters enter again every 10 s at the
  -- latest (W2).
  local function keep(queue, left)
    local expiry = max(left, 0) + 60000
    if call('PTTL', queue) < expiry then
      call('PEXPIRE', queue, expiry + spare)
    end
  end

  -- Puts a ticket into the queue, or leaves it where it stands (K1). A place that was named before
  -- is kept, unless the clock has been set back behind it (K2).
  local function stand(queue, ticket, left)
    local place = tonumber(call('ZSCORE', queue, ticket.member) or nil)
    if not place then
      place = ticket.score
      if not place or place > now then
        local last = call('ZRANGE', queue, '-1', '-1', 'WITHSCORES')
        place = max(now, (tonumber(last[2]) or 0) + 1)
      end
      ticket.is_new = true
      call('ZADD', queue, text(place), ticket.member)
    end
    ticket.score = place
    keep(queue, left)
  end

  -- First to ourselves, of no content: batch.lua says why.
  local own = not sharded and channels .. ARGV[2]:match('^[^:]*')

  local function publish(channel, message)
    if own and own ~= channel then
      try('PUBLISH', own, '')
      own = nil
    end
    call('PUBLISH', channel, message)
  end

  -- S2: a registry is there if its channel has a subscriber. (PUBLISH's own count says nothing:
  -- replicas pass a message on, and patterns make the dead look alive.)
  local subscribers = {}

  local function is_there(channel)
    if subscribers[channel] == nil then
      subscribers[channel] = call('PUBSUB', 'NUMSUB', channel)[2] > 0
    end
    return subscribers[channel]
  end

  -- The first ticket whose registry is there; those before it are dropped, and not published to.
  -- Those with a ttl of 0 only listen, and are passed by: of those that are there, since a queue in
  -- which somebody always stands never runs out, nor would they.
  local function first_live(queue)
    local listening = 0
    while true do
      local head = call('ZRANGE', queue, listening, listening, 'WITHSCORES')
      local member = head[1]
      if not member then
        return nil
      end
      local owner, ttl = member:match('^(%S+) (%d+)$')
      local instance = owner and owner:match('^(.+):%d+$')
      local channel = instance and channel_of(instance, queue)
      if not channel or not is_there(channel) then
        call('ZREM', queue, member)
      elseif ttl == '0' then
        listening = listening + 1
      else
        return {
          member = member,
          score = tonumber(head[2]),
          owner = owner,
          ttl = ttl,
          channel = channel,
        }
      end
    end
  end

  -- W7: the first of those that listen and are there is told that the lock is free, and nobody else
  -- has it for the 100 ms that it may take to ask; called when nobody else stands in the queue.
  local function tell_first(lock, queue)
    while true do
      local member = call('ZRANGE', queue, '0', '0')[1]
      if not member then
        return
      end
      call('ZREM', queue, member)
      local owner, instance = member:match('^((.+):%d+) 0$')
      local channel = instance and channel_of(instance, queue)
      if channel and is_there(channel) then
        local kept = try('SET', lock, owner, 'NX', 'PX', 100)
        local told = pcall(publish, channel, 'freed ' .. lock:sub(#prefix + 2))
        if not told and kept and kept.ok then
          call('DEL', lock) -- it would be kept for one who does not know
        end
        return
      end
    end
  end

  -- Gives the lock to an owner whose ticket, if any, has left the queue: state first, publish last.
  local function set_lock(lock, queue, ticket, newcomer)
    local number = draw()
    if newcomer then
      stand(queue, newcomer, ticket.ttl)
    end
    call('SET', lock, ticket.owner, 'PX', ticket.ttl)
    if ticket.channel then
      local name = lock:sub(#prefix + 2)
      local fields = { '1', ticket.owner, ticket.ttl, text(number), text(now), name }
      local grant = table.concat(fields, ' ')
      local ok, err = pcall(publish, ticket.channel, grant)
      if not ok then
        call('DEL', lock) -- S1: its owner would not know
        error(err, 0)
      end
    end
    return number
  end

  -- The same for a ticket that stands. It leaves first, since that frees memory: a script whose
  -- first write takes memory is refused on a full server. If the rest fails, it stands again (S1).
  local function give(lock, queue, ticket, newcomer)
    know_fence()
    local stood = call('ZREM', queue, ticket.member) == 1
    local ok, result = pcall(set_lock, lock, queue, ticket, newcomer)
    if ok then
      return result
    end
    if newcomer and newcomer.is_new then
      pcall(call, 'ZREM', queue, newcomer.member)
    end
    if stood then
      pcall(call, 'ZADD', queue, text(ticket.score), ticket.member)
      pcall(keep, queue, 0)
    end
    error(result, 0)
  end

  local function hand_over(lock, queue)
    local head = first_live(queue)
    if head then
      give(lock, queue, head)
    end
    return head ~= nil
  end

  -- Serves the next ticket, or else frees the lock if it was held. What hinders a hand-over neither
  -- keeps the lock locked nor fails the op: waiters find it free by themselves (W2).
  local function let_go(lock, queue, held)
    local ok, given = pcall(hand_over, lock, queue)
    if held and not (ok and given) then
      call('DEL', lock)
    end
    if ok and not given then
      pcall(tell_first, lock, queue)
    end
  end

  local function busy(left, ticket)
    return { 'busy', tonumber(left), ticket and ticket.score or false }
  end

  -- S3: a win is proved by the very command that reports it; the ttl is never made shorter.
  local function again(lock, ttl)
    if call('PTTL', lock) < ttl then
      call('PEXPIRE', lock, text(ttl))
    end
    return { 'won', draw() }
  end

  -- For who has won: else its own release would tell it that the lock is free, and keep it from all
  -- others. After the win, which a full server is to refuse (S1), and not for this to fail: what is in
  -- the queue's place is no affair of who has the lock.
  local function listen_no_more(queue, owner, answer)
    try('ZREM', queue, owner .. ' 0')
    return answer
  end

  -- Attempt, or enter if there is a ticket to stand in the queue with.
  local function take(lock, queue, owner, ttl, ticket)
    if now > of_use then
      return { 'stale' } -- O5: whoever sent this has given it up
    end
    local value = call('GET', lock)
    if value == owner then
      know_fence()
      if ticket then
        call('ZREM', queue, ticket.member)
      end
      return listen_no_more(queue, owner, again(lock, ttl))
    end
    if value then
      local left = call('PTTL', lock)
      if ticket then
        stand(queue, ticket, left)
      end
      return busy(left, ticket)
    end
    local head = first_live(queue)
    if not head then
      local number = set_lock(lock, queue, { owner = owner, ttl = ttl })
      return listen_no_more(queue, owner, { 'won', number })
    end
    local place = ticket and ticket.score
    if head.owner == owner then
      head.channel, head.ttl = nil, ttl -- not to be told: this very answer does
      return { 'won', give(lock, queue, head) }
    elseif place and place <= now and place < head.score then
      -- K2: before the connection broke, ours stood in front of all that stand now.
      local ours = { member = ticket.member, score = place, owner = owner, ttl = ttl }
      return { 'won', give(lock, queue, ours) }
    end
    give(lock, queue, head, ticket)
    return busy(head.ttl, ticket)
  end

  local run = {}

  function run.A(lock, queue, owner, ttl)
    return take(lock, queue, owner, tonumber(ttl))
  end

  function run.E(lock, queue, owner, ttl, score)
    local ticket = { member = owner .. ' ' .. ttl, score = tonumber(score) }
    if score == 'ear' then
      ticket = { member = owner .. ' 0', listens = true }
    end
    return take(lock, queue, owner, tonumber(ttl), ticket)
  end

  function run.R(lock, queue, owner)
    local value = call('GET', lock)
    local held = value == owner
    if held or not value then
      let_go(lock, queue, held)
    end
    return { 'gone', held and 1 or 0 }
  end

  -- The op does not name the ttl with which its ticket's text ends; ZSCAN finds it in one step.
  local function leave(queue, owner)
    local found = call('ZSCAN', queue, 0, 'MATCH', owner .. ' *', 'COUNT', 1000000)[2]
    for i = 1, #found, 2 do
      call('ZREM', queue, found[i])
    end
  end

  function run.W(lock, queue, owner)
    local ok, err = pcall(leave, queue, owner)
    local value = call('GET', lock)
    local held = value == owner
    if held or not value then
      let_go(lock, queue, held)
    end
    if not ok then
      error(err, 0)
    end
    return { 'gone', held and 1 or 0 }
  end

  function run.Y(lock, queue, old, ttl, new)
    if call('GET', lock) ~= old then
      return { 'not-old' }
    end
    local head = first_live(queue)
    if not head then
      return { 'won', set_lock(lock, queue, { owner = new, ttl = tonumber(ttl) }) }
    end
    local ticket = { member = new .. ' ' .. ttl }
    give(lock, queue, head, ticket)
    return busy(head.ttl, ticket)
  end

  -- Takes the lock over from the owner that left it to whoever knows its name. The queue stays: its
  -- tickets are served when the new owner is done.
  function run.D(lock, _, owner, ttl, from)
    if now > of_use then
      return { 'stale' } -- O5: the lock would be nobody's for a ttl
    end
    local value = call('GET', lock)
    if value == owner then
      know_fence()
      return again(lock, tonumber(ttl))
    elseif not value or value ~= from then
      return { 'not-old' }
    end
    local number = draw()
    call('SET', lock, owner, 'PX', ttl)
    return { 'won', number }
  end

  -- Raises the fence to a draw that another server of a quorum made; for the lock's owner alone, so
  -- that whoever has the lock next draws after it. `age` 1: tells for how many seconds the server
  -- has been up, as far as we have the right to know.
  function run.V(lock, _, owner, number, age)
    if call('GET', lock) ~= owner then
      return { 'lost' }
    end
    know_fence()
    local least = as_fence(number)
    if not least then
      error('ERR no fence can go on from there', 0)
    end
    if least > fence then
      call('SET', KEYS[1], text(least))
      fence = least
    end
    drawn = max(drawn, least)
    local info = age == '1' and try('INFO', 'server')
    local up = type(info) == 'string' and info:match('uptime_in_seconds:(%d+)')
    return { 'raised', tonumber(up or -1) }
  end

  return run
end

local reply = { tonumber(string.match(word, '%d+')), now }
local run
local more = 3 + count
for i = 1, count do
  local op = sub(ops, i, i)
  local answer = answers[i]
  if not answer then
    run = run or in_full()
    local lock, queue, owner = KEYS[1 + i], KEYS[1 + count + i], ARGV[1 + i]
    local ok, result = pcall(run[op], lock, queue, owner, ARGV[more], ARGV[more + 1])
    -- Some servers raise a table, some a text.
    if not ok then
      result = { 'error', type(result) == 'table' and result.err or tostring(result) }
    end
    answer = result
  end
  reply[i + 2] = answer
  more = more + ((op == 'R' or op == 'W') and 0 or op == 'A' and 1 or 2)
end
return reply
