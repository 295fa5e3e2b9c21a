"""One block in one file: a header of 64 bytes, then the block's bytes.

The header, little-endian: magic with the format's version (8), digest of the cache that it belongs to (16), content
name (16), length of the block (8), its CRC-32 (4), CRC-32 of the header before this field (4), zeros (8). A file is
written under a temporary name and renamed: under its final name it is whole, unless it was damaged later. CRC-32 finds
every error burst of up to 32 bits; it does not protect against a writer of the files, which only their owner can be.

A block of a served model is about a megabyte, so a file of its own costs next to nothing; deleting it frees its room
at once, and one rename completes it. Segment files would have to be compacted for either.
"""

import os
import struct
from dataclasses import asdict, dataclass
from hashlib import blake2b
from zlib import crc32

from tandem.values.block_hash import HASH_BYTES
from tandem.values.ids import BlockHash
from tandem.values.kv_layout import KVLayout

HEADER_BYTES = 64
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
_MAGIC = b"TandKV\x00\x01"
_FIELDS = struct.Struct("<8s16s16sQI")
_CRC = struct.Struct("<I")
_FILE_MODE = 0o600


class BadBlockFile(Exception):
    """The file is damaged, cut short, or belongs to another cache; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """Properties that all files of one cache share."""

    digest: bytes
    """Digest of model, layout, secret and everything else that changes the bits of KV; 16 bytes."""
    block_bytes: int


def cache_identity(layout: KVLayout, *, secret: bytes, computed_by: tuple[str, ...]) -> CacheIdentity:
    """Identity of the cache of blocks that a model of this layout computes under a cluster's secret.

    `computed_by`: whatever else changes the bits of KV, such as kernels and quantisation.
    """
    digest = blake2b(key=secret, digest_size=16, person=b"tandem-kv-disk")
    geometry = asdict(layout)
    del geometry["num_regions"]  # says where KV lies, not what it is
    for part in (*(f"{name}={value}" for name, value in geometry.items()), *computed_by):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return CacheIdentity(digest=digest.digest(), block_bytes=layout.block_bytes)


def file_name(name: BlockHash) -> str:
    """Folder and file of a block. A name is a keyed hash, which reveals nothing of the prompt without the secret."""
    text = name.hex()
    return f"{text[:2]}/{text[2:]}{SUFFIX}"


def name_of(folder: str, file: str) -> BlockHash | None:
    """The block that a file in `folder` is named after; None when the file has another kind of name."""
    text = folder + file.removesuffix(SUFFIX)
    if not file.endswith(SUFFIX) or len(folder) != 2 or len(text) != 2 * HASH_BYTES or text != text.lower():
        return None
    try:
        return BlockHash(bytes.fromhex(text))
    except ValueError:
        return None


def write_block(path: str, block: memoryview, *, name: BlockHash, identity: CacheIdentity) -> None:
    """Write a block's file, whole or not at all. Raises OSError, and then leaves no file behind."""
    fields = _FIELDS.pack(_MAGIC, identity.digest, name, len(block), crc32(block))
    header = (fields + _CRC.pack(crc32(fields))).ljust(HEADER_BYTES, b"\x00")
    temporary = path.removesuffix(SUFFIX) + TEMPORARY_SUFFIX
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
        try:
            _write_all(fd, memoryview(header))
            _write_all(fd, block)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]


def read_block(path: str, into: memoryview, *, name: BlockHash, identity: CacheIdentity) -> None:
    """Read a block's file into `into`, whose content is undefined after a failure. Raises OSError, BadBlockFile."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        checksum = _check_header(os.read(fd, HEADER_BYTES), name=name, identity=identity)
        if os.fstat(fd).st_size != HEADER_BYTES + len(into):
            raise BadBlockFile("its length differs from the header's")
        done = 0
        while done < len(into):
            count = os.readv(fd, [into[done:]])
            if not count:
                raise BadBlockFile("it is cut short")
            done += count
    finally:
        os.close(fd)
    if crc32(into) != checksum:
        raise BadBlockFile("its bytes are damaged")


def check_file(path: str, *, name: BlockHash, identity: CacheIdentity) -> float:
    """Time of a file's last use, in seconds since the epoch. Raises OSError, or BadBlockFile for a wrong header or
    length.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_header(os.read(fd, HEADER_BYTES), name=name, identity=identity)
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if found.st_size != HEADER_BYTES + identity.block_bytes:
        raise BadBlockFile("its length differs from the header's")
    return found.st_mtime


def remove(path: str) -> None:
    """Remove a file if it exists and may be removed; otherwise it is found again when the folder is next read."""
    try:
        os.unlink(path)
    except OSError:
        return


def _check_header(header: bytes, *, name: BlockHash, identity: CacheIdentity) -> int:
    """Verify a file's header. Returns the checksum of the block. Raises BadBlockFile."""
    if len(header) < HEADER_BYTES:
        raise BadBlockFile("its header is incomplete")
    fields = header[: _FIELDS.size]
    (own,) = _CRC.unpack_from(header, _FIELDS.size)
    magic, digest, named, length, checksum = _FIELDS.unpack(fields)
    if magic != _MAGIC or own != crc32(fields):
        raise BadBlockFile("its header is damaged, or of another version")
    if digest != identity.digest or named != name or length != identity.block_bytes:
        raise BadBlockFile("it belongs to another cache or block")
    return int(checksum)
