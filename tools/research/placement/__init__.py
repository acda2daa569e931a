"""Studies of expert placement: other policies, exact bounds, Prism's evaluation."""
