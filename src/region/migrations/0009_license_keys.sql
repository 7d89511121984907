-- Keys of operating systems that must not be installed without one; and what asking after one release's past needs.

CREATE TABLE license_key (
    osystem        text NOT NULL CHECK (osystem <> ''),
    distro_series  text NOT NULL CHECK (distro_series <> ''),
    license_key    text NOT NULL CHECK (license_key <> ''),
    created        timestamptz NOT NULL DEFAULT now(),
    updated        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (osystem, distro_series)
);

CREATE INDEX generation_change_release ON generation_change (os, release);
CREATE INDEX generation_image_release ON generation_image (os, release);
