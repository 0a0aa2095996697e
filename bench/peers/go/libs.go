package main

import (
	"context"
	"fmt"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

// held is a lock that is held. lost tells, without asking the server, whether the library has said that it is over.
type held struct {
	unlock func() error
	lost   func() bool
}

// A locker waits for the lock of a key for as long as it takes.
type locker func(key string) (held, error)

func never() bool { return false }

// open sets a library up as its own pages do for a service with one server.
func open(lib, addr string, ttl time.Duration) (locker, error) {
	ctx := context.Background()
	switch lib {
	case "rueidislock", "rueidislock-1":
		// https://github.com/redis/rueidis/tree/main/rueidislock: three keys a lock by default, of which two count;
		// KeyMajority 1 for a single server, and NoLoopTracking for Redis 7.0.5 and newer.
		option := rueidislock.LockerOption{
			ClientOption:   rueidis.ClientOption{InitAddress: []string{addr}},
			KeyMajority:    2,
			NoLoopTracking: true,
			KeyValidity:    ttl,
		}
		if lib == "rueidislock-1" {
			option.KeyMajority = 1
		}
		l, err := rueidislock.NewLocker(option)
		if err != nil {
			return nil, err
		}
		return func(key string) (held, error) {
			lock, cancel, err := l.WithContext(ctx, key)
			if err != nil {
				return held{}, err
			}
			return held{func() error { cancel(); return nil }, func() bool { return lock.Err() != nil }}, nil
		}, nil
	case "redsync":
		// https://github.com/go-redsync/redsync: by default it tries 32 times, after pauses of 50 to 250 ms. Here it
		// tries for as long as it takes, as the others do.
		rs := redsync.New(goredis.NewPool(redis.NewClient(&redis.Options{Addr: addr})))
		return func(key string) (held, error) {
			m := rs.NewMutex(key, redsync.WithExpiry(ttl), redsync.WithTries(1<<30))
			if err := m.Lock(); err != nil {
				return held{}, err
			}
			unlock := func() error {
				if ok, err := m.Unlock(); !ok || err != nil {
					return fmt.Errorf("unlock: %v, %w", ok, err)
				}
				return nil
			}
			// It says until when the lock is surely had, and leaves it to its user to look.
			return held{unlock, func() bool { return !time.Now().Before(m.Until()) }}, nil
		}, nil
	case "redislock":
		// https://github.com/bsm/redislock: its example's LinearBackoff(100ms), without its bound of three tries.
		c := redislock.New(redis.NewClient(&redis.Options{Addr: addr}))
		options := &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}
		return func(key string) (held, error) {
			// Without a deadline of its own it would give up when the ttl is over.
			waits, stop := context.WithTimeout(ctx, time.Hour)
			defer stop()
			l, err := c.Obtain(waits, key, ttl, options)
			if err != nil {
				return held{}, err
			}
			return held{func() error { return l.Release(ctx) }, never}, nil
		}, nil
	}
	return nil, fmt.Errorf("no such library: %s", lib)
}
