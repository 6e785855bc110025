#include "runtime/options.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/file.h"
#include "runtime/flag_file.h"
#include "runtime/json.h"
#include "runtime/number.h"
#include "runtime/process.h"
#include "runtime/spelling.h"
#include "runtime/utf8.h"
#include "runtime/version.h"

// cJSON writes 15 digits. Flags are rounded to as many, so a resumed run reads from run.json exactly the value that the
// run started with.
#define DIGITS 15
#define INT_LIMIT 1e15
#define AS_TEXT(macro) AS_TEXT_OF(macro)
#define AS_TEXT_OF(text) #text
#define HELP_COLUMN 34
#define HELP_WIDTH 120
#define CONFIG_LIMIT ((size_t)1 << 20)    // bytes of a --config file

typedef union {
    int64_t integer;
    double number;
    const char *text;
    bool on;
    int choice;
    IntList list;
} Value;

// ---- converting values from and to text

static bool has_bounds(const Option *o) {
    return o->min != 0 || o->max != 0;
}

static const char *kind_name(const Option *o) {
    if (o->type == OPT_TEXT || o->type == OPT_TEXT_LIST) return "text in UTF-8";
    if (o->type == OPT_FLOAT) return "a number";
    return o->type == OPT_INT ? "a whole number" : "1 to " AS_TEXT(OPTION_LIST_MAX) " comma-separated whole numbers";
}

// Writes what a value of this flag must be, for messages.
static void expected(const Option *o, char *out, size_t size) {
    const char *kind = kind_name(o);
    if (o->type == OPT_SWITCH) snprintf(out, size, "0 or 1");
    else if (o->type == OPT_CHOICE) snprintf(out, size, "one of %s", o->choices);
    else if (!has_bounds(o)) snprintf(out, size, "%s", kind);
    else if (isinf(o->max)) snprintf(out, size, "%s of at least %.15g", kind, o->min);
    else if (o->type != OPT_FLOAT) snprintf(out, size, "%s from %.0f to %.0f", kind, o->min, fmin(o->max, INT_LIMIT));
    else snprintf(out, size, "%s from %.15g to %.15g", kind, o->min, o->max);
}

static bool in_range(const Option *o, double x) {
    return !has_bounds(o) || (x >= o->min && x <= o->max);
}

static bool read_integer(const Option *o, const char *text, size_t length, int64_t *integer) {
    double x;
    if (!number_read(text, length, &x) || x != floor(x) || fabs(x) > INT_LIMIT || !in_range(o, x)) return false;
    *integer = (int64_t)x;
    return true;
}

static bool read_float(const Option *o, const char *text, double *number) {
    char rounded[32];
    if (!number_read(text, strlen(text), number) || !in_range(o, *number)) return false;
    snprintf(rounded, sizeof rounded, "%.*g", DIGITS, *number);
    *number = strtod(rounded, NULL);
    return isfinite(*number);
}

static bool read_list(const Option *o, const char *text, IntList *list) {
    list->count = 0;
    for (const char *p = text;; p++) {
        size_t length = strcspn(p, ",");
        if (list->count == OPTION_LIST_MAX || !read_integer(o, p, length, &list->values[list->count])) return false;
        list->count++;
        p += length;
        if (*p == 0) return true;
    }
}

static bool is_utf8(const char *text) {
    return utf8_valid((const uint8_t *)text, strlen(text)) == strlen(text);
}

static bool value_read(const Option *o, const char *text, Value *v) {
    switch (o->type) {
    case OPT_INT: return read_integer(o, text, strlen(text), &v->integer);
    case OPT_FLOAT: return read_float(o, text, &v->number);
    case OPT_TEXT_LIST:
    case OPT_TEXT: v->text = text; return o->any_bytes || is_utf8(text);
    case OPT_SWITCH: v->on = text[0] == '1'; return (text[0] == '0' || text[0] == '1') && text[1] == 0;
    case OPT_CHOICE: v->choice = word_place(o->choices, '|', text); return v->choice >= 0;
    case OPT_INT_LIST: return read_list(o, text, &v->list);
    }
    return false;
}

