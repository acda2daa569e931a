"""Reads GGUF files: container, values, model and tokenizer."""
