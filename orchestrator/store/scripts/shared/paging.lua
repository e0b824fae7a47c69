-- Shared by the scripts that read a run's log. Follows common.lua.
--
-- One call reads a part of it, bounded in steps and in bytes, but for its first step: Redis serves
-- nobody else meanwhile. The header's `logged` is '<step> <bytes>': so large the records of the steps
-- before that one are, with the run's first input. It holds where it names the run's step; where older
-- versions or a retry have written since, it does not, and the size of each record is read.
local MOST_STEPS, MOST_BYTES, MOST_FIELDS = 200, 262144, 1000

local function size_of(key, name) return redis.call('HSTRLEN', key, name) end

-- Adds what is there of `names` to `out`, as name, value, ...
local function add_fields(key, names, out)
  if #names == 0 then return end
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    if value then
      out[#out + 1] = names[i]
      out[#out + 1] = value
    end
  end
end

-- The log from the step `first` on, after the fields `names`. Returns it as name, value, ...; the step
-- at which to go on, or nil at the log's end; and its bytes. Where all is `small`, no size is read.
local function read_part(first, step, names, small)
  local bytes, at = 0, first
  if not small then
    for _, name in ipairs(names) do bytes = bytes + size_of(log_key, name) end
  end
  while at <= step do
    local own, input = tostring(at), 'input:' .. at
    local size = small and 0 or size_of(log_key, own) + size_of(log_key, input)
    if at > first and (bytes + size > MOST_BYTES or at - first >= MOST_STEPS) then break end
    bytes = bytes + size
    names[#names + 1] = own
    names[#names + 1] = input
    at = at + 1
  end
  local log = {}
  add_fields(log_key, names, log)
  return log, at <= step and at or nil, bytes
end

-- As much as one call may read of the journal's fields `names` from the place `from` on. Returns name,
-- value, ...; and the place at which to go on, or nil after the last.
local function read_journal(names, from)
  local part, bytes, at = {}, 0, from
  while at <= #names and at - from < MOST_FIELDS do
    local size = size_of(journal_key, names[at])
    if at > from and bytes + size > MOST_BYTES then break end
    bytes = bytes + size
    part[#part + 1] = names[at]
    at = at + 1
  end
  local out = {}
  add_fields(journal_key, part, out)
  return out, at <= #names and at or nil
end
