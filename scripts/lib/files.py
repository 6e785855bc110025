"""Files that are read and written without surprises, and text for terminals of any encoding.

Folders of runs, evaluations and grids may be somebody else's, with links, pipes and devices in place of files. Scripts
open files through this module only.
"""
import contextlib
import errno
import os
import re
import stat
import sys
from pathlib import Path

# The most bytes of each kind of file.
JSON, GRID, TEXT, EVAL, METRICS, RESULTS, ARRAY = 1 << 24, 1 << 18, 1 << 26, 1 << 28, 1 << 30, 1 << 30, 1 << 32


def open_checked(path, flags, refuse):
    """A file descriptor; an OSError, before anything is read or written, if refuse(os.stat_result) says why not. A
    pipe does not block."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    if why := refuse(os.fstat(handle)):
        os.close(handle)
        raise OSError(errno.EINVAL, why, str(path))
    return handle


def is_not_regular(status):
    if stat.S_ISDIR(status.st_mode):
        return os.strerror(errno.EISDIR)
    return "" if stat.S_ISREG(status.st_mode) else "expected a regular file, found a pipe, a device or a socket"


def open_regular(path, limit=None):
    """Opens a regular file of at most `limit` bytes (None: any) for reading. Devices and pipes may have no end."""
    def refuse(status):
        too_long = limit is not None and status.st_size > limit
        return is_not_regular(status) or (f"it has {status.st_size:,} bytes, but a file of this kind has at most "
                                          f"{limit:,}" if too_long else "")
    return os.fdopen(open_checked(path, os.O_RDONLY, refuse), "rb")


def read(path, limit):
    """The bytes of a regular file of at most `limit` bytes."""
    with open_regular(path, limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def create(path, mode="wb"):
    """Opens a new file for writing. What had its name, a link or a pipe included, is removed first, never followed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), mode)


def extend(path):
    """Opens a file for reading and appending text. One that has other names, by links, is refused."""
    return open_own(path, os.O_APPEND | os.O_CREAT, "a+")


def change(path):
    """Opens an existing file for reading and writing bytes. One that has other names, by links, is refused."""
    return open_own(path, 0, "r+b")


def open_own(path, flags, mode):
    def refuse(status):
        return is_not_regular(status) or "it has another name, by a hard link" * (status.st_nlink != 1)
    try:
        return os.fdopen(open_checked(path, os.O_RDWR | os.O_NOFOLLOW | flags, refuse), mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "expected a file, found a link. Remove it"
        raise


def replace(path, content, named=False):
    """Replaces a file's contents, bytes, atomically: `path` is either unchanged or complete. No link is followed,
    unless the user has named the file: then a link stays, and its target is replaced; and what is not a regular file,
    such as /dev/stdout, is written in place."""
    path = Path(path)
    if named and path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve() if named else path
    part = target.with_name(f".{target.name}.tmp")
    try:
        with create(part) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def refuse_link(folder):
    """An OSError if a folder that the user has not named, and that is written to, is a link."""
    if os.path.islink(folder):
        raise OSError(errno.ELOOP, "expected a folder, found a link. Remove it", str(folder))


def others_can_exchange(folder):
    """Which folder belongs to another user, may be written to by everybody, and so lets them exchange what is written
    into `folder`: this one, or, unless it has the sticky bit as /tmp does, the one that contains it or in which it will
    be created. None if there is none. runtime/own.c has the same rule."""
    def foreign(path):
        status = os.stat(path)
        return status.st_uid != os.geteuid() and status.st_mode & stat.S_IWOTH and status
    folder = Path(os.path.abspath(folder))
    if folder.exists() and foreign(folder):
        return folder
    while not folder.exists() and not folder.parent.exists():
        folder = folder.parent
    around = (folder.parent, folder / "..") if folder.exists() else (folder.parent,)
    return next((path for path in around if (status := foreign(path)) and not status.st_mode & stat.S_ISVTX), None)


def printable(path):
    """A path as text in UTF-8, whatever the locale. Other bytes become escapes, such as \\xe9."""
    return os.fsencode(path).decode(errors="backslashreplace")


# What acts on a terminal instead of being shown: C0 but tab and newline, C1, and the controls of bidirectional text.
CONTROLS = re.compile("[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")


def escaped(text):
    """The text with an escape, such as \\x1b or \\u202e, in place of each control, as runtime/utf8.c writes them."""
    return CONTROLS.sub(lambda found: f"\\{'x%02x' if found[0] < chr(128) else 'u%04x'}" % ord(found[0]), text)


class Escaping:
    """A text stream that prints controls as escapes. Names in messages come from files that anybody may have made."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self.stream.write(escaped(text))
        return len(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def raw(stream):
    """The stream itself, for a progress line."""
    return stream.stream if isinstance(stream, Escaping) else stream


def print_escapes():
    """From now on, what standard output cannot encode is printed as an escape instead of ending the program, and so are
    controls: in messages, and on standard output if it is a terminal."""
    if sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdout.isatty():
        sys.stdout = Escaping(raw(sys.stdout))
    sys.stderr = Escaping(raw(sys.stderr))
