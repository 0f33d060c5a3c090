"""Bytes to arrays: clips, images, and the threads and the cache that go with them.

    decoder       Clip: what is to be decoded, a self-contained MP4 and the times of the frames in it;
                  FrameDecoder, by torchcodec and by PyAV, and open_decoder, which picks one
    backends      which of them load in this process, and what to do where none does
    picture_size  PictureSize: the size that pictures get, by stretching, cropping or padding
    image         PNG, JPEG and TIFF out of a table's column
    cache         DecoderCache: open decoders, bounded in number and bytes
    executor      DecodePool: the threads that decode

torch, torchcodec and PyAV are imported at first use.
"""

from asyncfetch.decode.cache import DecoderCache, DecoderCacheStatistics
from asyncfetch.decode.decoder import Clip, DepthScale, FrameDecoder, open_decoder, stack_frames
from asyncfetch.decode.executor import DecodePool, DecodePoolStatistics
from asyncfetch.decode.image import decode_image
from asyncfetch.decode.picture_size import Fit, PictureSize, picture_size

__all__ = [
    "Clip",
    "DecodePool",
    "DecodePoolStatistics",
    "DecoderCache",
    "DecoderCacheStatistics",
    "DepthScale",
    "Fit",
    "FrameDecoder",
    "PictureSize",
    "decode_image",
    "open_decoder",
    "picture_size",
    "stack_frames",
]
