"""What the server does in one step: each verb is one Lua script, and all of them begin alike.

Three keys in one hash slot belong to a name: its record (``lease``), the wishes of those who wait,
by the instant of coming (``line``), and when those who wait for long were last heard of (``seen``).
A record is text, one field on a line, so that it is read and written with one command each. Times
are whole microseconds of the server's clock, written with ``%.0f``: Lua would round them otherwise.
What nobody else wants is decided first, with as little Lua as possible.

A script writes the record before it tells anybody: should the server refuse the write, nothing
has happened.
"""

from __future__ import annotations

from fencepost.model.lease import MARK
from fencepost.world.redis import Script

# A record that nobody has touched for so long is forgotten; the time floor keeps its tokens.
RETENTION_MS = 7 * 86_400_000
# Who waits says so at least every second: who has not for so long is stopped, or cut off.
_STALE_US = 5_000_000
_LINE_MS = 60_000
_BREAKS_MS = 90 * 86_400_000
# Of nonces that gave the lease back, the last eight: a late duplicate must not take it again.
_SPENT = 8 * 33

_BEGIN = """
local LEASE, LINE, SEEN = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local text = redis.call('GET', LEASE)
"""

# The record, read and written; ``free`` says whether anybody may have it.
_RECORD = rf"""
local held, token, nonce, spent, ttl, ends, since, who, ended = '0', 0, '', '', 0, 0, 0, '', ''
if text then
    held, token, nonce, spent, ttl, ends, since, who, ended = string.match(text,
        '^1\n([01])\n(%d+)\n([^\n]*)\n([^\n]*)\n(%d+)\n(%d+)\n(%d+)\n([^\n]*)\n(.*)$')
    if not held then
        return redis.error_reply('FENCEPOST ' .. LEASE .. ' has a record of another format')
    end
    token, ttl, ends = tonumber(token), tonumber(ttl), tonumber(ends)
end
-- A clock that was set back must not keep a lease for longer than it was granted.
local moved = ends - now > ttl
if moved then ends = now + ttl end
local free = held == '0' or ends <= now

local function save()
    text = string.format('1\n%s\n%.0f\n%s\n%s\n%.0f\n%.0f\n%.0f\n%s\n%s',
        held, token, nonce, spent, ttl, ends, since, who, ended)
    redis.call('SET', LEASE, text, 'PX', {RETENTION_MS})
end

local function spend()
    if held == '0' and nonce ~= '' then
        spent = string.sub(' ' .. nonce .. spent, 1, {_SPENT})
    end
end

local function grant(whose, long, by)
    spend()
    token = math.max(token + 1, now)
    held, nonce, ttl, ends, since, who, ended = '1', whose, long, now + long, now, by, ''
    save()
end

local function is_spent(whose)
    return whose == nonce and held == '0' or string.find(spent, ' ' .. whose, 1, true)
end

-- A request of that nonce may still be on its way, and nobody waits for what it would be granted.
local function refuse(whose)
    if not is_spent(whose) then
        spent = string.sub(' ' .. whose .. spent, 1, {_SPENT})
        save()
    end
end

local function answer(word)
    return string.format('%s%.0f\n', word, now) .. (text or '')
end
"""

# What most who ask find: nobody has it, nobody waits, and their nonce is new. Needs ``plain``.
_TAKE = rf"""
local me, long = ARGV[1], tonumber(ARGV[2])
if plain and (not text or string.sub(text, 1, 4) == '1\n0\n' and not string.find(text, me, 1, true))
    and redis.call('EXISTS', LINE) == 0 then
    local token, spent, last, nonce = now, ''
    if text then
        last, nonce, spent = string.match(text, '^1\n0\n(%d+)\n([^\n]*)\n([^\n]*)\n')
    end
    if last or not text then
        if last then token = math.max(last + 1, now) end
        if last and nonce ~= '' then spent = string.sub(' ' .. nonce .. spent, 1, {_SPENT}) end
        redis.call('SET', LEASE, string.format('1\n1\n%.0f\n%s\n%s\n%s\n%.0f\n%.0f\n%s\n',
            token, me, spent, ARGV[2], now + long, now, ARGV[3]), 'PX', {RETENTION_MS})
        return token
    end
end
"""