static Value value_get(const Option *o) {
    switch (o->type) {
    case OPT_INT: return (Value){.integer = *(const int64_t *)o->value};
    case OPT_FLOAT: return (Value){.number = *(const double *)o->value};
    case OPT_TEXT: return (Value){.text = *(const char *const *)o->value};
    case OPT_SWITCH: return (Value){.on = *(const bool *)o->value};
    case OPT_CHOICE: return (Value){.choice = *(const int *)o->value};
    case OPT_INT_LIST: return (Value){.list = *(const IntList *)o->value};
    case OPT_TEXT_LIST: break;
    }
    return (Value){0};
}

static void list_add(const Option *o, const char *text) {
    TextList *list = o->value;
    if (list->count == OPTION_LIST_MAX)
        usage_fail("--%s: expected at most " AS_TEXT(OPTION_LIST_MAX) " of them, found more.", o->name);
    list->values[list->count++] = text;
}

static void value_set(const Option *o, Value v) {
    switch (o->type) {
    case OPT_INT: *(int64_t *)o->value = v.integer; break;
    case OPT_FLOAT: *(double *)o->value = v.number; break;
    case OPT_TEXT: *(const char **)o->value = v.text; break;
    case OPT_SWITCH: *(bool *)o->value = v.on; break;
    case OPT_CHOICE: *(int *)o->value = v.choice; break;
    case OPT_INT_LIST: *(IntList *)o->value = v.list; break;
    case OPT_TEXT_LIST: list_add(o, v.text); break;
    }
}

static void choice_text(const Option *o, int choice, char *out, size_t size) {
    const char *p = o->choices;
    for (int i = 0; i < choice; i++) p += strcspn(p, "|") + 1;
    snprintf(out, size, "%.*s", (int)strcspn(p, "|"), p);
}

static void value_text(const Option *o, Value v, char *out, size_t size) {
    switch (o->type) {
    case OPT_INT: snprintf(out, size, "%lld", (long long)v.integer); break;
    case OPT_FLOAT: snprintf(out, size, "%s", number_text(v.number).text); break;
    case OPT_TEXT_LIST:
    case OPT_TEXT: snprintf(out, size, "%s", v.text ? v.text : "none"); break;
    case OPT_SWITCH: snprintf(out, size, "%d", v.on); break;
    case OPT_CHOICE: choice_text(o, v.choice, out, size); break;
    case OPT_INT_LIST:
        out[0] = 0;
        for (size_t i = 0, n = 0; i < v.list.count && n < size; i++)
            n += (size_t)snprintf(out + n, size - n, "%s%lld", i ? "," : "", (long long)v.list.values[i]);
        break;
    }
}

const char *options_text(const Option *row, char *out, size_t size) {
    value_text(row, value_get(row), out, size);
    return out;
}

// ---- usage errors

void usage_fail(const char *format, ...) {
    Error error = {.code = EXIT_USAGE};
    va_list args;
    va_start(args, format);
    vsnprintf(error.text, sizeof error.text, format, args);
    va_end(args);
    process_fail_early(&error);
}

// Writes " Did you mean --name?" for the flag that was probably meant, or "". `dashes` precede its name.
static const char *nearest_flag(const Option *table, size_t count, const char *dashes, const char *name, size_t length,
                                char *out, size_t size) {
    size_t least = SIZE_MAX;
    out[0] = 0;
    for (const Option *o = table; o < table + count; o++)
        if (!o->only_in && is_nearer(name, length, o->name, strlen(o->name), &least))
            snprintf(out, size, " Did you mean %s%s?", dashes, o->name);
    return out;
}

static _Noreturn void wrong_value(const Option *o, const char *text) {
    char want[256], near[96];
    expected(o, want, sizeof want);
    if (o->type == OPT_TEXT || o->type == OPT_TEXT_LIST)
        usage_fail("--%s: expected %s, found other bytes.", o->name, want);
    if (o->type != OPT_CHOICE) usage_fail("--%s %s: expected %s, found \"%s\".", o->name, text, want, text);
    usage_fail("--%s %s: expected %s.%s", o->name, text, want, nearest_word(o->choices, text, near, sizeof near));
}

// `where` and `dashes` precede the flag's name.
static void reject_elsewhere(const Option *o, const char *where, const char *dashes) {
    if (o->only_in)
        usage_fail("%s%s%s is only supported by %s, not by %s.", where, dashes, o->name, o->only_in, program_name);
}

// ---- help

