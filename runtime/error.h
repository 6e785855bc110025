// Error reporting and exit codes for all programs.
//
// A function whose failure a caller may want to survive (a full disk while saving, a damaged file under a fuzzer) takes
// an `Error *` and returns false. A function that cannot continue calls fail(). A message says what was expected, what
// was found, in which file and at which offset, and what to do about it. Further lines are indented by two spaces.
// Printed messages contain no control characters: those of a name that they quote appear as escapes, such as \x1b.
#ifndef RUNTIME_ERROR_H
#define RUNTIME_ERROR_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,       // invalid flags
    EXIT_INPUT = 3,       // invalid input file
    EXIT_RESOURCE = 4,    // out of memory or disk space, or more threads than the system allows
    EXIT_DIVERGED = 5,    // the loss is not finite, or the logits to sample from
    EXIT_PEER = 6,        // a device or another rank failed
    EXIT_BUSY = 7,        // another process is using the run folder
    EXIT_STOPPED = 75     // stopped by a signal after saving a checkpoint
} ExitCode;

typedef struct {
    ExitCode code;
    char text[2048];
} Error;

// The prefix of every message. Set it once at the start of main().
extern const char *program_name;

// Hooks for multi-rank runs (runtime/process.c); both may be NULL. fail() calls fail_speaker(says) to ask whether this
// rank should print its message, since all ranks may be about to print the same one; `says` is true if the message is
// not empty. It calls fail_hook just before it exits.
extern bool (*fail_speaker)(bool says);
extern void (*fail_hook)(int code);

// Prints "program: text" to stderr and exits with the code.
void fail(ExitCode code, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

// Like fail(), with the text and code of an Error. An empty text is not printed.
void fail_with(const Error *error) __attribute__((noreturn));

// What precedes a message that does not name a rank itself: on ranks other than 0, "rank 2 on node1: ".
extern const char *fail_where;

// Prints "program: warning: text" to stderr, unless warn_off is set. It is set on every rank but 0, so that a warning
// appears once.
extern bool warn_off;
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Zeroed memory for `count` items of `size` bytes, which the caller frees. Fails if there is none; `what` names the
// items: "the flags".
void *allocate(size_t count, size_t size, const char *what);

// Flushes stdout, and fails if what was printed could not be written. `what` names it: "the text".
void flush_stdout(const char *what);

// Fills the error and returns false, so that a function can end with `return error_set(...)`.
bool error_set(Error *error, ExitCode code, const char *format, ...) __attribute__((format(printf, 3, 4)));

// Collects several reasons for one error, one per line ("\n  - reason"), so that the user sees all of them at once.
// Reasons that do not fit are counted.
typedef struct {
    int count, left_out;
    char text[1200];
} Reasons;

void reasons_add(Reasons *reasons, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The collected lines, followed by "and N more" if some did not fit.
typedef struct {
    char text[1280];
} ReasonsText;
ReasonsText reasons_text(const Reasons *reasons);

#ifdef __cplusplus
}
#endif
#endif
