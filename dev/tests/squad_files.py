"""Small files in the formats of SQuAD 1.1 and 2.0, and a tokenizer whose tokens are bytes, by which masks can be
counted by hand."""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))
import vocabulary

END = 256    # end-of-text of the tokenizer of bytes; a byte's token is its value in vocabulary.alphabet()


def question(text, *answers, impossible=None):
    """A question as in SQuAD 1.1, or as in 2.0 if `impossible` is given."""
    row = {"id": "56be4db0acb8001400a502ec", "question": text,
           "answers": [{"text": answer, "answer_start": 0} for answer in answers]}
    if impossible:
        row["plausible_answers"] = [{"text": "plausible", "answer_start": 0}]
    return row if impossible is None else row | {"is_impossible": impossible}


def write(path, version, *paragraphs):
    """Writes a file with one article; a paragraph is its context and its questions."""
    rows = [{"context": context, "qas": list(questions)} for context, *questions in paragraphs]
    path.write_text(json.dumps({"version": version, "data": [{"title": "Article", "paragraphs": rows}]}))
    return path


def write_bytes_tokenizer(folder):
    """A tokenizer.json without merges: a token for each byte, and end-of-text."""
    vocabulary.train(["unused"], END + 1, folder / "tokenizer.json")
    return folder / "tokenizer.json"


def facts(count):
    """Paragraphs with something to learn: the answer is the context's last word, one of three."""
    colors = ("red", "blue", "green")
    return [(f"Box {i} is {colors[i % 3]}", question(f"What is box {i}?", colors[i % 3])) for i in range(count)]
