-- As publish.lua, with a key that no other request has.
local body = string.rep("0123456789abcdefghij", 10)
local head = "POST /v1/topics/bench/messages?delay="
local counter = 0
local run

function init()
  local random = io.open("/dev/urandom", "rb")
  run = string.format("%02x%02x%02x%02x", random:read(4):byte(1, 4))
  random:close()
end

-- Put together by hand: wrk.format would cost more than it has to.
function request()
  counter = counter + 1
  return head .. (600 + counter % 3000) .. "s HTTP/1.1\r\nHost: bench\r\nHadelay-Key: order-" .. run .. "-" .. counter
    .. "\r\nContent-Length: 200\r\n\r\n" .. body
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
