"""Builds prompts that have a model fill in the text between a prefix and a suffix, by marks that its tokenizer has."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """The marks before the prefix, before the suffix, and before the text between them, which `ends` end, too."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()

    def prompt(self, before: str, after: str) -> str:
        """Returns the prompt whose continuation stands between the two texts."""
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"

    @property
    def stops(self) -> tuple[str, ...]:
        """Returns the names of tokens that no text between two others contains."""
        return (self.prefix, self.suffix, self.middle, *self.ends)


FORMS = (
    InfillMarks(  # Qwen3-Coder
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    ),
    InfillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),  # StarCoder, Granite
)


def infill_marks(tokens: Container[str]) -> InfillMarks | None:
    """Returns the marks that the tokenizer has among its added tokens; None where it has none."""
    known = (form for form in FORMS if all(mark in tokens for mark in (form.prefix, form.suffix, form.middle)))
    return next(known, None)
