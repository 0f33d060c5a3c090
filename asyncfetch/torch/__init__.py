"""The bridge to torch's DataLoader.

dataset.py    StreamDataset: iterates a Stream; FrameDataset: dataset[i]
bridge.py     AsyncIterableDataset: any async iterator of your own
"""

from __future__ import annotations

from asyncfetch.errors import MissingDependency

try:
    import torch  # noqa: F401  everything here derives from its classes
except ImportError as error:
    raise MissingDependency('asyncfetch.torch needs torch: pip install "asyncfetch[lerobot]"') from error

from asyncfetch.torch.bridge import AsyncIterableDataset
from asyncfetch.torch.dataset import FrameDataset, StreamDataset

__all__ = ["AsyncIterableDataset", "FrameDataset", "StreamDataset"]
