"""`edgemoe pack`: from a Hugging Face checkpoint to a store. Imports no torch.

checkpoint: where tensors lie, everything checked -> layout: what the store's files will hold -> writer: the copying
-> packer: the whole thing, resumable.
"""

from edgemoe.pack.packer import JOURNAL, Progress, ensure_store, pack, silent

__all__ = ["JOURNAL", "Progress", "ensure_store", "pack", "silent"]
