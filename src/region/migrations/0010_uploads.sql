-- Images that people upload, and the imports that uploads and repairs ask for.

ALTER TABLE import_job DROP CONSTRAINT import_job_trigger_check;
ALTER TABLE import_job ADD CONSTRAINT import_job_trigger_check
    CHECK (trigger IN ('timer', 'request', 'start', 'selection', 'repair', 'upload'));

-- An upload is wanted from when it is begun. What has come of its content is on the disk of one region process; it is
-- an image of the next generation when all of it has come and is right. Of several for one image the newest counts.
CREATE TABLE boot_upload (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    os            text NOT NULL CHECK (os <> ''),
    release       text NOT NULL CHECK (release <> ''),
    arch          text NOT NULL CHECK (arch <> ''),
    subarch       text NOT NULL CHECK (subarch <> ''),
    title         text NOT NULL DEFAULT '',
    filetype      text NOT NULL CHECK (filetype <> ''),
    base_image    text NOT NULL DEFAULT '',
    sha256        text NOT NULL CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    size          bigint NOT NULL CHECK (size > 0),
    process       text NOT NULL CHECK (process <> ''),
    username      text NOT NULL DEFAULT '',
    created       timestamptz NOT NULL DEFAULT now(),
    touched       timestamptz NOT NULL DEFAULT now(),
    completed     timestamptz
);
CREATE INDEX boot_upload_image ON boot_upload (os, release, arch, subarch);