static const char *arg_name(const Option *o) {
    if (o->type == OPT_SWITCH) return "0|1";
    if (o->type == OPT_CHOICE) return o->choices;
    if (o->arg) return o->arg;
    if (o->type == OPT_TEXT || o->type == OPT_TEXT_LIST) return "TEXT";
    if (o->type == OPT_FLOAT) return "X";
    return o->type == OPT_INT ? "N" : "N[,N...]";
}

// Prints the text in the help column, wrapped between words. `column` is the current position on the line.
static void print_wrapped(const char *text, int column) {
    while (*text) {
        int room = HELP_WIDTH - HELP_COLUMN, length = (int)strlen(text);
        if (length > room) {
            length = room;
            while (length > 0 && text[length] != ' ') length--;
            if (length == 0) length = (int)strcspn(text, " ");
        }
        printf("%*s%.*s\n", HELP_COLUMN - column, "", length, text);
        text += length;
        while (*text == ' ') text++;
        column = 0;
    }
}

static void print_help(const Option *o) {
    char value[512], text[1024];
    value_text(o, value_get(o), value, sizeof value);
    int column = printf("  --%s %s", o->name, arg_name(o));
    if (column >= HELP_COLUMN) {
        printf("\n");
        column = 0;
    }
    bool is_text = o->type == OPT_TEXT || o->type == OPT_TEXT_LIST, unset = is_text && !value_get(o).text;
    snprintf(text, sizeof text, "%s", o->help ? o->help : "");
    size_t length = strlen(text);
    if (unset && o->required) snprintf(text + length, sizeof text - length, " (no default)");
    if (!unset) snprintf(text + length, sizeof text - length, " (default %s)", o->computed ? o->computed : value);
    print_wrapped(text, column);
}

// Ends the program after it has printed what a flag asked for.
static _Noreturn void end_printed(const char *what) {
    flush_stdout(what);
    exit(EXIT_DONE);
}

static _Noreturn void print_version(void) {
    if (process_launched_rank() <= 0) printf("attn.c " ATTN_C_VERSION " (%s)\n", program_name);
    end_printed("the version");
}

static const char *group_of(const Option *o) {
    return o->group ? o->group : "Flags";
}

// Prints each row of the table, below the name of its group.
static void print_groups(const Option *table, size_t count, const char *heading, void (*print)(const Option *)) {
    for (size_t i = 0; i < count; i++) {
        if (table[i].only_in) continue;
        if (i == 0 || strcmp(group_of(&table[i]), group_of(&table[i - 1])) != 0) printf(heading, group_of(&table[i]));
        print(&table[i]);
    }
}

// ---- --print-config

// On a terminal, what would act on it is printed as an escape, too.
static void print_quoted(const char *text) {
    Utf8Printer terminal = utf8_printer(stdout);
    putchar('"');
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\') printf("\\%c", *p);
        else if (iscntrl(*p)) printf("\\u%04x", *p);
        else if (terminal.escapes) utf8_print(&terminal, (const char *)p, 1);
        else putchar(*p);
    }
    utf8_print_end(&terminal);
    putchar('"');
}

static void print_texts(const Option *o) {
    const TextList *list = o->value;
    putchar('[');
    for (size_t i = 0; i < list->count; i++) {
        if (i > 0) printf(", ");
        print_quoted(list->values[i]);
    }
    if (!list->count) print_quoted(arg_name(o));
    putchar(']');
}

// Prints `name = value`. Defaults are comments, because some flags have another effect if they are given.
static void print_entry(const Option *o) {
    char text[512];
    Value v = value_get(o);
    printf("%s%s = ", o->given ? "" : "# ", o->name);
    if (o->computed && !o->given) {
        printf("%s", o->computed);
    } else if (o->type == OPT_TEXT) {
        print_quoted(v.text ? v.text : arg_name(o));
    } else if (o->type == OPT_TEXT_LIST) {
        print_texts(o);
    } else if (o->type == OPT_SWITCH) {
        printf("%s", v.on ? "true" : "false");
    } else {
        const char *open = o->type == OPT_CHOICE ? "\"" : "", *close = open;
        if (o->type == OPT_INT_LIST) {
            open = "[";
            close = "]";
        }
        value_text(o, v, text, sizeof text);
        printf("%s%s%s", open, text, close);
    }
    putchar('\n');
}

static _Noreturn void print_config(const Option *table, size_t count) {
    if (process_launched_rank() > 0) exit(EXIT_DONE);
    printf("# Flags of %s (attn.c " ATTN_C_VERSION "), for --config. Comments are flags that were not given.\n",
           program_name);
    print_groups(table, count, "\n# %s\n", print_entry);
    end_printed("the flags");
}

