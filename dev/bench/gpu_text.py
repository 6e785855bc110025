"""Text to train on where there are no shards and no network: this project's own pages and sources, one token per byte.

    python3 dev/bench/gpu_text.py FOLDER      writes FOLDER/text_train_000001.bin; needs nothing but Python

Every byte is a token below 256, and 0 is the end-of-text token, so that every vocabulary is large enough. The losses
are only good for comparing two trainers.
"""
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("README.md", "doc/*.md", "*.c", "*.h", "*.cu", "cuda/*", "math/*", "runtime/*", "attention/*.*")
MAGIC, VERSION = 20240520, 1


def write(folder):
    """Writes the shard; returns what it wrote, in words."""
    paths = sorted({path for pattern in FILES
                    for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".pyc"})
    tokens = b"".join(b"\0" + path.read_bytes().replace(b"\0", b"") for path in paths)
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack("<256i", MAGIC, VERSION, len(tokens), *[0] * 253)
    (folder / "text_train_000001.bin").write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return f"{len(tokens)} bytes of {len(paths)} files as tokens in {folder}"


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(f"gpu_text: {write(Path(sys.argv[1]))}")


if __name__ == "__main__":
    main()
