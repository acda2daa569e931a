"""A store passes from box to box in pieces, each known by its checksum."""