// ---- flags

Option *options_find(Option *table, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(table[i].name, name) == 0) return &table[i];
    return NULL;
}

static void set_value(Option *o, Value v) {
    value_set(o, v);
    o->given = true;
}

// ---- --config

static char *owned_text(const char *text, size_t size) {
    return memcpy(allocate(size, 1, "the flags"), text, size);
}

// A list of texts takes the place of one in an earlier file.
static void set_texts(Option *o, const FlagLine *line) {
    size_t size = 0;
    ((TextList *)o->value)->count = 0;
    for (size_t i = 0; i < line->count; i++) size += strlen(line->text + size) + 1;
    free(o->owned);
    o->owned = owned_text(line->text, size + 1);
    for (size_t i = 0, at = 0; i < line->count; i++) {
        set_value(o, (Value){.text = o->owned + at});
        at += strlen(o->owned + at) + 1;
    }
}

static void set_owned(Option *o, Value v) {
    if (o->type == OPT_TEXT && v.text) {
        free(o->owned);
        v.text = o->owned = owned_text(v.text, strlen(v.text) + 1);
    }
    set_value(o, v);
}

static void set_line(Option *o, const FlagLine *line, const char *where) {
    char want[256], near[96] = "", list[512];
    const char *text = line->text;
    Value v;
    if (o->type == OPT_TEXT_LIST) {
        set_texts(o, line);
        return;
    }
    if (line->count != 1) {
        size_t n = 0;
        if (o->type == OPT_TEXT) usage_fail("%s%s: expected a single value, found a list.", where, o->name);
        list[0] = 0;
        for (size_t i = 0; i < line->count && n < sizeof list; i++, text += strlen(text) + 1)
            n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i ? "," : "", text);
        if (n >= sizeof list) usage_fail("%s%s: the list is too long.", where, o->name);
        text = list;
    }
    if (o->type == OPT_SWITCH && !strcmp(text, "true")) text = "1";
    if (o->type == OPT_SWITCH && !strcmp(text, "false")) text = "0";
    if (!value_read(o, text, &v)) {
        expected(o, want, sizeof want);
        if (o->type == OPT_CHOICE) nearest_word(o->choices, text, near, sizeof near);
        usage_fail("%s%s: expected %s, found \"%s\".%s", where, o->name, want, text, near);
    }
    set_owned(o, v);
}

// Returns the row that a line sets. lines: where the file sets each row, or 0.
static Option *line_row(Option *table, size_t count, const char *flag, int number, int *lines, const char *where) {
    char near[96];
    Option *o = options_find(table, count, flag);
    if (!strcmp(flag, "config"))
        usage_fail("%sconfig: a file of flags cannot name another. Repeat --config on the command line.", where);
    if (!o && (!strcmp(flag, "help") || !strcmp(flag, "print-config")))
        usage_fail("%s%s: belongs on the command line, not in a file of flags.", where, flag);
    if (!o)
        usage_fail("%s%s: unknown flag.%s Run `--help` for the full list.", where, flag,
                   nearest_flag(table, count, "", flag, strlen(flag), near, sizeof near));
    reject_elsewhere(o, where, "");
    int *line = &lines[o - table];
    if (*line) usage_fail("%s%s: is set twice; the first time is on line %d.", where, o->name, *line);
    *line = number;
    return o;
}

static void read_lines(Option *table, size_t count, FlagFile file) {
    char where[600];
    int *lines = allocate(count, sizeof *lines, "the flags");
    FlagLine line;
    while (flag_file_next(&file, &line)) {
        snprintf(where, sizeof where, "%.512s: line %d: ", file.path, file.line);
        set_line(line_row(table, count, line.flag, file.line, lines, where), &line, where);
    }
    if (file.error.text[0]) process_fail_early(&file.error);
    free(lines);
}

static bool value_from_json(const Option *o, const cJSON *item, Value *v);
static bool same_value(const Option *o, Value a, Value b);

