"""What is shown of this box and others to those who look."""
