"""The OpenAI-compatible application on the Unix socket."""