// The flags of a run, by its run.json, of which those count as given that differ from the defaults and, after
// --init-from, those whose default is the loaded model's. Flags that only another program has, such as those of the GPU
// trainer, are left out.
static void read_run(Option *table, size_t count, const char *path, const char *text) {
    Error error;
    cJSON *json = json_parse(text, strlen(text), (JsonPlace){path, 1, 0}, &error);
    if (!json) process_fail_early(&error);
    const cJSON *item, *arguments = cJSON_GetObjectItemCaseSensitive(json, "arguments");
    bool loaded = cJSON_IsString(cJSON_GetObjectItemCaseSensitive(arguments, "init-from"));
    Value v;
    if (!cJSON_IsObject(arguments)) {
        error_set(&error, EXIT_INPUT, "%s: expected lines flag = value, or a run's run.json, found other JSON.", path);
        process_fail_early(&error);
    }
    cJSON_ArrayForEach(item, arguments) {
        Option *o = options_find(table, count, item->string);
        if (!o || o->only_in || o->per_call) continue;
        if (!value_from_json(o, item, &v))
            usage_fail("%s: \"%s\" has a value that --%s cannot take.", path, o->name, o->name);
        if (!same_value(o, v, value_get(o)) || (loaded && o->of_model)) set_owned(o, v);
    }
    cJSON_Delete(json);
}

static void read_config(Option *table, size_t count, const char *path) {
    Error error;
    size_t size;
    char *text = file_read(path, CONFIG_LIMIT, &size, &error);
    if (!*path) usage_fail("--config: expected a file, found no name.");
    if (!text) process_fail_early(&error);
    if (strlen(text) < size) {
        error_set(&error, EXIT_INPUT, "%s: contains a 0 byte; expected text.", path);
        process_fail_early(&error);
    }
    if (text[strspn(text, " \t\r\n")] == '{') {
        read_run(table, count, path, text);
    } else {
        char *values = owned_text(text, size + 1);
        read_lines(table, count, (FlagFile){.path = path, .next = text, .values = values});
        free(values);
    }
    free(text);
}

// ---- the command line

enum { CONFIG, PRINT_CONFIG, OWN_COUNT };

typedef struct {
    Option *table, own[OWN_COUNT];    // own: the flags that every program has
    size_t count;
    const char *config;
    bool print;
    char **first, **word, **end;    // word: the next word to be read
} CommandLine;

static void start(CommandLine *c, Option *table, size_t count, int argc, char **argv) {
    // clang-format off
    *c = (CommandLine){
        .table = table, .count = count, .first = argv + 1, .word = argv + 1, .end = argv + argc,
        .own = {
            [CONFIG]       = {"config", OPT_TEXT, &c->config, .any_bytes = true, .arg = "FILE", .group = "Configuration", .help = "read flags from this file, which has lines flag = value or is a run's run.json; those on the command line win"},
            [PRINT_CONFIG] = {"print-config", OPT_SWITCH, &c->print, .group = "Configuration", .help = "print the given flags as such a file, and exit"},
        }};
    // clang-format on
}

static const char *suggestion(const CommandLine *c, const char *name, size_t length, char *out, size_t size) {
    if (nearest_flag(c->table, c->count, "--", name, length, out, size)[0]) return out;
    return nearest_flag(c->own, OWN_COUNT, "--", name, length, out, size);
}

static Option *flag_find(CommandLine *c, const char *word, size_t length) {
    char name[64], near[96];
    snprintf(name, sizeof name, "%.*s", (int)length, word + 2);
    Option *o = length < sizeof name ? options_find(c->table, c->count, name) : NULL;
    if (!o && length < sizeof name) o = options_find(c->own, OWN_COUNT, name);
    if (!o)
        usage_fail("--%.*s: unknown flag.%s Run `--help` for the full list.", (int)length, word + 2,
                   suggestion(c, word + 2, length, near, sizeof near));
    reject_elsewhere(o, "", "--");
    return o;
}

static _Noreturn void stray_word(const CommandLine *c, const char *word, const char *before) {
    char near[96];
    if (word[0] == '-' && word[1] && word[1] != '-')
        usage_fail("%s: flags start with two dashes.%s Run `--help` for the full list.", word,
                   suggestion(c, word + 1, strcspn(word + 1, "="), near, sizeof near));
    usage_fail("\"%s\": this word does not belong to a flag%s%s.\n"
               "  Write --flag value, and quote values that contain spaces or *.",
               word, before ? "; it follows " : "", before ? before : "");
}

