"""Studies of request routing: other policies, and their comparison in simulation and on a test bed."""
