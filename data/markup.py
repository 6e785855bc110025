"""Prose out of markup: the paragraphs of reStructuredText, plain text and Perl's POD, without what is not prose.

rst(text) and pod(text) return the paragraphs of a document, in order and on one line each: headings, sentences and list
items. Code, tables, diagrams, directives without text, comments and footnotes go. What remains must look like English
(is_prose()) and be unknown to known(); a heading stays if a paragraph of its section stays.
"""
import re

# ---- what is prose

COMMON = frozenset("""a about after all also an and any are as at be because been before but by can do does each either
for from has have if in into is it its may more most must no not of on one only or other over same should so some such
than that the their them then there these they this to two under up use used using was we were when where which while
who will with without would you your""".split())
WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
NOT_PROSE = re.compile(r"[^A-Za-z0-9 .,;:'\"()!?%/–—’“”-]")


def is_prose(text, words=6):
    """Has it that many words, hardly anything but words, and enough of the commonest ones to be English?"""
    found = WORD.findall(text)
    letters = sum(map(len, found))
    return (len(found) >= words and letters > 0.68 * len(text) and len(NOT_PROSE.findall(text)) < 0.04 * len(text)
            and sum(word.lower() in COMMON for word in found) >= 0.2 * len(found) and max(map(len, text.split())) <= 50
            and not re.search(r"\b(Copyright|SPDX-License)", text))


def is_title(text):
    return re.search(r"[A-Za-z]{3}", text) and not re.search(r"[$@%{}<>=;|\\]", text)


def paragraphs(blocks, known):
    """The prose of (is it a heading?, text) in order, where text is "" for what was left out, without the paragraphs
    for which known() is true. A heading waits for a paragraph below it."""
    heading, last, gap = "", "", False    # what has not been yielded; was something left out just before?
    for is_heading, text in [*blocks, (True, "")]:
        text = " ".join(text.split())
        kept = not is_heading and is_prose(text) and not (gap and text.split()[0] in COMMON) and not known(text)
        if last := last if kept else complete(last, is_heading):
            yield from (one for one in (heading, last) if one)
            heading = ""
        last, gap = text if kept else "", not is_heading and not text
        if is_heading:
            heading = text if is_title(text) else ""


def complete(text, ends):
    """A text without a last sentence that leads to what was left out after it, such as "For example:". Items of lists,
    and what ends a section, may lack a period."""
    if re.search(r"[.!?][\"')\]]*$", text) or (ends or BULLET.match(text)) and not text.endswith(":"):
        return text
    return " ".join(re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)[:-1])


# ---- reStructuredText

# directives whose content is no prose; the content of any other is kept, and so are the arguments of those in TITLED
DROPPED = frozenset("""audit-event audit-event-table c:macro-expansion code code-block contents csv-table currentmodule
date default-domain doctest figure flat-table graphviz highlight image include index ipython kernel-abi kernel-doc
kernel-feat kernel-figure kernel-include kernel-render list-table literalinclude math meta module moduleauthor
parsed-literal productionlist raw replace role sectionauthor sectnum sourcecode table tabularcolumns testcode testoutput
testsetup toctree unicode""".split())
TITLED = frozenset("""admonition attention caution danger error hint important note seealso sidebar tip todo topic
warning""".split())
DIRECTIVE = re.compile(r"\.\. ([\w:+.-]+?):: ?(.*)|\.\.( |$)|__ ")
BULLET = re.compile(r"(?:[-*+•]|(?:\d{1,3}|[A-Za-z#])[.)]|\((?:\d{1,3}|[A-Za-z#])\)) +(?=\S)")
LISTED = re.compile(r"[-*+•] +\S")
FIELD = re.compile(r":[^:`\n]+:( |$)")
RULE = re.compile(r"([!-/:-@[-`{-~])\1{2,}\s*$")    # a line of one punctuation mark
BORDER = re.compile(r"=+( +=+)+\s*$")


def indented(lines, i):
    """The index after the blank and indented lines from i on."""
    while i < len(lines) and (not lines[i].strip() or lines[i][0] == " "):
        i += 1
    return i