// Reads the next flag and its value. Returns NULL at the end.
static Option *next_flag(CommandLine *c, const char **text) {
    if (c->word == c->end) return NULL;
    const char *word = *c->word++, *next = c->word < c->end ? *c->word : NULL;
    if (strncmp(word, "--", 2) != 0 || !word[2]) stray_word(c, word, c->word - 1 > c->first ? c->word[-2] : NULL);
    size_t length = strcspn(word + 2, "=");
    Option *o = flag_find(c, word, length);
    *text = word[2 + length] ? word + 3 + length : NULL;
    if (!*text && next && strncmp(next, "--", 2) != 0) *text = *c->word++;
    else if (!*text && o->type == OPT_SWITCH) *text = "1";
    if (!*text)
        usage_fail("--%s: its value is missing%s%s. Write --%s %s.", o->name, next ? "; the next word is " : "",
                   next ? next : "", o->name, arg_name(o));
    return o;
}

static _Noreturn void print_help_page(const CommandLine *c, OptionsHelp help) {
    if (process_launched_rank() > 0) exit(EXIT_DONE);
    printf("attn.c " ATTN_C_VERSION " (%s)\n\n%s\n", program_name, help.usage);
    print_groups(c->table, c->count, "\n%s\n", print_help);
    print_groups(c->own, OWN_COUNT, "\n%s\n", print_help);
    printf(
        "\nWrite --flag value or --flag=value. A bare switch means 1. If a flag is repeated, the last one wins, unless its text\nsays otherwise.\n");
    printf("\nExample: ./%s %s\nMore: doc/%s\n", program_name, help.example, help.page);
    end_printed("the help");
}

static bool has_word(const CommandLine *c, const char *word) {
    for (char **at = c->first; at < c->end; at++)
        if (strcmp(*at, word) == 0) return true;
    return false;
}

// The command line takes the place of a --config file.
static void forget_texts(Option *o) {
    ((TextList *)o->value)->count = 0;
    free(o->owned);
    o->owned = NULL;
}

void options_parse(Option *table, size_t count, int argc, char **argv, OptionsHelp help) {
    CommandLine c;
    const char *text;
    start(&c, table, count, argc, argv);
    if (has_word(&c, "--help") || has_word(&c, "-h")) print_help_page(&c, help);
    if (has_word(&c, "--version")) print_version();
    for (Option *o; (o = next_flag(&c, &text));)
        if (o == &c.own[CONFIG]) read_config(table, count, text);
    c.word = c.first;
    for (Option *o; (o = next_flag(&c, &text));) {
        Value v;
        if (!value_read(o, text, &v)) wrong_value(o, text);
        if (o->type == OPT_TEXT_LIST && o->owned) forget_texts(o);
        set_value(o, v);
    }
    if (c.print) print_config(table, count);
}

// ---- run.json

static cJSON *value_json(const Option *o, Value v) {
    char text[64];
    switch (o->type) {
    case OPT_INT: return cJSON_CreateNumber((double)v.integer);
    case OPT_FLOAT: return cJSON_CreateNumber(v.number);
    case OPT_TEXT_LIST:
    case OPT_TEXT: return v.text ? cJSON_CreateString(v.text) : cJSON_CreateNull();
    case OPT_SWITCH: return cJSON_CreateBool(v.on);
    case OPT_CHOICE: choice_text(o, v.choice, text, sizeof text); return cJSON_CreateString(text);
    case OPT_INT_LIST: break;
    }
    cJSON *array = cJSON_CreateArray();
    for (size_t i = 0; i < v.list.count; i++) cJSON_AddItemToArray(array, cJSON_CreateNumber((double)v.list.values[i]));
    return array;
}

char *options_json(const Option *table, size_t count) {
    cJSON *object = cJSON_CreateObject();
    for (size_t i = 0; i < count; i++)
        if (!table[i].only_in)
            cJSON_AddItemToObject(object, table[i].name, value_json(&table[i], value_get(&table[i])));
    char *text = cJSON_Print(object);
    cJSON_Delete(object);
    if (!text) fail(EXIT_RESOURCE, "out of memory while writing the flags as JSON");
    return text;
}

