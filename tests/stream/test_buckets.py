"""What the samples of a batch have in common."""

from __future__ import annotations

import pytest
import torch

from asyncfetch.errors import ConfigError
from asyncfetch.stream.buckets import WAITING_BATCHES, bucket_of


def test_buckets_are_told_apart_by_pictures() -> None:
    sample = {"video": torch.zeros(2, 3, 4, 5), "mask": torch.zeros(1, 4, 5), "audio": torch.zeros(2, 77), "text": "a"}
    assert bucket_of(sample, "shape") == (("video", (2, 3, 4, 5)), ("mask", (1, 4, 5)))
    assert bucket_of(sample, "frames") == (("video", 2),)
    assert bucket_of({"text": "a"}, "shape") == ()
    assert WAITING_BATCHES == 16
    with pytest.raises(ConfigError, match="bucket_by='shape' looks at the tensors of dicts, not at list"):
        bucket_of([1], "shape")
