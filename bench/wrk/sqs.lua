-- As publish.lua, through the door for AWS SDKs: SendMessage in AWS JSON, as an SDK sends it, but for the signature.
local body = string.rep("0123456789abcdefghij", 10)
local head = '{"QueueUrl":"' .. os.getenv("BENCH_QUEUE") .. '","MessageBody":"' .. body .. '","DelaySeconds":'
local headers = { ["Content-Type"] = "application/x-amz-json-1.0", ["X-Amz-Target"] = "AmazonSQS.SendMessage" }
local counter = 0
local requests = {}

function init()
  for n = 1, 3000 do
    requests[n] = wrk.format("POST", "/aws/sqs/", headers, head .. (600 + n) .. "}")
  end
end

function request()
  counter = counter % 3000 + 1
  return requests[counter]
end

dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "done.lua")
