import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.locks.Lock;
import java.util.function.Function;

/** One library in one role: see ../README.md. */
public class Peer {
    static final long MILLISECOND = 1_000_000;
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
            super(null, null, "task", 256 << 10);
            setDaemon(true);
            this.lock = lib.apply(key);
            this.end = end;
        }

        @Override
        public void run() {
            while (now() < end) {
                long asked = now();
                waitingSince = asked;
                try {
                    lock.lock();
                    long at = now();
                    waitingSince = 0;
                    if (number("inside") > 0) {
                        pause(number("inside"));
                    }
                    turns.add(new long[] {asked, at, now()});
                    lock.unlock();
                } catch (Exception failure) {
                    failures++;
                    error = failure;
                    pause(10);
                }
            }
            waitingSince = 0;
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
        all(number("warm"));
        say("warm", "");
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
                boolean hangs = task.isAlive();
                hung += hangs ? 1 : 0;
                // One that hangs writes no more.
                for (var turn : List.copyOf(task.turns)) {
                    out.println(keyOf(i) + " " + i + " " + turn[0] + " " + turn[1] + " " + turn[2]);
                }
                if (hangs) {
                    out.println(keyOf(i) + " " + i + " " + task.waitingSince + " 0 0");
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
        lock.lock();
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
        long last = 0;
        for (long i = 0; i < number("millis"); i++) {
            last = now();
            pause(1);
        }
        say("ended", ",\"last\":" + last + ",\"told\":false");
        try {
            lock.unlock();
        } catch (Exception late) {
            say("refused", ",\"error\":" + quoted(late));
        }
    }

    /** Many threads wait for one key. */
    static void waitForIt() throws Exception {
        for (int i = 0; i < number("tasks"); i++) {
            new Task(args.get("key") + "0", Long.MAX_VALUE).start();
        }
        say("waiting", "");
        in.readLine();
    }
}
