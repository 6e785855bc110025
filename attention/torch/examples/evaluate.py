"""Evaluates a model of transformers with lm_eval (pip install lm_eval) after switching its normalizer.

    python evaluate.py MODEL TASK[,TASK] [--attn softmax1] [--limit 100] [--include FOLDER]

MODEL is a folder or a name on the hub whose attention uses transformers' AttentionInterface; --include is a folder with
task files of your own."""
import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import attn_c.transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("tasks", type=lambda text: text.split(","), help="names of tasks, separated by commas")
    parser.add_argument("--attn", default="softmax1", help="the normalizer (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="how many examples of each task to evaluate (default: all)")
    parser.add_argument("--include", metavar="FOLDER", help="a folder with task files of your own")
    options = parser.parse_args()
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise SystemExit(f"evaluate.py: {error}; pip install lm_eval")
    model = AutoModelForCausalLM.from_pretrained(options.model)
    model.set_attn_implementation(attn_c.transformers.register(options.attn))
    wrapped = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(options.model))
    results = lm_eval.simple_evaluate(wrapped, tasks=options.tasks, limit=options.limit,
                                      task_manager=TaskManager(include_path=options.include))
    print(lm_eval.utils.make_table(results))


if __name__ == "__main__":
    main()
