// A worker that writes the history as bench/delays/history.py does, or holds its jobs for ever.
import { openSync, readFileSync, writeSync } from "node:fs";
import { Worker } from "bullmq";

const plan = JSON.parse(readFileSync(process.env.DELAYS_PLAN));
const file = openSync(`${plan.history}/work-${process.pid}.jsonl`, "a");
const now = () => performance.timeOrigin + performance.now();
const note = (e, id) => writeSync(file, JSON.stringify({ e, at: now(), ids: [id], pid: process.pid }) + "\n");

const worker = new Worker("bench", async (job) => {
  note("got", job.data.id);
  if (plan.hold) await new Promise(() => {});
  note("done", job.data.id);
}, {
  connection: { host: "127.0.0.1", port: plan.port, maxRetriesPerRequest: null },
  concurrency: 100, lockDuration: plan.visibility_s * 1000, stalledInterval: plan.visibility_s * 1000, maxStalledCount: 3,
});
worker.on("error", (error) => process.stderr.write(`${error}\n`));
process.on("SIGTERM", () => worker.close(true).finally(() => process.exit(0)));
