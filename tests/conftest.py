"""Fixtures that several test folders share."""

from __future__ import annotations

import os

from edgemoe.kernels.env import WORKER_ENV

for _name, _value in WORKER_ENV.items():  # before anything loads torch
    os.environ.setdefault(_name, _value)
