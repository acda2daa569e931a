"""Text and tokens: tokenizer, chat template, stop strings, splitting reasoning and tool calls from an answer."""
