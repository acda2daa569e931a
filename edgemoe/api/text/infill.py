"""Builds prompts that have a model fill in the text between a prefix and a suffix, by marks that its tokenizer has."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """The marks before the prefix, before the suffix, and before the text between them, which `ends` end, too.

    `repository` stands before a repository's name, `file` before the name of one of its files.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    repository: str = ""
    file: str = ""

    def prompt(self, before: str, after: str) -> str:
        """Returns the prompt whose continuation stands between the two texts."""
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"

    def files(self, files: Sequence[tuple[str, str]], tokens: Container[str]) -> str:
        """Returns the text before the prefix that shows other files, each a name and a text, as llama.cpp writes it."""
        if not files:
            return ""
        if not self.file or self.file not in tokens:
            return "".join(text for _, text in files)
        head = f"{self.repository}myproject\n" if self.repository and self.repository in tokens else ""
        return head + "".join(f"{self.file}{name}\n{text}\n" for name, text in files) + f"{self.file}filename\n"

    @property
    def stops(self) -> tuple[str, ...]:
        """Returns the names of tokens that no text between two others contains."""
        return (self.prefix, self.suffix, self.middle, *self.ends)


FORMS = (
    InfillMarks(  # Qwen3-Coder
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    InfillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillMarks(  # StarCoder, Granite
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>"), "<repo_name>", "<file_sep>"
    ),
)


def infill_marks(tokens: Container[str]) -> InfillMarks | None:
    """Returns the marks that the tokenizer has among its added tokens; None where it has none."""
    known = (form for form in FORMS if all(mark in tokens for mark in (form.prefix, form.suffix, form.middle)))
    return next(known, None)
