-- Machines: what they are, what they were asked to run, what came back, and what is still to be done with that.

CREATE TABLE node (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    system_id         text NOT NULL UNIQUE CHECK (system_id ~ '^[a-z0-9]{6}$'),
    hostname          text NOT NULL UNIQUE CHECK (hostname ~ '^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$'),
    description       text NOT NULL DEFAULT '',
    architecture      text NOT NULL CHECK (architecture ~ '^[a-z0-9_]+/[A-Za-z0-9._-]+$'),
    -- MAAS's numbers. Only the transition function changes it (the trigger below).
    status            smallint NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 22),
    previous_status   smallint NOT NULL DEFAULT 0 CHECK (previous_status BETWEEN 0 AND 22),
    status_changed    timestamptz NOT NULL DEFAULT now(),
    -- Why it is in this status, where that needs a reason: what failed, and what to do.
    status_message    text NOT NULL DEFAULT '',
    owner             text NOT NULL DEFAULT '',
    power_type        text NOT NULL DEFAULT 'manual',
    power_parameters  jsonb NOT NULL DEFAULT '{}',
    -- '' while it is not known; else uefi, pxe (a BIOS), powernv, open-firmware, ...
    boot_method       text NOT NULL DEFAULT '' CHECK (boot_method ~ '^[a-z0-9-]{0,32}$'),
    memory            bigint NOT NULL DEFAULT 0 CHECK (memory >= 0),       -- MiB
    cpu_count         integer NOT NULL DEFAULT 0 CHECK (cpu_count >= 0),
    -- What else commissioning found: virtuality, kernel command line, modaliases, cpu model, ...; by what found it.
    facts             jsonb NOT NULL DEFAULT '{}',
    -- The whole storage configuration as one value (region.layouts), so that nobody sees half of one.
    storage_layout    text NOT NULL DEFAULT '',
    storage           jsonb NOT NULL DEFAULT '{}',
    osystem           text NOT NULL DEFAULT '',
    distro_series     text NOT NULL DEFAULT '',
    hwe_kernel        text NOT NULL DEFAULT '',
    created           timestamptz NOT NULL DEFAULT now(),
    updated           timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX node_status ON node (status, id);

-- A status that is changed by anything but the transition function would leave open what hangs on it.
CREATE FUNCTION node_status_needs_a_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.status <> OLD.status AND coalesce(current_setting('stanchion.transition', true), '') <> OLD.system_id THEN
        RAISE EXCEPTION 'the status of node % is changed by the transition function alone', OLD.system_id;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER node_status_needs_a_transition BEFORE UPDATE OF status ON node
    FOR EACH ROW EXECUTE FUNCTION node_status_needs_a_transition();

-- When a node was heard of last, and what that was. A row of its own: heartbeats never wait for what else is written.
CREATE TABLE node_heartbeat (
    node_id    bigint PRIMARY KEY REFERENCES node ON DELETE CASCADE,
    last_ping  timestamptz NOT NULL DEFAULT clock_timestamp(),
    heard      text NOT NULL DEFAULT ''
);

-- The OAuth credentials of a node. A token that was replaced, or whose node is done, is retired: for a grace period it
-- still authenticates what is on its way (a replay, a late output), until it expires.
CREATE TABLE node_token (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node_id       bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    consumer_key  text NOT NULL UNIQUE,
    token_key     text NOT NULL UNIQUE,
    token_secret  text NOT NULL,
    created       timestamptz NOT NULL DEFAULT now(),
    -- For how long it is good once it is retired.
    grace_seconds double precision NOT NULL DEFAULT 3600 CHECK (grace_seconds >= 0),
    expires       timestamptz
);
CREATE UNIQUE INDEX node_token_one_lives ON node_token (node_id) WHERE expires IS NULL;

