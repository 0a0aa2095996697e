// One library in one role: see ../README.md.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

var said sync.Mutex

// say prints one line of JSON: the word, when it was said, and more.
func say(word string, more map[string]any) {
	line := map[string]any{"say": word, "at": now()}
	for name, value := range more {
		line[name] = value
	}
	text, _ := json.Marshal(line)
	said.Lock()
	defer said.Unlock()
	fmt.Println(string(text))
}

// now is the machine's monotonic clock in nanoseconds, the same in all processes.
func now() int64 {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano()
}

// processorTime is what this process has used, in nanoseconds.
func processorTime() int64 {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t)
	return t.Nano()
}

func fail(err error) {
	say("failed", map[string]any{"error": err.Error()})
	os.Exit(1)
}

var hear = bufio.NewScanner(os.Stdin)

func main() {
	lib, role, addr, args := os.Args[1], os.Args[2], "127.0.0.1:"+os.Args[3], map[string]string{}
	for _, arg := range os.Args[4:] {
		name, value, _ := strings.Cut(arg, "=")
		args[name] = value
	}
	ttl := time.Duration(number(args, "ttl")) * time.Millisecond
	lock, err := open(lib, addr, ttl)
	if err != nil {
		fail(err)
	}
	switch role {
	case "run":
		run(lock, args)
	case "hold":
		hold(lock, args)
	case "work":
		work(lock, args)
	case "wait":
		wait(lock, args)
	}
}

func number(args map[string]string, name string) int64 {
	value, _ := strconv.ParseInt(args[name], 10, 64)
	return value
}

// run: many tasks, each of which takes and releases a lock again and again.
func run(lock locker, args map[string]string) {
	tasks, hot := int(number(args, "tasks")), args["hot"] == "1"
	inside := time.Duration(number(args, "inside")) * time.Millisecond
	key := func(task int) string {
		if hot {
			return "hot"
		}
		return fmt.Sprintf("free-%s-%d", args["name"], task)
	}
	// A turn is three points in time: asked, held, about to release.
	type task struct {
		sync.Mutex
		turns        []int64
		waitingSince int64
		failures     int
		error        string
	}
	all := func(millis int64) ([]*task, int64) {
		done, end := make(chan int, tasks), now()+millis*1e6
		each := make([]*task, tasks)
		for i := range each {
			each[i] = &task{}
			go func(me *task, key string) {
				for now() < end {
					me.Lock()
					if me.waitingSince == 0 {
						me.waitingSince = now()
					}
					asked := me.waitingSince
					me.Unlock()
					held, err := lock(key)
					if err == nil {
						at := now()
						time.Sleep(inside)
						me.Lock()
						me.waitingSince = 0
						me.turns = append(me.turns, asked, at, now())
						me.Unlock()
						err = held.unlock()
					}
					if err != nil {
						me.Lock()
						me.failures++
						me.error = err.Error()
						me.Unlock()
						time.Sleep(10 * time.Millisecond)
					}
				}
				done <- 1
			}(each[i], key(i))
		}
		// Whoever has no lock long after the end hangs.
		patience, hung := time.After(time.Duration(millis+number(args, "patience"))*time.Millisecond), int64(tasks)
		for hung > 0 {
			select {
			case <-done:
				hung--
			case <-patience:
				return each, hung
			}
		}
		return each, 0
	}
	_, cold := all(number(args, "warm"))
	say("warm", map[string]any{"hung": cold})
	hear.Scan()
	begin, used := now(), processorTime()
	each, hung := all(number(args, "millis"))
	end, used := now(), processorTime()-used
	file, err := os.Create(args["journal"])
	if err != nil {
		fail(err)
	}
	out := bufio.NewWriter(file)
	failures, first := 0, ""
	for i, task := range each {
		task.Lock() // it may still write
		// It waits still, or was refused when it asked last.
		if since := task.waitingSince; since > 0 {
			fmt.Fprintln(out, key(i), i, since, 0, 0)
		}
		for t := 0; t < len(task.turns); t += 3 {
			fmt.Fprintln(out, key(i), i, task.turns[t], task.turns[t+1], task.turns[t+2])
		}
		failures += task.failures
		if task.error != "" {
			first = task.error
		}
	}
	out.Flush()
	say("done", map[string]any{"begin": begin, "end": end, "cpu": used, "hung": hung, "failures": failures, "error": first})
	os.Exit(0)
}

// hold: takes some keys, and releases and takes them again as it is told.
func hold(lock locker, args map[string]string) {
	var all []held
	take := func() {
		for i := int64(0); i < number(args, "keys"); i++ {
			held, err := lock(fmt.Sprintf("%s%d", args["key"], i))
			if err != nil {
				fail(err)
			}
			all = append(all, held)
		}
		say("held", nil)
	}
	take()
	for hear.Scan() {
		if hear.Text() == "lock" {
			take()
			continue
		}
		say("releasing", nil)
		for _, held := range all {
			if err := held.unlock(); err != nil {
				fail(err)
			}
		}
		all = nil
	}
}

// work: works for so many milliseconds under a lock, one at a time, unless the library says that it is lost. Meanwhile
// others of this process may compute.
func work(lock locker, args map[string]string) {
	held, err := lock(args["key"] + "0")
	for err != nil {
		time.Sleep(100 * time.Millisecond)
		held, err = lock(args["key"] + "0")
	}
	say("held", nil)
	if compute := number(args, "compute"); compute > 0 {
		go func() {
			for end := now() + compute*1e6; now() < end; {
			}
		}()
	}
	last, worked, gaps := now(), int64(0), [][2]int64{}
	for worked < number(args, "millis")*1e6 && !held.lost() {
		at := now()
		// When its process was stopped, or had no processor, it did not work.
		if at-last > 100e6 {
			gaps = append(gaps, [2]int64{last, at})
		}
		worked += min(at-last, 5e6)
		last = at
		time.Sleep(time.Millisecond)
	}
	say("ended", map[string]any{"last": last, "gaps": gaps, "told": held.lost()})
	held.unlock()
}

// wait: many tasks wait for one key.
func wait(lock locker, args map[string]string) {
	for i := int64(0); i < number(args, "tasks"); i++ {
		go func() {
			held, err := lock(args["key"] + "0")
			if err != nil {
				say("gave-up", map[string]any{"error": err.Error()})
				return
			}
			held.unlock()
		}()
	}
	say("waiting", nil)
	hear.Scan()
	os.Exit(0)
}
