// Publishes and removes jobs: one JSON document per line on standard input, one answer per line on standard output.
import { createInterface } from "node:readline";
import { Queue } from "bullmq";

const connection = { host: "127.0.0.1", port: Number(process.argv[2]), enableOfflineQueue: false };
const queue = new Queue("bench", { connection, defaultJobOptions: { removeOnComplete: true, attempts: 3 } });
queue.on("error", () => {}); // each call rejects by itself
await queue.waitUntilReady();

async function answer(question) {
  if (question.remove) {
    let count = 0;
    for (const id of question.remove) count += await queue.remove(id);
    return { count };
  }
  await queue.addBulk(question.add.map(({ id, due, padding }) => ({
    name: "deliver", data: { id, padding }, opts: { jobId: id, delay: Math.max(0, due - Date.now() + 1) },
  })));
  return { count: question.add.length };
}

for await (const line of createInterface({ input: process.stdin })) {
  const said = await answer(JSON.parse(line)).catch((error) => ({ error: String(error) }));
  process.stdout.write(JSON.stringify(said) + "\n");
}
process.exit(0);
