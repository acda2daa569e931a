"""Shared parts of tests in several folders: models, boxes, fakes, waiting."""
