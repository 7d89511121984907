-- Manifests and logs name a source by its URL without the user's name and password in it, so no two may share that.
CREATE UNIQUE INDEX boot_source_name ON boot_source (regexp_replace(url, '^(https?://)[^/]*@', '\1'));
