-- Which start of a rack each link belongs to, so that two machines with one identity are found out also when each is
-- linked with another region process.

-- A digest of what the rack says of itself when it registers, new at each of its starts; empty if it is too old to say.
ALTER TABLE rack_connection ADD COLUMN instance text NOT NULL DEFAULT '';
