#!/usr/bin/env python3
"""Plants bugs one at a time, and tells which small worlds find each, and how.

    src/turnstile/tests/worlds/planted.py [PART OF A NAME]...

Each breaks one rule of docs/protocol.md. It works on a clone of HEAD, so commit first. It fails if a bug is not found.
The work happens in a copy, in a folder that is deleted at the end.
"""

import os
import re
import subprocess
import sys
import tempfile

MACHINE = "src/turnstile/machine/"
SLOT = "src/store/memory/slot.rs"
KEYSPACE = "src/store/memory/keyspace.rs"

# The rule, what is wrong, where, what stands there, and what stands there instead.
#
# Not here: O1, a grant for a retired owner is not given back. Such a grant needs a request that the server runs after O4 has
# ended its connection, and the referee excuses what is left then.
BUGS = [
    ("D1", "a deadline counts from the answer", MACHINE + "asking.rs",
     "acquisition.on_won(epoch, in_flight.sent)", "acquisition.on_won(epoch, cx.at())"),
    ("D2", "a grant counts from its receipt", MACHINE + "acquisition.rs",
     "Some(self.win(grant.epoch, start, ttl))", "Some(self.win(grant.epoch, received, ttl))"),
    ("D5", "nothing is released at the deadline", MACHINE + "timers.rs",
     "self.end_tenure(cx, TenureEnd::Release(None));", "self.end_tenure(cx, TenureEnd::Lost);"),
    ("F1", "an epoch is the time alone", SLOT,
     "*fence = (*fence + 1).max(now);", "*fence = now;"),
    ("F2", "a pass has the token of its tenure", "src/turnstile/tenure.rs",
     "Token::of(self.win.epoch, self.turns.into())", "Token::of(self.win.epoch, 0)"),
    ("M1", "permits are counted without their weights", SLOT,
     "self.taken() + u64::from(weight) <= u64::from(limit)\n            }\n            _ => false",
     "(self.until.len() as u64) < u64::from(limit).max(u64::from(weight))\n            }\n            _ => false"),
    ("M1", "a reader enters beside a writer", SLOT,
     "(_, None) | (Mode::Shared, Some(Mode::Shared)) => true", "(_, None) | (Mode::Shared, Some(_)) => true"),
    ("M8", "a kept key is freed", KEYSPACE,
     "slot.holders.add(owner.kept(), now + micros(left));", "let _ = (left, owner.kept());"),
    ("M11", "the old owner stays beside the adopter", KEYSPACE,
     "|| slot.holders.remove_first(is_from)", "|| slot.holders.iter().any(|(it, _)| is_from(it))"),
    ("O2", "two ops are in flight", MACHINE + "schedule.rs",
     "            if self.in_flight.is_some() {\n                return;\n            }\n", ""),
    ("O3", "a grant does not wait for the reply", MACHINE + "asking.rs",
     "if let Some(in_flight) = &mut self.in_flight {", "if let Some(in_flight) = self.in_flight.as_mut().filter(|_| false) {"),
    ("O6", "an op whose answer is lost is not undone", MACHINE + "store_events.rs",
     "acquisition.raise_footprint(footprint);", "let _ = (acquisition, footprint);"),
    ("O6", "a release whose answer is lost is not sent again", MACHINE + "store_events.rs",
     "self.pending_unknown();", "self.pending_done(cx, true);"),
    ("S3", "an owner that has the lock gets no new ttl", SLOT,
     "self.holders.add(owner, cx.now + micros(ttl));\n        let epoch",
     "if !self.holders.contains(&owner) {\n            self.holders.add(owner, cx.now + micros(ttl));\n        }\n        let epoch"),
    ("W2", "a ticket never asks again", MACHINE + "acquisition.rs",
     "self.repeats.ask_at = if is_old { now } else { now + next };",
     "self.repeats.ask_at = if is_old { now } else { Point::FOREVER.max(now + next) };"),
]


def run(*command, **options):
    return subprocess.run(command, text=True, capture_output=True, check=False, **options)


def main():
    parts = sys.argv[1:] or [""]
    root = run("git", "rev-parse", "--show-toplevel").stdout.strip()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "copy")
        subprocess.run(["git", "clone", "-q", root, copy], check=True)
        target = os.environ.get("CARGO_TARGET_DIR", os.path.join(folder, "target"))
        chosen = [bug for bug in BUGS if any(part in f"{bug[0]} {bug[1]}" for part in parts)]
        if not chosen:
            sys.exit(f"no bug has one of {parts} in its name")
        test = ["cargo", "test", "-q", "-p", "lockstream", "--lib", "every_interleaving", "--", "--nocapture"]
        options = {"cwd": copy, "env": {**os.environ, "CARGO_TARGET_DIR": target}}
        clean = run(*test, **options)
        if clean.returncode != 0:
            sys.exit(f"it fails without a bug\n{clean.stderr}")
        for rule, what, path, old, new in chosen:
            path = os.path.join(copy, path)
            with open(path, encoding="utf-8") as file:
                text = file.read()
            if text.count(old) != 1:
                sys.exit(f"{rule}, {what}: `{old}` stands {text.count(old)} times in {path}")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text.replace(old, new))
            told = run(*test, **options)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            if "test result" not in told.stdout:
                sys.exit(f"{rule}, {what}: it does not compile\n{told.stderr}")
            found = re.findall(r"^(.*): it is not so that (.*?): (.*), after((?:\n  .*)+)", told.stderr, re.M)
            print(f"## {rule}: {what}: {len(found)} worlds find it", flush=True)
            missed += not found
            for world, promise, breach, steps in found:
                print(f"- {world}: {promise}, {len(steps.split(chr(10))) - 1} steps")
            if found:
                _, _, breach, steps = min(found, key=lambda it: it[3].count("\n"))
                print(f"  {breach}, after{steps}", flush=True)
    if missed:
        sys.exit(f"{missed} bugs were not found")


if __name__ == "__main__":
    main()
