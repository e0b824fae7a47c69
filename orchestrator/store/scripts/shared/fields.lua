-- In front of every script. Fields of a hash as a table of name -> text, or false for one that it lacks.
local function fields_of(key, ...)
  local names, values, found = { ... }, redis.call('HMGET', key, ...), {}
  for i = 1, #names do found[names[i]] = values[i] end
  return found
end

