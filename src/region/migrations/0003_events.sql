-- Events: what racks said happened on them. Rows are in the order of being committed, and in each rack's own order.

CREATE TABLE event (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rack         text NOT NULL CHECK (rack <> ''),
    hostname     text NOT NULL,
    epoch        text NOT NULL CHECK (epoch ~ '^[0-9a-f]{32}$'),
    sequence     bigint NOT NULL CHECK (sequence > 0),
    type         text NOT NULL CHECK (length(type) BETWEEN 1 AND 64),
    level        integer NOT NULL CHECK (level BETWEEN 0 AND 100),
    description  text NOT NULL CHECK (length(description) <= 2048),
    occurred     timestamptz NOT NULL,
    received     timestamptz NOT NULL DEFAULT now(),
    -- The rack's own id of the event. A rack that is forgotten leaves its events, with the name that it had.
    UNIQUE (rack, epoch, sequence)
);
CREATE INDEX event_rack ON event (rack, id);
CREATE INDEX event_warnings ON event (id) WHERE level >= 30;
CREATE INDEX event_errors ON event (id) WHERE level >= 40;

-- How far the events of each rack's buffer have come: what comes again is known, also when the event was deleted.
CREATE TABLE event_source (
    rack      text NOT NULL,
    epoch     text NOT NULL,
    sequence  bigint NOT NULL,
    changed   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (rack, epoch)
);
