-- A request body from a file: BENCH_BODY names it, BENCH_PATH is where it goes, BENCH_TYPE its content type.
local file = assert(io.open(os.getenv("BENCH_BODY"), "rb"))
local body = file:read("*a")
file:close()
local ready

function request()
  ready = ready or wrk.format("POST", os.getenv("BENCH_PATH"), { ["Content-Type"] = os.getenv("BENCH_TYPE") }, body)
  return ready
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
