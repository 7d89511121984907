-- Images: where they come from, what was published, what racks hold, and every import that was run.

CREATE TABLE boot_source (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    url               text NOT NULL UNIQUE CHECK (url ~ '^(https?|file)://'),
    keyring_filename  text NOT NULL DEFAULT '',
    keyring_data      bytea NOT NULL DEFAULT '',
    allow_unsigned    boolean NOT NULL DEFAULT false,
    priority          integer NOT NULL DEFAULT 1,
    created           timestamptz NOT NULL DEFAULT now(),
    updated           timestamptz NOT NULL DEFAULT now(),
    -- One way to trust a source: a keyring by name, a keyring by value, or an explicit word that it is unsigned.
    CHECK ((keyring_filename <> '')::int + (octet_length(keyring_data) > 0)::int + allow_unsigned::int = 1)
);

CREATE TABLE boot_source_selection (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source_id  bigint NOT NULL REFERENCES boot_source ON DELETE CASCADE,
    os         text NOT NULL CHECK (os <> ''),
    release    text NOT NULL,
    arches     text[] NOT NULL DEFAULT '{*}',
    subarches  text[] NOT NULL DEFAULT '{*}',
    labels     text[] NOT NULL DEFAULT '{*}',
    UNIQUE (source_id, os, release)
);

-- The newest "updated" of each signed document that was accepted from a source: an older one is a replay.
CREATE TABLE boot_source_document (
    source_id  bigint NOT NULL REFERENCES boot_source ON DELETE CASCADE,
    name       text NOT NULL,
    updated    timestamptz NOT NULL,
    sha256     text NOT NULL,
    PRIMARY KEY (source_id, name)
);

CREATE TABLE import_job (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state        text NOT NULL CHECK (state IN
                     ('queued', 'reading', 'fetching', 'publishing', 'done', 'failed', 'cancelled')),
    trigger      text NOT NULL CHECK (trigger IN ('timer', 'request', 'start', 'selection')),
    requested    timestamptz NOT NULL DEFAULT now(),
    started      timestamptz,
    ended        timestamptz,
    bytes_done   bigint NOT NULL DEFAULT 0 CHECK (bytes_done >= 0),
    bytes_total  bigint NOT NULL DEFAULT 0 CHECK (bytes_total >= 0),
    files_done   integer NOT NULL DEFAULT 0,
    files_total  integer NOT NULL DEFAULT 0,
    fetching     text NOT NULL DEFAULT '',
    generation   bigint,
    outcome      text NOT NULL DEFAULT '',
    CHECK ((state IN ('done', 'failed', 'cancelled')) = (ended IS NOT NULL))
);
CREATE UNIQUE INDEX import_job_one_queued ON import_job ((true)) WHERE state = 'queued';

CREATE TABLE import_problem (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id     bigint NOT NULL REFERENCES import_job ON DELETE CASCADE,
    severity   text NOT NULL CHECK (severity IN ('error', 'warning')),
    source     text NOT NULL DEFAULT '',
    product    text NOT NULL DEFAULT '',
    version    text NOT NULL DEFAULT '',
    file       text NOT NULL DEFAULT '',
    reason     text NOT NULL
);
CREATE INDEX import_problem_job ON import_problem (job_id);

-- A generation is immutable. Its manifest is dropped when it is retired; what it listed stays in generation_image,
-- because a rack that has not answered for long may still hold it.
CREATE TABLE generation (
    number     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    digest     text NOT NULL CHECK (digest ~ '^[0-9a-f]{64}$'),
    manifest   bytea,
    published  timestamptz NOT NULL DEFAULT now(),
    job_id     bigint REFERENCES import_job ON DELETE SET NULL,
    retired    timestamptz,
    CHECK ((manifest IS NULL) = (retired IS NOT NULL))
);
CREATE INDEX generation_digest ON generation (digest);

CREATE TABLE generation_image (
    generation     bigint NOT NULL REFERENCES generation,
    os             text NOT NULL,
    release        text NOT NULL,
    arch           text NOT NULL,
    subarch        text NOT NULL,
    kflavor        text NOT NULL,
    label          text NOT NULL,
    version        text NOT NULL,
    source         text NOT NULL,
    product        text NOT NULL,
    size           bigint NOT NULL CHECK (size >= 0),
    title          text NOT NULL DEFAULT '',
    support_eol    text NOT NULL DEFAULT '',
    PRIMARY KEY (generation, os, release, arch, subarch, kflavor, label)
);

-- Why a generation differs from the one before, and what it kept although upstream could not be read or completed.
CREATE TABLE generation_change (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation  bigint NOT NULL REFERENCES generation,
    kind        text NOT NULL CHECK (kind IN ('added', 'changed', 'removed', 'kept')),
    os          text NOT NULL,
    release     text NOT NULL,
    arch        text NOT NULL,
    subarch     text NOT NULL,
    kflavor     text NOT NULL,
    label       text NOT NULL,
    version     text NOT NULL,
    reason      text NOT NULL CHECK (reason <> '')
);
CREATE INDEX generation_change_generation ON generation_change (generation);

CREATE TABLE current_generation (
    only_one    boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    generation  bigint NOT NULL REFERENCES generation
);

CREATE FUNCTION generation_is_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.digest <> OLD.digest OR NEW.published <> OLD.published
       OR (NEW.manifest IS NOT NULL AND NEW.manifest IS DISTINCT FROM OLD.manifest) THEN
        RAISE EXCEPTION 'generation % is immutable', OLD.number;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER generation_is_immutable BEFORE UPDATE ON generation
    FOR EACH ROW EXECUTE FUNCTION generation_is_immutable();

CREATE FUNCTION current_generation_only_grows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.generation < OLD.generation THEN
        RAISE EXCEPTION 'generation % cannot become current after %', NEW.generation, OLD.generation;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER current_generation_only_grows BEFORE UPDATE ON current_generation
    FOR EACH ROW EXECUTE FUNCTION current_generation_only_grows();

CREATE TABLE rack (
    system_id           text PRIMARY KEY CHECK (system_id ~ '^[a-z0-9]{6}$'),
    name                text NOT NULL UNIQUE CHECK (name <> ''),
    certificate_sha256  text NOT NULL UNIQUE,
    enrolled            timestamptz NOT NULL DEFAULT now(),
    revoked             timestamptz,
    version             text NOT NULL DEFAULT '',
    last_connected      timestamptz,
    last_disconnected   timestamptz
);

-- What each rack last said that it holds. generation and digest are NULL while it has nothing.
CREATE TABLE rack_inventory (
    system_id   text PRIMARY KEY REFERENCES rack ON DELETE CASCADE,
    generation  bigint,
    digest      text,
    state       text NOT NULL,
    progress    jsonb NOT NULL DEFAULT '{}',
    reported    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE join_token (
    id        text PRIMARY KEY,
    key       bytea NOT NULL,
    created   timestamptz NOT NULL DEFAULT now(),
    expires   timestamptz NOT NULL,
    uses_left integer NOT NULL DEFAULT 1 CHECK (uses_left >= 0)
);

CREATE TABLE api_key (
    consumer_key  text NOT NULL,
    token_key     text NOT NULL,
    token_secret  text NOT NULL,
    name          text NOT NULL,
    created       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_key, token_key)
);