CREATE TABLE interface (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node_id         bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    name            text NOT NULL CHECK (name <> ''),
    type            text NOT NULL DEFAULT 'physical' CHECK (type IN ('physical', 'bond', 'bridge', 'vlan', 'alias')),
    -- Of physical interfaces one MAC is at one node alone; a bond, bridge or vlan may have that of its parent.
    mac_address     text CHECK (mac_address ~ '^[0-9a-f]{2}(:[0-9a-f]{2}){5}$'),
    enabled         boolean NOT NULL DEFAULT true,
    link_connected  boolean NOT NULL DEFAULT true,
    -- [{"address": "10.0.0.5", "prefix": 24}], as found at the last commissioning.
    discovered      jsonb NOT NULL DEFAULT '[]',
    -- [{"mode": "auto"|"dhcp"|"static"|"link_up", "subnet": "10.0.0.0/24"|null}]: how it is to be configured.
    links           jsonb NOT NULL DEFAULT '[]',
    facts           jsonb NOT NULL DEFAULT '{}',
    created         timestamptz NOT NULL DEFAULT now(),
    updated         timestamptz NOT NULL DEFAULT now(),
    UNIQUE (node_id, name)
);
CREATE UNIQUE INDEX interface_mac ON interface (mac_address) WHERE type = 'physical';

CREATE TABLE block_device (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node_id     bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    name        text NOT NULL CHECK (name <> ''),
    -- What a disk is known by from one commissioning to the next: its serial number with its model, else its id_path.
    identity    text NOT NULL CHECK (identity <> ''),
    id_path     text NOT NULL DEFAULT '',
    model       text NOT NULL DEFAULT '',
    serial      text NOT NULL DEFAULT '',
    size        bigint NOT NULL CHECK (size >= 0),          -- bytes
    block_size  integer NOT NULL DEFAULT 512 CHECK (block_size > 0),
    tags        text[] NOT NULL DEFAULT '{}',               -- ssd, rotary, sata, nvme, removable, ...
    facts       jsonb NOT NULL DEFAULT '{}',
    created     timestamptz NOT NULL DEFAULT now(),
    updated     timestamptz NOT NULL DEFAULT now(),
    UNIQUE (node_id, identity),
    UNIQUE (node_id, name) DEFERRABLE INITIALLY DEFERRED
);

-- What a node boots from: chosen by people, or found; gone with what it names.
ALTER TABLE node ADD COLUMN boot_interface_id bigint REFERENCES interface ON DELETE SET NULL;
ALTER TABLE node ADD COLUMN boot_disk_id bigint REFERENCES block_device ON DELETE SET NULL;

