"""The simulator held against the test bed: runs of `tools.bench.prism`, simulated with the same requests."""
