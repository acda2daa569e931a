"""What daemons say to each other."""
