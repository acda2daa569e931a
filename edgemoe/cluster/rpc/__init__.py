"""Messages and transport, used by both processes."""
