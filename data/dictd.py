"""The entries of a dictionary in dictd's format, a .dict.dz and its index, and the prose of those of GCIDE.

A line of the index is a headword, an offset and a length, both in base 64. dictzip's files are gzip's.
"""
import base64
import gzip
import re
import unicodedata

import markup
from shards import INPUT, DataError, files


def number(text):
    """A number whose digits are those of base 64, of which A is 0."""
    whole = "A" * (-len(text) % 4) + text
    return int.from_bytes(base64.b64decode(whole, validate=True), "big")


def entries(path):
    """The texts of all entries in the order of the file, without those that describe the dictionary."""
    places = set()
    index = path.with_name(path.name.removesuffix(".dict.dz") + ".index")
    if not index.exists():
        raise DataError(INPUT, f"expected {index.name} beside it, found none")
    for line, row in enumerate(files.read(index, files.TEXT).decode("utf-8", "replace").splitlines(), 1):
        try:
            word, offset, length = row.split("\t")[:3]
            places.add((number(offset), number(length), word.startswith("00-")))
        except ValueError:
            raise DataError(INPUT, f"{index.name}: line {line}: expected a headword, an offset and a length, found "
                                   f"{row[:80]!r}.") from None
    about = {place[:2] for place in places if place[2]}
    with files.open_regular(path, files.METRICS) as file:
        data = gzip.open(file).read(files.METRICS)
    return [data[offset:offset + length].decode("utf-8", "replace")
            for offset, length in sorted({place[:2] for place in places} - about)]


# ---- GCIDE's notation

ACCENTS = {"'": "\u0301", "`": "\u0300", '"': "\u0308", "^": "\u0302", "~": "\u0303", "=": "\u0304", ".": "\u0307",
           ",": "\u0327"}
NAMES = {"ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "=ae": "ǣ", "deg": "°", "imac": "ī", "thorn": "þ", "eth": "ð",
         "th": "þ", "root": "√", "sect": "§", "pounds": "£", "aum": "ä", "add": "a", "asl": "à", "udd": "u",
         "yogh": "ȝ", "ng": "ng", "frac12": "½", "frac14": "¼", "frac34": "¾", "alpha": "α", "beta": "β", "gamma": "γ",
         "phi": "φ", "Delta": "Δ", "bprime": "'", "?": ""}
CODE = re.compile(r"""\[(?:(['`"^~=.,*-])([A-Za-z])|([A-Za-z])(\^)|([A-Za-z]{2,6}\d{0,2}|=ae|\?))\]""")
SPOKEN = r"""\s*\([^()]*[\["`*?][^()]*\)"""    # a pronunciation, which has accents or marks of stress
PRONUNCIATION = re.compile(rf"""\\[^\\]*\\(?:,?{SPOKEN})?|(?<=\}}){SPOKEN}|"""
                           r"""\s*\((?=[^() ]*[\["`*])[^() ]*\)|\s*\([^()]*[\w\]][`*][\w\[][^()]*\)""")
STRESS = re.compile(r"""(?<=\w)["`*](?=\w)|(?<=\w)`(?=[ ,.;-])""")
BRACKETS = re.compile(r"\s*\[[^\[\]]*\]")
# What the words that went left behind.
GAPS = [(re.compile(r" +([,.;:)])"), r"\1"), (re.compile(r",{2,}"), ","), (re.compile(r"(?<!\.)\.\.(?!\.)"), ".")]


def character(match):
    mark, letter, short, breve, name = match.groups()
    if letter:
        return unicodedata.normalize("NFC", letter + ACCENTS.get(mark, ""))
    if breve:
        return unicodedata.normalize("NFC", short + "\u0306")
    return NAMES.get(name, match[0])


def gcide(text):
    """The paragraphs of an entry, joined to one text: headword and definitions. Pronunciation, etymology, sources and
    labels of usage, which are all in brackets, go."""
    # A source at the end of a paragraph may be followed by the next headwords.
    text = re.sub(r"(\[(?:1913 Webster|Webster 1913[^\]]*|PJC|WordNet[^\]]*)\])[\s\w'-]*$", r"\1", text)
    text = STRESS.sub("", CODE.sub(character, PRONUNCIATION.sub(" ", text)))
    while (shorter := BRACKETS.sub("", text)) != text:
        text = shorter
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", re.sub(r"[{}]", "", text))]
    text = "\n".join(part for part in parts if markup.WORD.search(part))
    for pattern, by in GAPS:
        text = pattern.sub(by, text)
    return text
