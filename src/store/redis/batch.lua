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
-- that hands over took 108 k (in full 203 k) and a yield 132 k (251 k) before the message to ourselves,
-- which is 6 k more; a yield takes 69 k (150 k) if nobody else waits, and an enter that has to wait 71 k
-- (159 k).
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
        -- Digits alone: a number that is spelt otherwise may be greater, and yet the lesser text.
        if not old or #old == #clock and old < clock and not string.find(old, '%D') then
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
      if type(left) ~= 'number' or left >= 1e14 then
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
      local member, taker, ttl, newcomer = head[1], ARGV[5], ARGV[4], nil
      local name, channel, own
      if member then
        local colon = string.find(member, ':', 1, true)
        local _, _, space = string.find(member, '^%d+() [1-9]%d*$', (colon or #member) + 1)
        if not space then
          break
        end
        local prefix = sharded and string.match(KEYS[1], '^(.*):~fence') or sub(KEYS[1], 1, -8)
        local channels = sharded and sub(queue, 1, -#':~queue1' - 1) or prefix
        channel = channels .. ':~grant:' .. sub(member, 1, colon - 1)
        own = not sharded and prefix .. ':~grant:' .. string.match(owner, '^[^:]*')
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
      if old and (#old ~= #clock or old >= clock or string.find(old, '%D')) then
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
          if own and own ~= channel then
            -- At the end of its turn the server writes first to the connection for which it last
            -- began to collect, and whom it writes to wakes up and takes its processor: it is to be
            -- the taker, and not who is answered. So our own connection has something before it, of
            -- no content. On 2 processors a hand-over took 166 to 217 µs with it, and 214 to 227 without.
            try('PUBLISH', own, '')
          end
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

