#!/usr/bin/env python3
"""Draws cases by commit: every machine draws the same cases for a commit, and the next commit draws others.

    dev/draw.py N WORD...    prints N of the words

DRAW=COMMIT repeats another commit's draw.
"""
import argparse
import os
import random
import subprocess
from pathlib import Path


# The environment variables that select cases of tests, or which builds are tested.
VARIABLES = ("DRAW", "DRAW_ONE_IN", "FLASH_ALL", "CUDA_BUILD", "RACES", "CUDA_ON_CPU_LONG", "FOREIGN",
             "VOCABULARIES_LONG", "LLAMA_CPP", "LM_EVAL", "SOAK", "SOAK_SEED", "MACHINES_LONG", "CONTAINER_LONG",
             "GPU_REHEARSAL", "TRAIN_GPT2", "TRAIN_GPT2CU", "FLASH_SO", "ATTN_C_CUDA_SO")


def commit():
    """$DRAW, or the commit of this checkout, or "none" outside of git."""
    if os.environ.get("DRAW"):
        return os.environ["DRAW"]
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "none"


def sample(cases, count):
    """Draws that many of the cases and keeps their order; all of them if there are no more than that. Draws from
    different cases are independent."""
    cases = list(cases)
    chance = random.Random(" ".join([commit(), *map(str, cases)]))
    drawn = sorted(chance.sample(range(len(cases)), min(count, len(cases))))
    return [cases[i] for i in drawn]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", metavar="N", type=int, help="how many to draw")
    parser.add_argument("words", metavar="WORD", nargs="*", help="the cases")
    options = parser.parse_args()
    print(*sample(options.words, options.count))
