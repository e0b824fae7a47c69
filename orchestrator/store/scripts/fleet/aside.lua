-- Keeps an entry at the head of a list of bounded length. KEYS[1] the list, ARGV[1] the entry, ARGV[2] how many are kept.
-- Returns 1, or 0 where it is among the newest already: the reply to the first call was lost.
for _, there in ipairs(redis.call('LRANGE', KEYS[1], 0, 9)) do
  if there == ARGV[1] then return 0 end
end
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], 0, tonumber(ARGV[2]) - 1)
return 1