def dedent(lines):
    width = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[width:] for line in lines]


def title_at(lines, i):
    """(title, index after it) if a section title begins at line i, else None."""
    if RULE.match(lines[i]):
        if i + 2 < len(lines) and lines[i + 1].strip() and lines[i + 2].rstrip() == lines[i].rstrip():
            return lines[i + 1].strip(), i + 3
        return "", i + 1
    if i + 1 < len(lines) and RULE.match(lines[i + 1]) and len(lines[i + 1].rstrip()) >= len(lines[i].strip()) - 2:
        return lines[i].strip(), i + 2
    return None


def rst_blocks(lines):
    """(is it a heading?, text) of each block; the lines begin at the same column."""
    i = 0
    while i < len(lines):
        line = lines[i]
        if not line.strip():
            i += 1
        elif line[0] == " ":
            end = indented(lines, i)
            yield from rst_blocks(dedent(lines[i:end]))
            i = end
        elif match := DIRECTIVE.match(line):
            end = indented(lines, i + 1)
            yield from directive(match, lines[i + 1:end])
            i = end
        elif found := title_at(lines, i):
            yield True, inline(found[0])
            i = found[1]
        elif line.startswith(("+-", "+=", "|", ">>>")) or BORDER.match(line):
            i = after_table(lines, i)
            yield False, ""
        elif FIELD.match(line):
            i = indented(lines, i + 1)
        elif match := BULLET.match(line):
            end = indented(lines, i + 1)
            yield from item(line, match.end(), lines[i + 1:end])
            i = end
        else:
            i = yield from paragraph(lines, i)


def after_table(lines, i):
    """The index after a table, diagram or session. A simple table may have blank lines, but ends with a border."""
    end = i
    while end < len(lines) and lines[end].strip():
        end += 1
    if BORDER.match(lines[i]):
        borders = [k for k in range(i + 1, len(lines)) if BORDER.match(lines[k])][:2]
        end = max(end, borders[-1] + 1 if borders else 0)
    return end


def directive(match, body):
    name = (match[1] or "").lower()
    if not name or name in DROPPED:
        if name:    # not a comment, target, footnote or substitution
            yield False, ""
        return
    first = 0
    while first < len(body) and body[first].strip() and (name not in TITLED or FIELD.match(body[first].strip())):
        first += 1    # options, and further lines of an argument
    yield from rst_blocks([match[2] if name in TITLED else "", *dedent(body[first:])])


def item(line, width, body):
    """A list item: its marker, then its blocks."""
    marker = "- " if line[0] in "-*+•" else line[:width].rstrip() + " "
    for heading, text in rst_blocks([line[width:], *dedent(body)]):
        yield heading, marker + text
        marker = ""


def paragraph(lines, i):
    """A paragraph, or a term with its definition; without the code that follows a "::". Returns the index after it.
    Plain text often has lists without a blank line before them."""
    end = i + 1
    while end < len(lines) and lines[end].strip():
        if end == i + 1 and lines[end][0] == " " or LISTED.match(lines[end]):
            break
        end += 1
    text, after = " ".join(line.strip() for line in lines[i:end]), end
    if text.endswith("::"):
        after = indented(lines, end)
        yield False, inline(text[:-1])
        yield False, ""
    elif end < len(lines) and lines[end][:1] == " ":
        after = indented(lines, end)
        term, definition = inline(text).removesuffix(":"), list(rst_blocks(dedent(lines[end:after])))
        if not definition or definition[0][0] or BULLET.match(definition[0][1]):
            yield False, term + ":"
        elif definition[0][1] and not re.search(r"[][(){}*=<>|\\]", term):
            definition[0] = False, f"{term}: {definition[0][1]}"
        yield from definition
    else:
        yield False, inline(text)
    return after


