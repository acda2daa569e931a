"""Messages and the socket between the front and the engine of one box."""
