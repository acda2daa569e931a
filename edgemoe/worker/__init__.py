"""The engine's process: `python -m edgemoe.worker`, started and supervised by the front."""
