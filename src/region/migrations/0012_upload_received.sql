-- How much of an upload's content has been acknowledged, after it was brought to the disk: of what is in the file beyond
-- that, nothing is known after a loss of power. NULL for uploads that were begun before this was kept.
ALTER TABLE boot_upload ADD COLUMN received bigint CHECK (received >= 0);