// The inverse of value_json(). Applies the flag's own checks by way of the text that the command line would contain.
static bool value_from_json(const Option *o, const cJSON *item, Value *v) {
    char text[512] = "";
    if (o->type == OPT_TEXT && cJSON_IsNull(item)) {
        v->text = NULL;
        return true;
    }
    if (o->type == OPT_TEXT || o->type == OPT_CHOICE)
        return cJSON_IsString(item) && value_read(o, item->valuestring, v);
    if (o->type == OPT_SWITCH && cJSON_IsBool(item)) {
        v->on = cJSON_IsTrue(item);
        return true;
    }
    if (o->type != OPT_INT_LIST) {
        snprintf(text, sizeof text, "%s", number_text(item->valuedouble).text);
        return cJSON_IsNumber(item) && value_read(o, text, v);
    }
    size_t n = 0;
    for (const cJSON *x = item->child; x && n < sizeof text; x = x->next) {
        if (!cJSON_IsNumber(x)) return false;
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%.17g", n ? "," : "", x->valuedouble);
    }
    return cJSON_IsArray(item) && value_read(o, text, v);
}

static bool same_value(const Option *o, Value a, Value b) {
    switch (o->type) {
    case OPT_INT: return a.integer == b.integer;
    case OPT_FLOAT: return a.number == b.number;
    case OPT_TEXT_LIST:
    case OPT_TEXT:
        if (!a.text || !b.text) return a.text == b.text;
        return !strcmp(a.text, b.text) || (o->same && o->same(a.text, b.text));
    case OPT_SWITCH: return a.on == b.on;
    case OPT_CHOICE: return a.choice == b.choice;
    case OPT_INT_LIST:
        return a.list.count == b.list.count && !memcmp(a.list.values, b.list.values, a.list.count * sizeof(int64_t));
    }
    return false;
}

static bool read_row(const Option *o, const cJSON *item, Value *v, Error *error) {
    char want[512];
    if (value_from_json(o, item, v)) return true;
    expected(o, want, sizeof want);
    return error_set(error, EXIT_INPUT,
                     "run.json in --out: the saved flag %s: expected %s. The file was edited or is damaged.\n"
                     "  Restore it from a copy, or start a new run in another --out (--init-from reuses the "
                     "weights).",
                     o->name, o->type == OPT_TEXT ? "a string" : want);
}

// Adds a given flag that a resumed run cannot change to `forbidden`. was: the run's value
static void compare_row(const Option *o, Value was, Reasons *forbidden) {
    char before[512], now[512];
    if (!o->given || o->on_resume || same_value(o, was, value_get(o))) return;
    value_text(o, was, before, sizeof before);
    value_text(o, value_get(o), now, sizeof now);
    reasons_add(forbidden, "--%s is %.120s, but the run started with %.120s.%s%s", o->name, now, before,
                o->resume_hint ? " " : "", o->resume_hint ? o->resume_hint : "");
}

bool options_resume(Option *table, size_t count, const char *json, Error *error) {
    cJSON *object = cJSON_Parse(json);
    Value *values = allocate(count, sizeof *values, "the flags");
    Reasons forbidden = {0};
    bool ok = cJSON_IsObject(object) || error_set(error, EXIT_INPUT, "run.json: the saved flags are not a JSON object");
    const cJSON *flag;
    cJSON_ArrayForEach(flag, object) {
        if (ok && !options_find(table, count, flag->string))
            ok = error_set(error, EXIT_INPUT,
                           "run.json: \"%.100s\": expected a flag of this program, found none of that name.\n"
                           "  Resume with the version that wrote it, or remove it from \"arguments\".",
                           flag->string);
    }
    for (size_t i = 0; ok && i < count; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, table[i].name);
        if (!item || table[i].only_in) continue;
        ok = read_row(&table[i], item, &values[i], error);
        if (ok) compare_row(&table[i], values[i], &forbidden);
    }
    if (ok && forbidden.count)
        ok = error_set(error, EXIT_USAGE,
                       "--resume: a resumed run cannot change:%s\n"
                       "  Omit %s, or start a new run in another --out (--init-from reuses the weights).",
                       reasons_text(&forbidden).text, forbidden.count == 1 ? "this flag" : "these flags");
    for (size_t i = 0; ok && i < count; i++) {
        if (table[i].given || table[i].only_in || table[i].per_call ||
            !cJSON_GetObjectItemCaseSensitive(object, table[i].name))
            continue;
        if (table[i].type == OPT_TEXT && values[i].text) {
            free(table[i].owned);
            values[i].text = table[i].owned = strdup(values[i].text);
        }
        value_set(&table[i], values[i]);
    }
    free(values);
    cJSON_Delete(object);
    return ok;
}
