-- How much a node can have stored: whoever has its token must not be able to fill the disk, or hide what others tell.
-- What is over a bound is refused as a whole, with SQLSTATE ST001 (ST002 where it is to be sent again later) and a
-- sentence that the node is answered. Each run of a node's scripts, which people begin, has room of its own.

CREATE TABLE node_usage (
    node_id        bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    script_set_id  bigint NOT NULL,             -- 0 for what belongs to no run
    signals        integer NOT NULL DEFAULT 0,
    bytes          bigint NOT NULL DEFAULT 0,   -- of outputs
    PRIMARY KEY (node_id, script_set_id)
);

CREATE TABLE node_message_rate (
    node_id   bigint PRIMARY KEY REFERENCES node ON DELETE CASCADE,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    messages  integer NOT NULL,
    bytes     bigint NOT NULL
);

CREATE FUNCTION bound_signals() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    most CONSTANT integer := 10000;
    found integer;
BEGIN
    INSERT INTO node_usage AS usage (node_id, script_set_id, signals)
    VALUES (NEW.node_id, coalesce(NEW.script_set_id, 0), 1)
    ON CONFLICT (node_id, script_set_id) DO UPDATE SET signals = usage.signals + 1
    RETURNING signals INTO found;
    IF found > most THEN
        RAISE EXCEPTION 'its run has % different signals stored already, and no more are', most USING ERRCODE = 'ST001';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER bound_signals AFTER INSERT ON signal FOR EACH ROW WHEN (NEW.status <> 'message')
    EXECUTE FUNCTION bound_signals();

-- By the hour, and not by the run: a machine that is in use reports each of its boots.
CREATE FUNCTION bound_messages() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    most CONSTANT integer := 2000;
    most_bytes CONSTANT bigint := 64 << 20;  -- as they are stored, in the queue
    rate node_message_rate;
BEGIN
    INSERT INTO node_message_rate AS known (node_id, messages, bytes)
    VALUES (NEW.node_id, 1, pg_column_size(NEW.payload))
    ON CONFLICT (node_id) DO UPDATE SET
        since = CASE WHEN known.since < clock_timestamp() - interval '1 hour' OR known.since > clock_timestamp()
                THEN clock_timestamp() ELSE known.since END,
        messages = CASE WHEN known.since < clock_timestamp() - interval '1 hour' OR known.since > clock_timestamp()
                   THEN 0 ELSE known.messages END + 1,
        bytes = CASE WHEN known.since < clock_timestamp() - interval '1 hour' OR known.since > clock_timestamp()
                THEN 0 ELSE known.bytes END + EXCLUDED.bytes
    RETURNING * INTO rate;
    IF rate.messages > most OR rate.bytes > most_bytes THEN
        RAISE EXCEPTION 'it has sent % messages, or % MiB of them, within an hour; send it again later',
            most, most_bytes >> 20 USING ERRCODE = 'ST002';
    END IF;
    RETURN NULL;
END $$;
-- Those of the region's own making have a kind; they come of signals, which are bounded above.
CREATE TRIGGER bound_messages AFTER INSERT ON processing FOR EACH ROW
    WHEN (NEW.step = 'message' AND NOT NEW.payload ? 'kind') EXECUTE FUNCTION bound_messages();

-- Results that nobody chose, but a node named.
CREATE FUNCTION bound_results() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    most CONSTANT integer := 1000;
BEGIN
    IF (SELECT count(*) FROM script_result WHERE script_set_id = NEW.script_set_id) > most THEN
        RAISE EXCEPTION 'its run has more than % results; script % would be one more', most, NEW.script_name
            USING ERRCODE = 'ST001';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER bound_results AFTER INSERT ON script_result FOR EACH ROW WHEN (NEW.script_version_id IS NULL)
    EXECUTE FUNCTION bound_results();

CREATE FUNCTION bound_late_results() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    most CONSTANT integer := 20;
BEGIN
    IF (SELECT count(*) FROM late_result WHERE script_result_id = NEW.script_result_id) > most THEN
        RAISE EXCEPTION 'script result % has % late ones beside it already, and no more are stored',
            NEW.script_result_id, most USING ERRCODE = 'ST001';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER bound_late_results AFTER INSERT ON late_result FOR EACH ROW EXECUTE FUNCTION bound_late_results();

CREATE FUNCTION bound_outputs() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    most CONSTANT bigint := 1 << 30;
    found bigint;
BEGIN
    INSERT INTO node_usage AS usage (node_id, script_set_id, bytes)
    SELECT node_id, script_set.id, sum(octet_length(content))
    FROM new JOIN script_result ON script_result.id = script_result_id JOIN script_set ON script_set.id = script_set_id
    GROUP BY node_id, script_set.id
    ON CONFLICT (node_id, script_set_id) DO UPDATE SET bytes = usage.bytes + EXCLUDED.bytes
    RETURNING bytes INTO found;
    IF found > most THEN
        RAISE EXCEPTION 'its run has % MiB of outputs stored already, and no more are', most >> 20
            USING ERRCODE = 'ST001';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER bound_outputs AFTER INSERT ON script_output REFERENCING NEW TABLE AS new FOR EACH STATEMENT
    EXECUTE FUNCTION bound_outputs();
