#include "runtime/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/utf8.h"

// Global, because fail() and warn() may be called anywhere. main() and process_start() set them once.
const char *program_name = "gpt2";
bool (*fail_speaker)(bool says) = NULL;
void (*fail_hook)(int code) = NULL;
bool warn_off = false;
const char *fail_where = "";

static _Noreturn void end(ExitCode code) {
    fflush(stdout);
    if (fail_hook) fail_hook(code);
    exit(code);
}

// A message may quote a name from a file that a stranger made, so nothing in it acts on a terminal. One write keeps the
// messages of several ranks apart.
static void say(const char *kind, const char *text) {
    uint8_t escaped[4 * sizeof(((Error *)0)->text)];
    size_t length = utf8_escape((const uint8_t *)text, strlen(text), escaped);
    fprintf(stderr, "%s: %s%.*s\n", program_name, kind, (int)length, (const char *)escaped);
}

void fail(ExitCode code, const char *format, ...) {
    Error error = {.code = code};
    va_list args;
    va_start(args, format);
    vsnprintf(error.text, sizeof error.text, format, args);
    va_end(args);
    fail_with(&error);
}

void fail_with(const Error *error) {
    bool says = error->text[0] != 0;
    fflush(stdout);
    if (fail_speaker) says = fail_speaker(says);
    if (says) say(strncmp(error->text, "rank ", 5) ? fail_where : "", error->text);
    end(error->code);
}

void warn(const char *format, ...) {
    char text[sizeof(((Error *)0)->text)];
    va_list args;
    if (warn_off) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fflush(stdout);
    say("warning: ", text);
}

void *allocate(size_t count, size_t size, const char *what) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) fail(EXIT_RESOURCE, "out of memory for %s.", what);
    return memory;
}

void flush_stdout(const char *what) {
    if (fflush(stdout) != 0 || ferror(stdout))
        fail(EXIT_RESOURCE, "stdout: cannot write %s: %s.", what, strerror(errno));
}

bool error_set(Error *error, ExitCode code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    error->code = code;
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    return false;
}

void reasons_add(Reasons *reasons, const char *format, ...) {
    char line[400] = "\n  - ";
    size_t start = strlen(line), used = strlen(reasons->text);
    va_list args;
    va_start(args, format);
    vsnprintf(line + start, sizeof line - start, format, args);
    va_end(args);
    reasons->count++;
    if (reasons->left_out || used + strlen(line) >= sizeof reasons->text) reasons->left_out++;
    else strcpy(reasons->text + used, line);
}

ReasonsText reasons_text(const Reasons *reasons) {
    ReasonsText lines;
    strcpy(lines.text, reasons->text);
    if (reasons->left_out) sprintf(lines.text + strlen(lines.text), "\n  - and %d more", reasons->left_out);
    return lines;
}
