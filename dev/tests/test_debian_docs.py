"""data/debian_docs.py: prose out of reStructuredText, POD and a dictionary, documents without duplicates, and packages
that the tests build."""
import base64
import gzip
import os
import shutil
import subprocess

import pytest

from test_data import contents, documents_of, read_shard, script
from trainer import script_of
import debian_docs
import dictd
import markup
import shards
import vocabulary

needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")


# ---- markup

RST = """\
.. SPDX-License-Identifier: GPL-2.0
.. _a-target:

=====================
The title of the page
=====================

:Author: Someone who is not in the text and should not be

The first paragraph has ``code``, *emphasis*, **strong words**, a `link
<https://example.org>`_, :func:`a_function`, :pep:`8` and a footnote [1]_.

.. [1] This is a footnote with enough words to be taken for prose.

A section without prose
-----------------------

+------+------+
| this | is a |
+------+------+

======  =====================================
Name    What it is for, in some more words
======  =====================================

one     the first of the rows of this table

======  =====================================

A section with prose
~~~~~~~~~~~~~~~~~~~~

This is the beginning of it. For example::

    this is code, and it is not to be in the text

with it, that sentence is broken and goes as well.

.. code-block:: c

   int this_is_code_and_not_text_at_all(void);

.. note:: This is a note that is about the text
   and that goes on in a second line.

.. c:function:: int name(int of_a_function)

   This is what the function does with the number that it gets.

   :param of_a_function: the number, in a field that is left out

- the first item of a list that has enough words
- the second item is on two lines
  and the second of them is indented
* no list

a term
    This is the definition of the term above it.

>>> print("this is a session and it is not to be in the text")
"""


def test_rst():
    assert markup.rst(RST) == [
        "The title of the page",
        "The first paragraph has code, emphasis, strong words, a link, a_function(), PEP 8 and a footnote.",
        "A section with prose",
        "This is the beginning of it.",
        "This is a note that is about the text and that goes on in a second line.",
        "This is what the function does with the number that it gets.",
        "- the first item of a list that has enough words",
        "- the second item is on two lines and the second of them is indented",
        "a term: This is the definition of the term above it."]


def test_plain_text():
    """Lists need no blank line before them, and a paragraph that is known goes, with a heading that nothing else
    follows."""
    text = """\
1. A heading
============

   These are the things that it does:
   - it is the first of the two
   - it is the second of the two

2. Another
==========

This has been said before, and it is not said again.
"""
    assert markup.rst(text, known=lambda paragraph: "before" in paragraph) == [
        "1. A heading", "These are the things that it does:",
        "- it is the first of the two", "- it is the second of the two"]


POD = """\
=encoding utf8

=head1 A heading with B<bold> words

This is I<text> with C<code>, with C<< $a <=> $b >>, F<< a B<bold> file >>, E<lt>entitiesE<gt>,
L<a link|https://example.org> and L<perlfunc/"sort">.X<not in the text> It goes on with words that have no codes in
them, so that it is taken for prose by the function that looks at it.

    this is code, and it is not to be in the text

=head2 A heading of what is left out

    this is code, and it is not to be in the text

=head2 A list

=over 4

=item *

This is the first item of the list.

=item 2.

This is the second item, and it is numbered.

=back

=begin html

This is for another format, and it is not to be in the text.

=end html

=for comment This is a comment that is not to be in the text.

The last paragraph of the page is here. It is used like this:

    this is code, and it is not to be in the text

=cut

This is not in the page, but is the source of the program.
"""


def test_pod():
    assert markup.pod(POD) == [
        "A heading with bold words",
        "This is text with code, with $a <=> $b, a bold file, <entities>, a link and sort in perlfunc. It goes on with "
        "words that have no codes in them, so that it is taken for prose by the function that looks at it.",
        "A list",
        "- This is the first item of the list.",
        "2. This is the second item, and it is numbered.",
        "The last paragraph of the page is here."]


