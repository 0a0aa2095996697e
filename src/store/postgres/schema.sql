-- All operations on locks. `lockstream` stands for the schema, and is replaced by its name.
--
-- Times are microseconds since the Unix epoch, and times to live are microseconds. A lock's key is `<prefix>:<key>`, an
-- owner is `<instance>:<sequence>`. A mode is '' for an exclusive owner, 'r' for a reader, '<weight>/<limit>' for a permit.
--
-- Tables only gain columns, and a function never changes what it does: a later version brings `ops_2` beside `ops_1`.

CREATE SCHEMA IF NOT EXISTS lockstream;

-- `owner`: null if the lock is free, and then nobody waits; '' if it is shared, and then `holder` has its owners. The row
-- of a freed lock stays, so an acquisition is one update in place. There is no index on a column that changes.
CREATE TABLE lockstream.lock (
    key text COLLATE "C" PRIMARY KEY,
    owner text COLLATE "C",
    epoch bigint NOT NULL,
    expires_at bigint NOT NULL,
    -- Whether there may be a ticket.
    waited boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

-- A shared lease. `kind`: 'r', or the limit of permits.
CREATE TABLE lockstream.holder (
    key text COLLATE "C",
    owner text COLLATE "C",
    kind text COLLATE "C" NOT NULL,
    weight integer NOT NULL,
    epoch bigint NOT NULL,
    expires_at bigint NOT NULL,
    PRIMARY KEY (key, owner)
) WITH (fillfactor = 50);

-- What a fence locks: one row for each lock, with the owner '', and one for each shared lease. It is never updated: a
-- lock on a row that is being updated may not be on its next version.
CREATE TABLE lockstream.guard (
    key text COLLATE "C",
    owner text COLLATE "C",
    PRIMARY KEY (key, owner)
);

-- The queue of a lock, and with `ttl` null its subscriptions. `line`: the advisory lock that the registry's session holds.
CREATE TABLE lockstream.ticket (
    key text COLLATE "C",
    score bigint,
    owner text COLLATE "C" NOT NULL,
    line bigint NOT NULL,
    mode text COLLATE "C" NOT NULL,
    ttl bigint,
    PRIMARY KEY (key, score),
    UNIQUE (key, owner)
);

-- One row. `epoch`: no lock whose row was swept had a greater one. `quiet`: for how long nothing is given away after
-- data may have been lost.
CREATE TABLE lockstream.state (
    version integer NOT NULL,
    epoch bigint NOT NULL,
    quiet bigint NOT NULL
);

-- Since when nothing was lost. An unlogged table is empty after a crash and after a promotion.
CREATE UNLOGGED TABLE lockstream.alive (since bigint NOT NULL);

INSERT INTO lockstream.state VALUES (1, 0, 0);

CREATE FUNCTION lockstream.now_1() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;

-- These tables may stand for others that were lost.
INSERT INTO lockstream.alive VALUES (lockstream.now_1());

-- Whether a tenure may end: not while a transaction is fenced by it. `whose`: '' or a shared owner.
CREATE FUNCTION lockstream.may_end_1(name text, whose text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM lockstream.guard g WHERE g.key = name AND g.owner = whose FOR UPDATE SKIP LOCKED;
    IF NOT found THEN
        IF EXISTS (SELECT 1 FROM lockstream.guard g WHERE g.key = name AND g.owner = whose) THEN
            RETURN false;
        END IF;
        INSERT INTO lockstream.guard VALUES (name, whose) ON CONFLICT DO NOTHING;
        IF NOT found THEN
            RETURN false;
        END IF;
    END IF;
    -- Stronger than the update that follows, so that a fence in a transaction with an older snapshot fails (40001).
    IF whose = '' THEN
        PERFORM 1 FROM lockstream.lock l WHERE l.key = name FOR UPDATE;
    ELSE
        PERFORM 1 FROM lockstream.holder h WHERE h.key = name AND h.owner = whose FOR UPDATE;
    END IF;
    RETURN true;
END $$;

-- Ends a shared lease, if it may end.
CREATE FUNCTION lockstream.end_shared_1(name text, whose text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT lockstream.may_end_1(name, whose) THEN
        RETURN false;
    END IF;
    DELETE FROM lockstream.holder h WHERE h.key = name AND h.owner = whose;
    DELETE FROM lockstream.guard g WHERE g.key = name AND g.owner = whose;
    RETURN true;
END $$;

-- The first ticket whose registry is there (S2). Those of others are deleted.
CREATE FUNCTION lockstream.first_live_1(name text, listens boolean, own_line bigint, OUT first lockstream.ticket)
LANGUAGE plpgsql AS $$
BEGIN
    LOOP
        SELECT * INTO first FROM lockstream.ticket t
            WHERE t.key = name AND (t.ttl IS NULL) = listens ORDER BY t.score LIMIT 1;
        EXIT WHEN first.line IS NULL OR first.line = own_line OR NOT pg_try_advisory_xact_lock_shared(first.line);
        DELETE FROM lockstream.ticket t WHERE t.key = name AND t.line = first.line;
    END LOOP;
END $$;

-- A lock in the midst of an operation. `kind`: null if it is free, 'x' if nobody may join, else that of its holders, who
-- have taken `taken` of it. `most`: how many more tickets may be served (M4); `unserved`: whether more may fit.
-- `is_in_the_way`: whether a ticket that does not fit was found.
CREATE TYPE lockstream.open_lock_1 AS (
    name text,
    owner text,
    epoch bigint,
    expires_at bigint,
    kind text,
    taken bigint,
    is_quiet boolean,
    most integer,
    unserved boolean,
    is_in_the_way boolean,
    notices text[]
);

-- M1: whether one with this mode may have the lock now.
CREATE FUNCTION lockstream.admits_1(o lockstream.open_lock_1, mode text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN o.kind IS NULL THEN true
        WHEN o.kind = 'x' OR mode = '' THEN false
        WHEN o.kind = 'r' OR mode = 'r' THEN o.kind = mode
        ELSE o.kind = split_part(mode, '/', 2) AND o.taken + split_part(mode, '/', 1)::bigint <= o.kind::bigint
    END
$$;

-- Gives the lock to an owner (S3), with a new epoch (F1). A lease never ends earlier by that.
CREATE FUNCTION lockstream.give_1(INOUT o lockstream.open_lock_1, whose text, mode text, ttl bigint, now bigint)
LANGUAGE plpgsql AS $$
DECLARE
    part integer := CASE WHEN mode LIKE '%/%' THEN split_part(mode, '/', 1)::integer ELSE 1 END;
    is_new boolean;
BEGIN
    o.epoch := greatest(o.epoch + 1, now);
    IF mode = '' THEN
        o.expires_at := CASE WHEN o.owner = whose THEN greatest(o.expires_at, now + ttl) ELSE now + ttl END;
        o.owner := whose;
        o.kind := 'x';
        RETURN;
    END IF;
    INSERT INTO lockstream.holder AS h
        VALUES (o.name, whose, CASE mode WHEN 'r' THEN 'r' ELSE split_part(mode, '/', 2) END, part, o.epoch, now + ttl)
        ON CONFLICT (key, owner) DO UPDATE
        SET epoch = excluded.epoch, expires_at = greatest(h.expires_at, excluded.expires_at)
        RETURNING xmax = 0 INTO is_new;
    IF is_new THEN
        INSERT INTO lockstream.guard VALUES (o.name, whose) ON CONFLICT DO NOTHING;
        o.taken := coalesce(o.taken, 0) + part;
    END IF;
    o.owner := '';
    -- While it is quiet nobody may join.
    o.kind := CASE WHEN o.is_quiet THEN 'x' WHEN mode = 'r' THEN 'r' ELSE split_part(mode, '/', 2) END;
END $$;

-- M3: serves tickets from the front as long as they fit, up to that of `own`, or to one that `place` is before.
CREATE FUNCTION lockstream.serve_1(
    INOUT o lockstream.open_lock_1, own text, place bigint, own_line bigint, now bigint
) LANGUAGE plpgsql AS $$
DECLARE
    t lockstream.ticket;
BEGIN
    o.is_in_the_way := false;
    WHILE o.kind IS DISTINCT FROM 'x' LOOP
        t := lockstream.first_live_1(o.name, false, own_line);
        IF t.owner IS NULL OR t.owner = own OR place < t.score THEN
            RETURN;
        END IF;
        o.is_in_the_way := true;
        IF NOT lockstream.admits_1(o, t.mode) THEN
            RETURN;
        ELSIF o.most <= 0 THEN
            o.unserved := true;
            RETURN;
        END IF;
        o.is_in_the_way := false;
        DELETE FROM lockstream.ticket d WHERE d.key = o.name AND d.score = t.score;
        o := lockstream.give_1(o, t.owner, t.mode, t.ttl, now);
        o.most := o.most - 1;
        -- The last grant of a call says that more may fit (M4).
        o.notices := o.notices || ARRAY[t.line::text, concat_ws(' ', CASE o.most WHEN 0 THEN '2' ELSE '1' END,
            t.owner, coalesce(nullif(t.mode, ''), 'x'), t.ttl, o.epoch, now, o.name)];
    END LOOP;
    o.is_in_the_way := true;
END $$;

-- M5: when the ticket in front may have the lock, or else one with `mode`.
CREATE FUNCTION lockstream.remaining_1(o lockstream.open_lock_1, mode text, now bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    wish text := coalesce((SELECT t.mode FROM lockstream.ticket t
        WHERE t.key = o.name AND t.ttl IS NOT NULL ORDER BY t.score LIMIT 1), mode);
    fits bigint;
BEGIN
    IF o.owner <> '' OR o.is_quiet THEN
        RETURN greatest(o.expires_at - now, 0);
    END IF;
    IF wish LIKE '%/%' THEN
        SELECT min(h.expires_at) INTO fits FROM (
            SELECT expires_at, kind, sum(weight) OVER (ORDER BY expires_at, owner) AS freed FROM lockstream.holder
            WHERE key = o.name
        ) h WHERE h.kind = split_part(wish, '/', 2)
            AND o.taken - h.freed + split_part(wish, '/', 1)::bigint <= h.kind::bigint;
    END IF;
    IF fits IS NULL THEN
        SELECT max(expires_at) INTO fits FROM lockstream.holder WHERE key = o.name;
    END IF;
    RETURN greatest(fits - now, 0);
END $$;

-- Enters the queue, or the subscriptions (K1, K2): the place, and whether it is new.
CREATE FUNCTION lockstream.enter_1(
    name text, whose text, own_line bigint, mode text, ttl bigint, place bigint, now bigint,
    OUT score bigint, OUT is_new boolean
) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE lockstream.ticket t SET line = own_line WHERE t.key = name AND t.owner = whose RETURNING t.score INTO score;
    is_new := NOT found;
    IF is_new THEN
        IF place <= now THEN
            score := place;
            WHILE EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = name AND t.score = enter_1.score) LOOP
                score := score + 1;
            END LOOP;
        ELSE
            SELECT greatest(now, max(t.score) + 1) INTO score FROM lockstream.ticket t WHERE t.key = name;
        END IF;
        INSERT INTO lockstream.ticket VALUES (name, score, whose, own_line, mode, ttl);
    END IF;
END $$;

-- One operation in full. Its letter:
--   A attempt  E enter  L subscribe  W withdraw  U unsubscribe  R release  Y yield: `more` is the new owner
--   D adopt: `more` is the present owner  S serve the queue
-- Its verdict: 'won', 'busy', 'not old', 'held' or 'not held' until now, 'again' if it must be sent again soon, or 'stale'.
CREATE FUNCTION lockstream.op_1(
    letter text, name text, own text, mode text, ttl bigint, more text, place bigint, own_line bigint, of_use bigint,
    quiet_until bigint, most integer,
    OUT at bigint, OUT verdict text, OUT epoch bigint, OUT remaining bigint, OUT score bigint, OUT is_new boolean,
    OUT unserved boolean, OUT notices text[]
) LANGUAGE plpgsql AS $$
DECLARE
    l lockstream.lock;
    o lockstream.open_lock_1;
    t lockstream.ticket;
    h record;
    asks boolean := letter IN ('A', 'E', 'L');
    winner text := CASE letter WHEN 'Y' THEN more ELSE own END;
    is_held boolean;
    -- Whether its lease has ended, and a transaction is still fenced by it.
    is_ending boolean := false;
BEGIN
    LOOP
        SELECT * INTO l FROM lockstream.lock k WHERE k.key = name FOR NO KEY UPDATE;
        EXIT WHEN found OR NOT asks;
        INSERT INTO lockstream.lock SELECT name, NULL, s.epoch, 0 FROM lockstream.state s ON CONFLICT DO NOTHING;
        INSERT INTO lockstream.guard VALUES (name, '') ON CONFLICT DO NOTHING;
    END LOOP;
    at := lockstream.now_1();
    IF l.key IS NULL THEN
        verdict := CASE letter WHEN 'Y' THEN 'not old' WHEN 'D' THEN 'not old' ELSE 'not held' END;
        RETURN;
    END IF;
    o := ROW(name, l.owner, l.epoch, l.expires_at, NULL, 0, quiet_until > at, most, false, false, NULL);

    -- What is over, and who has it.
    IF o.owner <> '' THEN
        o.kind := 'x';
        is_held := o.owner = own AND mode = '' AND o.expires_at > at;
        IF o.expires_at <= at THEN
            IF lockstream.may_end_1(name, '') THEN
                o.owner := NULL;
                o.kind := NULL;
            ELSE
                -- A transaction is fenced by it.
                is_ending := o.owner = own AND mode = '';
            END IF;
        END IF;
    ELSIF o.owner = '' THEN
        FOR h IN SELECT owner FROM lockstream.holder WHERE key = name AND expires_at <= at LOOP
            PERFORM lockstream.end_shared_1(name, h.owner);
        END LOOP;
        SELECT min(kind), coalesce(sum(weight), 0), coalesce(bool_or(owner = own AND expires_at > at), false),
            coalesce(bool_or(owner = own AND expires_at <= at), false)
            INTO o.kind, o.taken, is_held, is_ending FROM lockstream.holder WHERE key = name;
        IF o.kind IS NULL THEN
            o.owner := NULL;
        ELSIF o.is_quiet THEN
            o.kind := 'x';
            o.expires_at := quiet_until;
        END IF;
    END IF;
    is_held := coalesce(is_held, false);

    IF letter = 'D' THEN
        IF mode <> '' OR NOT (is_held OR coalesce(l.owner = more AND l.expires_at > at, false)) THEN
            verdict := 'not old';
        ELSIF NOT is_held AND NOT lockstream.may_end_1(name, '') THEN
            verdict := 'again';
        ELSIF at > of_use THEN
            verdict := 'stale';
        ELSE
            o := lockstream.give_1(o, own, '', ttl, at);
            verdict := 'won';
        END IF;
    ELSIF asks AND at > of_use THEN
        verdict := 'stale';
    ELSIF asks AND is_held THEN
        o := lockstream.give_1(o, own, mode, ttl, at);
        epoch := o.epoch;
        DELETE FROM lockstream.ticket d WHERE d.key = name AND d.owner = own;
        verdict := 'won';
        IF o.kind <> 'x' THEN
            o := lockstream.serve_1(o, NULL, NULL, own_line, at);
        END IF;
    ELSIF letter = 'Y' AND NOT is_held THEN
        verdict := 'not old';
    ELSE
        IF NOT asks THEN
            IF letter IN ('W', 'U') THEN
                DELETE FROM lockstream.ticket d WHERE d.key = name AND d.owner = own;
            END IF;
            is_held := is_held AND letter <> 'S';
            verdict := CASE WHEN is_held THEN 'held' WHEN is_ending AND letter <> 'S' THEN 'again' ELSE 'not held' END;
            IF is_held AND mode = '' THEN
                IF lockstream.may_end_1(name, '') THEN
                    o.owner := NULL;
                    o.kind := NULL;
                ELSE
                    -- No fence begins from now on.
                    o.expires_at := at;
                    verdict := 'again';
                END IF;
            ELSIF is_held THEN
                IF lockstream.end_shared_1(name, own) THEN
                    SELECT CASE WHEN o.is_quiet THEN 'x' ELSE min(kind) END, coalesce(sum(weight), 0)
                        INTO o.kind, o.taken FROM lockstream.holder WHERE key = name;
                    IF o.taken = 0 THEN
                        o.owner := NULL;
                        o.kind := NULL;
                    END IF;
                ELSE
                    UPDATE lockstream.holder d SET expires_at = at WHERE d.key = name AND d.owner = own;
                    verdict := 'again';
                END IF;
            END IF;
        END IF;
        IF o.owner IS NULL AND o.is_quiet THEN
            -- Somebody whose lease was lost may still have it. The epoch is new, so that the last token fences nothing.
            o.owner := '~quiet';
            o.epoch := greatest(o.epoch + 1, at);
            o.kind := 'x';
            o.expires_at := quiet_until;
        END IF;
        IF letter = 'E' THEN
            -- Its ticket may be from a connection that is gone.
            UPDATE lockstream.ticket d SET line = own_line WHERE d.key = name AND d.owner = own;
        END IF;
        IF verdict IS DISTINCT FROM 'again' THEN
            o := lockstream.serve_1(o, CASE WHEN asks THEN own END, CASE WHEN place <= at THEN place END, own_line, at);
        END IF;
        IF asks AND NOT o.is_in_the_way AND lockstream.admits_1(o, mode) OR letter = 'Y' AND o.owner IS NULL THEN
            o := lockstream.give_1(o, winner, mode, ttl, at);
            epoch := o.epoch;
            DELETE FROM lockstream.ticket d WHERE d.key = name AND d.owner = own;
            verdict := 'won';
            IF o.kind <> 'x' THEN
                o := lockstream.serve_1(o, NULL, NULL, own_line, at);
            END IF;
        ELSIF asks OR letter = 'Y' AND verdict <> 'again' THEN
            verdict := 'busy';
            IF letter <> 'A' THEN
                SELECT e.score, e.is_new INTO score, is_new FROM lockstream.enter_1(
                    name, winner, own_line, mode, CASE WHEN letter <> 'L' THEN ttl END, place, at) e;
            END IF;
            remaining := lockstream.remaining_1(o, mode, at);
        ELSIF o.owner IS NULL THEN
            -- W7: the lock is kept for the first subscriber for as long as it may take to ask.
            t := lockstream.first_live_1(name, true, own_line);
            IF t.owner IS NOT NULL THEN
                DELETE FROM lockstream.ticket d WHERE d.key = name AND d.score = t.score;
                o.owner := t.owner;
                o.epoch := greatest(o.epoch + 1, at);
                o.expires_at := at + 100000;
                o.notices := o.notices || ARRAY[t.line::text, 'f ' || name];
            END IF;
        END IF;
    END IF;

    epoch := coalesce(epoch, o.epoch);
    unserved := o.unserved;
    notices := o.notices;
    IF o.owner IS NULL AND l.waited AND verdict IN ('not old', 'stale') THEN
        -- It is over, and somebody waits: whoever asks next serves the queue.
        RETURN;
    END IF;
    l.waited := o.owner IS NOT NULL AND (l.waited OR score IS NOT NULL);
    -- Not if nothing changes: whoever waits for the end of a transaction asks often, and old versions of the row stay until
    -- then.
    UPDATE lockstream.lock k SET owner = o.owner, epoch = o.epoch, expires_at = o.expires_at, waited = l.waited
        WHERE k.key = name
        AND (k.owner, k.epoch, k.expires_at, k.waited) IS DISTINCT FROM (o.owner, o.epoch, o.expires_at, l.waited);
END $$;

-- Operations on locks, in the order of their keys: else two calls might wait for each other.
--
-- Besides the letters of `op_1` there are N renew, V raise the epoch above `place`, and K keep: `more` is the name under
-- which nobody has the lock (M8). `own_line`: 0 if no grants can be heard. `of_use`: until when A, E, L and D are of use
-- (O5). `is_durable`: whether it is on disk before it is answered.
-- Besides the verdicts of `op_1` there are 'renewed', 'raised' with the age in `remaining`, and 'lost'.
-- Without `enable_seqscan = off` PostgreSQL reads a table in full once it knows that it is small, with all old versions of
-- its rows; without `force_generic_plan` it plans some statements anew each time.
-- `notices`: pairs of a line and a text, to be sent by `notify_1` when this call is done. A transaction that notifies holds
-- a lock of the whole server until it is on disk.
CREATE FUNCTION lockstream.ops_1(
    is_durable boolean, own_line bigint, of_use bigint, letters text, names text[], owners text[], modes text[],
    ttls bigint[], mores text[], places bigint[]
) RETURNS TABLE (
    at bigint, verdict text, epoch bigint, remaining bigint, score bigint, is_new boolean, unserved boolean, notices text[]
) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET lock_timeout = '2s' SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    letter text;
    name text;
    own text;
    mode text;
    lasts bigint;
    quiet bigint;
    since bigint;
    quiet_until bigint := 0;
    -- A call serves so many tickets, and one more for each other lock (M4).
    per_call CONSTANT integer := 64;
    granted integer := 0;
    is_waited boolean;
    first lockstream.ticket;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'lockstream needs transactions that are READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'LS002';
    END IF;
    IF NOT is_durable THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    ELSIF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    SELECT s.quiet, a.since INTO quiet, since FROM lockstream.state s LEFT JOIN lockstream.alive a ON true;
    IF since IS NULL THEN
        since := lockstream.now_1();
        INSERT INTO lockstream.alive VALUES (since);
    END IF;
    IF since + quiet > lockstream.now_1() THEN
        quiet_until := since + quiet;
    END IF;
    FOR i IN 1 .. length(letters) LOOP
        letter := substr(letters, i, 1);
        name := names[i];
        own := owners[i];
        mode := modes[i];
        lasts := ttls[i];
        at := NULL;
        verdict := NULL;
        epoch := NULL;
        remaining := NULL;
        score := NULL;
        is_new := false;
        unserved := false;
        notices := NULL;
        IF letter = 'N' AND mode = '' THEN
            UPDATE lockstream.lock k SET expires_at = greatest(k.expires_at, lockstream.now_1() + lasts)
                WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1();
            verdict := CASE WHEN found THEN 'renewed' ELSE 'lost' END;
        ELSIF letter = 'N' THEN
            -- Under the lock's row, as everything that ends a shared lease.
            PERFORM 1 FROM lockstream.lock k WHERE k.key = name FOR NO KEY UPDATE;
            UPDATE lockstream.holder h SET expires_at = greatest(h.expires_at, lockstream.now_1() + lasts)
                WHERE h.key = name AND h.owner = own AND h.expires_at > lockstream.now_1();
            verdict := CASE WHEN found THEN 'renewed' ELSE 'lost' END;
        ELSIF letter = 'K' AND mode = '' THEN
            -- A transaction that is fenced by the lease may go on: nobody gets the lock before that has ended. The new
            -- epoch lets no other fence begin.
            UPDATE lockstream.lock k SET owner = mores[i], epoch = greatest(k.epoch + 1, lockstream.now_1()),
                expires_at = lockstream.now_1() + lasts
                WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1()
                RETURNING k.waited INTO is_waited;
            verdict := CASE WHEN found THEN 'held' ELSE 'not held' END;
        ELSIF letter = 'K' THEN
            SELECT k.waited INTO is_waited FROM lockstream.lock k WHERE k.key = name FOR NO KEY UPDATE;
            UPDATE lockstream.holder h SET expires_at = lockstream.now_1()
                WHERE h.key = name AND h.owner = own AND h.expires_at > lockstream.now_1();
            verdict := CASE WHEN found THEN 'held' ELSE 'not held' END;
            IF found THEN
                -- The lease itself ends now, or with the transaction that is fenced by it.
                UPDATE lockstream.lock k SET epoch = greatest(k.epoch + 1, lockstream.now_1()) WHERE k.key = name;
                INSERT INTO lockstream.holder
                    SELECT h.key, mores[i], h.kind, h.weight, k.epoch, lockstream.now_1() + lasts
                    FROM lockstream.holder h, lockstream.lock k WHERE h.key = name AND h.owner = own AND k.key = name;
                INSERT INTO lockstream.guard VALUES (name, mores[i]) ON CONFLICT DO NOTHING;
                PERFORM lockstream.end_shared_1(name, own);
            END IF;
        ELSIF letter = 'V' THEN
            UPDATE lockstream.lock k SET epoch = greatest(k.epoch, places[i])
                WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1();
            verdict := CASE WHEN found THEN 'raised' ELSE 'lost' END;
            remaining := greatest(lockstream.now_1() - since, 0);
        ELSIF letter IN ('A', 'E', 'L') AND mode = '' AND quiet_until = 0 THEN
            -- The shortest way: the lock is free, and then nobody waits.
            UPDATE lockstream.lock k SET owner = own, epoch = greatest(k.epoch + 1, lockstream.now_1()),
                expires_at = lockstream.now_1() + lasts
                WHERE k.key = name AND k.owner IS NULL AND lockstream.now_1() <= of_use
                RETURNING k.epoch, k.expires_at - lasts INTO epoch, at;
            IF found THEN
                verdict := 'won';
            END IF;
        ELSIF letter = 'R' AND mode = '' AND quiet_until = 0 THEN
            -- `op_1` does this, too, in twice as many statements: nobody waits, or the first ticket is an exclusive one.
            PERFORM 1 FROM lockstream.guard g WHERE g.key = name AND g.owner = '' FOR UPDATE SKIP LOCKED;
            IF found THEN
                SELECT k.waited INTO is_waited FROM lockstream.lock k
                    WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1() FOR UPDATE;
                first := NULL;
                IF is_waited THEN
                    SELECT * INTO first FROM lockstream.ticket t WHERE t.key = name ORDER BY t.score LIMIT 1;
                END IF;
                IF is_waited IS NOT NULL AND first.key IS NULL THEN
                    UPDATE lockstream.lock k SET owner = NULL, waited = false WHERE k.key = name;
                    verdict := 'held';
                ELSIF first.ttl IS NOT NULL AND first.mode = ''
                    AND (first.line = own_line OR NOT pg_try_advisory_xact_lock_shared(first.line))
                THEN
                    DELETE FROM lockstream.ticket t WHERE t.key = name AND t.score = first.score;
                    at := lockstream.now_1();
                    UPDATE lockstream.lock k
                        SET owner = first.owner, epoch = greatest(k.epoch + 1, at), expires_at = at + first.ttl
                        WHERE k.key = name RETURNING k.epoch INTO epoch;
                    granted := granted + 1;
                    notices := ARRAY[first.line::text, concat_ws(' ', CASE WHEN granted < per_call THEN '1' ELSE '2' END,
                        first.owner, 'x', first.ttl, epoch, at, name)];
                    verdict := 'held';
                END IF;
            END IF;
        END IF;
        IF letter = 'K' AND verdict = 'held' AND is_waited THEN
            -- Its end has moved: the first in the queue is told to ask.
            first := lockstream.first_live_1(name, false, own_line);
            IF first.line IS NOT NULL THEN
                notices := ARRAY[first.line::text, 'f ' || name];
            END IF;
        END IF;
        IF verdict IS NULL THEN
            SELECT * INTO at, verdict, epoch, remaining, score, is_new, unserved, notices FROM lockstream.op_1(
                letter, name, own, mode, lasts, mores[i], places[i], own_line, of_use, quiet_until,
                greatest(1, per_call - granted));
            granted := granted + coalesce(array_length(notices, 1) / 2, 0);
        END IF;
        at := coalesce(at, lockstream.now_1());
        RETURN NEXT;
    END LOOP;
END $$;

-- Sends notices. They need not be on disk: a crash loses them anyway.
CREATE FUNCTION lockstream.notify_1(notices text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    FOR i IN 1 .. coalesce(array_length(notices, 1), 0) BY 2 LOOP
        PERFORM pg_notify('lockstream:' || notices[i], notices[i + 1]);
    END LOOP;
END $$;

-- The holders and then the first tickets of a lock: who, the mode, until when (null: a ticket), the time, and how many
-- tickets there are.
CREATE FUNCTION lockstream.inspect_1(name text)
RETURNS TABLE (who text, mode text, expires_at bigint, at bigint, tickets bigint)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH clock AS (SELECT lockstream.now_1() AS now, (
        SELECT count(*) FROM lockstream.ticket t WHERE t.key = name AND t.ttl IS NOT NULL
    ) AS tickets), held AS (
        SELECT l.owner, '' AS mode, l.expires_at, l.epoch FROM lockstream.lock l WHERE l.key = name AND l.owner <> ''
        UNION ALL
        SELECT h.owner, CASE h.kind WHEN 'r' THEN 'r' ELSE h.weight || '/' || h.kind END, h.expires_at, h.epoch
            FROM lockstream.holder h WHERE h.key = name
    )
    SELECT NULL, NULL, NULL, clock.now, clock.tickets FROM clock
    UNION ALL
    (SELECT held.owner, held.mode, held.expires_at, clock.now, clock.tickets FROM held, clock
        WHERE held.expires_at > clock.now ORDER BY held.epoch)
    UNION ALL
    (SELECT t.owner, t.mode, NULL, clock.now, clock.tickets FROM lockstream.ticket t, clock
        WHERE t.key = name AND t.ttl IS NOT NULL ORDER BY t.score LIMIT 100)
$$;

-- The locks that begin with `start` and come after `after`, and may be held or waited for. It looks at `most` rows, and
-- the last of these is returned in any case, so that the next call begins after it.
CREATE FUNCTION lockstream.scan_1(start text, after text, most integer) RETURNS TABLE (name text, in_use boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    FOR name, in_use IN SELECT l.key, l.owner IS NOT NULL FROM lockstream.lock l
        WHERE l.key >= start AND l.key > after ORDER BY l.key LIMIT most
    LOOP
        EXIT WHEN NOT starts_with(name, start);
        most := most - 1;
        IF in_use OR most = 0 THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- Takes the session's line, and tells what the session must know.
CREATE FUNCTION lockstream.hello_1(
    own_line bigint, OUT version integer, OUT quiet bigint, OUT now bigint, OUT is_standby boolean, OUT server text
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    is_standby := pg_is_in_recovery();
    IF own_line <> 0 AND NOT is_standby THEN
        PERFORM pg_advisory_lock(own_line);
    END IF;
    SELECT s.version, s.quiet INTO version, quiet FROM lockstream.state s;
    now := lockstream.now_1();
    BEGIN
        server := (SELECT system_identifier::text FROM pg_control_system());
    EXCEPTION WHEN insufficient_privilege THEN
        server := NULL;
    END;
END $$;

-- Ends a session's connection that it has given up.
CREATE FUNCTION lockstream.end_backend_1(backend integer, started timestamptz) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a WHERE a.pid = backend AND a.backend_start = started
$$;

-- Deletes what nobody has used for an hour, and tickets of registries that are gone. It waits for nobody, and does a piece
-- at a time, since others wait for what it has deleted. It returns false if more is left, and no other session is at it.
CREATE FUNCTION lockstream.sweep_1(unused bigint DEFAULT 3600000000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    piece CONSTANT integer := 1000;
    before bigint := lockstream.now_1() - unused;
    -- A session does not exclude itself: its own line would seem to be free.
    own bigint[] := ARRAY(SELECT l.classid::bigint << 32 | l.objid::bigint FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.pid = pg_backend_pid());
    highest bigint := 0;
    done integer := 0;
    is_all boolean;
    dead bigint;
    l record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(6012214763185742) THEN
        RETURN true;
    END IF;
    FOR dead IN SELECT DISTINCT t.line FROM lockstream.ticket t WHERE t.line <> ALL (own) LOOP
        IF pg_try_advisory_xact_lock_shared(dead) THEN
            DELETE FROM lockstream.ticket d USING (
                SELECT t.key, t.score FROM lockstream.ticket t WHERE t.line = dead FOR UPDATE SKIP LOCKED
            ) t WHERE d.key = t.key AND d.score = t.score;
            done := done + 1;
            EXIT WHEN done = piece;
        END IF;
    END LOOP;
    is_all := done < piece;
    done := 0;
    FOR l IN SELECT k.key, k.epoch FROM lockstream.lock k WHERE k.expires_at <= before AND k.owner IS DISTINCT FROM ''
        LIMIT piece FOR UPDATE SKIP LOCKED
    LOOP
        done := done + 1;
        CONTINUE WHEN EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = l.key);
        CONTINUE WHEN NOT lockstream.may_end_1(l.key, '');
        highest := greatest(highest, l.epoch);
        DELETE FROM lockstream.guard g WHERE g.key = l.key AND g.owner = '';
        DELETE FROM lockstream.lock k WHERE k.key = l.key;
    END LOOP;
    UPDATE lockstream.state s SET epoch = highest WHERE s.epoch < highest;
    is_all := is_all AND done < piece;
    done := 0;
    -- Of a shared lock its holders count.
    FOR l IN SELECT k.key FROM lockstream.lock k WHERE k.owner = ''
        AND NOT EXISTS (SELECT 1 FROM lockstream.holder h WHERE h.key = k.key AND h.expires_at > before)
        AND NOT EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = k.key) LIMIT piece FOR UPDATE SKIP LOCKED
    LOOP
        done := done + 1;
        PERFORM lockstream.end_shared_1(h.key, h.owner) FROM lockstream.holder h
            WHERE h.key = l.key AND h.expires_at <= before;
        UPDATE lockstream.lock k SET owner = NULL, expires_at = before, waited = false WHERE k.key = l.key
            AND NOT EXISTS (SELECT 1 FROM lockstream.holder h WHERE h.key = l.key);
    END LOOP;
    RETURN is_all AND done < piece;
END $$;

-- Fences the transaction that calls it: it commits only if the lease with this token still has the lock, and nobody else
-- gets the lock before it has ended. Raises an error if the lease is over.
CREATE FUNCTION lockstream.fence(key text, token bigint, prefix text DEFAULT 'lock') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := prefix || ':' || key;
    whose text := '';
    is_held boolean;
BEGIN
    SELECT h.owner INTO whose FROM lockstream.holder h WHERE h.key = name AND h.epoch = token / 64;
    whose := coalesce(whose, '');
    -- First the guard, and then a look: who ends the lease has the guard meanwhile.
    PERFORM 1 FROM lockstream.guard g WHERE g.key = name AND g.owner = whose FOR KEY SHARE;
    IF found AND whose = '' THEN
        SELECT l.owner <> '' AND l.epoch = token / 64 AND l.expires_at > lockstream.now_1() INTO is_held
            FROM lockstream.lock l WHERE l.key = name FOR KEY SHARE;
    ELSIF found THEN
        SELECT h.epoch = token / 64 AND h.expires_at > lockstream.now_1() INTO is_held
            FROM lockstream.holder h WHERE h.key = name AND h.owner = whose FOR KEY SHARE;
    END IF;
    IF is_held IS DISTINCT FROM true THEN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            -- The lease may be newer than the snapshot, or its last renewal is: then one of these fails with 40001.
            INSERT INTO lockstream.lock VALUES (name, NULL, 0, 0) ON CONFLICT DO NOTHING;
            PERFORM 1 FROM lockstream.lock l WHERE l.key = name FOR SHARE;
            PERFORM 1 FROM lockstream.holder h WHERE h.key = name AND h.owner = whose FOR SHARE;
        END IF;
        RAISE 'the lease on "%" with token % is over', key, token USING ERRCODE = 'LS001';
    END IF;
END $$;

-- What is about rights: an application needs USAGE on the schema and EXECUTE on these.
REVOKE ALL ON ALL TABLES IN SCHEMA lockstream FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA lockstream FROM PUBLIC;
