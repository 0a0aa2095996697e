-- Attempt, enter, withdraw, release, yield, adopt and raise, over any number of locks in one call, each
-- at most once (O2).
--
-- KEYS  the fence, then the lock of each op, then the queue of each
-- ARGV  the call's number with a letter for each op behind it, the owner of each op, the last server
--       time at which A, E and D are of use ('' if there are none; O5), then what else belongs to
--       each op; what is '' at the very end is left out:
--         A ttl        E ttl score|''|ear  Y ttl new
--         R            W                 D ttl from             V draw age
--       ('ear': not to stand for the lock, but to be told when it is free; W7)
-- ->    if all went plainly, a text: the first word again, each R gave up what it held; or that word
--       and a time, and each A, E and Y won, with draws in their order from that time of the server
--       on. Of a lone E or Y also that word, a time and ms or -1: it stands in the queue since that
--       time, which is its score, and the lock is another's for so long.
--       Else the call's number, the server's time, then one answer an op:
--         {'won', draw}  {'busy', ms left or -1, score or nil}  {'not-old'}  {'gone', 1 or 0}
--         {'raised', s or -1}  {'lost'}  {'stale'}  {'error', text}
--       or in short, to A and E: the draw with which it won, and to R: 1, it was held.
--
-- An op that errs has done nothing, or has left a lock whose owner knows (S1): what can fail by
-- type or rights comes before the lock is set, or is caught and undone. Times are in µs, ttls in
-- ms.

-- The copy that goes to clusters says true, and SHARDNUMSUB and SPUBLISH: grants go through the shard
-- that has the lock's slot, by a channel of each lock and registry.
local sharded = false