@pytest.mark.parametrize("text, prose", [
    ("This is a sentence about the text that it is in.", True), ("Too short, this is.", False),
    ("Dies ist ein Satz auf Deutsch, und das sollte man merken.", False),
    ("foo bar baz qux quux corge grault garply waldo", False),
    ("if (x->y[i] == 0) { return the_value_of(a); } else { is_it = 1; }", False),
    ("Copyright (c) of the text is with those who wrote it.", False),
    ("it is 0x01 0x02 0x03 0x04 0x05 0x06 0x07 0x08 in the table of the bytes", False)])
def test_what_is_prose(text, prose):
    assert bool(markup.is_prose(text)) == prose


# ---- a dictionary

ENTRIES = ["""\
Abb['e] \\Ab"b['e]`\\ ([.a]b"b[asl]`), n.; pl. {Abb['e]s} (-b[=a]z). [F. abb['e]. See
   {Abbot}.]
   1. The French word answering to the English {abbot}, in
      medi[ae]val times. [Obs.] --Chaucer.
      [1913 Webster]

   2. A title (in use). -- {Ab"bey*ly}, adv. -- Ab"bey*ly, adv.
      [PJC] Abbess

Abbess
""", """\
Cascara \\Cas"ca*ra\\ (Bot.)
   The buckthorn of the Pacific coast.
   [Webster 1913 Suppl.]

""", "00-database-info\n   This is about the dictionary and not to be in the text.\n"]
PROSE = ["Abbé, n.; pl. Abbés. 1. The French word answering to the English abbot, in mediæval times. --Chaucer.\n"
         "2. A title (in use). -- Abbeyly, adv. -- Abbeyly, adv.",
         "Cascara (Bot.) The buckthorn of the Pacific coast."]


def in_base64(number):
    return base64.b64encode(number.to_bytes(6, "big")).decode().lstrip("A") or "A"


def write_dictionary(folder, texts):
    """A .dict.dz and its index, with two headwords for each entry."""
    folder.mkdir(parents=True)
    rows, offset = [], 0
    for text in texts:
        word = text.split()[0]
        rows += [f"{name}\t{in_base64(offset)}\t{in_base64(len(text.encode()))}\n" for name in (word, word + " 2")]
        offset += len(text.encode())
    (folder / "gcide.index").write_text("".join(sorted(rows)))
    (folder / "gcide.dict.dz").write_bytes(gzip.compress("".join(texts).encode()))
    return folder / "gcide.dict.dz"


def test_dictionary(tmp_path):
    path = write_dictionary(tmp_path / "dictd", [*ENTRIES, "x " * 3000])
    entries = dictd.entries(path)
    assert entries == [*ENTRIES[:2], "x " * 3000]
    assert [dictd.gcide(entry) for entry in entries[:2]] == PROSE
    path.with_name("gcide.index").write_text("word\tA\n")
    with pytest.raises(shards.DataError, match="gcide.index: line 1: expected a headword, an offset and a length"):
        dictd.entries(path)


# ---- packages

def build(folder, name, files):
    """Builds NAME_1.0_all.deb with these files: {path: bytes, or the target of a symbolic link as str}."""
    tree = folder / "trees" / name
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(f"Package: {name}\nVersion: 1.0\nArchitecture: all\n"
                                         "Maintainer: Nobody <nobody@example.org>\nDescription: test\n")
    for path, content in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (tree / path).symlink_to(content)
        else:
            (tree / path).write_bytes(content)
    (folder / "debs").mkdir(exist_ok=True)
    path = folder / "debs" / f"{name}_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", "-Znone", tree, path], check=True,
                   stdout=subprocess.DEVNULL)
    return path


def page(number):
    """A page whose paragraph is long enough for a document and different from all others."""
    return (f"This is the page about {chr(97 + number) * 5}. "
            + "It says that there is more to be said about it than fits into the page. " * 4)


REPEATED = "This paragraph is in all of the pages of the manual, number {}."


