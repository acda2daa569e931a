"""The simulator held against the test bed: runs of `tools.research.placement.prism`, simulated with the same requests."""
