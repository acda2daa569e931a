"""Commands that look at a running daemon by what its /events say."""
