"""The front's own rooms: the request log, the engine's supervisor, listening sockets, the service manager."""
