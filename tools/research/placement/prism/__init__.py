"""The evaluation of [Prism, IV] on the test bed: daemons, placements, load and what came of it."""
