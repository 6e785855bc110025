"""Reads eval.json, as series: the rows of one model under one normalizer (doc/evaluation_reference.md)."""
import dataclasses
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib import files, run_folder
from lib.run_folder import Refused, differing, flag_text

TASKS = ("loss", "positions", "needle", "attention", "scores", "choice")

# Flags of eval_gpt2 that do not affect the results, or that a page shows anyway.
SHOWN_ANYWAY = {"task", "model", "attn", "out", "picture", "threads"}

COUNTS = {"seq_len", "trained_seq_len", "tokens", "map_cell"}       # keys with whole numbers


@dataclass
class Series:
    folder: Path
    task: str
    model: str
    attn: str
    trained: bool       # is this the normalizer that the model was trained with?
    L: int              # the training length
    rows: list
    arguments: dict
    run: Path = None    # the model's run folder, if it is at hand
    step: int = 0       # of the run's checkpoint
    seeds: int = 1      # whose means these are; see over_seeds()
    label: str = ""     # what tells it apart from the others
    color: object = None
    dash: object = "-"

    @property
    def normalizer(self):
        if not self.trained:
            return f"{self.attn} (untrained)"
        found = self.run and run_folder.normalizers(run_folder.read_run(self.run), self.step)
        return found if found and found.split(", then ")[-1].partition(" at ")[0] == self.attn else self.attn

    @property
    def full_name(self):
        return self.model if self.seeds > 1 else join([self.model, self.normalizer])


# ---------------------------------------------------------------- reading

def read(folder):
    """The series of the eval.json in a folder, in the file's order."""
    path = Path(folder) / "eval.json"

    class Object(dict):
        def __missing__(self, key):
            raise Refused(f"{path}: expected the key {key!r} in {str(dict(self))[:60]}. Run eval_gpt2 again: this file "
                          "is incomplete or of another version.")

    def checked(found):
        for key in COUNTS.intersection(found):
            if type(found[key]) is not int or not 0 < found[key] < 1 << 63:
                raise Refused(f"{path}: expected a whole number as {key!r}, found {json.dumps(found[key])[:40]}. Run "
                              "eval_gpt2 again.")
        return Object(found)
    try:
        data = json.loads(files.read(path, files.EVAL), object_hook=checked)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}. Expected a folder that eval_gpt2 wrote, its --out.")
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: not a complete JSON file ({error}). Run eval_gpt2 again.")
    if not isinstance(data, dict):
        raise Refused(f"{path}: expected a JSON object, found {str(data)[:60]}.")
    if data["task"] not in TASKS:
        raise Refused(f"{path}: unknown task {data['task']!r}. Expected one of {', '.join(TASKS)}.")
    for key in "models", "results":
        if not isinstance(data[key], list) or not all(isinstance(x, dict) and isinstance(x["attn"], str)
                                                      and isinstance(x["name" if key == "models" else "model"], str)
                                                      for x in data[key]):
            raise Refused(f"{path}: expected a list of objects with names as {key!r}, found {str(data[key])[:40]}.")
    if not isinstance(data["arguments"], dict):
        raise Refused(f"{path}: expected an object as 'arguments', found {str(data['arguments'])[:40]}.")
    models = {model["name"]: model for model in data["models"]}
    found = {}
    for row in data["results"]:
        key = row["model"], row["attn"]
        if key not in found:
            if key[0] not in models:
                raise Refused(f"{path}: results name the model {key[0]!r}, which is not in \"models\".")
            model = models[key[0]]
            found[key] = Series(Path(folder), data["task"], *key, key[1] == model["attn"], model["trained_seq_len"], [],
                                data["arguments"], *origin(folder, str(model.get("checkpoint", ""))))
            if found[key].step and re.fullmatch("step-[0-9]+", key[0]):     # what grid.py names
                found[key].model = Path(model["checkpoint"]).parent.parent.name
        found[key].rows.append(row)
    if not found:
        raise Refused(f"{path}: it has no results.")
    return list(found.values())


def origin(folder, checkpoint):
    """(the run folder that has the checkpoint, or None; its step, or 0). A run may have moved together with its
    evaluations."""
    path = Path(checkpoint)
    if path.parent.name != "ckpt" or not re.fullmatch("step-[0-9]+", path.name):
        return None, 0
    run = path.parent.parent
    found = [at for at in (*Path(os.path.abspath(folder)).parents, Path(os.path.abspath(run)))
             if at.name == run.name and (at / "run.json").is_file()]
    return (found or [None])[0], int(path.name[5:])


def read_all(folders, runs=()):
    """The series of all folders, and {run folder: name} of `runs` and of those that the models are from, by which the
    models are called."""
    series = [s for folder in folders for s in read(folder)]
    known = dict.fromkeys(Path(os.path.abspath(run)) for run in [*runs, *(s.run for s in series if s.run)])
    called = dict(zip(known, run_folder.names(list(known))))
    steps = {run: {s.step for s in series if s.run == run} for run in known}
    twice = {(s.folder, s.attn, s.run, s.step): s for s in series}      # one model given twice keeps its names
    for s in series:
        if s.run and twice[s.folder, s.attn, s.run, s.step] is s:
            s.model = called[s.run] + f", step {s.step:,}" * (len(steps[s.run]) > 1)
        elif match := run_folder.GRID_RUN.fullmatch(s.model):
            s.model = f"{match[1]}, seed {match[2]}"
    return series, called


