-- What every script ends with.
-- It prints what the harness reads: answers by kind, rate, latency in ms.
function done(summary, latency, requests)
  local bad = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
  io.write(string.format(
    'RESULT {"requests": %d, "bad": %d, "status": %d, "seconds": %f, "p50": %f, "p99": %f, "max": %f}\n',
    summary.requests, bad, summary.errors.status, summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end
