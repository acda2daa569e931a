"""What is brought up ahead of need, and by which prices."""
