"""Reads the tokenizer and the chat template of a checkpoint before it is packed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from edgemoe.durable import replace_file
from edgemoe.errors import CheckpointError
from edgemoe.store.catalog import is_store
from edgemoe.store.checkpoint import check_tokenizer
from edgemoe.store.gguf.checkpoint_of_gguf import gguf_at, open_checkpoint


def check_texts(model: str | Path) -> None:
    """Raises CheckpointError where a checkpoint's tokenizer or chat template cannot be read. Skips stores."""
    path = Path(model).expanduser()
    if not path.exists() or is_store(path):
        return
    if (file := gguf_at(path)) is None:
        check_tokenizer(path)
        _check(path, path)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, content in open_checkpoint(file).made:
            replace_file(Path(folder) / name, content)
        _check(Path(folder), file)


def _check(folder: Path, model: Path) -> None:
    from edgemoe.api.text.tokenizer import TextModel  # takes a while to import

    try:
        template = TextModel(folder).template
        if template is not None:
            template.check()
    except CheckpointError as error:
        raise CheckpointError(f"{model}: {str(error).removeprefix(f'{folder}/')}; fetch that file again") from error
