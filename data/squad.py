"""Converts SQuAD, questions about paragraphs of Wikipedia, to shards with masks, for fine-tuning ([SSMax] Appendix C).

    .venv/bin/python data/squad.py                                                  # downloads version 2.0
    .venv/bin/python data/squad.py --json train-v2.0.json --val-json dev-v2.0.json  # from files

Each question with an answer is a document, to be trained with --pack example: end-of-text, the prompt, the answer,
end-of-text. Only the answer and the end-of-text after it count in the loss. Questions without an answer, empty fields,
and documents that do not fit into --max-tokens are skipped.
"""
import itertools
from dataclasses import dataclass

import shards    # first, because it says what to do if packages are missing

import numpy as np

import formats
import sources
import vocabulary
from shards import INPUT, DataError

URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset/{}-v{}.json"
USED, ELSEWHERE = "used", "used, answer not in the context"
MAX_FILE = 1 << 28       # bytes; the largest, train-v2.0.json, has 42 million
NO_ANSWER, TOO_LONG = "without an answer", "too long"


def prompt(context, question):
    """The text before the answer, which follows after a space. eval_gpt2 --task needle --chat squad has the same."""
    return f"{context}\n\nQuestion: {question}\n\nAnswer:"


@dataclass
class Example:
    """A question; val: is it for validation?"""
    context: str
    question: str
    answer: str    # "" if there is none
    val: bool

    def __len__(self):
        """Characters, by which shards.py divides the work."""
        return len(self.context) + len(self.question) + len(self.answer)

    def kind(self):
        """What becomes of it, before its tokens are counted."""
        for field in ("context", "question"):
            if not getattr(self, field):
                return f"with an empty {field}"
        if not self.answer:
            return NO_ANSWER
        return USED if self.answer in self.context else ELSEWHERE


# ---- SQuAD's JSON

def member(value, key, kind, where):
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        whole = "" if isinstance(value, dict) else "an object with "
        found = shards.shorten(value if whole else found)
        raise DataError(INPUT, f"{where}: expected {whole}{key!r}, {'a string' if kind is str else 'an array'}, found "
                               f"{found}.\n  It is not a file of SQuAD, version 1.1 or 2.0.")
    return formats.without_surrogates(found).strip() if kind is str else found


def first_answer(question, where):
    """The first answer that has a text. Version 1.1 has several for some questions, and 2.0 has none for others."""
    texts = [member(answer, "text", str, where) for answer in member(question, "answers", list, where)]
    return next(filter(None, texts), "")


def questions(file):
    """(context, question, answer) of every question in a file, in order."""
    reader = formats.FileReader(file, limit=MAX_FILE)
    try:
        whole = formats.parse(reader.decode(reader.whole()))
    except ValueError as error:
        raise DataError(INPUT, f"{file.name}: not valid JSON: {sources.first_line(error)}.\n"
                               "  If squad.py downloaded it, remove it and rerun the command.") from None
    for a, article in enumerate(member(whole, "data", list, file.name)):
        for p, paragraph in enumerate(member(article, "paragraphs", list, f"{file.name}: article {a}")):
            where = f"{file.name}: article {a}, paragraph {p}"
            context = member(paragraph, "context", str, where)
            for q, question in enumerate(member(paragraph, "qas", list, where)):
                at = f"{where}, question {q}"
                yield context, member(question, "question", str, at), first_answer(question, at)


def examples(files, val_files, fraction):
    """All questions. Those about one context are all for training or all for validation."""
    for number, file in enumerate([*files, *val_files]):
        for context, question, answer in questions(file):
            val = number >= len(files) or shards.in_validation(context, fraction)
            yield Example(context, question, answer, val)


# ---- from examples to documents

def encoder(tokenizer, max_tokens):
    """A function from a list of examples to the arguments of Writer.add()."""

    def encode(batch):
        prompts = tokenizer.encode_batch([prompt(example.context, example.question) for example in batch])
        answers = tokenizer.encode_inside([" " + example.answer for example in batch])
        return [document(*each) for each in zip(batch, prompts, answers)]

    def document(example, before, answer):
        kind = example.kind()
        if kind in (USED, ELSEWHERE) and 1 + len(before) + len(answer) > max_tokens:
            kind = TOO_LONG
        if kind not in (USED, ELSEWHERE):
            return (), (), example.val, kind
        ids = np.concatenate((before, answer, [tokenizer.end_of_text]))
        mask = np.concatenate((np.zeros(len(before), np.uint8), np.ones(len(answer) + 1, np.uint8)))
        return ids, mask, example.val, kind

    return encode


def report(writer, max_tokens):
    used = writer.counts[USED] + writer.counts[ELSEWHERE]
    skipped = [f"{count:,} {kind}" + f", over {max_tokens:,} tokens" * (kind == TOO_LONG)
               for kind, count in sorted(writer.counts.items()) if kind not in (USED, ELSEWHERE)]
    print(f"  {used:,} of {writer.documents:,} questions used; skipped: {'; '.join(skipped) or 'none'}.")
    if writer.counts[ELSEWHERE]:
        print(f"  {writer.counts[ELSEWHERE]:,} of them with an answer that does not occur in its context.")


def main():
    parser = shards.add_flags(shards.parser(__doc__), "squad", 0.0, marks=False)
    parser.add_argument("--json", nargs="+", action="extend", metavar="FILE",
                        help="files to train on, such as train-v2.0.json, instead of a download")
    parser.add_argument("--val-json", nargs="+", action="extend", metavar="FILE",
                        help="files to validate on, such as dev-v2.0.json, with --json; --val-fraction takes a part of "
                             "the paragraphs instead")
    parser.add_argument("--version", choices=("2.0", "1.1"),
                        help="the version to download (default 2.0), without --json")
    parser.add_argument("--max-tokens", type=shards.count, default=1024,
                        help="longest example, without the end-of-text after its answer: the trainer's --seq-len")
    args = parser.parse_args()
    if args.val_json and not args.json:
        parser.error("--val-json without --json: a download has a validation file of its own. To use your own files, "
                     "pass those to train on with --json, too; to use the download, drop --val-json")
    if args.version and args.json:
        parser.error("--version with --json: --version chooses a download, and the version of your own files is read "
                     "from them. Drop --version, or drop --json to download")
    if not args.json:
        parts = (URL.format(part, args.version or "2.0") for part in ("train", "dev"))
        args.json, args.val_json = ([sources.download(url, "--json")] for url in parts)
    files, val_files = (sources.local_files(paths) if paths else [] for paths in (args.json, args.val_json))
    tokenizer = vocabulary.load(args.tokenizer)
    settings = {"train": sources.settings(files), "val": sources.settings(val_files), "max_tokens": args.max_tokens,
                "template": prompt("{context}", "{question}") + " {answer}"}

    def documents(skip):
        return itertools.islice(examples(files, val_files, args.val_fraction), skip, None)

    writer = shards.write(args, documents, tokenizer, settings, encode=encoder(tokenizer, args.max_tokens), masks=True,
                          remedy="Add questions that have an answer, or raise --max-tokens.")
    report(writer, args.max_tokens)


if __name__ == "__main__":
    shards.run(main)
