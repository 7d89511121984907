-- Manifests and logs name a source by its URL without the user's name and password in it, so no two may share that.
CREATE UNIQUE INDEX boot_source_name ON boot_source (regexp_replace(url, '^(https?://)[^/]*@', '\1'));

-- What a source was called before it was pointed elsewhere: the images that it gave then are still its own, so that a
-- new address that cannot be read does not take them away.
ALTER TABLE boot_source ADD COLUMN former_names text[] NOT NULL DEFAULT '{}';
