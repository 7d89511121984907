-- How what a node said is stored: one statement, and so one round trip and one transaction, whatever it has to look at.
-- It is a function, and not in SQL, because its statements are then planned once for each connection, and not for each
-- signal.

-- Signals of one node are stored one after the other, so that what follows from them is queued in their order (numbers
-- are drawn before they are committed). Nobody else takes this lock, and it is held for one statement.
CREATE FUNCTION lock_signals(the_node bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('stanchion: signals of a node', the_node));
END $$;

-- A node was heard of: the time of the boot deadline is over for the runs that it has.
CREATE FUNCTION hear_node(the_node bigint, what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO node_heartbeat AS heartbeat (node_id, heard) VALUES (the_node, what)
    ON CONFLICT (node_id) DO UPDATE SET last_ping = EXCLUDED.last_ping, heard = EXCLUDED.heard;
    UPDATE script_set SET boot_deadline = NULL
    FROM node
    WHERE node.id = the_node AND script_set.id IN (commissioning_set_id, testing_set_id)
      AND boot_deadline IS NOT NULL;
END $$;

-- Whether nothing that a node's runner could still do is wanted. "the_run" is the run that it spoke of, if any.
CREATE FUNCTION node_is_to_stop(the_node bigint, the_run bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN NOT EXISTS (SELECT FROM script_set WHERE id IN (commissioning_set_id, testing_set_id) AND ended IS NULL)
        OR coalesce(the_run NOT IN (coalesce(commissioning_set_id, 0), coalesce(testing_set_id, 0)), false)
    FROM node WHERE id = the_node;
END $$;

-- The run that what a node says belongs to, where it does not name a result: the one that is going on, commissioning
-- first; else the one that ended last. With a token that is retired it speaks of what is over in any case.
CREATE FUNCTION run_of_node(the_node bigint, is_retired boolean) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN run.id
    FROM node JOIN script_set AS run ON run.node_id = node.id
    WHERE node.id = the_node
      AND (run.ended IS NOT NULL OR (run.id IN (commissioning_set_id, testing_set_id) AND NOT is_retired))
    ORDER BY run.ended IS NULL DESC,
             CASE WHEN run.ended IS NULL THEN run.signalled IS NOT NULL END,
             CASE WHEN run.ended IS NULL THEN run.result_type END,
             run.id DESC
    LIMIT 1;
END $$;

-- The runs that a node has at present: its newest, and the other one if that was still going on when the newest began,
-- so that they are one commissioning with its tests. What was said of an earlier one says nothing of these.
CREATE FUNCTION present_runs(the_node bigint) RETURNS bigint[] LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce(array_agg(run.id ORDER BY run.id) FILTER (WHERE coalesce(run.ended, 'infinity') >= newest), '{}')
    FROM (SELECT script_set.id, script_set.ended, max(script_set.created) OVER () AS newest
          FROM node JOIN script_set ON script_set.id IN (commissioning_set_id, testing_set_id)
          WHERE node.id = the_node) AS run;
END $$;

CREATE FUNCTION queue_event(the_node bigint, the_run bigint, the_result bigint, kind text, description text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO processing (node_id, script_set_id, script_result_id, step, payload)
    VALUES (the_node, the_run, the_result, 'message', jsonb_build_object('kind', kind, 'description', description));
END $$;

-- Stores a signal. Statuses of results only move forward; what comes after the end is kept as late; what is not known
-- gets a result of its own; a signal that was stored already changes nothing. "problem" says in one word why nothing
-- was stored: 'node', 'token' or 'result', which there is not (any more).
CREATE FUNCTION store_signal(
    the_node         bigint,
    its_token        text,              -- that it came with, or NULL to take the word for it:
    is_retired       boolean,           -- came with a token that was replaced, or of a node that is done
    is_beat          boolean,           -- says nothing but that the node lives
    is_final         boolean,           -- says that the run has ended
    its_status       text,
    its_digest       text,
    its_message      text,
    its_result       bigint,
    its_version      bigint,            -- of the script; 0 or less is none that there can be
    its_exit_status  integer,
    its_runtime      double precision,  -- seconds
    comes_to         smallint,          -- the status that the scripts have by it
    is_ending        boolean,           -- whether that is how they ended
    its_power        jsonb,             -- or NULL
    its_scripts      text[],            -- of which it has outputs
    output_script    integer[],         -- of each output: the script, by its place in its_scripts from 1,
    output_name      text[],            -- which of its outputs it is,
    output_content   bytea[],           -- and the bytes
    with_hooks       text[],            -- the scripts whose outputs are looked into
    OUT node_status  smallint,
    OUT stop         boolean,
    OUT problem      text,
    OUT is_replay    boolean
) LANGUAGE plpgsql AS $$
#variable_conflict error
DECLARE
    unfinished CONSTANT smallint[] := ARRAY[0, 10, 7, 1];  -- in the order in which a script has them
    runs bigint[];
    expiry record;
    the_run bigint;
    result_name text;
    version bigint;
    first integer := 1;
    target record;
    target_id bigint;
    late bigint;
    is_hooked boolean;
    run record;
BEGIN
    PERFORM lock_signals(the_node);
    is_replay := false;
    SELECT node.status INTO node_status FROM node WHERE node.id = the_node;
    IF NOT FOUND THEN
        problem := 'node';
        RETURN;
    END IF;
    runs := present_runs(the_node);
    IF its_token IS NOT NULL THEN
        -- Read after the runs: a token that is not retired by now was that of these runs.
        SELECT expires IS NOT NULL AS is_set, expires <= clock_timestamp() AS is_over INTO expiry
        FROM node_token WHERE token_key = its_token AND node_id = the_node;
        IF NOT FOUND OR expiry.is_over THEN
            problem := 'token';
            RETURN;
        END IF;
        is_retired := is_retired OR expiry.is_set;
    END IF;
    IF its_result IS NOT NULL THEN
        SELECT script_set.id, script_name INTO the_run, result_name
        FROM script_result JOIN script_set ON script_set.id = script_set_id
        WHERE script_result.id = its_result AND node_id = the_node;
        IF NOT FOUND AND is_retired AND NOT EXISTS (SELECT FROM script_result WHERE script_result.id = its_result) THEN
            its_result := NULL;  -- of a run that is not kept any more: what it brought goes by its name
        ELSIF the_run IS NULL THEN
            problem := 'result';
        END IF;
    END IF;
    stop := is_retired OR node_is_to_stop(the_node, the_run);
    IF NOT is_retired THEN
        PERFORM hear_node(
            the_node, its_status || coalesce(' ' || result_name, '') || coalesce(': ' || nullif(its_message, ''), '')
        );
    END IF;
    IF is_beat OR problem IS NOT NULL THEN
        RETURN;
    END IF;
    the_run := coalesce(the_run, run_of_node(the_node, is_retired));
    IF the_run IS NULL AND its_scripts <> '{}' THEN
        INSERT INTO script_set (node_id, result_type, ended) VALUES (the_node, 0, clock_timestamp())
        RETURNING id INTO the_run;
    END IF;

    PERFORM FROM signal
    WHERE node_id = the_node AND script_set_id = ANY(runs || the_run) AND signal.status = its_status
      AND script_result_id IS NOT DISTINCT FROM its_result AND digest = its_digest;
    IF FOUND THEN
        is_replay := true;
        RETURN;
    END IF;
    INSERT INTO signal (node_id, script_set_id, script_result_id, status, digest)
    VALUES (the_node, the_run, its_result, its_status, its_digest)
    ON CONFLICT DO NOTHING;

    IF its_version IS NOT NULL THEN
        SELECT script_version.id INTO version FROM script_version WHERE script_version.id = its_version;
        IF NOT FOUND THEN
            PERFORM queue_event(
                the_node, the_run, its_result, 'SCRIPT_RESULT_ERROR',
                format('The node named version %s of script %s, which there is not. The result was stored without it.',
                       its_version, coalesce(result_name, its_scripts[1], 'that it did not name'))
            );
        END IF;
    END IF;

    -- With a result that it names: the outputs of the script of that name, or of whatever name if they are the only.
    IF its_result IS NOT NULL AND cardinality(its_scripts) <> 1 AND result_name <> ALL(its_scripts) THEN
        first := 0;
    END IF;
    FOR number IN first .. cardinality(its_scripts) LOOP
        IF its_result IS NOT NULL
           AND (number = 0 OR cardinality(its_scripts) = 1 OR its_scripts[number] = result_name) THEN
            target_id := its_result;
        ELSE
            SELECT script_result.id INTO target_id
            FROM script_result JOIN script_set ON script_set.id = script_set_id
            WHERE script_set_id = ANY(CASE WHEN is_retired THEN ARRAY[the_run] ELSE runs || the_run END)
              AND script_name = its_scripts[number]
            ORDER BY script_set.ended IS NULL DESC, script_result.status = ANY(unfinished) DESC,
                     script_set_id = the_run DESC, script_result.id
            LIMIT 1;
            IF NOT FOUND THEN
                INSERT INTO script_result (script_set_id, script_id, script_name)
                VALUES (the_run, (SELECT script.id FROM script WHERE script.name = its_scripts[number]),
                        its_scripts[number])
                RETURNING script_result.id INTO target_id;
            END IF;
        END IF;
        SELECT script_set_id, script_name, status, ended IS NOT NULL AS is_over INTO target
        FROM (SELECT script_set_id, script_name, script_result.status, script_set.ended
              FROM script_result JOIN script_set ON script_set.id = script_set_id
              WHERE script_result.id = target_id
              FOR NO KEY UPDATE OF script_result) AS found;

        IF is_ending AND target.status = ANY(unfinished) THEN
            -- What a run that is over finds out about the hardware is not put in the place of what a later one did.
            is_hooked := NOT target.is_over AND number = ANY(output_script)
                AND (target.script_name = ANY(with_hooks) OR (number, 'result') IN
                     (SELECT * FROM unnest(output_script, output_name)));
            UPDATE script_result
            SET status = comes_to, exit_status = its_exit_status, runtime = its_runtime,
                script_version_id = coalesce(version, script_version_id),
                started = coalesce(started, clock_timestamp() - make_interval(secs => coalesce(its_runtime, 0))),
                ended = clock_timestamp(), updated = clock_timestamp(),
                post_processing = CASE WHEN is_hooked THEN 'pending' ELSE 'none' END
            WHERE script_result.id = target_id;
            INSERT INTO script_output (script_result_id, name, content)
            SELECT target_id, name, content FROM unnest(output_script, output_name, output_content)
                AS output (script, name, content)
            WHERE script = number;
            IF its_exit_status IS NULL AND its_status <> 'TIMEDOUT' THEN
                PERFORM queue_event(
                    the_node, target.script_set_id, target_id, 'EXIT_STATUS_MISSING',
                    format('The node said that script %s had ended, but not with which exit status. It counts as '
                           'failed; its output was stored.', target.script_name)
                );
            END IF;
            IF is_hooked THEN
                INSERT INTO processing (node_id, script_set_id, script_result_id, step)
                VALUES (the_node, target.script_set_id, target_id, 'hook');
            END IF;
            CONTINUE;
        END IF;

        IF array_position(unfinished, comes_to) > array_position(unfinished, target.status) THEN
            UPDATE script_result
            SET status = comes_to, started = coalesce(started, clock_timestamp()), updated = clock_timestamp()
            WHERE script_result.id = target_id;
        END IF;
        IF is_ending OR number = ANY(output_script) THEN
            INSERT INTO late_result (script_result_id, signal_status, exit_status, runtime)
            VALUES (target_id, its_status, its_exit_status, its_runtime)
            RETURNING id INTO late;
            INSERT INTO script_output (script_result_id, late_result_id, name, content)
            SELECT target_id, late, name, content FROM unnest(output_script, output_name, output_content)
                AS output (script, name, content)
            WHERE script = number;
            PERFORM queue_event(
                the_node, target.script_set_id, target_id, 'LATE_OUTPUT',
                format('What script %s came to arrived when its result was there already. It was stored beside that, '
                       'as late.', target.script_name)
            );
        END IF;
    END LOOP;

    IF is_retired THEN
        IF is_final THEN
            PERFORM queue_event(
                the_node, the_run, its_result, 'LATE_END',
                format('The node said that it was done (%s%s) when its run had been ended already. What it brought is '
                       'kept as late, and changes nothing: if it is wanted, commission or test it again.',
                       its_status, coalesce(': ' || nullif(rtrim(its_message, '.'), ''), ''))
            );
        END IF;
        RETURN;
    END IF;
    IF its_power IS NOT NULL THEN
        INSERT INTO processing (node_id, script_set_id, script_result_id, step, payload)
        VALUES (the_node, the_run, its_result, 'power', its_power);
    END IF;
    IF is_final THEN
        -- With TESTING its commissioning is done, with the others everything is.
        FOR run IN
            SELECT script_set.id, result_type FROM script_set
            WHERE script_set.id = ANY(runs) AND ended IS NULL AND signalled IS NULL
              AND (its_status <> 'TESTING' OR result_type = 0)
            ORDER BY result_type
            FOR NO KEY UPDATE
        LOOP
            UPDATE script_set SET signalled = clock_timestamp(), signal_status = its_status WHERE script_set.id = run.id;
            INSERT INTO processing (node_id, script_set_id, step, payload)
            SELECT the_node, run.id, step, jsonb_build_object('message', its_message)
            FROM unnest(CASE WHEN run.result_type = 0 THEN ARRAY['storage', 'networking', 'tags', 'finish']
                             ELSE ARRAY['finish'] END) WITH ORDINALITY AS due (step, place)
            ORDER BY place;
        END LOOP;
    END IF;
END $$;

-- Stores a status message to be looked at, if it was not stored before. Whether there is such a node.
CREATE FUNCTION store_message(the_node bigint, is_retired boolean, its_digest text, what text, its_payload jsonb)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    the_run bigint;
BEGIN
    PERFORM lock_signals(the_node);
    PERFORM FROM node WHERE id = the_node;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF NOT is_retired THEN
        PERFORM hear_node(the_node, what);
    END IF;
    the_run := run_of_node(the_node, is_retired);
    INSERT INTO signal (node_id, script_set_id, status, digest) VALUES (the_node, the_run, 'message', its_digest)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO processing (node_id, script_set_id, step, payload)
        VALUES (the_node, the_run, 'message', its_payload);
    END IF;
    RETURN true;
END $$;

-- What the step was to be done with: nothing that a node said is lost because it could not be processed.
ALTER TABLE step_failure ADD COLUMN payload jsonb NOT NULL DEFAULT '{}';
