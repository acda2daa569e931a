"""Pure decisions: arrays and dataclasses in, decisions out; no clock, socket, device or thread."""
