// One library in one role: see ../README.md.
import { ExecutionError, Redlock } from "@sesamecare-oss/redlock";
import { Redis } from "ioredis";
import { Mutex } from "redis-semaphore";
import { writeFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { setImmediate as turn, setTimeout as sleep } from "node:timers/promises";

/** The machine's monotonic clock in nanoseconds, the same in all processes. */
const now = () => Number(process.hrtime.bigint());
const MILLISECOND = 1_000_000;

/** Prints one line of JSON: the word, when it was said, and more. */
const say = (word, more = {}) => console.log(JSON.stringify({ say: word, at: now(), ...more }));

const [lib, role, port, ...rest] = process.argv.slice(2);
const args = Object.fromEntries(rest.map((arg) => arg.split(/=(.*)/s, 2)));
const ttl = Number(args.ttl);

const redis = new Redis({ host: "127.0.0.1", port: Number(port) });
redis.on("error", () => {}); // it connects again by itself

/** Each waits for the lock of a key for as long as it takes. `lost` tells, without asking the server, whether the library
 * has said that it is over. */
const libs = {
  // https://github.com/sesamecare/redlock, which took the place of redlock on npm: `using`, which extends by itself. It
  // tries eleven times; here it is called again for as long as it takes. (`retryCount: -1` would also try for ever to
  // extend and to release a lock that is another's by now.)
  redlock() {
    const redlock = new Redlock([redis]);
    redlock.on("error", () => {});
    return (key) =>
      new Promise((resolve, reject) => {
        let held = false;
        const ask = () => {
          const used = redlock.using([key], ttl, (signal) => {
            held = true;
            return new Promise((end) => {
              resolve({ unlock: () => (end(), used), lost: () => signal.aborted });
            });
          });
          used.catch((error) => {
            if (held || !(error instanceof ExecutionError)) reject(error);
            else ask();
          });
        };
        ask();
      });
  },
  // https://github.com/swarthy/redis-semaphore: it refreshes by itself, and tells a loss through `onLockLost`. By default
  // it waits for 10 s; here as long as it takes.
  "redis-semaphore"() {
    return async (key) => {
      const mutex = new Mutex(redis, key, { lockTimeout: ttl, acquireTimeout: 1e9, onLockLost() {} });
      await mutex.acquire();
      return { unlock: () => mutex.release(), lost: () => !mutex.isAcquired };
    };
  },
};

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const hear = async () => (await lines.next()).value;

/** Many tasks, each of which takes and releases a lock again and again. */
async function run(lock) {
  const tasks = Number(args.tasks);
  const inside = Number(args.inside ?? 0);
  const key = (task) => (args.hot === "1" ? "hot" : `free-${args.name}-${task}`);
  async function one(me, key, end) {
    while (now() < end) {
      const asked = me.waitingSince || now();
      me.waitingSince = asked;
      try {
        const held = await lock(key);
        const at = now();
        if (inside) await sleep(inside);
        me.waitingSince = 0;
        me.turns.push(asked, at, now());
        await held.unlock();
      } catch (error) {
        me.failures++;
        me.error = String(error);
        await sleep(10);
      }
    }
    me.done = true;
  }
  async function all(millis) {
    const end = now() + millis * MILLISECOND;
    const each = Array.from({ length: tasks }, () => ({ turns: [], waitingSince: 0, failures: 0, error: "" }));
    const ended = Promise.all(each.map((me, i) => one(me, key(i), end)));
    // Whoever has no lock long after the end hangs.
    const patience = sleep(millis + Number(args.patience), null, { ref: false });
    await Promise.race([ended, patience]);
    return [each, each.filter((me) => !me.done).length];
  }
  const [, cold] = await all(Number(args.warm));
  say("warm", { hung: cold });
  await hear();
  const begin = now();
  const before = process.cpuUsage();
  const [each, hung] = await all(Number(args.millis));
  const used = process.cpuUsage(before);
  const end = now();
  let text = "";
  each.forEach((me, i) => {
    for (let t = 0; t < me.turns.length; t += 3) {
      text += `${key(i)} ${i} ${me.turns[t]} ${me.turns[t + 1]} ${me.turns[t + 2]}\n`;
    }
    // It waits still, or was refused when it asked last.
    if (me.waitingSince) text += `${key(i)} ${i} ${me.waitingSince} 0 0\n`;
  });
  writeFileSync(args.journal, text);
  const failures = each.reduce((sum, me) => sum + me.failures, 0);
  const error = each.find((me) => me.error)?.error ?? "";
  say("done", { begin, end, cpu: (used.user + used.system) * 1000, hung, failures, error });
}

/** Takes some keys, and releases and takes them again as it is told. */
async function hold(lock) {
  let held = [];
  const take = async () => {
    for (let i = 0; i < Number(args.keys); i++) held.push(await lock(`${args.key}${i}`));
    say("held");
  };
  await take();
  for (let line; (line = await hear()) !== undefined; ) {
    if (line === "lock") {
      await take();
      continue;
    }
    say("releasing");
    await Promise.all(held.map((one) => one.unlock()));
    held = [];
  }
}

/** Works for so many milliseconds under a lock, one at a time, unless the library says that it is lost. Meanwhile others
 * of this process may compute. */
async function work(lock) {
  let held;
  while (!held) held = await lock(`${args.key}0`).catch(() => sleep(100));
  say("held");
  const compute = Number(args.compute ?? 0);
  if (compute) {
    const end = now() + compute * MILLISECOND;
    setImmediate(() => {
      while (now() < end);
    });
  }
  const gaps = [];
  let last = now();
  for (let worked = 0; worked < Number(args.millis) * MILLISECOND && !held.lost(); ) {
    const at = now();
    // When its process was stopped, or had no processor, it did not work.
    if (at - last > 100 * MILLISECOND) gaps.push([last, at]);
    worked += Math.min(at - last, 5 * MILLISECOND);
    last = at;
    await sleep(1);
  }
  say("ended", { last, gaps, told: held.lost() });
  await Promise.resolve(held.unlock()).catch(() => {});
}

/** Many tasks wait for one key. */
async function wait(lock) {
  for (let i = 0; i < Number(args.tasks); i++) {
    const gaveUp = (error) => say("gave-up", { error: String(error) });
    lock(`${args.key}0`).then((held) => held.unlock(), gaveUp);
  }
  await turn();
  say("waiting");
  await hear();
}

try {
  await { run, hold, work, wait }[role](libs[lib]());
  process.exit(0);
} catch (error) {
  say("failed", { error: String(error) });
  process.exit(1);
}