INLINE = [(re.compile(pattern), by) for pattern, by in [
    (r"``(.+?)``", r"\1"),
    (r":[\w:+.-]+:`([^`<]*?)\s*<[^`>]*>`", r"\1"),     # a role with a title
    (r":(pep|rfc):`(\d+)`", lambda match: f"{match[1].upper()} {match[2]}"), (r":issue:`(\d+)`", r"issue \1"),
    (r"(:(?:py:|c:)?(?:func|meth):`[^`()]+)`", r"\1()`"),
    (r":[\w:+.-]+:`~(?:[^`]*\.)?([^`.]+)`", r"\1"),    # ~ shows the last part of a name
    (r":[\w:+.-]+:`!?([^`]+)`", r"\1"),
    (r"`([^`<]+?)\s*<[^`>]+>`__?", r"\1"),             # a link
    (r"`([^`]+)`_{0,2}", r"\1"),
    (r"\*\*(\S(?:.*?\S)?)\*\*", r"\1"),
    (r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])", r"\1"),
    (r"\s*\[(?:#\w*|\d+|\*)\]_", ""),                  # a footnote
    (r"\[(\w+)\]_", r"\1"),
    (r"\|\w[\w ]*\|_?", ""),                           # a substitution
    (r"\\ ", ""), (r"\\(.)", r"\1"), (r"(?<=[A-Za-z])_(?=[\s.,;:)]|$)", "")]]


def inline(text):
    for pattern, by in INLINE:
        text = pattern.sub(by, text)
    return text


def rst(text, known=lambda paragraph: False):
    lines = [line.expandtabs().rstrip() for line in text.splitlines()]
    return list(paragraphs(rst_blocks(dedent(lines)), known))


# ---- POD

ENTITIES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "quot": '"', "amp": "&", "eacute": "é", "ouml": "ö",
            "uuml": "ü"}


WIDE, NARROW = re.compile(r"([A-Z])<{2,} +(.*?) +(?<!>)>{2,}(?!>)", re.S), re.compile(r"([A-Z])<([^<>]*)>")


def pod_code(letter, text):
    """What a formatting code shows."""
    if letter in "XZ":
        return ""
    if letter == "E":
        return ENTITIES.get(text, "")
    if letter == "L":
        name, bar, target = text.partition("|")
        return (name if bar or "://" in name
                else " in ".join(part.strip('"') for part in reversed(name.split("/", 1)) if part))
    return text


def pod_inline(text):
    """Resolves C<code>, C<< code >> and so on, the innermost first."""

    def hidden(shown):
        return shown.replace("<", "\0").replace(">", "\1")

    text = WIDE.sub(lambda match: hidden(pod_code(match[1], pod_inline(match[2]))), text)
    text = re.sub(r"(?<![A-Z])<[^<>]*>", lambda match: hidden(match[0]), text)
    while (new := NARROW.sub(lambda match: hidden(pod_code(match[1], match[2])), text)) != text:
        text = new
    return text.replace("\0", "<").replace("\1", ">")


def pod_blocks(text):
    skipping, marker = False, ""
    for chunk in re.split(r"\n[ \t]*\n", text):
        chunk = chunk.strip("\n")
        command, _, rest = chunk.partition(" ") if chunk.startswith("=") else ("", "", "")
        if chunk[:1] in (" ", "\t") and not skipping:
            yield False, ""
            continue
        if command in ("=begin", "=cut"):
            skipping = True
        elif command in ("=end", "=pod") or command.startswith("=head"):
            skipping = False
        if skipping or not chunk:
            continue
        if command.startswith("=head"):
            yield True, pod_inline(rest)
        elif command == "=item":
            bullet = re.match(r"\s*(?:(\*)|(\d+)\.?)(?:\s+|$)", rest)
            marker = ("- " if bullet[1] else bullet[2] + ". ") if bullet else ""
            rest = rest[bullet.end():] if bullet else rest
            if rest:
                yield not bullet, marker + pod_inline(rest)
                marker = ""
        elif not command:
            yield False, marker + pod_inline(chunk)
            marker = ""


def pod(text, known=lambda paragraph: False):
    return list(paragraphs(pod_blocks(text), known))