# For those scripts after which somebody else may have the lease.
_LINE = rf"""
local function tell(id, what)
    local heard = redis.pcall('PUBLISH', 'fp:turn:' .. id, what)
    return type(heard) == 'number' and heard > 0
end

-- Give a lease that is free to the first in line who still listens; say whether somebody has it.
-- Who wants something else is only woken. The dead, and those long silent, are passed over, and so
-- is what another version wrote there: whoever still waits says so again.
local function hand(which, asking, may)
    local given = false
    while true do
        local first = redis.call('ZPOPMIN', LINE)
        local wish, came = first[1], first[2]
        if not wish then break end
        local wants, whose, long, id, by =
            string.match(wish, '^([^\n]*)\n([^\n]*)\n(%d+)\n([^\n]*)\n(.*)$')
        if id and now - came >= {_STALE_US} then
            came = redis.call('HGET', SEEN, id) or came
        end
        if id and now - came < {_STALE_US} then
            local for_it = whose ~= '' and wants == which
            if for_it and may then
                grant(whose, tonumber(long), by)
                given = true
                if whose == asking or tell(id, string.format('%s %.0f', whose, token)) then
                    return true
                end
            else
                redis.call('ZADD', LINE, first[2], wish)
                if for_it or tell(id, 'turn') then break end
                redis.call('ZREM', LINE, wish)
            end
        end
    end
    if given then
        held, nonce, ended = '0', '', 'it was offered to one who had just left'
        save()
    end
    return false
end
"""

# Grant the lease, adopt what this nonce has, or say who has it. Those in line come first.
# nonce, ttl, who, which, our own wish in line, whether to take that out of it: 1, or 2 if it might
# come back, since a request that put it there was not answered.
ACQUIRE = Script(
    _BEGIN
    + "local plain = ARGV[5] == ''"
    + _TAKE
    + _RECORD
    + _LINE
    + f"""
local wish, doubted = ARGV[5], ARGV[6] == '2'
if ARGV[6] ~= '' then redis.call('ZREM', LINE, wish) end
if not free then
    if nonce == me then
        ttl, ends = long, now + long
        save()
        if wish ~= '' then redis.call('ZREM', LINE, wish) end
        return -token
    end
    -- A mark takes the place of a mark, for as many permits as either says.
    if string.find(me, '{MARK}', 1, true) == 1 and string.find(nonce, '{MARK}', 1, true) == 1 then
        local most, by = tonumber(string.match(who, '^%d+')), ARGV[3]
        if most > tonumber(string.match(by, '^%d+')) then by = who end
        grant(me, long, by)
        return token
    end
    if doubted then refuse(me) end
    if moved then save() end
    return answer('H')
end
-- Refused by ourselves, with an answer that got lost: it was held then.
if is_spent(me) then return answer(doubted and 'H' or 'S') end
if hand(ARGV[4], me, true) then
    if nonce == me then return token end
    if doubted then refuse(me) end
    return answer('H')
end
grant(me, long, ARGV[3])
if wish ~= '' then redis.call('ZREM', LINE, wish) end
return token
""",
    keys=3,
    arguments=6,
)

# Stand in line, or go on standing there, and be granted the lease if it is free and we are first.
# nonce (empty: only to be woken), ttl, who, which, our wish, when we came (empty: now), our id.
# Who must wait learns how long at most, the last token so far, and when it came.
STAND = Script(
    _BEGIN
    + "local plain = ARGV[1] ~= '' and ARGV[6] == ''"
    + _TAKE
    + _RECORD
    + _LINE
    + f"""
local wish, came = ARGV[5], ARGV[6]
if me ~= '' then
    if not free and nonce == me then
        ttl, ends = long, now + long
        save()
        redis.call('ZREM', LINE, wish)
        return -token
    end
    if is_spent(me) then return answer('S') end
end
local present = string.format('%.0f', now)
if came == '' then
    came = present
else
    redis.call('HSET', SEEN, ARGV[7], present)
    redis.call('PEXPIRE', SEEN, {_LINE_MS})
end
redis.call('ZADD', LINE, 'NX', came, wish)
redis.call('PEXPIRE', LINE, {_LINE_MS})
if me ~= '' then
    if free and hand(ARGV[4], me, true) and nonce == me then return token end
    if moved and not free then save() end
end
return string.format('W%.0f %.0f ', math.max(ends - now, 0), token) .. came
""",
    keys=3,
    arguments=7,
)

