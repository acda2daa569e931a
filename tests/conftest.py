"""Fixtures that several test folders share."""

from __future__ import annotations

import os

from edgemoe.kernels.env import WORKER_ENV

SPINS = {"GOMP_SPINCOUNT": "2000"}  # tests multiply small matrices, often on a busy box
for _name, _value in {**WORKER_ENV, **SPINS}.items():  # before anything loads torch
    os.environ.setdefault(_name, _value)
