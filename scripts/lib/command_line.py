"""The --help of the scripts in data/ and scripts/."""
import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def shown(value):
    """A default, as a user would write it on the command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(shown, value))
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        value = value.relative_to(ROOT)
    return str(value)


class HelpFormatter(argparse.HelpFormatter):
    """States the defaults, except of switches, none and empty ones, and keeps the lines of the examples."""

    def _get_help_string(self, action):
        if action.default in (None, argparse.SUPPRESS, "", []) or action.default is False or "(default" in action.help:
            return action.help
        return f"{action.help} (default: {shown(action.default)})".replace("%", "%%")

    def _fill_text(self, text, width, indent):
        return text if "\n" in text else super()._fill_text(text, width, indent)


def parser(doc, page, **options):
    """A parser for the script with this docstring, whose first paragraph describes it and whose first indented one has
    examples. page: the one in doc/ that says more"""
    first, *rest = doc.strip().split("\n\n")
    examples = next(paragraph for paragraph in rest if paragraph.startswith("    "))
    return argparse.ArgumentParser(description=" ".join(first.split()), epilog=f"Examples:\n{examples}\n\nSee {page}.",
                                   formatter_class=HelpFormatter, allow_abbrev=False, **options)