# Give the lease back, to the first in line if there is one. nonce, token (empty: any), which.
RELEASE = Script(
    r"""
local text = redis.call('GET', KEYS[1])
local mine = '1\n1\n' .. ARGV[2] .. '\n' .. ARGV[1] .. '\n'
if text and string.sub(text, 1, #mine) == mine and redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('SETRANGE', KEYS[1], 2, '0')
    return 1
end
local LEASE, LINE, SEEN = KEYS[1], KEYS[2], KEYS[3]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
"""
    + _RECORD
    + _LINE
    + """
local me = ARGV[1]
if text and nonce == me and (ARGV[2] == '' or string.format('%.0f', token) == ARGV[2]) then
    if held == '1' then
        held = '0'
        if not hand(ARGV[3], '', true) then
            held, nonce, ended = '0', me, ''
            save()
        end
    end
    return 1
end
if is_spent(me) then return 1 end
return answer('L')
""",
    keys=3,
    arguments=3,
)

# Move the end of a lease that is ours and not over. nonce, token, ttl.
RENEW = Script(
    _BEGIN
    + _RECORD
    + """
if not free and nonce == ARGV[1] and string.format('%.0f', token) == ARGV[2] then
    ttl = tonumber(ARGV[3])
    ends = now + ttl
    save()
    return 1
end
return answer('L')
""",
    keys=1,
    arguments=3,
)

# Take the lease away, write down who and why, and let the next in line have it.
# token, why it ended, which, the rest of a JSON object.
BREAK = Script(
    _BEGIN
    + _RECORD
    + _LINE
    + f"""
if not text or string.format('%.0f', token) ~= ARGV[1] then
    return string.format('T%.0f', token)
end
local fresh = math.max(token + 1, now)
held, nonce, ended, token = '0', '', ARGV[2], fresh
save()
redis.call('LPUSH', KEYS[4], string.format(
    '{{"token":%s,"fresh":%.0f,"at_us":%.0f,%s', ARGV[1], fresh, now, ARGV[4]))
redis.call('LTRIM', KEYS[4], 0, 99)
redis.call('PEXPIRE', KEYS[4], {_BREAKS_MS})
hand(ARGV[3], '', true)
return fresh
""",
    keys=4,
    arguments=4,
)

# Leave the line; if asked to, call whoever is first in it then. our wish, which, whether to call,
# our nonce if a request that put us there was not answered: it must not be granted anything now.
LEAVE = Script(
    _BEGIN
    + _RECORD
    + _LINE
    + r"""
redis.call('ZREM', LINE, ARGV[1])
local doubted = ARGV[4]
if doubted ~= '' and text then
    refuse(doubted)
elseif doubted ~= '' then
    local long, by = string.match(ARGV[1], '^[^\n]*\n[^\n]*\n(%d+)\n[^\n]*\n(.*)$')
    nonce, token, ttl, ends, since, who = doubted, now, tonumber(long), now, now, by
    ended = 'it was withdrawn before it was granted'
    save()
end
if ARGV[3] == '1' then hand(ARGV[2], '', free) end
return 1
""",
    keys=3,
    arguments=4,
)

# Say whether nobody stands before us who was heard of lately. our wish.
FIRST = Script(
    _BEGIN
    + rf"""
for _, wish in ipairs(redis.call('ZRANGE', LINE, 0, 99)) do
    if wish == ARGV[1] then return 1 end
    local came = redis.call('ZSCORE', LINE, wish)
    local id = string.match(wish, '^[^\n]*\n[^\n]*\n%d+\n([^\n]*)\n')
    if id and now - came >= {_STALE_US} then
        came = redis.call('HGET', SEEN, id) or came
    end
    if id and now - came < {_STALE_US} then return 0 end
end
return 1
""",
    keys=3,
    arguments=1,
)

# The record as it is, after the server's time.
PEEK = Script(
    """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
return string.format('P%.0f\\n', now) .. (redis.call('GET', KEYS[1]) or '')
""",
    keys=1,
    arguments=0,
)
