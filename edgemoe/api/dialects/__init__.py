"""Dialects: how families of models write reasoning and tool calls, and the parsers that read them as they stream."""