@pytest.fixture(scope="module")
def debs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    documentation = "usr/share/doc/linux-doc-6.1/Documentation"
    pages = [gzip.compress(f"{page(i)}\n\n{REPEATED.format(i)}\n".encode()) for i in range(20)]
    build(folder, "linux-doc-6.1", {
        **{f"{documentation}/{i:02d}/page.{'rst' if i % 2 else 'txt'}.gz": text for i, text in enumerate(pages)},
        f"{documentation}/translations/it/page.rst.gz": pages[0],
        f"{documentation}/short.rst.gz": gzip.compress(b"This is too short to be of any use.\n"),
        "usr/share/doc/linux-doc-6.1/copyright": b"This is not one of the files that the script is to read."})
    build(folder, "perl-doc",
          {"usr/share/perl/5.36/pod/perl.pod": f"=head1 NAME\n\n{page(20)}\n\n{REPEATED.format(99)}\n".encode()})
    entries = [f"Word{chr(97 + i)} \\Word\\ n. One of the {i} words of the test. {page(i)}\n" for i in range(25)]
    dictionary = write_dictionary(folder / "dictd", ENTRIES[1:2] + entries)
    build(folder, "dict-gcide",
          {f"usr/share/dictd/{path.name}": path.read_bytes() for path in dictionary.parent.iterdir()})
    return folder / "debs"


def collect(debs, package, out, *flags, **how):
    """What the script prints for one package."""
    return script("debian_docs", "--debs", debs, "--packages", package, "--out", out, *flags, **how)


@needs_dpkg
def test_packages(debs, tmp_path):
    """All documents, in order, each paragraph once; the hash of a document decides whether it is for validation."""
    words = ["--debs", debs, "--packages", "linux-doc", "perl-doc", "--val-fraction", 0.2, "--out"]
    text = script("debian_docs", *words, tmp_path / "a", "--workers", 1)
    assert "linux-doc-6.1_1.0_all.deb: 21 files, 20 documents" in text and "19 paragraphs had occurred before" in text
    expected = [page(i).strip() for i in range(20)] + ["NAME\n\n" + page(20).strip()]
    expected[0] += "\n\n" + REPEATED.format(0)
    for split in ("train", "val"):
        wanted = [one for one in expected if shards.in_validation(one, 0.2) == (split == "val")]
        assert documents_of(tmp_path / "a", split) == wanted, split
    assert len(documents_of(tmp_path / "a", "val")) > 1
    script("debian_docs", *words, tmp_path / "b", "--workers", 3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert "occurred" not in script("debian_docs", *words, tmp_path / "a"), "a finished run is not repeated"


@needs_dpkg
def test_vocabulary_of_its_own(debs, tmp_path, monkeypatch):
    import tokenizers
    monkeypatch.setattr(vocabulary, "DATA", tmp_path)
    text = collect(debs, "dict-gcide", tmp_path / "out", "--tokenizer", "own", "--vocab", 300, "--val-fraction", 0)
    assert ("training a vocabulary of 300 ids on all documents" in text
            and "dict-gcide_1.0_all.deb: 1 file, 1 document, " in text)
    tokens = read_shard(tmp_path / "out/debian_docs_train_000001.bin")
    assert tokens[0] == 299 and max(tokens[1:]) < 299
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).decode(tokens[1:])
    assert found.startswith(PROSE[1] + "\n\nWorda n. One of the 0 words of the test.") and found.count("\n\n") == 25


@needs_dpkg
def test_wrong_packages(debs, tmp_path):
    """A package that is missing, that is none, and without prose."""
    out = tmp_path / "out"
    assert "expected python3-doc's .deb file" in collect(debs, "python3-doc", out, code=3)
    assert f"{tmp_path / 'no'}: not a folder" in collect(tmp_path / "no", "perl-doc", out, code=3)
    (tmp_path / "debs").mkdir()
    (tmp_path / "debs/perl-doc_1.0_all.deb").write_bytes(b"not a package")
    assert "dpkg-deb -x" in collect(tmp_path / "debs", "perl-doc", out, code=3)
    build(tmp_path, "perl-doc", {"usr/share/perl/5.36/pod/perl.pod": b"=head1 NAME\n\nToo short.\n"})
    text = collect(tmp_path / "debs", "perl-doc", out, code=3)
    assert "perl-doc_1.0_all.deb: found no prose in files that match" in text
    text = collect(debs, "perl-doc", out, code=3, env={"PATH": str(tmp_path)})
    assert "apt-get and dpkg-deb, so run it on Debian" in text


