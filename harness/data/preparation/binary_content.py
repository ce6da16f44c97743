"""What a file holds that is no text in UTF-8, told by its first bytes: names lie, and junk can be trained on."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from harness.data.preparation.invalid_text import replacements

HEAD_BYTES = 2**14
MOST_BINARY = 0.05  # of the first bytes: zero bytes and what is not UTF-8, where there is a zero byte at all
LEAST_LATIN = 0.9  # of the characters that zero bytes are taken for a part of
CONTROLS = bytes({*range(0x20), 0x7F} - set(b"\t\n\v\f\r\b\x1b"))
NUMPY_MAGIC = b"\x93NUMPY"
SHARD_MAGIC, WIDE_SHARD_MAGIC, EVALUATION_MAGIC = 20240520, 20240801, 20240522  # dev/data/data_common.py of llm.c


class Content(NamedTuple):
    """What is in a file, and what to do about it, for a message."""

    what: str
    remedy: str

    @property
    def is_text(self) -> bool:
        """In another encoding than UTF-8."""
        return self.what.startswith("text in ")


LEAVE_OUT = "leave it out"
UNPACK = "unpack it"
# After 0x80: the protocol, and an opcode that begins one (0x80 and the protocol alone may be a token's number).
PICKLE_STARTS = [b"\4\x95", b"\5\x95", *(bytes([version, opcode]) for version in (2, 3) for opcode in b"}](cX\x8a")]
BY_FIRST_BYTES = {  # of these no text in UTF-8 begins with
    NUMPY_MAGIC: Content("a NumPy array", "if it is tokens, add --from-bin"),
    SHARD_MAGIC.to_bytes(4, "little"): Content("tokens (a shard of llm.c or modded-nanogpt)", "add --from-bin"),
    WIDE_SHARD_MAGIC.to_bytes(4, "little"): Content("tokens (a shard of llm.c)", "add --from-bin"),
    EVALUATION_MAGIC.to_bytes(4, "little"): Content("the examples of an evaluation of llm.c", LEAVE_OUT),
    b"\x1f\x8b\x08": Content("what gzip has compressed", "give it a name that ends in .gz"),
    b"\x28\xb5\x2f\xfd": Content("what zstd has compressed", "give it a name that ends in .zst"),
    b"\xfd7zXZ\0": Content("what xz has compressed", UNPACK),
    b"\x04\x22\x4d\x18": Content("what lz4 has compressed", UNPACK),
    b"7z\xbc\xaf\x27\x1c": Content("a 7-Zip archive", UNPACK),
    b"PK\3\4": Content("a zip archive (.npz, .docx and .pt are such, too)", UNPACK),
    b"\x89PNG\r\n": Content("a PNG image", LEAVE_OUT),
    b"\xff\xd8\xff": Content("a JPEG image", LEAVE_OUT),
    b"\x7fELF": Content("a program (ELF)", LEAVE_OUT),
    b"\x89HDF\r\n": Content("an HDF5 file", "write its text as JSON lines first"),
    b"SQLite format 3\0": Content("an SQLite database", "write its text as JSON lines first"),
    **{b"\x80" + start: Content("a pickle", LEAVE_OUT) for start in PICKLE_STARTS},
    codecs.BOM_UTF32_LE: Content("text in UTF-32", "convert it with iconv -f UTF-32 -t UTF-8"),  # before UTF-16's
    codecs.BOM_UTF32_BE: Content("text in UTF-32", "convert it with iconv -f UTF-32 -t UTF-8"),
    codecs.BOM_UTF16_LE: Content("text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    codecs.BOM_UTF16_BE: Content("text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
}
BY_FIRST_LETTERS = {  # text could begin with these, but not go on as such files do
    b"%PDF-": Content("a PDF document", "extract its text first, with pdftotext for example"),
    b"PAR1": Content("parquet", "give it a name that ends in .parquet"),
    b"ARROW1": Content("an Arrow file", "write it as parquet first"),
    b"BZh91AY&SY": Content("what bzip2 has compressed", UNPACK),
    b"GIF8": Content("a GIF image", LEAVE_OUT),
    b"GGUF": Content("the weights of a model (GGUF)", LEAVE_OUT),
    b"RIFF": Content("an image, a sound or a film (RIFF)", LEAVE_OUT),
    b"OggS": Content("a sound or a film (Ogg)", LEAVE_OUT),
    b"ID3\3\0": Content("a sound (MP3)", LEAVE_OUT),
    b"ID3\4\0": Content("a sound (MP3)", LEAVE_OUT),
    b"MZ\x90\0": Content("a program (Windows)", LEAVE_OUT),
}
SAFETENSORS = Content("tensors (safetensors)", "leave it out; a dataset of tokens is used as it is, in DATASETS_DIR")
TAR = Content("a tar archive", UNPACK)
BINARY = Content(
    "binary data",
    "if it is tokens (nanoGPT's train.bin, for example), add --from-bin; text in another encoding has to become UTF-8 "
    "first; leave out anything else",
)


def identify(head: bytes, size: int) -> Content | None:
    """What a file of `size` bytes that begins with `head` holds, if it is no text in UTF-8 for certain. Of text in
    Latin-1 and its like one cannot be certain."""
    return known_format(head, size) or _by_zero_bytes(head)


def known_format(head: bytes, size: int) -> Content | None:
    """The format that a file's first bytes name, if they name one."""
    for magic, content in BY_FIRST_BYTES.items():
        if head.startswith(magic):
            return content
    if is_text(head):
        return None
    for magic, content in BY_FIRST_LETTERS.items():
        if head.startswith(magic):
            return content
    # https://github.com/huggingface/safetensors, Format: 8 bytes with the length of the JSON object that follows.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return SAFETENSORS
    return TAR if head[257:262] == b"ustar" else None


def is_text(head: bytes) -> bool:
    """Whether it is UTF-8 without control characters; the last character may be cut off."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return len(head.translate(None, CONTROLS)) == len(head)


def _by_zero_bytes(head: bytes) -> Content | None:
    if head.count(0) == 0 or head.count(0) + replacements(head) <= MOST_BINARY * len(head):
        return None
    for encoding, width in (("UTF-16LE", 2), ("UTF-16BE", 2), ("UTF-32LE", 4), ("UTF-32BE", 4)):
        if _is_latin(head[: len(head) // width * width], encoding):
            return Content(f"text in {encoding}", f"convert it with iconv -f {encoding} -t UTF-8")
    return BINARY


def _is_latin(head: bytes, encoding: str) -> bool:
    """Whether it is mostly European text: of other alphabets no such file tells by its zero bytes."""
    try:
        text = head.decode(encoding)
    except UnicodeDecodeError:
        return False
    latin = sum(each < "\u0250" and (each.isprintable() or each in "\t\r\n") for each in text)
    return latin >= LEAST_LATIN * len(text) > 0
