import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;
import java.util.concurrent.locks.Lock;
import java.util.function.Function;

/** One library in one role: see ../README.md. */
public class Peer {
    static final long MILLISECOND = 1_000_000;
    static final long STACK = 256 << 10;
    static final BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    static final Map<String, String> args = new HashMap<>();
    static Function<String, Lock> lib;

    /** The machine's monotonic clock in nanoseconds, which on Linux is the same in all processes. */
    static long now() {
        return System.nanoTime();
    }

    static long processorTime() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    /** Prints one line of JSON: the word, when it was said, and more, which comes as JSON. */
    static synchronized void say(String word, String more) {
        System.out.println("{\"say\":\"" + word + "\",\"at\":" + now() + more + "}");
        System.out.flush();
    }

    static String quoted(Object text) {
        return '"' + String.valueOf(text).replaceAll("[\"\\\\\\p{Cntrl}]", " ") + '"';
    }

    static long number(String name) {
        return Long.parseLong(args.getOrDefault(name, "0"));
    }

    public static void main(String[] words) throws Exception {
        for (int i = 3; i < words.length; i++) {
            var parts = words[i].split("=", 2);
            args.put(parts[0], parts[1]);
        }
        try {
            lib = Libs.open(words[0], Integer.parseInt(words[2]), number("ttl"));
            switch (words[1]) {
                case "run" -> run();
                case "hold" -> hold();
                case "work" -> work();
                case "wait" -> waitForIt();
                default -> throw new IllegalArgumentException("no such role: " + words[1]);
            }
            Runtime.getRuntime().halt(0);
        } catch (Exception error) {
            say("failed", ",\"error\":" + quoted(error));
            Runtime.getRuntime().halt(1);
        }
    }

    /** What one thread does: a turn is three points in time, asked, held, and about to release. */
    static class Task extends Thread {
        final Lock lock;
        final long end;
        final List<long[]> turns = new ArrayList<>();
        volatile long waitingSince;
        int failures;
        Object error = "";

        Task(String key, long end) {
            super(null, null, "task", STACK);
            setDaemon(true);
            this.lock = lib.apply(key);
            this.end = end;
        }

        @Override
        public void run() {
            while (now() < end) {
                long asked = waitingSince == 0 ? now() : waitingSince;
                waitingSince = asked;
                try {
                    lock.lock();
                    long at = now();
                    if (number("inside") > 0) {
                        pause(number("inside"));
                    }
                    waitingSince = 0;
                    synchronized (turns) {
                        turns.add(new long[] {asked, at, now()});
                    }
                    lock.unlock();
                } catch (Exception failure) {
                    failures++;
                    error = failure;
                    pause(10);
                }
            }
        }
    }

    static void pause(long millis) {
        try {
            Thread.sleep(millis);
        } catch (InterruptedException nobodyInterrupts) {
            throw new IllegalStateException(nobodyInterrupts);
        }
    }

    static String keyOf(int task) {
        return number("hot") == 1 ? "hot" : "free-" + args.get("name") + "-" + task;
    }

    static Task[] all(long millis) throws Exception {
        long end = now() + millis * MILLISECOND;
        var tasks = new Task[(int) number("tasks")];
        for (int i = 0; i < tasks.length; i++) {
            tasks[i] = new Task(keyOf(i), end);
            tasks[i].start();
        }
        // Whoever has no lock long after the end hangs.
        long patience = end + number("patience") * MILLISECOND;
        for (var task : tasks) {
            task.join(Math.max(1, (patience - now()) / MILLISECOND));
        }
        return tasks;
    }

    /** Many threads, each of which takes and releases a lock again and again. */
    static void run() throws Exception {
        int cold = 0;
        for (var task : all(number("warm"))) {
            cold += task.isAlive() ? 1 : 0;
        }
        say("warm", ",\"hung\":" + cold);
        in.readLine();
        long begin = now(), used = processorTime();
        var tasks = all(number("millis"));
        long end = now();
        used = processorTime() - used;
        int failures = 0, hung = 0;
        Object error = "";
        try (var out = new PrintWriter(args.get("journal"))) {
            for (int i = 0; i < tasks.length; i++) {
                var task = tasks[i];
                hung += task.isAlive() ? 1 : 0;
                synchronized (task.turns) { // it may still write
                    for (var turn : task.turns) {
                        out.println(keyOf(i) + " " + i + " " + turn[0] + " " + turn[1] + " " + turn[2]);
                    }
                }
                // It waits still, or was refused when it asked last.
                long since = task.waitingSince;
                if (since > 0) {
                    out.println(keyOf(i) + " " + i + " " + since + " 0 0");
                }
                failures += task.failures;
                error = task.failures > 0 ? task.error : error;
            }
        }
        say("done", ",\"begin\":" + begin + ",\"end\":" + end + ",\"cpu\":" + used + ",\"hung\":" + hung
                + ",\"failures\":" + failures + ",\"error\":" + quoted(error));
    }

    /** Takes some keys, and releases and takes them again as it is told. */
    static void hold() throws Exception {
        var held = new ArrayList<Lock>();
        for (int i = 0; i < number("keys"); i++) {
            held.add(lib.apply(args.get("key") + i));
        }
        held.forEach(Lock::lock);
        say("held", "");
        for (String line; (line = in.readLine()) != null;) {
            if (line.equals("lock")) {
                held.forEach(Lock::lock);
                say("held", "");
                continue;
            }
            say("releasing", "");
            held.forEach(Lock::unlock);
        }
    }

    /**
     * Works for so many milliseconds under a lock, one at a time. Meanwhile others of this process may compute. Nobody
     * tells it of a loss.
     */
    static void work() {
        var lock = lib.apply(args.get("key") + "0");
        for (boolean held = false; !held;) {
            try {
                lock.lock();
                held = true;
            } catch (Exception refused) {
                pause(100);
            }
        }
        say("held", "");
        if (number("compute") > 0) {
            long end = now() + number("compute") * MILLISECOND;
            var computes = new Thread(() -> {
                while (now() < end) {
                    Thread.onSpinWait();
                }
            });
            computes.setDaemon(true);
            computes.start();
        }
        long last = now(), worked = 0;
        var gaps = new StringJoiner(",");
        while (worked < number("millis") * MILLISECOND) {
            long at = now();
            // When its process was stopped, or had no processor, it did not work.
            if (at - last > 100 * MILLISECOND) {
                gaps.add("[" + last + "," + at + "]");
            }
            worked += Math.min(at - last, 5 * MILLISECOND);
            last = at;
            pause(1);
        }
        say("ended", ",\"last\":" + last + ",\"gaps\":[" + gaps + "],\"told\":false");
        try {
            lock.unlock();
        } catch (Exception late) {
            say("refused", ",\"error\":" + quoted(late));
        }
    }

    /** Many threads wait for one key. */
    static void waitForIt() throws Exception {
        for (int i = 0; i < number("tasks"); i++) {
            var lock = lib.apply(args.get("key") + "0");
            var waits = new Thread(null, () -> {
                try {
                    lock.lock();
                    lock.unlock();
                } catch (Exception error) {
                    say("gave-up", ",\"error\":" + quoted(error));
                }
            }, "waits", STACK);
            waits.setDaemon(true);
            waits.start();
        }
        say("waiting", "");
        in.readLine();
    }
}