@needs_dpkg
def test_links_are_not_followed(tmp_path):
    """To a file, to a folder, and out of the package."""
    pod = f"=head1 NAME\n\n{page(0)}\n".encode()
    (tmp_path / "other.pod").write_bytes(pod)
    folder = "usr/share/perl/5.36/pod"
    build(tmp_path, "perl-doc", {f"{folder}/perl.pod": pod, f"{folder}/link.pod": "perl.pod",
                                 f"{folder}/other.pod": f"{tmp_path}/other.pod", "usr/share/perl/5": "5.36"})
    text = collect(tmp_path / "debs", "perl-doc", tmp_path / "out", "--val-fraction", 0)
    assert "perl-doc_1.0_all.deb: 1 file, 1 document, " in text and " 0 paragraphs had occurred" in text


DAMAGED = {"truncated": lambda data: data[:-20], "corrupted": lambda data: data[:10] + b"\xff" + data[11:],
           "no gzip": lambda data: b"text", "no index": lambda data: data}


@needs_dpkg
@pytest.mark.parametrize("how, said", [("truncated", "Compressed file ended before"), ("corrupted", "Error -3 while"),
                                       ("no gzip", "Not a gzipped file"),
                                       ("no index", "expected gcide.index beside it")])
def test_a_damaged_package_is_named(debs, tmp_path, how, said):
    """With the file in it, and not where it was unpacked."""
    name, path = (("dict-gcide", "usr/share/dictd/gcide.dict.dz") if how == "no index" else
                  ("linux-doc-6.1", "usr/share/doc/linux-doc-6.1/Documentation/a.rst.gz"))
    build(tmp_path, name, {path: DAMAGED[how](gzip.compress(page(0).encode()))})
    text = collect(tmp_path / "debs", name.removesuffix("-6.1"), tmp_path / "out", code=3)
    assert f"{tmp_path}/debs/{name}_1.0_all.deb: {path}: {said}" in text
    assert "Remove it and download it again, or leave " in text


def test_newest_version(tmp_path):
    for version in ("6.9.1", "6.10.1", "6.10"):
        (tmp_path / f"linux-doc-6.1_{version}_all.deb").touch()
    assert debian_docs.find(tmp_path, "linux-doc-.*").name == "linux-doc-6.1_6.10.1_all.deb"
    assert debian_docs.find(tmp_path, "perl-doc") is None


APT = """
echo "$0 $*" >> {folder}/called
case "$*" in
    "depends linux-doc") [ "$LC_ALL" = C ] && depends=Depends || depends="Hängt ab von"
        printf "linux-doc\\n  $depends: linux-doc-6.1\\n  Suggests: other\\n" ;;
    "depends perl-doc") echo perl-doc ;;
    "download -q linux-doc-6.1" | "download -q perl-doc") shift 2; : > "$1_2.0_all.deb" ;;
    *) echo "E: Unable to locate package" >&2; exit 100 ;;
esac
"""


def test_download(tmp_path, monkeypatch):
    """Commands that stand in for APT's: an empty package's dependency is downloaded, once, whatever the
    user's language is."""
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "apt-cache"):
        script_of(tmp_path / "bin" / name, APT.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(shards, "DATA", tmp_path)
    for name, package in (("linux-doc", "linux-doc-6.1"), ("perl-doc", "perl-doc")):
        assert debian_docs.deb_of(name, None) == tmp_path / f"cache/debs/{package}_2.0_all.deb"
    called = (tmp_path / "called").read_text()
    debian_docs.deb_of("linux-doc", None)
    assert (tmp_path / "called").read_text() == called and called.count("download -q") == 2
    with pytest.raises(shards.DataError, match="Unable to locate package") as caught:
        debian_docs.deb_of("dict-gcide", None)
    assert caught.value.code == 3 and len(list((tmp_path / "cache/debs").iterdir())) == 2
