-- Receives ten messages, and settles ten, by turns. BENCH_API: native, or sqs. The harness reads from the counts of the
-- topic how many were settled.
local sqs = os.getenv("BENCH_API") == "sqs"
local queue = '{"QueueUrl":"' .. os.getenv("BENCH_QUEUE") .. '"'
local types = { ["Content-Type"] = sqs and "application/x-amz-json-1.0" or "application/json" }
local pattern = sqs and '"ReceiptHandle":"([^"]+)"' or '"lease":"([^"]+)"'
local known = {}
local receive

local function aws(target, document)
  types["X-Amz-Target"] = "AmazonSQS." .. target
  return wrk.format("POST", "/aws/sqs/", types, document)
end

function init()
  if sqs then
    receive = aws("ReceiveMessage", queue .. ',"MaxNumberOfMessages":10}')
  else
    receive = wrk.format("POST", "/v1/topics/bench/receive", types, '{"max":10}')
  end
end

function request()
  local count = math.min(#known, 10)
  if count == 0 then
    return receive
  end
  local some = {}
  for i = 1, count do
    local handle = table.remove(known)
    some[i] = sqs and '{"Id":"' .. i .. '","ReceiptHandle":"' .. handle .. '"}' or '"' .. handle .. '"'
  end
  if sqs then
    return aws("DeleteMessageBatch", queue .. ',"Entries":[' .. table.concat(some, ",") .. "]}")
  end
  return wrk.format("POST", "/v1/leases:ack", types, '{"leases":[' .. table.concat(some, ",") .. "]}")
end

function response(status, headers, body)
  if body:find('"body_base64"', 1, true) or body:find('"Body"', 1, true) then
    for handle in body:gmatch(pattern) do
      known[#known + 1] = handle
    end
  end
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
