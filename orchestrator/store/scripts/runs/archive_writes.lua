-- Makes small writes about archived runs, together, in a full Redis too: what is moved next frees more. KEYS[1] a hash, or
-- nothing yet, of the slot of all keys. ARGV[1] the commands (JSON). Returns the reply to the first.
-- A script that has written may go on where memory is full: its first write removes a field that nobody has.
local commands, replies = cjson.decode(ARGV[1]), {}
redis.call('HDEL', KEYS[1], '')
for number, command in ipairs(commands) do replies[number] = redis.call(unpack(command)) end
return replies[1]
