// Command-line flags. Each flag is one row of a table, which the parser, --help and run.json all read.
//
//   static int64_t batch = 4;                      // the default is the variable's value before options_parse()
//   static Option table[] = {
//       {"batch", OPT_INT, &batch, 1, 65536, .arg = "N", .group = "Training", .help = "sequences per micro-batch"},
//   };
#ifndef RUNTIME_OPTIONS_H
#define RUNTIME_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#define OPTION_LIST_MAX 16

typedef struct {
    int64_t values[OPTION_LIST_MAX];
    size_t count;
} IntList;

typedef struct {
    const char *values[OPTION_LIST_MAX];
    size_t count;
} TextList;

typedef enum {
    OPT_INT,         // value is int64_t *: an integer of at most 1e15 within min..max; 1e6 and 1_000_000 are also valid
    OPT_FLOAT,       // value is double *: finite, rounded to 15 digits, within min..max
    OPT_TEXT,        // value is const char **: UTF-8, since run.json contains it; NULL means none
    OPT_SWITCH,      // value is bool *: 0 or 1; the bare flag means 1
    OPT_CHOICE,      // value is int *: the index of the given name in `choices`, to match an enum in the same order
    OPT_INT_LIST,    // value is IntList *: comma-separated integers, each within min..max
    OPT_TEXT_LIST    // value is TextList *, empty by default: a text each time the flag is given; not for programs that
                     // call options_json()
} OptionType;

typedef struct {
    const char *name;    // without the dashes
    OptionType type;
    void *value;                // holds the default before parsing; `type` determines its C type
    double min, max;            // bounds of numbers, inclusive; both 0 means unbounded
    const char *choices;        // OPT_CHOICE: "fp32|bf16"
    const char *arg;            // how --help names the value: N, X, GLOB, DIR
    const char *group;          // the heading in --help; rows of a group are consecutive
    const char *help;           // one line that states the unit and the meaning of 0
    unsigned uses;              // for the program's own checks
    const char *only_in;        // set if this program rejects the flag: the program that has it, for the message
    bool required;              // for --help: the program does nothing without this flag
    bool any_bytes;             // texts: need not be UTF-8; not for programs that call options_json()
    const char *computed;       // the default in words, if the program computes it after options_parse()
    bool on_resume;             // --resume may change this flag
    bool per_call;              // run.json never sets this flag: it is about one call, such as what its user trusts
    bool of_model;              // with --init-from, the default is what the loaded model has
    const char *resume_hint;    // if not: a sentence for the message that says what to do instead
    // Do two different texts mean the same? NULL: no
    bool (*same)(const char *a, const char *b);
    bool given;     // set by the parser if the flag is on the command line or in a --config file
    char *owned;    // the memory of texts that are not on the command line
} Option;

// What --help prints around the flags.
typedef struct {
    const char *usage;      // before them
    const char *example;    // flags of a complete call
    const char *page;       // in doc/
} OptionsHelp;

// Parses `--flag value` and `--flag=value` into the table's variables; if a flag is repeated, the last one wins, but an
// OPT_TEXT_LIST has all of them. Every program also has these flags:
//   --config FILE     reads flags from lines flag = value (runtime/flag_file.h) or a run.json; those on the command
//                     line win. May be repeated
//   --print-config    prints the given flags as such a file, and the others as comments, and exits with 0
//   --help            prints the version, `help` and all flags with their defaults, and exits with 0
//   --version         prints the version and exits with 0
// Any error (unknown flag, missing or invalid value, out of range, NaN, stray word) exits with EXIT_USAGE and suggests
// the nearest valid name if there is one; a file that cannot be read, with EXIT_INPUT. Call it before process_start(),
// so that an invalid flag never starts MPI; under a launcher, only rank 0 prints.
void options_parse(Option *table, size_t count, int argc, char **argv, OptionsHelp help);

// Reports any other error in the flags: exits with EXIT_USAGE; under a launcher, only rank 0 prints.
void usage_fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

// Returns the row with that name, or NULL.
Option *options_find(Option *table, size_t count, const char *name);

// Writes the row's current value as a user would give it. Returns out.
const char *options_text(const Option *row, char *out, size_t size);

// Returns the current values as JSON, including defaults that the program has filled in: {"train-data": "...", "batch":
// 4, "seq-len": [64, 128], "dtype": "fp32", ...}. The caller frees it.
char *options_json(const Option *table, size_t count);

// For --resume. `json` is the output of options_json() when the run started. Flags that are not given take the run's
// values, except of `per_call`. Given flags whose values differ from the run's, and that are not `on_resume`, are an
// error (EXIT_USAGE) that states both values of each; nothing is changed then. Flags that the run does not know keep
// their values; those that the table does not know are an error (EXIT_INPUT).
bool options_resume(Option *table, size_t count, const char *json, Error *error);

#endif
