#!/usr/bin/env python3
"""Prints runtime/tokenizer_classes.h: which characters are letters, numbers and spaces to tiktoken.

    python dev/tokenizer_classes.py > runtime/tokenizer_classes.h

The classes come from tiktoken itself (an encoding whose pattern is just the class keeps the characters of that class
and drops the others), because Python's unicodedata follows another version of Unicode.
"""
import tiktoken

HEAD = """\
// Letters, numbers and spaces as tiktoken's patterns know them (\\p{L}, \\p{N}, \\s): ranges of code points in rising
// order. Made by dev/tokenizer_classes.py from tiktoken: do not edit. What is in no range is of class OTHER.
// clang-format off
typedef enum { OTHER, LETTER, NUMBER, SPACE } CharClass;

static const struct {
    uint32_t first, last;
    CharClass class;
} char_ranges[] = {"""


def members(pattern):
    """The set of code points that match a pattern for one character."""
    ranks = {bytes([b]): b for b in range(256)}
    encoding = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    everything = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    return set(map(ord, encoding.decode(encoding.encode_ordinary(everything))))


def ranges():
    """(first, last, class) of all runs of code points that share a class."""
    classes = {c: name for name, pattern in (("LETTER", r"\p{L}"), ("NUMBER", r"\p{N}"), ("SPACE", r"\s"))
               for c in members(pattern)}
    found = []
    for c in sorted(classes):
        if found and found[-1][1] == c - 1 and found[-1][2] == classes[c]:
            found[-1][1] = c
        else:
            found.append([c, c, classes[c]])
    return found


def header():
    rows = [f"{{{first:#x}, {last:#x}, {name}}}," for first, last, name in ranges()]
    lines = ["    " + " ".join(rows[i:i + 4]) for i in range(0, len(rows), 4)]
    return "\n".join([HEAD] + lines + ["};", ""])


if __name__ == "__main__":
    print(header(), end="")
