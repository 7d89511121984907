-- Which certificates each rack was given, and join tokens that can be taken back.

-- A certificate is good from when it was issued until a newer one of the same rack was used. What was replaced is kept
-- until it expires, so that whoever shows it can be told what became of it.
CREATE TABLE rack_certificate (
    number       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    system_id    text NOT NULL REFERENCES rack ON DELETE CASCADE,
    sha256       text NOT NULL UNIQUE CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    -- The sha256 of each authority's certificate that the rack was told to trust when it was given this one.
    authorities  text[] NOT NULL,
    issued       timestamptz NOT NULL DEFAULT now(),
    expires      timestamptz NOT NULL,
    -- When the rack said that it has stored it, when it first registered with it, and when it used a newer one.
    stored       timestamptz,
    used         timestamptz,
    superseded   timestamptz
);
CREATE INDEX rack_certificate_rack ON rack_certificate (system_id);

-- Racks from before: their certificate is good for two years, and which authorities they trust is not known, so that they
-- are asked to renew.
INSERT INTO rack_certificate (system_id, sha256, authorities, issued, expires, used)
SELECT system_id, certificate_sha256, '{}', enrolled, enrolled + interval '730 days', enrolled
FROM rack WHERE certificate_sha256 ~ '^[0-9a-f]{64}$';

ALTER TABLE join_token ADD COLUMN revoked timestamptz;
