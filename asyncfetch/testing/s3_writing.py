"""What an S3 server does with requests that write: PUT, and multipart uploads. Holds everything in memory."""

from __future__ import annotations

import functools
import hashlib
import itertools
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from asyncfetch.testing.s3_signature import Refusal
from asyncfetch.testing.server.answers import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

__all__ = ["Upload", "Writing", "tag_of", "xml"]


@dataclass(slots=True)
class Upload:
    """A multipart upload that was neither completed nor aborted."""

    path: str
    """Bucket and key."""
    parts: dict[int, bytes] = field(default_factory=dict)
    """By number."""


class _Joined(bytes):
    """An object made of parts, which its tag tells."""

    tag: str


def tag_of(content: bytes) -> str:
    """The ETag of an object, quotes included."""
    return content.tag if isinstance(content, _Joined) else f'"{_md5(content).hex()}"'


class Writing:
    """Puts into a mapping. For one thread.

    Args:
        objects: By bucket and key.
        takes_any_digest: Whether Content-MD5 is ignored.
        min_part_bytes: Of all parts but the last.
    """

    def __init__(self, objects: MutableMapping[str, bytes], *, takes_any_digest: bool, min_part_bytes: int) -> None:
        self._objects = objects
        self._takes_any_digest = takes_any_digest
        self._min_part_bytes = min_part_bytes
        self._numbers = itertools.count(1)
        self.uploads: dict[str, Upload] = {}
        """By id."""

    def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Answer | Refusal:
        """What becomes of a request that writes to ``path``, "bucket/key"."""
        asked = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        digest = headers.get("Content-MD5", "")
        if digest and not self._takes_any_digest and digest != b64encode(_md5(body)).decode():
            return Refusal(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        if method == "POST" and "uploads" in asked:
            upload_id = f"upload/{next(self._numbers)}+"
            self.uploads[upload_id] = Upload(path)
            return xml(
                200, f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
            )
        if "uploadId" in asked:
            upload = self.uploads.get(asked["uploadId"])
            if upload is None or upload.path != path:
                return Refusal(404, "NoSuchUpload", "The specified multipart upload does not exist.")
            if method == "PUT":
                upload.parts[int(asked["partNumber"])] = body
                return Answer(200, {"ETag": tag_of(body), "Content-Length": "0"})
            if method == "POST":
                return self._complete(asked["uploadId"], upload, body)
            del self.uploads[asked["uploadId"]]
            return Answer(204)
        if method == "PUT":
            self._objects[path] = body
            return Answer(200, {"ETag": tag_of(body), "Content-Length": "0"})
        if method == "DELETE":
            self._objects.pop(path, None)
            return Answer(204)
        return Refusal(405, "MethodNotAllowed", "The specified method is not allowed against this resource.")

    def _complete(self, upload_id: str, upload: Upload, body: bytes) -> Answer | Refusal:
        named = {
            int(part.findtext("{*}PartNumber", "")): part.findtext("{*}ETag", "")
            for part in ET.fromstring(body).iterfind("{*}Part")
        }
        if list(named) != sorted(named) or not named:
            return Refusal(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
        if any(number not in upload.parts or tag_of(upload.parts[number]) != tag for number, tag in named.items()):
            return Refusal(400, "InvalidPart", "One or more of the specified parts could not be found.")
        parts = [upload.parts[number] for number in named]
        if any(len(part) < self._min_part_bytes for part in parts[:-1]):
            return Refusal(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
        joined = _Joined(b"".join(parts))
        joined.tag = f'"{_md5(b"".join(map(_md5, parts))).hex()}-{len(parts)}"'
        self._objects[upload.path] = joined
        del self.uploads[upload_id]
        return xml(
            200, f"<CompleteMultipartUploadResult><ETag>{escape(joined.tag)}</ETag></CompleteMultipartUploadResult>"
        )


def xml(status: int, text: str) -> Answer:
    """An answer with a body of XML."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Answer(status, {"Content-Type": "application/xml", "Content-Length": str(len(body))}, text=body)


@functools.lru_cache(maxsize=1024)
def _md5(content: bytes) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).digest()
