"""Messages of one subject each."""
