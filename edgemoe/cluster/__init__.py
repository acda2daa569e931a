"""The messages and protocols between daemons."""
