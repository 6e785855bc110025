// How every program here says that something is wrong, and the exit codes that it ends with.
//
// A function that a caller may want to survive (a full disk while saving, a broken file under a fuzzer) takes an `Error
// *` and returns false; one that cannot go on calls fail(). A message says what was expected, what was found, in which
// file and at which offset, and what to do about it; a second line is indented by two spaces.
#ifndef RUNTIME_ERROR_H
#define RUNTIME_ERROR_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,       // wrong flags
    EXIT_INPUT = 3,       // a bad input file
    EXIT_RESOURCE = 4,    // out of memory or disk
    EXIT_DIVERGED = 5,    // the loss is no longer finite
    EXIT_PEER = 6,        // a device or another process failed
    EXIT_BUSY = 7,        // the run folder is in use
    EXIT_STOPPED = 75     // stopped by a signal, with a checkpoint saved
} ExitCode;

typedef struct {
    ExitCode code;
    char text[2048];
} Error;

// The name that starts each message; set once at the start of main().
extern const char *program_name;

// Where there are other processes (runtime/process.c); both may be NULL. fail() asks fail_speaker, `says`: it has a
// message, whether this process is to print its message, as all of them may be about to print the same; and calls
// fail_hook just before it exits.
extern bool (*fail_speaker)(bool says);
extern void (*fail_hook)(int code);

// Writes "program: text" to stderr and ends the process with the code.
void fail(ExitCode code, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));

// fail() with what an Error says; an empty text is not printed.
void fail_with(const Error *error) __attribute__((noreturn));

// Writes "program: warning: text" to stderr, but where warn_off is set: in all processes of a job but the first, which
// warns for all.
extern bool warn_off;
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Fills the error and returns false, so that a function can end with `return error_set(...)`.
bool error_set(Error *error, ExitCode code, const char *format, ...) __attribute__((format(printf, 3, 4)));

// Several reasons for one error, so that all are named at once: a line each, "\n  - reason". Those for which there is
// no room are counted.
typedef struct {
    int count, left_out;
    char text[1200];
} Reasons;

void reasons_add(Reasons *reasons, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The lines, and as the last how many more there are.
typedef struct {
    char text[1280];
} ReasonsText;
ReasonsText reasons_text(const Reasons *reasons);

#ifdef __cplusplus
}
#endif
#endif
