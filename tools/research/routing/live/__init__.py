"""Which box runs which request, live: daemons in boxes of a test bed, asked at all of them."""
