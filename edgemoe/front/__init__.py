"""The front's own rooms: the request book, the engine's supervisor, listening sockets, the service manager."""