local call, try, sub = redis.call, redis.pcall, string.sub
local word = ARGV[1]
local count = (#KEYS - 1) / 2
local of_use = ARGV[2 + count]
-- The server's time, in text, as which it goes into the fence, the queue and the reply: to spell a
-- number costs more than to read one.
local clock
if of_use then
  local time = call('TIME')
  clock = time[1] .. sub('00000', #time[2]) .. time[2]
end

-- What most calls meet: nobody waits, or somebody who is there, and nothing is in the way. Then what
-- counts is how often the server is called, how many tables and texts are made, and how many words
-- come and go. In calls of one, acquire and release take redis 7.0 98 k instructions, 44 k of them
-- before a script's first line; SET NX PX and a script that compares and deletes take 34 k. A release
-- that hands over takes 108 k (in full 203 k), a yield 132 k (251 k), or 69 k (150 k) if nobody else
-- waits, and an enter that has to wait 71 k (159 k).
--
-- Whatever is not quite so, an error too, is left undone and without an answer, for what follows to
-- do in full; nothing is made for that before an op needs it.
local wins, freed = 0, 0
-- F1. What the fence held when it was written.
local old
-- K3. What a queue's expiry is set to beyond what it needs: so the tickets of the next second find it
-- long enough.
local spare = 1000
-- First for a call of one op, of which there are most. (Not loops: what is not quite so breaks out.)
local takes
if count == 1 then
  local lock, queue, owner, letter = KEYS[2], KEYS[3], ARGV[2], string.byte(word, -1)
  if letter == 69 or letter == 65 then -- E, A
    repeat
      -- Times of as many digits are in order as texts, too; to read numbers from them takes longer.
      local found = #of_use == #clock and clock <= of_use and try('EXISTS', lock, queue)
      if found == 0 then
        old = try('SET', KEYS[1], clock, 'KEEPTTL', 'GET')
        takes, wins = true, 1
        if tonumber(old or 0) and (not old or #old == #clock and old < clock) then
          local set = try('SET', lock, owner, 'NX', 'PX', ARGV[4])
          if set and set.ok then
            return word .. ' ' .. clock
          end
        end
        break
      elseif letter == 65 or ARGV[5] or found ~= 1 and found ~= 2 then
        break
      end
      -- The lock is another's, and our ticket goes last.
      local value = try('GET', lock)
      if type(value) ~= 'string' or value == owner then
        break
      end
      local left = try('PTTL', lock)
      if type(left) ~= 'number' or left > 1e14 then
        break
      elseif found == 2 then
        -- K2: not if the clock has been set back behind a ticket.
        local later = try('ZRANGE', queue, clock, '+inf', 'BYSCORE', 'LIMIT', '0', '1')
        if later.err or later[1] then
          break
        end
      end
      if try('ZADD', queue, 'NX', clock, owner .. ' ' .. ARGV[4]) ~= 1 then
        break
      end
      local least = (left > 0 and left or 0) + 60000
      local lasts = found == 2 and try('PTTL', queue) or 0
      if type(lasts) ~= 'number' or lasts < least and try('PEXPIRE', queue, least + spare) ~= 1 then
        break
      end
      return word .. ' ' .. clock .. ' ' .. left
    until true
  elseif letter == 82 or letter == 89 then -- R, Y
    repeat
      if try('GET', lock) ~= owner then
        break
      end
      if letter == 82 then
        local found = try('EXISTS', queue)
        if found == 0 and try('DEL', lock) == 1 then
          return word
        elseif found ~= 1 then
          break
        end
      end
      -- S2. Whose turn it is, who is to hear of it, and what stands at the end instead.
      local head = try('ZRANGE', queue, '0', '0', 'WITHSCORES')
      local member, taker, ttl, channel, name, newcomer = head[1], ARGV[5], ARGV[4], nil, nil, nil
      if member then
        local colon = string.find(member, ':', 1, true)
        local _, _, space = string.find(member, '^%d+() [1-9]%d*$', (colon or #member) + 1)
        if not space then
          break
        end
        local prefix = sharded and string.match(KEYS[1], '^(.*):~fence') or sub(KEYS[1], 1, -8)
        local channels = sharded and sub(queue, 1, -#':~queue1' - 1) or prefix
        channel = channels .. ':~grant:' .. sub(member, 1, colon - 1)
        local heard = try('PUBSUB', 'NUMSUB', channel)[2]
        if not heard or heard == 0 then
          break
        end
        if taker then
          -- K2: not if the clock has been set back behind a ticket.
          local later = try('ZRANGE', queue, clock, '+inf', 'BYSCORE', 'LIMIT', '0', '1')
          if later.err or later[1] then
            break
          end
          newcomer = taker .. ' ' .. ttl
        end
        taker, ttl = sub(member, 1, space - 1), sub(member, space + 1)
        name = sub(lock, #prefix + 2)
      elseif letter == 82 or head.err then
        break
      end
      if not clock then
        local time = call('TIME')
        clock = time[1] .. sub('00000', #time[2]) .. time[2]
      end
      -- A full server refuses this, and what is done in full begins with what frees memory (S1).
      old = try('SET', KEYS[1], clock, 'KEEPTTL', 'GET')
      wins = 1
      if not tonumber(old or 0) or old and (#old ~= #clock or old >= clock) then
        break
      end
      if not member then
        if try('SET', lock, taker, 'PX', ttl).ok then
          return word .. ' ' .. clock
        end
        break
      end
      if newcomer then
        -- Before the other leaves, so that the queue is never empty and keeps its expiry (K3).
        if try('ZADD', queue, 'NX', clock, newcomer) ~= 1 then
          break
        end
        local least, lasts = ttl + 60000, try('PTTL', queue)
        if type(lasts) ~= 'number' or lasts < least and try('PEXPIRE', queue, least + spare) ~= 1 then
          try('ZREM', queue, newcomer)
          break
        end
      end
      if try('ZREM', queue, member) == 1 then
        if try('SET', lock, taker, 'PX', ttl).ok then
          local grant = '1 ' .. member .. ' ' .. clock .. ' ' .. clock .. ' ' .. name
          if type(try('PUBLISH', channel, grant)) == 'number' then
            return newcomer and word .. ' ' .. clock .. ' ' .. ttl or word
          end
          -- As if nothing had been done, but for a ttl that goes with the lock: what follows meets
          -- the same, and undoes it (S1).
          try('SET', lock, owner, 'KEEPTTL')
        end
        try('ZADD', queue, head[2], member)
      end
      if newcomer then
        try('ZREM', queue, newcomer)
      end
    until true
  end
end

local now = clock and tonumber(clock)
of_use = tonumber(of_use)

local max = math.max
-- F1. What a fence holds, if draws can go on from there: a double counts no further than 2^53 µs, which
-- is in the year 2255.
local function as_fence(held)
  local number = tonumber(held or 0)
  return number and number < 9e15 and number or nil
end

local ops = string.match(word, '%a+')
local answers = {}
-- F1. What the fence holds, and the last draw that was taken from it.
local fence, drawn

if count == 1 then
  answers[1] = takes
else
  local values = try('MGET', unpack(KEYS, 2, count + 1))
  local is_quiet = try('EXISTS', unpack(KEYS, count + 2)) == 0
  local ours = {}
  for i = 1, values.err and 0 or count do
    local op, value = sub(ops, i, i), values[i]
    local is_ours = op == 'R' and value == ARGV[1 + i]
    -- False also for what is no text: then SET finds it.
    local is_free = not value and (op == 'A' or op == 'E') and now <= of_use
    if (is_ours or is_free) and (is_quiet or try('EXISTS', KEYS[1 + count + i]) == 0) then
      if is_free then
        answers[i] = true
        wins = wins + 1
      else
        answers[i] = 1
        freed = freed + 1
        ours[freed] = KEYS[1 + i]
      end
    end
  end
  -- Before the first SET, since it frees memory (S1). One that is refused has deleted none.
  if freed > 0 and try('DEL', unpack(ours)) ~= freed then
    freed = 0
    for i = 1, count do
      answers[i] = answers[i] == true or nil
    end
  end
end

if wins > 0 then
  -- F1: read and written in one, before the first lock that draws from it is set, with room for all
  -- that are to win. Nearly always the clock is past the fence, so the draws are now and what
  -- follows. If it is not, or this is no fence, that is mended at once; nobody sees it meanwhile, and
  -- no server that took the first write refuses the second. (KEEPTTL: it goes back as it was.)
  if old == nil then
    old = try('SET', KEYS[1], now + wins - 1, 'KEEPTTL', 'GET')
  end
  local was = as_fence(old)
  if was then
    drawn = max(was, now - 1)
    fence = drawn + wins
    if was >= now then
      call('SET', KEYS[1], fence)
    end
  elseif type(old) == 'string' then
    call('SET', KEYS[1], old, 'KEEPTTL')
  end
  local more = 3 + count
  wins = 0
  for i = 1, count do
    if answers[i] == true then
      -- NX, since what MGET shows as nothing may be a list.
      local set = was and try('SET', KEYS[1 + i], ARGV[1 + i], 'NX', 'PX', ARGV[more])
      if set and set.ok then
        wins = wins + 1
        drawn = drawn + 1
        answers[i] = drawn
      else
        answers[i] = nil
      end
    end
    local op = sub(ops, i, i)
    more = more + ((op == 'R' or op == 'W') and 0 or op == 'A' and 1 or 2)
  end
end

if wins + freed == count then
  if wins == 0 then
    return word
  elseif drawn == now + wins - 1 then
    return word .. ' ' .. clock
  end
end

if not now then
  local time = call('TIME')
  clock = time[1] .. sub('00000', #time[2]) .. time[2]
  now = tonumber(clock)
end

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

  local function publish(channel, message)
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
