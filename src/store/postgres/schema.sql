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

-- A shared lease. `kind`: 'r', or the limit under which a permit was taken.
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

-- One row, which is made again from the defaults if somebody empties the table. `epoch`: no lock whose row was swept had a
-- greater one. `quiet`: for how long nothing is given away after data may have been lost. Its default is set with it.
-- `secret`: of the channels.
CREATE TABLE lockstream.state (
    version integer NOT NULL DEFAULT 1,
    epoch bigint NOT NULL DEFAULT 0,
    quiet bigint NOT NULL DEFAULT 0,
    secret uuid NOT NULL DEFAULT gen_random_uuid(),
    one boolean PRIMARY KEY DEFAULT true CHECK (one)
);

-- Since when nothing was lost: one row. An unlogged table is empty after a crash and after a promotion.
CREATE UNLOGGED TABLE lockstream.alive (since bigint NOT NULL, one boolean PRIMARY KEY DEFAULT true CHECK (one));

-- Grants that were committed, and for which no notification was sent yet. Whoever grants may die in between, so those who
-- wait look here, too. It is unlogged because they ask again anyway when the server has crashed.
CREATE UNLOGGED TABLE lockstream.notice (
    line bigint,
    at bigint,
    payload text COLLATE "C",
    PRIMARY KEY (line, at, payload)
);

-- At most one row: when the last sweep began, and up to which key it has come; null if it is done.
CREATE UNLOGGED TABLE lockstream.sweep (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    began_at bigint NOT NULL,
    after text COLLATE "C"
);

CREATE FUNCTION lockstream.now_1() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;

-- Makes the rows that belong to the schema itself, where they are missing. Whatever has emptied `state` may have emptied the
-- other tables, too: that is a loss of data. Epochs grow all the same, by the clock (F1).
CREATE FUNCTION lockstream.make_rows_1() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO lockstream.state DEFAULT VALUES ON CONFLICT DO NOTHING;
    IF found THEN
        DELETE FROM lockstream.alive;
    END IF;
    INSERT INTO lockstream.alive VALUES (lockstream.now_1()) ON CONFLICT DO NOTHING;
END $$;

-- These tables may stand for others that were lost.
SELECT lockstream.make_rows_1();

-- Ends a tenure, and returns whether it may end: not while a transaction is fenced by it. `whose`: '' or a shared owner. The
-- row of an exclusive lock is left to the caller.
CREATE FUNCTION lockstream.end_1(name text, whose text) RETURNS boolean
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
    IF whose = '' THEN
        -- Stronger than the update that follows, so that a fence in a transaction with an older snapshot fails (40001).
        PERFORM 1 FROM lockstream.lock l WHERE l.key = name FOR UPDATE;
    ELSE
        DELETE FROM lockstream.holder h WHERE h.key = name AND h.owner = whose;
        DELETE FROM lockstream.guard g WHERE g.key = name AND g.owner = whose;
    END IF;
    RETURN true;
END $$;

-- The first ticket whose registry is there (S2). Those of others are deleted. `clears`: how many more of them this call may
-- delete (G3); negative if it must not look further.
CREATE FUNCTION lockstream.first_live_1(
    name text, listens boolean, own_line bigint, INOUT clears integer, OUT first lockstream.ticket
) LANGUAGE plpgsql AS $$
BEGIN
    WHILE clears >= 0 LOOP
        SELECT * INTO first FROM lockstream.ticket t
            WHERE t.key = name AND (t.ttl IS NULL) = listens ORDER BY t.score LIMIT 1;
        EXIT WHEN first.line IS NULL OR first.line = own_line OR NOT pg_try_advisory_xact_lock_shared(first.line);
        IF clears > 0 THEN
            DELETE FROM lockstream.ticket t WHERE t.key = name AND t.score = first.score;
        END IF;
        first := NULL;
        clears := clears - 1;
    END LOOP;
END $$;

-- If more than `most` tickets of registries that are gone are in front, deletes that many. Returns whether it did.
CREATE FUNCTION lockstream.clear_1(name text, listens boolean, own_line bigint, most integer) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    t record;
    dead integer := 0;
BEGIN
    FOR t IN SELECT x.line, x.score FROM lockstream.ticket x
        WHERE x.key = name AND (x.ttl IS NULL) = listens ORDER BY x.score LIMIT most + 1
    LOOP
        EXIT WHEN t.line = own_line OR NOT pg_try_advisory_xact_lock_shared(t.line);
        IF dead = most THEN
            DELETE FROM lockstream.ticket d WHERE d.key = name AND (d.ttl IS NULL) = listens AND d.score < t.score;
            RETURN true;
        END IF;
        dead := dead + 1;
    END LOOP;
    RETURN false;
END $$;

-- What is said of an operation: see `ops_1`.
CREATE TYPE lockstream.answer_1 AS (
    at bigint, verdict text, epoch bigint, remaining bigint, score bigint, is_new boolean, unserved boolean, notices text[],
    holder text, holds text, others bigint
);

-- A lock in the midst of an operation. `kind`: null if it is free, 'x' if nobody may join, 'r' if readers have it, 'p' if
-- permits have it, which take `taken` of it. `is_held`: whether the owner who asks has it, and `is_ending`: whether it has
-- had it, and a transaction is still fenced by that lease. `ended`: leases that are over. `most`: how many more tickets may
-- be served (M4), and `clears`: how many more that are dead may be deleted (G3); `unserved`: whether more may fit.
-- `is_in_the_way`: whether a ticket that does not fit was found.
CREATE TYPE lockstream.open_lock_1 AS (
    name text,
    owner text,
    epoch bigint,
    expires_at bigint,
    kind text,
    taken bigint,
    is_held boolean,
    is_ending boolean,
    ended text[],
    is_quiet boolean,
    most integer,
    clears integer,
    unserved boolean,
    is_in_the_way boolean,
    notices text[]
);