def number(value):
    """A number of the file as a float. JSON has null for what is not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"eval.json: expected a number, found {str(value)[:40]!r}.")
    return float(value)


def numbers(values):
    """A list of numbers, or of lists of them, as a NumPy array."""
    def walk(value):
        return [walk(x) for x in value] if isinstance(value, list) else number(value)
    try:
        return np.array(walk(values), float)
    except ValueError:
        raise Refused("eval.json: expected lists of equal lengths.")


def mean(arrays, axis=0):
    """The mean without NaNs; NaN where nothing else is left."""
    x = np.asarray(arrays, float)
    count = np.isfinite(x).sum(axis)
    return np.where(count > 0, np.nansum(np.where(np.isfinite(x), x, 0.0), axis) / np.maximum(count, 1), np.nan)


def less(series, base):
    """The series with its losses less those of the baseline, at the lengths that both have. Ratios of perplexities
    take the place of perplexities."""
    below, rows = {int(row["seq_len"]): row for row in base.rows}, []
    for row in series.rows:
        other = below.get(int(row["seq_len"]))
        if not other:
            continue
        changed = dict(row)
        if "loss_by_position" in row:
            changed["loss_by_position"] = list(numbers(row["loss_by_position"]) - numbers(other["loss_by_position"]))
        if "perplexity" in row:
            changed["perplexity"] = number(row["perplexity"]) / number(other["perplexity"])
        rows.append(changed | {"loss": number(row["loss"]) - number(other["loss"])})
    if not rows:
        raise Refused(f"{series.folder} and the baseline {base.folder} have no length in common (--seq-lens).")
    return dataclasses.replace(series, rows=rows)


# ---------------------------------------------------------------- seeds

def over_seeds(series):
    """The series of losses with those merged whose runs differ only in their seeds: means, and in "loss_each",
    "perplexity_each" and "loss_by_position_each" the numbers of each seed. A run that is not at hand stays alone."""
    flags, arguments = flags_of(series), {}
    for s in series:
        found = run_folder.read_run(s.run)["arguments"] if s.run else {"run": s.full_name}
        arguments[id(s)] = found | {"init-from": bool(found.get("init-from"))}
    of_runs = differing(arguments.values(), run_folder.OWN | {"attn", "attn-switch"})
    of_evaluations = differing(flags.values(), SHOWN_ANYWAY | {"seed"})
    groups = {}
    for s in series:
        texts = [flag_text(key, found.get(key)) for keys, found in ((of_runs, arguments[id(s)]),
                                                                    (of_evaluations, flags[s.folder])) for key in keys]
        groups.setdefault((s.normalizer, *texts, f"L = {s.L}"), []).append(s)
    return [merged(group, name) for name, group in zip(called(list(groups)), groups.values())]


def called(keys):
    """A name for each (normalizer, texts of flags...): the normalizer, and the texts that tell it apart from others
    with the same one."""
    alike = [[other[1:] for other in keys if other[0] == key[0]] for key in keys]
    return [join([key[0], *(text for text, *others in zip(key[1:], *like) if len(set(others)) > 1)])
            for key, like in zip(keys, alike)]


def merged(group, name):
    """One series of several seeds."""
    if len(group) == 1:
        return dataclasses.replace(group[0])
    by_length = [{int(row["seq_len"]): row for row in s.rows} for s in group]
    rows = []
    for T in sorted(set.intersection(*map(set, by_length))):
        row = {"seq_len": T}
        for key in "loss", "perplexity", "loss_by_position":
            if all(key in found[T] for found in by_length):
                row[f"{key}_each"] = np.array([numbers(found[T][key]) for found in by_length])
                row[key] = row[f"{key}_each"].mean(axis=0).tolist()
        rows.append(row)
    if not rows:
        raise Refused(f"{group[0].folder} and {group[1].folder} have no length in common (--seq-lens).")
    return dataclasses.replace(group[0], rows=rows, model=f"{name}, {len(group)} seeds", seeds=len(group))


# ---------------------------------------------------------------- flags

def flags_of(series):
    """{folder: {flag: value}}. A flag that was not given has its default, or None for the checkpoint's own value."""
    return {s.folder: {key: None if (key, value) == ("rope-theta", 0) else value for key, value in s.arguments.items()}
            for s in series}


# ---------------------------------------------------------------- labels

MOST_FLAGS, LONGEST_FLAG = 2, 40    # in a label


def labels_of_folders(series):
    """({folder: what tells its evaluation apart from the others of the same model}, is it the flags?): the flags if
    they do so in a few words, otherwise the folder."""
    found = flags_of(series)
    keys = differing(found.values(), SHOWN_ANYWAY)
    by_flags = {folder: [flag_text(key, flags.get(key)) for key in keys] for folder, flags in found.items()}
    short = len(keys) <= MOST_FLAGS and all(len(text) <= LONGEST_FLAG for texts in by_flags.values() for text in texts)
    if short and len({(*by_flags[s.folder], s.full_name) for s in series}) == len(series):
        return {folder: join(texts) for folder, texts in by_flags.items()}, True
    return dict(zip(found, run_folder.names(found))), False


def join(texts):
    """A model that is named after its normalizer is named once."""
    return ", ".join(dict.fromkeys(part for text in texts for part in text.split(", ")))


def label(series):
    """Labels the series by what differs: the models, their normalizers and, where these do not tell them apart, the
    flags of the evaluations or their folders. Returns what all have in common."""
    folders, are_flags = labels_of_folders(series)
    parts = [(s.model, s.normalizer, folders[s.folder]) for s in series]
    varies = [len({part[i] for part in parts}) > 1 for i in range(3)]
    if len({part[:2] for part in parts}) == len(parts):
        varies[2] = False
    for s, part in zip(series, parts):
        shown = [text for text, differs in zip(part, varies) if differs]
        s.label = join(shown if are_flags or not varies[2] else shown[-1:] + shown[:-1]) or s.full_name
    return join(text for text, differs in zip(parts[0][:2], varies) if not differs) if len(series) > 1 else ""
