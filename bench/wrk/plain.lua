-- The same body to the baseline: a handler that reads it and answers.
local body = string.rep("0123456789abcdefghij", 10)

function request()
  return wrk.format("POST", "/", nil, body)
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
