-- etcd through its JSON gateway: a value of 200 bytes under a key of 12 random bytes, both base64 as it wants them.
local alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
local value = string.rep("MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5", 6) .. "MDEyMzQ1Njc4OTAxMjM0NTY3ODk="
local headers = { ["Content-Type"] = "application/json" }

function init()
  math.randomseed(os.time() + math.floor((os.clock() * 1e6) % 1e6) + tonumber(tostring({}):match("0x(%x+)"), 16) % 1e6)
end

function request()
  local key = {}
  for i = 1, 16 do
    local n = math.random(64)
    key[i] = alphabet:sub(n, n)
  end
  return wrk.format("POST", "/v3/kv/put", headers, '{"key":"' .. table.concat(key) .. '","value":"' .. value .. '"}')
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
