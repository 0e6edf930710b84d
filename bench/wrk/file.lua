-- A request body from a file: BENCH_BODY names it, BENCH_PATH is where it goes, BENCH_TYPE its content type.
local file = assert(io.open(os.getenv("BENCH_BODY"), "rb"))
local body = file:read("*a")
file:close()
local ready

function init()
  local headers, token = { ["Content-Type"] = os.getenv("BENCH_TYPE") }, os.getenv("BENCH_TOKEN") or ""
  if token ~= "" then
    headers["Authorization"] = "Bearer " .. token
  end
  ready = wrk.format("POST", os.getenv("BENCH_PATH"), headers, body)
end

function request()
  return ready
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