-- Scripts, and every version that any of them has had.
CREATE TABLE script (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name             text NOT NULL UNIQUE CHECK (name ~ '^[A-Za-z0-9._-]{1,255}$' AND name NOT IN ('.', '..')),
    title            text NOT NULL DEFAULT '',
    description      text NOT NULL DEFAULT '',
    tags             text[] NOT NULL DEFAULT '{}',
    script_type      smallint NOT NULL CHECK (script_type IN (0, 2)),           -- commissioning, testing
    hardware_type    smallint NOT NULL DEFAULT 0 CHECK (hardware_type BETWEEN 0 AND 4),
    parallel         smallint NOT NULL DEFAULT 0 CHECK (parallel BETWEEN 0 AND 2),
    parameters       jsonb NOT NULL DEFAULT '{}',
    packages         jsonb NOT NULL DEFAULT '{}',
    results          jsonb NOT NULL DEFAULT '{}',                               -- what they mean, for people
    timeout_seconds  bigint NOT NULL DEFAULT 0 CHECK (timeout_seconds >= 0),    -- 0: none
    destructive      boolean NOT NULL DEFAULT false,
    may_reboot       boolean NOT NULL DEFAULT false,
    builtin          boolean NOT NULL DEFAULT false,
    created          timestamptz NOT NULL DEFAULT now(),
    updated          timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE script_version (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    script_id  bigint NOT NULL REFERENCES script ON DELETE CASCADE,
    number     integer NOT NULL CHECK (number > 0),
    content    bytea NOT NULL,
    comment    text NOT NULL DEFAULT '',
    created    timestamptz NOT NULL DEFAULT now(),
    UNIQUE (script_id, number)
);

-- One run of a node's scripts of one type. Its options belong to the run, and are gone with it.
CREATE TABLE script_set (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node_id        bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    result_type    smallint NOT NULL CHECK (result_type IN (0, 1, 2)),
    options        jsonb NOT NULL DEFAULT '{}',
    -- Not when its transaction began: that may have waited for the one that ended the run before.
    created        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Until when the node must have been heard of at all; NULL once it was.
    boot_deadline  timestamptz,
    -- When the node said that it was done (signal OK, FAILED or TESTING), and when all that follows from it was done.
    signalled      timestamptz,
    signal_status  text,
    ended          timestamptz
);
CREATE INDEX script_set_node ON script_set (node_id, result_type, id);
ALTER TABLE node ADD COLUMN commissioning_set_id bigint REFERENCES script_set ON DELETE SET NULL;
ALTER TABLE node ADD COLUMN testing_set_id bigint REFERENCES script_set ON DELETE SET NULL;

-- "status" and "exit_status" are what the script itself came to; "post_processing" is what the region made of it.
CREATE TABLE script_result (
    id                 bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    script_set_id      bigint NOT NULL REFERENCES script_set ON DELETE CASCADE,
    script_id          bigint REFERENCES script ON DELETE SET NULL,
    script_version_id  bigint REFERENCES script_version ON DELETE SET NULL,
    script_name        text NOT NULL CHECK (script_name <> ''),
    parameters         jsonb NOT NULL DEFAULT '{}',
    timeout_seconds    bigint NOT NULL DEFAULT 0 CHECK (timeout_seconds >= 0),
    status             smallint NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 11),
    exit_status        integer,
    runtime            double precision,
    started            timestamptz,
    ended              timestamptz,
    suppressed         boolean NOT NULL DEFAULT false,
    post_processing    text NOT NULL DEFAULT 'none' CHECK (post_processing IN ('none', 'pending', 'done', 'failed')),
    -- When it failed: the exception's type and text, and what the log has the traceback under.
    post_processing_error  text NOT NULL DEFAULT '',
    correlation            text NOT NULL DEFAULT '',
    created            timestamptz NOT NULL DEFAULT now(),
    updated            timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX script_result_set ON script_result (script_set_id, id);
CREATE INDEX script_result_script ON script_result (script_id);
CREATE INDEX script_result_unfinished ON script_result (script_set_id) WHERE status IN (0, 1, 7, 10);

-- What came when the result had ended already: kept, shown, and never put in the place of the result.
CREATE TABLE late_result (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    script_result_id  bigint NOT NULL REFERENCES script_result ON DELETE CASCADE,
    received          timestamptz NOT NULL DEFAULT now(),
    signal_status     text NOT NULL,
    exit_status       integer,
    runtime           double precision
);
CREATE INDEX late_result_result ON late_result (script_result_id);

-- The bytes, exactly as they came: of the result itself (late_result_id NULL), or of a late one.
CREATE TABLE script_output (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    script_result_id  bigint NOT NULL REFERENCES script_result ON DELETE CASCADE,
    late_result_id    bigint REFERENCES late_result ON DELETE CASCADE,
    name              text NOT NULL CHECK (name IN ('output', 'stdout', 'stderr', 'result')),
    content           bytea NOT NULL,
    UNIQUE NULLS NOT DISTINCT (script_result_id, late_result_id, name)
);
ALTER TABLE script_output ALTER COLUMN content SET STORAGE EXTERNAL;

-- Which signals were stored: one that comes again changes nothing.
CREATE TABLE signal (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node_id           bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    script_set_id     bigint REFERENCES script_set ON DELETE CASCADE,
    script_result_id  bigint REFERENCES script_result ON DELETE CASCADE,
    status            text NOT NULL,
    digest            text NOT NULL CHECK (digest ~ '^[0-9a-f]{64}$'),
    received          timestamptz NOT NULL DEFAULT now(),
    UNIQUE NULLS NOT DISTINCT (node_id, script_set_id, script_result_id, status, digest)
);

-- What is to be done with what was stored, each node's in order. A row is deleted by the transaction that has done it.
CREATE TABLE processing (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node_id           bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    script_set_id     bigint REFERENCES script_set ON DELETE CASCADE,
    script_result_id  bigint REFERENCES script_result ON DELETE CASCADE,
    step              text NOT NULL CHECK (step IN ('hook', 'message', 'power', 'storage', 'networking', 'tags', 'finish')),
    payload           jsonb NOT NULL DEFAULT '{}',
    created           timestamptz NOT NULL DEFAULT now(),
    not_before        timestamptz NOT NULL DEFAULT now(),
    -- Counted before it is begun, so that what ends the process each time is given up one day.
    attempts          smallint NOT NULL DEFAULT 0,
    claimed_by        uuid,
    claimed           timestamptz
);
CREATE INDEX processing_node ON processing (node_id, id);

-- Which steps failed, of which run: what finishing it depends on, and what people are shown.
CREATE TABLE step_failure (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node_id           bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    script_set_id     bigint REFERENCES script_set ON DELETE CASCADE,
    script_result_id  bigint REFERENCES script_result ON DELETE CASCADE,
    step              text NOT NULL,
    error_type        text NOT NULL,
    error             text NOT NULL,
    correlation       text NOT NULL,
    occurred          timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX step_failure_set ON step_failure (script_set_id);
CREATE INDEX step_failure_node ON step_failure (node_id);

-- A tag with a definition (XPath) is set by evaluating it; one without is set by people. Every change of the definition
-- is a new generation, and only what was found by the generation that is current is written.
CREATE TABLE tag (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text NOT NULL UNIQUE CHECK (name ~ '^[a-zA-Z0-9_-]+$' AND length(name) <= 256),
    definition   text NOT NULL DEFAULT '',
    comment      text NOT NULL DEFAULT '',
    kernel_opts  text NOT NULL DEFAULT '',
    generation   bigint NOT NULL DEFAULT 1,
    -- The newest generation that all nodes were evaluated with; less than "generation" while that is going on.
    evaluated    bigint NOT NULL DEFAULT 0,
    -- While it is: the last node, in the order of their numbers, that was evaluated with the current generation.
    position     bigint NOT NULL DEFAULT 0,
    -- Why it could not be evaluated on some node, with its current generation.
    problem      text NOT NULL DEFAULT '',
    created      timestamptz NOT NULL DEFAULT now(),
    updated      timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE node_tag (
    node_id  bigint NOT NULL REFERENCES node ON DELETE CASCADE,
    tag_id   bigint NOT NULL REFERENCES tag ON DELETE CASCADE,
    PRIMARY KEY (node_id, tag_id)
);
CREATE INDEX node_tag_tag ON node_tag (tag_id);

-- Events of nodes stand beside those of racks: the region writes them, in the transaction of what they tell of.
ALTER TABLE event ALTER COLUMN rack DROP NOT NULL;
ALTER TABLE event ALTER COLUMN epoch DROP NOT NULL;
ALTER TABLE event ALTER COLUMN sequence DROP NOT NULL;
ALTER TABLE event ADD COLUMN node text CHECK (node <> '');
ALTER TABLE event ADD COLUMN correlation text NOT NULL DEFAULT '';
ALTER TABLE event ADD COLUMN username text NOT NULL DEFAULT '';
ALTER TABLE event ADD CHECK ((rack IS NULL) <> (node IS NULL));
ALTER TABLE event ADD CHECK ((rack IS NULL) = (epoch IS NULL) AND (rack IS NULL) = (sequence IS NULL));
CREATE INDEX event_node ON event (node, id) WHERE node IS NOT NULL;
CREATE INDEX event_hostname ON event (hostname, id);
-- Most of what nodes say is below what people are shown.
CREATE INDEX event_information ON event (id) WHERE level >= 20;
