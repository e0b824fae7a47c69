-- Notes at a batch's manifest how far the sweep of a request is, or that it has ended. KEYS[1] manifest, ARGV[1] number of
-- the request, ARGV[2] the row after the last one that was reached, or '' where it has ended. Returns 'noted', 'gone'
-- where there is no such batch any more, or 'superseded' where the request is over, or not the newest. A sweeper that
-- stalled writes nothing then, and undoes no progress of another one.
local h = fields_of(KEYS[1], 'created', 'sweep')
if not h.created then return 'gone' end
local word, number, row = string.match(h.sweep or '', '^(%S+) (%S+) (%d+)$')
if number ~= ARGV[1] then return 'superseded' end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], 'sweep', 'order')
elseif tonumber(ARGV[2]) > tonumber(row) then
  redis.call('HSET', KEYS[1], 'sweep', word .. ' ' .. number .. ' ' .. ARGV[2])
end
return 'noted'
