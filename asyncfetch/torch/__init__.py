"""The bridge to torch's DataLoader.

dataset.py    StreamDataset: iterates a Stream; FrameDataset: dataset[i]; collate: samples as a batch
memory.py     what a rank's workers share
watching.py   workers that are killed, stopped or hang
bridge.py     AsyncIterableDataset: any async iterator of your own

States, and putting those of several ranks together, are the stream's; ``merge_states`` is in this room, too.
"""

from __future__ import annotations

from asyncfetch.errors import MissingDependency, install_command

try:
    import torch  # noqa: F401  everything here derives from its classes
except ImportError as error:
    raise MissingDependency(f"asyncfetch.torch needs torch: {install_command('lerobot')}") from error

from asyncfetch.order.state import merge_states
from asyncfetch.torch.bridge import AsyncIterableDataset
from asyncfetch.torch.dataset import FrameDataset, StreamDataset, collate

__all__ = ["AsyncIterableDataset", "FrameDataset", "StreamDataset", "collate", "merge_states"]
