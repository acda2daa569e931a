"""The simulator compared with the test bed: runs of `placement.prism`, simulated with the same requests."""
