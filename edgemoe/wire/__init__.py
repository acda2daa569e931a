"""The base class of every message between processes, decoding by tag, and protocol versions."""
