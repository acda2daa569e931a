"""The evaluation of [Prism, IV] on the test bed: daemons, placements, load, results."""