-- The kind of a lock, of the `kind` of one of its holders.
CREATE FUNCTION lockstream.kind_1(of_holder text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN of_holder = 'r' THEN 'r' WHEN of_holder IS NOT NULL THEN 'p' END $$;

-- Looks who has a lock. `own` and `mode`: those of the owner who asks. A lease that is over has it, too.
CREATE FUNCTION lockstream.open_1(
    l lockstream.lock, own text, mode text, quiet_until bigint, at bigint, OUT o lockstream.open_lock_1
) LANGUAGE plpgsql STABLE AS $$
BEGIN
    o := ROW(l.key, l.owner, l.epoch, l.expires_at, NULL, 0, false, false, NULL, quiet_until > at, 0, 0, false, false, NULL);
    IF l.owner <> '' THEN
        o.kind := 'x';
        o.is_held := l.owner = own AND mode = '' AND l.expires_at > at;
        o.is_ending := l.owner = own AND mode = '' AND l.expires_at <= at;
        o.ended := CASE WHEN l.expires_at <= at THEN ARRAY[''] END;
    ELSIF l.owner = '' THEN
        SELECT lockstream.kind_1(min(h.kind)), coalesce(sum(h.weight), 0),
            coalesce(bool_or(h.owner = own AND h.expires_at > at), false),
            coalesce(bool_or(h.owner = own AND h.expires_at <= at), false),
            array_agg(h.owner) FILTER (WHERE h.expires_at <= at)
            INTO o.kind, o.taken, o.is_held, o.is_ending, o.ended FROM lockstream.holder h WHERE h.key = l.key;
        IF o.kind IS NULL THEN
            o.owner := NULL;
        ELSIF o.is_quiet THEN
            o.kind := 'x';
            o.expires_at := quiet_until;
        END IF;
    END IF;
END $$;

-- M1: whether one with this mode may have the lock now. A permit counts all that is taken against its own limit.
CREATE FUNCTION lockstream.admits_1(o lockstream.open_lock_1, mode text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN o.kind IS NULL THEN true
        WHEN o.kind = 'x' OR mode = '' THEN false
        WHEN o.kind = 'r' OR mode = 'r' THEN o.kind = mode
        ELSE o.taken + split_part(mode, '/', 1)::bigint <= split_part(mode, '/', 2)::bigint
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
    o.kind := CASE WHEN o.is_quiet THEN 'x' ELSE lockstream.kind_1(mode) END;
END $$;

-- M3: serves tickets from the front as long as they fit, up to that of `own`, or to one that `place` is before.
CREATE FUNCTION lockstream.serve_1(
    INOUT o lockstream.open_lock_1, own text, place bigint, own_line bigint, now bigint
) LANGUAGE plpgsql AS $$
DECLARE
    live record;
    t lockstream.ticket;
BEGIN
    o.is_in_the_way := false;
    WHILE o.kind IS DISTINCT FROM 'x' LOOP
        SELECT * INTO live FROM lockstream.first_live_1(o.name, false, own_line, o.clears);
        o.clears := live.clears;
        t := live.first;
        IF o.clears >= 0 AND (t.owner IS NULL OR t.owner = own OR place < t.score) THEN
            RETURN;
        END IF;
        o.is_in_the_way := true;
        IF o.clears >= 0 AND NOT lockstream.admits_1(o, t.mode) THEN
            RETURN;
        ELSIF o.clears < 0 OR o.most <= 0 THEN
            o.unserved := true;
            RETURN;
        END IF;
        o.is_in_the_way := false;
        DELETE FROM lockstream.ticket d WHERE d.key = o.name AND d.score = t.score;
        -- Later than the answer of a `look_1` that has seen the ticket.
        now := lockstream.now_1();
        o := lockstream.give_1(o, t.owner, t.mode, t.ttl, now);
        o.most := o.most - 1;
        -- The last grant of a call says that more may fit (M4).
        o.notices := o.notices || ARRAY[t.line::text, now::text, concat_ws(' ', CASE o.most WHEN 0 THEN '2' ELSE '1' END,
            t.owner, coalesce(nullif(t.mode, ''), 'x'), t.ttl, o.epoch, now, o.name)];
    END LOOP;
    o.is_in_the_way := true;
END $$;

-- For how long a lease still lasts. If it has ended and a transaction is fenced by it, nobody knows for how long: whoever
-- waits asks less and less often.
CREATE FUNCTION lockstream.left_1(until bigint, now bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN until > now THEN until - now ELSE least((now - until) / 8, 2000000) END
$$;

-- Answers that the lock is busy. M5: `remaining` is when the ticket in front may have the lock, or else one with `mode`. G8:
-- who has it, of several the one that ends first, what it excludes, and how many other readers there are or how much other
-- permits take.
CREATE FUNCTION lockstream.busy_1(o lockstream.open_lock_1, mode text, INOUT answer lockstream.answer_1)
LANGUAGE plpgsql AS $$
DECLARE
    wish text;
    fits bigint;
BEGIN
    answer.verdict := 'busy';
    IF o.owner <> '' THEN
        answer.holder := nullif(o.owner, '~quiet');
        answer.holds := '';
        answer.others := 0;
    ELSE
        SELECT h.owner, CASE h.kind WHEN 'r' THEN 'r' ELSE h.weight || '/' || h.kind END, o.taken - h.weight
            INTO answer.holder, answer.holds, answer.others FROM lockstream.holder h
            WHERE h.key = o.name ORDER BY h.expires_at, h.owner LIMIT 1;
    END IF;
    IF o.kind = 'x' THEN
        fits := o.expires_at;
    ELSE
        wish := coalesce((SELECT t.mode FROM lockstream.ticket t
            WHERE t.key = o.name AND t.ttl IS NOT NULL ORDER BY t.score LIMIT 1), mode);
        IF o.kind = 'p' AND wish LIKE '%/%' THEN
            SELECT min(h.expires_at) INTO fits FROM (
                SELECT expires_at, sum(weight) OVER (ORDER BY expires_at, owner) AS freed FROM lockstream.holder
                WHERE key = o.name
            ) h WHERE o.taken - h.freed + split_part(wish, '/', 1)::bigint <= split_part(wish, '/', 2)::bigint;
        END IF;
        fits := coalesce(fits, (SELECT max(h.expires_at) FROM lockstream.holder h WHERE h.key = o.name));
    END IF;
    answer.remaining := lockstream.left_1(fits, answer.at);
END $$;

-- Enters the queue, or the subscriptions (K1, K2): the place, and whether it is new.
CREATE FUNCTION lockstream.enter_1(
    name text, whose text, own_line bigint, mode text, ttl bigint, place bigint, now bigint,
    OUT score bigint, OUT is_new boolean
) LANGUAGE plpgsql AS $$
BEGIN
    SELECT t.score INTO score FROM lockstream.ticket t WHERE t.key = name AND t.owner = whose;
    is_new := NOT found;
    IF is_new THEN
        IF place <= now THEN
            -- Others may have it by now, or the places behind it.
            SELECT free INTO score FROM generate_series(place, place + 100) free WHERE NOT EXISTS (
                SELECT 1 FROM lockstream.ticket t WHERE t.key = name AND t.score = free) ORDER BY free LIMIT 1;
        END IF;
        IF score IS NULL THEN
            SELECT greatest(now, max(t.score) + 1) INTO score FROM lockstream.ticket t WHERE t.key = name;
        END IF;
        INSERT INTO lockstream.ticket VALUES (name, score, whose, own_line, mode, ttl);
    ELSE
        UPDATE lockstream.ticket t SET line = own_line WHERE t.key = name AND t.owner = whose AND t.line <> own_line;
    END IF;
END $$;

-- What `op_1` would answer if it changes nothing, and else no verdict. It writes nothing: a lock on a row is written, too.
-- `ended`: leases that have ended. The verdict counts only if transactions are fenced by all of them.
--
-- Nothing waits for the row of the lock here, so a grant may be on its way. `at` is before the look, and a grant takes its
-- time after it has deleted the ticket. So a grant to a ticket that nobody was deleting yet (its `xmax`) is later than this
-- answer (D2). STABLE: all is seen as it was at one moment.
CREATE FUNCTION lockstream.look_1(
    letter text, name text, own text, mode text, place bigint, own_line bigint, quiet_until bigint, at bigint,
    OUT answer lockstream.answer_1, OUT ended text[]
) LANGUAGE plpgsql STABLE AS $$
DECLARE
    asks boolean := letter IN ('A', 'E', 'L');
    l lockstream.lock;
    o lockstream.open_lock_1;
    t lockstream.ticket;
    own_score bigint;
BEGIN
    SELECT * INTO l FROM lockstream.lock k WHERE k.key = name;
    IF l.key IS NULL OR l.owner IS NULL AND (asks OR l.waited OR quiet_until > at) THEN
        RETURN;
    END IF;
    -- What settles an op that may be under way still, on a connection that is gone, waits for that (O6).
    IF NOT asks AND letter <> 'S' AND EXISTS (
        SELECT 1 FROM lockstream.lock k, pg_snapshot_xip(pg_current_snapshot()) x
        WHERE k.key = name AND k.xmax::text::bigint = (x::text::bigint & 4294967295)
    ) THEN
        RETURN;
    END IF;
    o := lockstream.open_1(l, own, mode, quiet_until, at);
    IF l.owner = '' AND o.kind IS NULL OR o.is_held AND letter <> 'S' THEN
        RETURN;
    END IF;
    IF letter <> 'A' THEN
        SELECT x.score INTO own_score FROM lockstream.ticket x
            WHERE x.key = name AND x.owner = own AND (NOT asks OR x.line = own_line AND x.xmax::text = '0');
        IF asks AND own_score IS NULL OR letter IN ('W', 'U') AND own_score IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;

    -- As `serve_1`: nobody may be served, nor its own request.
    IF o.kind <> 'x' AND letter <> 'Y' THEN
        SELECT * INTO t FROM lockstream.ticket x WHERE x.key = name AND x.ttl IS NOT NULL ORDER BY x.score LIMIT 1;
        IF t.owner IS NULL OR asks AND (t.owner = own OR place <= at AND place < t.score) THEN
            IF asks AND lockstream.admits_1(o, mode) THEN
                RETURN;
            END IF;
        ELSIF lockstream.admits_1(o, t.mode)
            OR t.line <> own_line AND pg_try_advisory_xact_lock_shared(t.line)
        THEN
            RETURN;
        END IF;
    END IF;

    answer.at := at;
    answer.epoch := l.epoch;
    ended := o.ended;
    IF asks THEN
        answer.score := own_score;
        answer := lockstream.busy_1(o, mode, answer);
    ELSIF letter = 'Y' THEN
        answer.verdict := 'not old';
    ELSE
        answer.verdict := CASE WHEN o.is_ending AND letter <> 'S' THEN 'again' ELSE 'not held' END;
    END IF;
END $$;

-- One operation in full. Its letter:
--   A attempt  E enter  L subscribe  W withdraw  U unsubscribe  R release  Y yield: `more` is the new owner
--   D adopt: `more` is the present owner  S serve the queue
-- Its verdict: 'won', 'busy', 'not old', 'held' or 'not held' until now, 'again' if it must be sent again soon, 'more' if it
-- must be sent again at once and the lock is as it was (G3), or 'stale'. `clears`: how many dead tickets, and leases that
-- are over, may be deleted, before it and after it.
CREATE FUNCTION lockstream.op_1(
    letter text, name text, own text, mode text, ttl bigint, more text, place bigint, own_line bigint, of_use bigint,
    quiet_until bigint, most integer, INOUT clears integer, OUT answer lockstream.answer_1
) LANGUAGE plpgsql AS $$
DECLARE
    l lockstream.lock;
    o lockstream.open_lock_1;
    t lockstream.ticket;
    h record;
    asks boolean := letter IN ('A', 'E', 'L');
    winner text := CASE letter WHEN 'Y' THEN more ELSE own END;
    seen record;
BEGIN
    answer.at := lockstream.now_1();
    -- Whoever waits for long, asks often or comes twice costs no write. One that enters first is not looked for.
    IF letter <> 'D' AND (letter <> 'E' OR place IS NOT NULL) AND NOT (asks AND answer.at > of_use) THEN
        SELECT * INTO seen
            FROM lockstream.look_1(letter, name, own, mode, place, own_line, quiet_until, answer.at) s;
        answer := seen.answer;
        IF answer.verdict IS NOT NULL AND NOT EXISTS (
            -- It may end. Nothing is inserted here: the row of the lock is not ours yet.
            SELECT 1 FROM unnest(seen.ended) e WHERE NOT EXISTS (
                SELECT 1 FROM lockstream.guard g WHERE g.key = name AND g.owner = e)
        ) AND NOT EXISTS (
            SELECT 1 FROM lockstream.guard g WHERE g.key = name AND g.owner = ANY (seen.ended) FOR UPDATE SKIP LOCKED
        ) THEN
            RETURN;
        END IF;
        answer := NULL;
    END IF;
    -- A sweep may delete the row before it is locked here.
    FOR attempt IN 1 .. 10 LOOP
        SELECT * INTO l FROM lockstream.lock k WHERE k.key = name FOR NO KEY UPDATE;
        EXIT WHEN found OR NOT asks AND NOT EXISTS (
            SELECT 1 FROM lockstream.holder d WHERE d.key = name AND d.owner = own);
        -- There are shared leases or tickets already if somebody has emptied this table.
        INSERT INTO lockstream.lock SELECT name,
            CASE WHEN EXISTS (SELECT 1 FROM lockstream.holder d WHERE d.key = name) THEN '' END,
            coalesce((SELECT s.epoch FROM lockstream.state s), 0), 0,
            EXISTS (SELECT 1 FROM lockstream.ticket d WHERE d.key = name) ON CONFLICT DO NOTHING;
        INSERT INTO lockstream.guard VALUES (name, '') ON CONFLICT DO NOTHING;
    END LOOP;
    answer.at := lockstream.now_1();
    IF l.key IS NULL AND asks THEN
        RAISE 'the table "lock" keeps no row for "%"', name USING ERRCODE = 'LS003';
    ELSIF l.key IS NULL THEN
        IF letter IN ('W', 'U') THEN
            DELETE FROM lockstream.ticket d WHERE d.key = name AND d.owner = own;
        END IF;
        answer.verdict := CASE WHEN letter IN ('Y', 'D') THEN 'not old' ELSE 'not held' END;
        RETURN;
    END IF;
    IF letter = 'E' AND answer.at <= of_use THEN
        -- Its ticket may be from a connection that is gone.
        UPDATE lockstream.ticket d SET line = own_line WHERE d.key = name AND d.owner = own AND d.line <> own_line;
    END IF;

    -- What is over ends, unless a transaction is fenced by it.
    IF l.owner <> '' AND l.expires_at <= answer.at THEN
        IF lockstream.end_1(name, '') THEN
            l.owner := NULL;
        END IF;
    ELSIF l.owner = '' THEN
        FOR h IN SELECT owner FROM lockstream.holder WHERE key = name AND expires_at <= answer.at LOOP
            IF clears <= 0 THEN
                answer.verdict := 'more';
                RETURN;
            ELSIF lockstream.end_1(name, h.owner) THEN
                clears := clears - 1;
            END IF;
        END LOOP;
    END IF;
    o := lockstream.open_1(l, own, mode, quiet_until, answer.at);
    -- If more dead tickets are in front than this call may delete, it does nothing else.
    IF l.waited AND (o.owner IS NULL OR o.owner IN ('', own))
        AND (lockstream.clear_1(name, false, own_line, clears) OR lockstream.clear_1(name, true, own_line, clears))
    THEN
        clears := 0;
        answer.verdict := 'more';
        RETURN;
    END IF;
    o.most := most;
    o.clears := clears;

    IF letter = 'D' THEN
        -- In just this mode: a text that was made up names no greater weight.
        SELECT * INTO h FROM lockstream.holder d WHERE d.key = name AND d.owner = more AND d.expires_at > answer.at
            AND mode = CASE d.kind WHEN 'r' THEN 'r' ELSE d.weight || '/' || d.kind END;
        IF NOT (o.is_held OR coalesce(CASE mode WHEN '' THEN l.owner = more AND l.expires_at > answer.at
            ELSE h.owner = more AND l.owner = '' END, false))
        THEN
            answer.verdict := 'not old';
        ELSIF answer.at > of_use THEN
            answer.verdict := 'stale';
        ELSIF NOT (o.is_held OR lockstream.end_1(name, CASE mode WHEN '' THEN '' ELSE more END)) THEN
            answer.verdict := 'again';
        ELSE
            o.taken := CASE WHEN o.is_held THEN o.taken ELSE o.taken - coalesce(h.weight, 0) END;
            o := lockstream.give_1(o, own, mode, ttl, answer.at);
            answer.verdict := 'won';
        END IF;
    ELSIF asks AND answer.at > of_use THEN
        answer.verdict := 'stale';
    ELSIF asks AND o.is_held THEN
        o := lockstream.give_1(o, own, mode, ttl, answer.at);
        answer.epoch := o.epoch;
        DELETE FROM lockstream.ticket d WHERE d.key = name AND d.owner = own;
        -- It knows now of a grant that it may not have been told. One that is being told is left alone.
        DELETE FROM lockstream.notice d USING (
            SELECT n.line, n.at, n.payload FROM lockstream.notice n
                WHERE n.line = own_line AND split_part(n.payload, ' ', 2) = own FOR UPDATE SKIP LOCKED
        ) n WHERE d.line = n.line AND d.at = n.at AND d.payload = n.payload;
        answer.verdict := 'won';
        IF o.kind <> 'x' THEN
            o := lockstream.serve_1(o, NULL, NULL, own_line, answer.at);
        END IF;
    ELSIF letter = 'Y' AND NOT o.is_held THEN
        answer.verdict := 'not old';
    ELSE
        IF NOT asks THEN
            IF letter IN ('W', 'U') THEN
                DELETE FROM lockstream.ticket d WHERE d.key = name AND d.owner = own;
            END IF;
            o.is_held := o.is_held AND letter <> 'S';
            answer.verdict := CASE WHEN o.is_held THEN 'held'
                WHEN o.is_ending AND letter <> 'S' THEN 'again' ELSE 'not held' END;
            IF o.is_held AND lockstream.end_1(name, CASE mode WHEN '' THEN '' ELSE own END) THEN
                IF mode = '' THEN
                    o.taken := 0;
                ELSE
                    SELECT CASE WHEN o.is_quiet THEN 'x' ELSE lockstream.kind_1(min(kind)) END, coalesce(sum(weight), 0)
                        INTO o.kind, o.taken FROM lockstream.holder WHERE key = name;
                END IF;
                IF o.taken = 0 THEN
                    o.owner := NULL;
                    o.kind := NULL;
                END IF;
            ELSIF o.is_held THEN
                -- No fence begins from now on.
                UPDATE lockstream.holder d SET expires_at = answer.at WHERE d.key = name AND d.owner = own;
                IF mode = '' THEN
                    o.expires_at := answer.at;
                END IF;
                answer.verdict := 'again';
            END IF;
        END IF;
        IF o.owner IS NULL AND o.is_quiet THEN
            -- Somebody whose lease was lost may still have it. The epoch is new, so that the last token fences nothing.
            o.owner := '~quiet';
            o.epoch := greatest(o.epoch + 1, answer.at);
            o.kind := 'x';
            o.expires_at := quiet_until;
        END IF;
        IF answer.verdict IS DISTINCT FROM 'again' THEN
            o := lockstream.serve_1(o, CASE WHEN asks THEN own END,
                CASE WHEN place <= answer.at THEN place END, own_line, answer.at);
        END IF;
        IF asks AND NOT o.is_in_the_way AND lockstream.admits_1(o, mode) OR letter = 'Y' AND o.owner IS NULL THEN
            o := lockstream.give_1(o, winner, mode, ttl, answer.at);
            answer.epoch := o.epoch;
            DELETE FROM lockstream.ticket d WHERE d.key = name AND d.owner = own;
            answer.verdict := 'won';
            IF o.kind <> 'x' THEN
                o := lockstream.serve_1(o, NULL, NULL, own_line, answer.at);
            END IF;
        ELSIF asks OR letter = 'Y' AND answer.verdict <> 'again' THEN
            IF letter <> 'A' THEN
                SELECT e.score, e.is_new INTO answer.score, answer.is_new FROM lockstream.enter_1(
                    name, winner, own_line, mode, CASE WHEN letter <> 'L' THEN ttl END, place, answer.at) e;
            END IF;
            answer := lockstream.busy_1(o, mode, answer);
        ELSIF o.owner IS NULL THEN
            -- W7: the lock is kept for the first subscriber for as long as it may take to ask.
            SELECT * INTO h FROM lockstream.first_live_1(name, true, own_line, clears);
            t := h.first;
            IF t.owner IS NOT NULL THEN
                DELETE FROM lockstream.ticket d WHERE d.key = name AND d.score = t.score;
                o.owner := t.owner;
                o.epoch := greatest(o.epoch + 1, answer.at);
                o.expires_at := answer.at + 100000;
                o.notices := o.notices || ARRAY[t.line::text, answer.at::text, 'f ' || name];
            END IF;
        END IF;
    END IF;

    answer.epoch := coalesce(answer.epoch, o.epoch);
    answer.unserved := o.unserved;
    answer.notices := o.notices;
    clears := greatest(o.clears, 0);
    IF o.owner IS NULL AND l.waited AND answer.verdict IN ('not old', 'stale') THEN
        -- It is over, and somebody waits: whoever asks next serves the queue.
        RETURN;
    END IF;
    l.waited := o.owner IS NOT NULL AND (l.waited OR answer.score IS NOT NULL);
    -- Not if nothing changes.
    UPDATE lockstream.lock k SET owner = o.owner, epoch = o.epoch, expires_at = o.expires_at, waited = l.waited
        WHERE k.key = name
        AND (k.owner, k.epoch, k.expires_at, k.waited) IS DISTINCT FROM (o.owner, o.epoch, o.expires_at, l.waited);
END $$;

-- Operations on locks, in the order of their keys: else two calls might wait for each other.
--
-- Besides the letters of `op_1` there are N renew, without a ttl only a look, V raise the epoch above `place`, T take it from
-- whoever `own` is, and K keep: `more` is the name under which nobody has the lock (M8). `own_line`: 0 if no grants can be
-- heard. `of_use`: until when A, E, L and D are of use (O5). `is_durable`: whether it is on disk before it is answered.
-- Besides the verdicts of `op_1` there are 'renewed', 'raised' with the age in `remaining`, and 'lost'.
-- Without `enable_seqscan = off` PostgreSQL reads a table in full once it knows that it is small, with all old versions of
-- its rows; without `force_generic_plan` it plans some statements anew each time.
-- `notices`: a line, a time and a text each, to be sent by `notify_1` when this call is done. A transaction that notifies
-- holds a lock of the whole server until it is on disk. Until they are sent they are in the table `notice`.
CREATE FUNCTION lockstream.ops_1(
    is_durable boolean, own_line bigint, of_use bigint, letters text, names text[], owners text[], modes text[],
    ttls bigint[], mores text[], places bigint[]
) RETURNS SETOF lockstream.answer_1
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    answer lockstream.answer_1;
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
    -- And it deletes so many dead tickets, and leases that are over (G3).
    clears integer := 100;
    is_waited boolean;
    live record;
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
        PERFORM lockstream.make_rows_1();
        SELECT s.quiet, a.since INTO quiet, since FROM lockstream.state s, lockstream.alive a;
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
        answer := NULL;
        IF letter = 'T' THEN
            -- As its own release: the mode of an owner never changes.
            letter := 'R';
            mode := coalesce((SELECT CASE h.kind WHEN 'r' THEN 'r' ELSE h.weight || '/' || h.kind END
                FROM lockstream.holder h WHERE h.key = name AND h.owner = own), '');
            answer.verdict := CASE WHEN own = '' THEN 'not held' END;
        END IF;
        IF answer.verdict IS NOT NULL THEN
            NULL;
        ELSIF letter = 'N' THEN
            IF lasts IS NULL THEN
                PERFORM 1 FROM lockstream.lock k WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1()
                    UNION ALL SELECT 1 FROM lockstream.holder h
                    WHERE h.key = name AND h.owner = own AND h.expires_at > lockstream.now_1();
            ELSIF mode = '' THEN
                UPDATE lockstream.lock k SET expires_at = greatest(k.expires_at, lockstream.now_1() + lasts)
                    WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1();
            ELSE
                -- Under the lock's row, as everything that ends a shared lease.
                PERFORM 1 FROM lockstream.lock k WHERE k.key = name AND EXISTS (SELECT 1 FROM lockstream.holder h
                    WHERE h.key = name AND h.owner = own AND h.expires_at > lockstream.now_1()) FOR NO KEY UPDATE;
                UPDATE lockstream.holder h SET expires_at = greatest(h.expires_at, lockstream.now_1() + lasts)
                    WHERE h.key = name AND h.owner = own AND h.expires_at > lockstream.now_1();
            END IF;
            answer.verdict := CASE WHEN found THEN 'renewed' ELSE 'lost' END;
        ELSIF letter = 'K' AND mode = '' THEN
            -- A transaction that is fenced by the lease may go on: nobody gets the lock before that has ended. The new
            -- epoch lets no other fence begin.
            UPDATE lockstream.lock k SET owner = mores[i], epoch = greatest(k.epoch + 1, lockstream.now_1()),
                expires_at = lockstream.now_1() + lasts
                WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1()
                RETURNING k.waited INTO is_waited;
            answer.verdict := CASE WHEN found THEN 'held' ELSE 'not held' END;
        ELSIF letter = 'K' THEN
            SELECT k.waited INTO is_waited FROM lockstream.lock k WHERE k.key = name FOR NO KEY UPDATE;
            UPDATE lockstream.holder h SET expires_at = lockstream.now_1()
                WHERE h.key = name AND h.owner = own AND h.expires_at > lockstream.now_1();
            answer.verdict := CASE WHEN found THEN 'held' ELSE 'not held' END;
            IF found THEN
                -- The lease itself ends now, or with the transaction that is fenced by it.
                UPDATE lockstream.lock k SET epoch = greatest(k.epoch + 1, lockstream.now_1()) WHERE k.key = name;
                INSERT INTO lockstream.holder
                    SELECT h.key, mores[i], h.kind, h.weight, coalesce(k.epoch, h.epoch + 1), lockstream.now_1() + lasts
                    FROM lockstream.holder h LEFT JOIN lockstream.lock k ON k.key = h.key
                    WHERE h.key = name AND h.owner = own;
                INSERT INTO lockstream.guard VALUES (name, mores[i]) ON CONFLICT DO NOTHING;
                PERFORM lockstream.end_1(name, own);
            END IF;
        ELSIF letter = 'V' THEN
            UPDATE lockstream.lock k SET epoch = greatest(k.epoch, places[i])
                WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1();
            answer.verdict := CASE WHEN found THEN 'raised' ELSE 'lost' END;
            answer.remaining := greatest(lockstream.now_1() - since, 0);
        ELSIF letter IN ('A', 'E', 'L') AND mode = '' AND quiet_until = 0 THEN
            -- The shortest way: the lock is free, and then nobody waits.
            UPDATE lockstream.lock k SET owner = own, epoch = greatest(k.epoch + 1, lockstream.now_1()),
                expires_at = lockstream.now_1() + lasts
                WHERE k.key = name AND k.owner IS NULL AND lockstream.now_1() <= of_use
                RETURNING k.epoch, k.expires_at - lasts INTO answer.epoch, answer.at;
            IF found THEN
                answer.verdict := 'won';
            END IF;
        ELSIF letter = 'R' AND mode = '' AND quiet_until = 0 THEN
            -- `op_1` does this, too, in twice as many statements: nobody waits, or the first ticket is an exclusive one.
            PERFORM 1 FROM lockstream.guard g WHERE g.key = name AND g.owner = ''
                AND EXISTS (SELECT 1 FROM lockstream.lock k WHERE k.key = name AND k.owner = own) FOR UPDATE SKIP LOCKED;
            IF found THEN
                SELECT k.waited INTO is_waited FROM lockstream.lock k
                    WHERE k.key = name AND k.owner = own AND k.expires_at > lockstream.now_1() FOR UPDATE;
                first := NULL;
                IF is_waited THEN
                    SELECT * INTO first FROM lockstream.ticket t WHERE t.key = name ORDER BY t.score LIMIT 1;
                END IF;
                IF is_waited IS NOT NULL AND first.key IS NULL THEN
                    UPDATE lockstream.lock k SET owner = NULL, waited = false WHERE k.key = name;
                    answer.verdict := 'held';
                ELSIF first.ttl IS NOT NULL AND first.mode = ''
                    AND (first.line = own_line OR NOT pg_try_advisory_xact_lock_shared(first.line))
                THEN
                    DELETE FROM lockstream.ticket t WHERE t.key = name AND t.score = first.score;
                    answer.at := lockstream.now_1();
                    UPDATE lockstream.lock k
                        SET owner = first.owner, epoch = greatest(k.epoch + 1, answer.at), expires_at = answer.at + first.ttl
                        WHERE k.key = name RETURNING k.epoch INTO answer.epoch;
                    granted := granted + 1;
                    answer.notices := ARRAY[first.line::text, answer.at::text, concat_ws(' ',
                        CASE WHEN granted < per_call THEN '1' ELSE '2' END, first.owner, 'x', first.ttl, answer.epoch,
                        answer.at, name)];
                    answer.verdict := 'held';
                END IF;
            END IF;
        END IF;
        IF letter = 'K' AND answer.verdict = 'held' AND is_waited THEN
            -- Its end has moved: the first in the queue is told to ask.
            SELECT * INTO live FROM lockstream.first_live_1(name, false, own_line, per_call);
            first := live.first;
            IF first.line IS NOT NULL THEN
                answer.notices := ARRAY[first.line::text, lockstream.now_1()::text, 'f ' || name];
            END IF;
        END IF;
        IF answer.verdict IS NULL THEN
            SELECT * INTO live FROM lockstream.op_1(
                letter, name, own, mode, lasts, mores[i], places[i], own_line, of_use, quiet_until,
                greatest(1, per_call - granted), clears);
            answer := live.answer;
            clears := live.clears;
            granted := granted + coalesce(array_length(answer.notices, 1) / 3, 0);
        END IF;
        IF answer.notices IS NOT NULL THEN
            BEGIN
                INSERT INTO lockstream.notice
                    SELECT answer.notices[n]::bigint, answer.notices[n + 1]::bigint, answer.notices[n + 2]
                    FROM generate_series(1, array_length(answer.notices, 1), 3) n ON CONFLICT DO NOTHING;
            EXCEPTION WHEN OTHERS THEN
                -- A full disk, say: a release needs no room. At 0 nothing is looked for.
                FOR n IN 2 .. array_length(answer.notices, 1) BY 3 LOOP
                    answer.notices[n] := '0';
                END LOOP;
            END;
        END IF;
        answer.at := coalesce(answer.at, lockstream.now_1());
        RETURN NEXT answer;
    END LOOP;
END $$;

-- Where the session with this line listens. Every role can see the lines, and may listen and notify anywhere: whoever knows
-- the channel can read grants and forge them. `secret`: that of `state`.
CREATE FUNCTION lockstream.channel_1(secret uuid, line bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT 'lockstream:' || left(encode(sha256((secret || ':' || line)::bytea), 'hex'), 32)
$$;

-- Sends notices of a call, unless they were told already. They need not be on disk: a crash loses them anyway.
CREATE FUNCTION lockstream.notify_1(notices text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off AS $$
DECLARE
    secret CONSTANT uuid := (SELECT s.secret FROM lockstream.state s);
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    FOR i IN 1 .. coalesce(array_length(notices, 1), 0) BY 3 LOOP
        DELETE FROM lockstream.notice n
            WHERE n.line = notices[i]::bigint AND n.at = notices[i + 1]::bigint AND n.payload = notices[i + 2];
        IF found OR notices[i + 1] = '0' THEN
            PERFORM pg_notify(lockstream.channel_1(secret, notices[i]::bigint), notices[i + 2]);
        END IF;
    END LOOP;
END $$;

-- What was granted to this line and not told. It reads one place of an index. Of what is older the ticket has asked by then
-- (W2); without that bound an old transaction elsewhere would make it read all that was ever told.
CREATE FUNCTION lockstream.untold_1(own_line bigint) RETURNS SETOF text
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off AS $$
    DELETE FROM lockstream.notice d USING (
        SELECT n.line, n.at, n.payload FROM lockstream.notice n
            WHERE n.line = own_line AND n.at > lockstream.now_1() - 15000000 FOR UPDATE SKIP LOCKED
    ) n WHERE d.line = n.line AND d.at = n.at AND d.payload = n.payload
    RETURNING d.payload
$$;

-- The first holders and then the first tickets of a lock: who, the mode, until when (null: a ticket), the time, how many
-- tickets there are, and how much all holders take. Tickets of registries that are gone are left out, as far as the first
-- 1,000 are looked at.
CREATE FUNCTION lockstream.inspect_1(name text, own_line bigint)
RETURNS TABLE (who text, mode text, expires_at bigint, at bigint, tickets bigint, taken bigint)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
    WITH seen AS (
        SELECT t.owner, t.mode, t.score, t.line = own_line OR NOT pg_try_advisory_xact_lock_shared(t.line) AS is_live
        FROM (
            SELECT * FROM lockstream.ticket t WHERE t.key = name AND t.ttl IS NOT NULL ORDER BY t.score LIMIT 1000
        ) t
    ), clock AS (SELECT lockstream.now_1() AS now, (
        SELECT count(*) FROM lockstream.ticket t WHERE t.key = name AND t.ttl IS NOT NULL
    ) - (SELECT count(*) FROM seen WHERE NOT seen.is_live) AS tickets), held AS (
        SELECT l.owner, '' AS mode, 1 AS weight, l.expires_at
            FROM lockstream.lock l, clock WHERE l.key = name AND l.owner <> '' AND l.expires_at > clock.now
        UNION ALL
        SELECT h.owner, CASE h.kind WHEN 'r' THEN 'r' ELSE h.weight || '/' || h.kind END, h.weight, h.expires_at
            FROM lockstream.holder h, clock WHERE h.key = name AND h.expires_at > clock.now
    )
    SELECT NULL, NULL, NULL, clock.now, clock.tickets, (SELECT coalesce(sum(held.weight), 0)::bigint FROM held) FROM clock
    UNION ALL
    (SELECT held.owner, held.mode, held.expires_at, clock.now, clock.tickets, NULL FROM held, clock
        ORDER BY held.expires_at, held.owner COLLATE "C" LIMIT 100)
    UNION ALL
    (SELECT seen.owner, seen.mode, NULL, clock.now, clock.tickets, NULL FROM seen, clock
        WHERE seen.is_live ORDER BY seen.score LIMIT 100)
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

-- Takes the session's line, and tells what the session must know. `channel`: where it listens. `missing`: tables of the
-- schema that somebody has dropped.
CREATE FUNCTION lockstream.hello_1(
    own_line bigint, OUT version integer, OUT quiet bigint, OUT now bigint, OUT is_standby boolean, OUT server text,
    OUT channel text, OUT missing text
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    is_standby := pg_is_in_recovery();
    now := lockstream.now_1();
    SELECT string_agg(name, ', ') INTO missing
        FROM unnest(ARRAY['lock', 'holder', 'guard', 'ticket', 'state', 'alive', 'notice', 'sweep']) name
        WHERE to_regclass('lockstream.' || name) IS NULL;
    IF missing IS NOT NULL THEN
        RETURN;
    END IF;
    IF own_line <> 0 AND NOT is_standby THEN
        PERFORM pg_advisory_lock(own_line);
    END IF;
    IF NOT is_standby AND NOT EXISTS (SELECT 1 FROM lockstream.state) THEN
        PERFORM lockstream.make_rows_1();
    END IF;
    SELECT s.version, s.quiet, lockstream.channel_1(s.secret, own_line) INTO version, quiet, channel FROM lockstream.state s;
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

-- Deletes what nobody has used for an hour, and tickets of registries that are gone. It goes through all locks by their
-- keys, and does a short piece at a time, since others wait for what it has deleted. It waits for nobody. It returns false
-- if there is more to do. A new pass begins at the earliest `pause` after the last one began. It must not be called by a
-- session that has a line: that would seem to be free.
CREATE FUNCTION lockstream.sweep_1(unused bigint DEFAULT 3600000000, pause bigint DEFAULT 300000000) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off AS $$
DECLARE
    piece CONSTANT integer := 1000;
    now CONSTANT bigint := lockstream.now_1();
    until bigint;
    has_begun boolean := false;
    before CONSTANT bigint := now - unused;
    pass lockstream.sweep;
    last text;
    looked_at integer;
    deleted integer;
    highest bigint := 0;
    l record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(6012214763185742) THEN
        RETURN true;
    END IF;
    INSERT INTO lockstream.sweep (began_at) VALUES (0) ON CONFLICT DO NOTHING;
    SELECT * INTO pass FROM lockstream.sweep;
    IF pass.after IS NULL THEN
        IF pass.began_at > now - pause AND pass.began_at <= now THEN
            RETURN true;
        END IF;
        pass.began_at := now;
        pass.after := '';
        -- Of registries that are gone.
        DELETE FROM lockstream.notice n WHERE n.at < now - 60000000;
    END IF;
    SELECT max(k.key), count(*) INTO last, looked_at
        FROM (SELECT key FROM lockstream.lock WHERE key > pass.after ORDER BY key LIMIT piece) k;

    DELETE FROM lockstream.ticket d USING (
        SELECT t.key, t.score FROM lockstream.ticket t WHERE t.key > pass.after AND t.key <= last
            AND pg_try_advisory_xact_lock_shared(t.line) LIMIT piece FOR UPDATE SKIP LOCKED
    ) t WHERE d.key = t.key AND d.score = t.score;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    until := lockstream.now_1() + 50000;

    IF deleted < piece THEN
        FOR l IN SELECT k.key, k.owner, k.epoch FROM lockstream.lock k
            WHERE k.key > pass.after AND k.key <= last
            -- Of a shared lock its holders count.
            AND CASE k.owner WHEN '' THEN NOT EXISTS (
                SELECT 1 FROM lockstream.holder h WHERE h.key = k.key AND h.expires_at > before
            ) ELSE k.expires_at <= before END
            ORDER BY k.key FOR UPDATE SKIP LOCKED
        LOOP
            -- The first is looked at however late it is, so each call comes on.
            IF has_begun AND lockstream.now_1() > until THEN
                last := pass.after;
                looked_at := piece;
                EXIT;
            END IF;
            has_begun := true;
            pass.after := l.key;
            CONTINUE WHEN EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = l.key);
            PERFORM lockstream.end_1(h.key, h.owner) FROM lockstream.holder h
                WHERE l.owner = '' AND h.key = l.key AND h.expires_at <= before;
            CONTINUE WHEN EXISTS (SELECT 1 FROM lockstream.holder h WHERE h.key = l.key);
            CONTINUE WHEN NOT lockstream.end_1(l.key, '');
            highest := greatest(highest, l.epoch);
            DELETE FROM lockstream.guard g WHERE g.key = l.key AND g.owner = '';
            DELETE FROM lockstream.lock k WHERE k.key = l.key;
        END LOOP;
        pass.after := CASE WHEN looked_at = piece THEN last END;
    END IF;
    UPDATE lockstream.state s SET epoch = highest WHERE s.epoch < highest;
    UPDATE lockstream.sweep SET began_at = pass.began_at, after = pass.after;
    RETURN pass.after IS NULL;
END $$;

-- Fences the transaction that calls it: it commits only if the lease with this token still has the lock, and nobody else
-- gets the lock before it has ended. Raises an error if the lease is over, or is none of this key and prefix.
CREATE FUNCTION lockstream.fence(key text, token bigint, prefix text DEFAULT 'lock') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := prefix || ':' || key;
    whose text := '';
    is_held boolean;
    was_held boolean;
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
        was_held := EXISTS (SELECT 1 FROM lockstream.lock l WHERE l.key = name AND l.epoch >= token / 64);
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            -- The lease may be newer than the snapshot, or its last renewal is: then one of these fails with 40001.
            INSERT INTO lockstream.lock VALUES (name, NULL, 0, 0) ON CONFLICT DO NOTHING;
            PERFORM 1 FROM lockstream.lock l WHERE l.key = name FOR SHARE;
            PERFORM 1 FROM lockstream.holder h WHERE h.key = name AND h.owner = whose FOR SHARE;
        END IF;
        IF was_held THEN
            RAISE 'the lease on "%" under the prefix "%" with token % is over', key, prefix, token
                USING ERRCODE = 'LS001';
        END IF;
        -- The row of a lock that nobody has used for long is gone.
        RAISE 'no lease on "%" under the prefix "%" has the token %: its key or its prefix is another, or it ended long ago',
            key, prefix, token
            USING ERRCODE = 'LS001', HINT = 'LeaseView::fence_sql() has the arguments. Each of several keys has its token.';
    END IF;
END $$;

-- What is about rights: an application needs USAGE on the schema and EXECUTE on some of its functions, and no right to a
-- table. docs/postgres.md has the statements.
REVOKE ALL ON ALL TABLES IN SCHEMA lockstream FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA lockstream FROM PUBLIC;
