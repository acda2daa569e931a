"""`edgemoe replay`: routing traces through the cache policies that also run live."""

from edgemoe.replay.replay_command import add_arguments, main

__all__ = ["add_arguments", "main"]
