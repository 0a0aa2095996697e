"""One library in one role: see ../README.md."""

import json
import os
import sys
import threading
import time

import redis
import redis_lock

said = threading.Lock()


def now():
    """The machine's monotonic clock in nanoseconds, the same in all processes."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def say(word, **more):
    """Prints one line of JSON: the word, when it was said, and more."""
    with said:
        print(json.dumps({"say": word, "at": now(), **more}), flush=True)


class RedisPy:
    """https://redis.readthedocs.io/en/stable/lock.html: nothing renews its locks, so `timeout` is for all of the work. A
    lock keeps its token in a thread-local."""

    def __init__(self, client, ttl):
        self.client, self.ttl = client, ttl

    def lock(self, key):
        lock = self.client.lock(key, timeout=self.ttl / 1000)
        if not lock.acquire():
            raise RuntimeError("not acquired")
        return Held(lock.release)


class PythonRedisLock:
    """https://python-redis-lock.readthedocs.io: with `auto_renewal`, which it advises for work of unknown length."""

    def __init__(self, client, ttl):
        self.client, self.ttl = client, ttl

    def lock(self, key):
        lock = redis_lock.Lock(self.client, key, expire=max(1, self.ttl // 1000), auto_renewal=True)
        if not lock.acquire():
            raise RuntimeError("not acquired")
        return Held(lock.release)


class Held:
    """`lost` tells, without asking the server, whether the library has said that the lock is over: neither does."""

    def __init__(self, unlock):
        self.unlock = unlock

    def lost(self):
        return False


def run(lib, args):
    """Many threads, each of which takes and releases a lock again and again."""
    tasks, hot = int(args["tasks"]), args.get("hot") == "1"
    inside = int(args.get("inside", 0)) / 1000

    def key(task):
        return "hot" if hot else f"free-{args['name']}-{task}"

    def one(me, key, end):
        while now() < end:
            asked = me["waiting_since"] or now()
            me["waiting_since"] = asked
            try:
                held = lib.lock(key)
                at = now()
                if inside:
                    time.sleep(inside)
                me["waiting_since"] = 0
                me["turns"].append((asked, at, now()))
                held.unlock()
            except Exception as error:
                me["failures"] += 1
                me["error"] = repr(error)
                time.sleep(0.01)

    def all_of(millis):
        end = now() + millis * 1_000_000
        each = [{"turns": [], "waiting_since": 0, "failures": 0, "error": ""} for _ in range(tasks)]
        threads = [threading.Thread(target=one, args=(me, key(i), end), daemon=True) for i, me in enumerate(each)]
        for thread in threads:
            thread.start()
        # Whoever has no lock long after the end hangs.
        patience = end + int(args["patience"]) * 1_000_000
        for thread in threads:
            thread.join(max(0, patience - now()) / 1e9)
        return each, sum(thread.is_alive() for thread in threads)

    _, cold = all_of(int(args["warm"]))
    say("warm", hung=cold)
    sys.stdin.readline()
    begin, used = now(), time.process_time_ns()
    each, hung = all_of(int(args["millis"]))
    end, used = now(), time.process_time_ns() - used
    with open(args["journal"], "w") as out:
        for i, me in enumerate(each):
            for turn in list(me["turns"]):
                print(key(i), i, *turn, file=out)
            # It waits still, or was refused when it asked last.
            if since := me["waiting_since"]:
                print(key(i), i, since, 0, 0, file=out)
    failures = sum(me["failures"] for me in each)
    first = next((me["error"] for me in each if me["error"]), "")
    say("done", begin=begin, end=end, cpu=used, hung=hung, failures=failures, error=first)
    os._exit(0)


def hold(lib, args):
    """Takes some keys, and releases and takes them again as it is told."""

    def take():
        held = [lib.lock(f"{args['key']}{i}") for i in range(int(args["keys"]))]
        say("held")
        return held

    held = take()
    for line in sys.stdin:
        if line.strip() == "lock":
            held = take()
            continue
        say("releasing")
        for one in held:
            one.unlock()
        held = []
    os._exit(0)


def work(lib, args):
    """Works for so many milliseconds under a lock, one at a time, unless the library says that it is lost. Meanwhile
    others of this process may compute."""
    held = None
    while not held:
        try:
            held = lib.lock(args["key"] + "0")
        except Exception:
            time.sleep(0.1)
    say("held")

    def computes(end):
        while now() < end:
            pass

    if compute := int(args.get("compute", 0)):
        end = now() + compute * 1_000_000
        threading.Thread(target=computes, args=(end,), daemon=True).start()
    last, worked, gaps = now(), 0, []
    while worked < int(args["millis"]) * 1_000_000 and not held.lost():
        at = now()
        # When its process was stopped, or had no processor, it did not work.
        if at - last > 100_000_000:
            gaps.append((last, at))
        worked += min(at - last, 5_000_000)
        last = at
        time.sleep(0.001)
    say("ended", last=last, gaps=gaps, told=held.lost())
    try:
        held.unlock()
    except Exception:
        pass
    os._exit(0)


def wait(lib, args):
    """Many threads wait for one key."""

    def one():
        try:
            lib.lock(args["key"] + "0").unlock()
        except Exception as error:
            say("gave-up", error=repr(error))

    for _ in range(int(args["tasks"])):
        threading.Thread(target=one, daemon=True).start()
    say("waiting")
    sys.stdin.readline()
    os._exit(0)


def main():
    name, role, port = sys.argv[1:4]
    args = dict(arg.split("=", 1) for arg in sys.argv[4:])
    libs = {"redis-py": RedisPy, "python-redis-lock": PythonRedisLock}
    # python-redis-lock waits in BLPOP, which redis-py gives up after 5 s by default, to send it again ten times.
    options = {"socket_timeout": None} if name == "python-redis-lock" else {}
    # By default a pool has 100 connections, and refuses whoever needs one more.
    options["max_connections"] = 2_048
    lib = libs[name](redis.Redis(host="127.0.0.1", port=int(port), **options), int(args["ttl"]))
    try:
        {"run": run, "hold": hold, "work": work, "wait": wait}[role](lib, args)
    except Exception as error:
        say("failed", error=repr(error))
        os._exit(1)


main()
