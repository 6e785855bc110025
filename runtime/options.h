// The flags of a program: one row of a table is one flag, and the parser, --help and run.json read that row.
//
//   static int64_t batch = 4;                      // the default is what the variable holds before options_parse()
//   static Option table[] = {
//       {"batch", OPT_INT, &batch, 1, 65536, .arg = "N", .group = "Training", .help = "sequences a process and
//       micro-step"},
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

typedef enum {
    OPT_INT,        // value is int64_t *: a whole number up to 1e15; 1e6 and 1_000_000 are read too; min..max
    OPT_FLOAT,      // value is double *: finite, kept to 15 digits, min..max
    OPT_TEXT,       // value is const char **: anything; NULL means none
    OPT_SWITCH,     // value is bool *: 0 or 1; bare means 1
    OPT_CHOICE,     // value is int *: the index in `choices` of the name given, so that an enum in the same order fits
    OPT_INT_LIST    // value is IntList *: whole numbers with commas between; each within min..max
} OptionType;

typedef struct {
    const char *name;    // without the dashes
    OptionType type;
    void *value;                // holds the default before parsing; its C type goes by `type`
    double min, max;            // of numbers, both included; both 0: no bounds
    const char *choices;        // OPT_CHOICE: "fp32|bf16"
    const char *arg;            // what --help calls the value: N, X, GLOB, DIR
    const char *group;          // the heading in --help; rows of a group stand together
    const char *help;           // one line, with the unit and what 0 means
    bool on_resume;             // may differ from the run that --resume continues
    const char *resume_hint;    // otherwise: how else to get there, a sentence for the message
    bool given;                 // set by the parser: the flag stood on the command line
    char *owned;                // set by options_resume(): the memory of an OPT_TEXT's value
} Option;

// Reads `--flag value` and `--flag=value` into the table's variables; given twice, the last counts. --help prints the
// version, `usage` and the groups with the defaults, --version the version alone; both exit with 0. Anything wrong
// (unknown flag or value, missing value, out of range, NaN, a word that belongs to no flag) ends with EXIT_USAGE and
// the nearest valid name where one is near. Call it before process_start(), so that a wrong flag never starts MPI;
// under a launcher only one process prints.
void options_parse(Option *table, size_t count, int argc, char **argv, const char *usage);

// For what else a program finds wrong in its flags: ends with EXIT_USAGE; under a launcher only one process prints.
void usage_fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

// The row of that name, or NULL.
Option *options_find(Option *table, size_t count, const char *name);

// {"train-data": "...", "batch": 4, "seq-len": [64, 128], "dtype": "fp32", ...} with the values as they are now,
// defaults filled in by the program included. The caller frees it.
char *options_json(const Option *table, size_t count);

// For --resume: `json` is what options_json() gave when the run began. A row that was not given takes the run's value.
// A row that was given with another value, and is not `on_resume`, is an error (EXIT_USAGE) naming the flag, the run's
// value and the given one; then nothing is changed. Rows that the run does not know keep what they have.
bool options_resume(Option *table, size_t count, const char *json, Error *error);

// How many letters to insert, delete, replace or swap with their neighbor to turn a (na letters) into b (nb), upper
// case as lower (the "optimal string alignment" distance); 64 where one of them has more than 63 letters. For the
// nearest name in a message.
size_t edit_distance(const char *a, size_t na, const char *b, size_t nb);

// Could one be a slip for the other at this distance? At most a third of the longer one's letters, but always one.
bool edit_is_slip(size_t distance, size_t na, size_t nb);

#endif
