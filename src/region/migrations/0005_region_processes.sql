-- Which region processes there are, and which racks each is linked with.

-- A process writes its own row, and its heartbeat every few seconds by the clock of the database. Whoever reads leaves
-- out rows whose heartbeat is old, and any process deletes them: a process that died says nothing.
CREATE TABLE region_process (
    id         uuid PRIMARY KEY,
    name       text NOT NULL CHECK (name <> ''),
    pid        integer NOT NULL CHECK (pid > 0),
    host       text NOT NULL,
    directory  text NOT NULL,
    endpoint   text NOT NULL CHECK (endpoint ~ '^.+:[0-9]+$'),
    started    timestamptz NOT NULL DEFAULT now(),
    heartbeat  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row for each rack that a process is linked with. "link" is the process's own number of the link; a later link has
-- a higher one, and no statement puts an earlier one in its place.
CREATE TABLE rack_connection (
    process  uuid NOT NULL REFERENCES region_process ON DELETE CASCADE,
    rack     text NOT NULL REFERENCES rack ON DELETE CASCADE,
    link     bigint NOT NULL CHECK (link > 0),
    since    timestamptz NOT NULL DEFAULT now(),
    address  text NOT NULL,
    PRIMARY KEY (process, rack)
);
CREATE INDEX rack_connection_rack ON rack_connection (rack);
