"""Audio of a window, decoded out of the bytes of a clip. Runs in decode threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfetch.decode.backends import choose_backend, import_torch
from asyncfetch.decode.decoder import tensor_on
from asyncfetch.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from asyncfetch.videos.plan import AudioPlan


def decode_audio(plan: AudioPlan, parts: Sequence[memoryview], *, rate: int, name: str) -> torch.Tensor:
    """Return the audio that an ``AudioPlan`` is for: (channels, samples) float32, as torchcodec's decoder gives it.

    Args:
        plan: Of a window.
        parts: Bytes of its parts.
        rate: Samples a second.
        name: For messages.

    Raises:
        DecodeError: They can't be decoded.
        MissingDependency: torchcodec doesn't load.
    """
    if not plan.parts:
        return no_audio()
    data = b"".join((plan.header, *parts))
    return audio_of(data, plan.start_seconds - plan.clip_seconds, plan.stop_seconds - plan.clip_seconds, rate, name)


def audio_of(data: bytes | memoryview, start_seconds: float, stop_seconds: float, rate: int, name: str) -> torch.Tensor:
    """The audio that a file in memory plays in [start_seconds, stop_seconds). See ``decode_audio``."""
    choose_backend("torchcodec")  # or an error that says what is missing
    from torchcodec.decoders import AudioDecoder  # type: ignore[attr-defined]

    try:
        decoder = AudioDecoder(tensor_on(data), sample_rate=rate)
        found: torch.Tensor = decoder.get_samples_played_in_range(start_seconds, stop_seconds).data
    except (RuntimeError, ValueError, IndexError) as error:
        message = f"{name}: torchcodec can't decode its audio from {start_seconds:.6f} s to {stop_seconds:.6f} s"
        raise DecodeError(f"{message}: {error}") from error
    return found


def no_audio() -> torch.Tensor:
    """The audio of a video that has none: no channel, no sample."""
    none: torch.Tensor = import_torch().zeros((0, 0))
    return none
