"""Where requests run: the choice of an engine, and moves from one to another."""
