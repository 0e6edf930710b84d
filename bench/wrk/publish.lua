-- One message of 200 bytes per request to the topic BENCH_TOPIC, or "bench", due within the hour that begins in ten minutes, or in BENCH_DELAY_S seconds.
-- Each thread numbers its own requests.
local body = string.rep("0123456789abcdefghij", 10)
local path = "/v1/topics/" .. (os.getenv("BENCH_TOPIC") or "bench") .. "/messages?delay="
local delay = tonumber(os.getenv("BENCH_DELAY_S") or "600")
local counter = 0
local requests = {}

-- Made beforehand, so that the generator costs little beside what it measures; 3,000 delays, so that no two in a row
-- are alike.
function init()
  local token = os.getenv("BENCH_TOKEN") or ""
  if token ~= "" then
    wrk.headers["Authorization"] = "Bearer " .. token
  end
  for n = 1, 3000 do
    requests[n] = wrk.format("POST", path .. (delay + n) .. "s", nil, body)
  end
end

function request()
  counter = counter % 3000 + 1
  return requests[counter]
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
