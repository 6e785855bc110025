"""Files that are replaced atomically, and text for terminals of any encoding."""
import os
import sys
from pathlib import Path


def replace(path, content):
    """Replaces a file's contents, bytes, atomically: `path` is either unchanged or complete. A link stays, and its
    target is replaced. What is not a regular file, such as /dev/stdout, is written in place."""
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()
    part = target.with_name(f".{target.name}.tmp")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def printable(path):
    """A path as text in UTF-8, whatever the locale. Other bytes become escapes, such as \\xe9."""
    return os.fsencode(path).decode(errors="backslashreplace")


def print_escapes():
    """From now on, what standard output cannot encode is printed as an escape instead of ending the program."""
    if sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
