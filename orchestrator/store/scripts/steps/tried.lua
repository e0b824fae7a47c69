-- Notes that an isolated process begins a step or a tool call. ARGV[2] step, ARGV[3] token, ARGV[4]
-- the index of the call or '', ARGV[5] how many share the process. Returns 1, or 0 where the token owns
-- neither any more. When that owner is lost, the note shows its work.
local index = ARGV[4]
local h = fields_of(run_key, 'token', 'step')
local owner = h.token
if index ~= '' then owner = redis.call('HGET', journal_key, 'o:' .. index) end
if owner ~= ARGV[3] or h.step ~= ARGV[2] then return 0 end
local noted = ARGV[3] .. ' ' .. ARGV[5]
if index == '' then
  redis.call('HSET', run_key, 'trial', noted)
else
  redis.call('HSET', journal_key, 'y:' .. index, noted)
end
return 1
