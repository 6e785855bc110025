// options: every type, every kind of error, --help, and what a resume may change.
#include <cjson/cJSON.h>
#include <math.h>

#include "dev/tests/check.h"
#include "runtime/options.h"

static struct {
    int64_t batch, seed;
    double lr;
    const char *data, *out, *prompt;
    bool resume, shuffle;
    int dtype;
    IntList lengths;
} v;

static Option table[] = {
    {"train-data", OPT_TEXT, &v.data, .arg = "GLOB", .group = "Data", .help = "shards to train on", .required = true},
    {"shuffle", OPT_SWITCH, &v.shuffle, .group = "Data", .help = "another order in each epoch"},
    {"seq-len", OPT_INT_LIST, &v.lengths, 1, 65536, .arg = "T[,T...]", .group = "Data", .help = "tokens a sequence"},
    {"batch", OPT_INT, &v.batch, 1, 4096, .group = "Training", .help = "sequences a process", .on_resume = true},
    {"seed", OPT_INT, &v.seed, 0, 1e15, .group = "Training", .help = "of everything random"},
    {"lr", OPT_FLOAT, &v.lr, 0, INFINITY, .group = "Training", .help = "learning rate", .on_resume = true},
    {"dtype", OPT_CHOICE, &v.dtype, .choices = "fp32|bf16", .group = "Training", .help = "of matrix products"},
    {"out", OPT_TEXT, &v.out, .arg = "DIR", .group = "Run", .help = "the run's folder", .on_resume = true},
    {"resume", OPT_SWITCH, &v.resume, .group = "Run", .help = "go on", .on_resume = true},
    {"prompt", OPT_TEXT, &v.prompt, .any_bytes = true, .group = "Run", .help = "of any bytes", .on_resume = true},
    {"zero", OPT_INT, &v.batch, .group = "GPUs", .help = "for GPUs", .only_in = "test_cu, the GPU program"},
};
#define ROWS (sizeof table / sizeof *table)

static void defaults(void) {
    v.batch = 4;
    v.seed = 42;
    v.lr = 6e-4;
    v.data = v.prompt = NULL;
    v.out = "log";
    v.resume = false;
    v.shuffle = true;
    v.dtype = 0;
    v.lengths = (IntList){{1024}, 1};
    for (size_t i = 0; i < ROWS; i++) table[i].given = false;
}

// Splits the words at spaces and parses them.
static void parse(void *words) {
    static char copy[1024];
    char *argv[32] = {"test"}, *rest = copy;
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", (const char *)words);
    while ((argv[argc] = strtok_r(rest, " ", &rest))) argc++;
    defaults();
    options_parse(table, ROWS, argc, argv, (OptionsHelp){"Usage: test [flags]", "--batch 2", "training.md"});
}

static void test_values(void) {
    check_group("values of every type");
    parse("");
    CHECK(v.batch == 4 && v.lr == 6e-4 && !v.data && v.shuffle && v.lengths.values[0] == 1024, "defaults stay");
    parse("--batch 8 --lr=3e-3 --train-data data/a*.bin --out= --dtype bf16 --seq-len 64,128,256 --resume --shuffle 0");
    CHECK(v.batch == 8 && v.lr == 3e-3 && !strcmp(v.data, "data/a*.bin") && !strcmp(v.out, ""), "int, float, text");
    CHECK(v.dtype == 1 && v.resume && !v.shuffle, "choice, switches");
    CHECK(v.lengths.count == 3 && v.lengths.values[2] == 256, "list");
    CHECK(options_find(table, ROWS, "lr")->given && !options_find(table, ROWS, "seed")->given, "given");
    CHECK(!options_find(table, ROWS, "nothing"), "no such row");
    parse("--batch 8 --batch=16 --shuffle 0 --shuffle --seed 1_000_000 --out=--x");
    CHECK(v.batch == 16 && v.shuffle && v.seed == 1000000 && !strcmp(v.out, "--x"),
          "given twice, the last one counts; 1_000_000; a value with dashes");
    parse("--seed 1e15 --batch 4e3 --lr 0");
    CHECK(v.seed == 1000000000000000 && v.batch == 4000 && v.lr == 0, "1e15, 4e3, 0");
    parse("--train-data caf\u00e9/*.bin --prompt caf\xe9");
    CHECK(!strcmp(v.data, "caf\u00e9/*.bin") && !strcmp(v.prompt, "caf\xe9"), "UTF-8, and a flag that need not be");
    parse("--resume=0 --shuffle=1 --resume 1");
    CHECK(v.resume && v.shuffle, "switches with values");
}

static void refused(const char *words, const char *part) {
    check_case();
    char output[4096];
    int code = check_fork(parse, (void *)words, output, sizeof output);
    CHECK(code == EXIT_USAGE && strstr(output, part), "%s: expected code 2 and \"%s\", found %d and: %s", words, part,
          code, output);
}

static void test_refusals(void) {
    check_group("wrong flags and values");
    refused("--bach 4", "--bach: unknown flag. Did you mean --batch?");
    refused("--train_data x", "Did you mean --train-data?");
    refused("--train x", "Did you mean --train-data?");
    refused("--LR 1", "Did you mean --lr?");
    refused("--btach 1", "Did you mean --batch?");
    refused("--zero 1", "--zero is only supported by test_cu, the GPU program, not by test_options.");
    refused("--zeros 1", "--zeros: unknown flag. Run `--help` for the full list.");
    refused("--config", "--config: its value is missing. Write --config FILE.");
    refused("--print-config 2", "--print-config 2: expected 0 or 1");
    refused("--dtype int8", "--dtype int8: expected one of fp32|bf16.\n");
    refused("--batch=4 --zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz 1",
            "unknown flag");
    refused("-batch 4", "-batch: flags start with two dashes. Did you mean --batch?");
    refused("batch 4", "does not belong to a flag");
    refused("--batch 4 5", "\"5\": this word does not belong to a flag; it follows 4");
    refused("--batch", "--batch: its value is missing. Write --batch N.");
    refused("--train-data --lr 1",
            "--train-data: its value is missing; the next word is --lr. Write --train-data GLOB.");
    refused("--batch 0", "expected a whole number from 1 to 4096, found \"0\"");
    refused("--batch 4097", "from 1 to 4096");
    refused("--batch 1.5", "whole number");
    refused("--batch 4x", "found \"4x\"");
    refused("--batch 0x10", "found \"0x10\"");
    refused("--batch=", "found \"\"");
    refused("--batch 1__0", "found \"1__0\"");
    refused("--seed 1000000000000001", "whole number");
    refused("--seed -1", "from 0 to");
    refused("--lr nan", "expected a number of at least 0, found \"nan\"");
    refused("--lr inf", "found \"inf\"");
    refused("--lr 1e999", "found \"1e999\"");
    refused("--lr -1e-4", "of at least 0");
    refused("--dtype bf61", "expected one of fp32|bf16. Did you mean bf16?");
    refused("--dtype BF16", "Did you mean bf16?");
    refused("--shuffle yes", "expected 0 or 1, found \"yes\"");
    refused("--seq-len 64,", "comma-separated whole numbers from 1 to 65536");
    refused("--seq-len 64,0", "found \"64,0\"");
    refused("--seq-len 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17",
            "expected 1 to 16 comma-separated whole numbers from 1 to 65536");
    refused("--train-data caf\xe9/*.bin", "--train-data: expected text in UTF-8, found other bytes.");
    refused("--", "does not belong to a flag");
}

static void test_help(void) {
    check_group("--help");
    char output[8192];
    CHECK(check_fork(parse, "--nonsense --help", output, sizeof output) == 0, "exit code");
    CHECK(strstr(output, "Usage: test [flags]") && strstr(output, "\nTraining\n  --batch N"), "usage and groups: %s",
          output);
    CHECK(strstr(output, "\nConfiguration\n  --config FILE") && !strstr(output, "--zero"), "%s", output);
    CHECK(strstr(output, "(default 0.0006)") && strstr(output, "shards to train on (no default)\n") &&
              strstr(output, "of any bytes\n") && strstr(output, "--dtype fp32|bf16"),
          "defaults: %s", output);
    const char *end = "\nExample: ./test_options --batch 2\nMore: doc/training.md\n";
    CHECK(strlen(output) > strlen(end) && !strcmp(output + strlen(output) - strlen(end), end), "the end: %s", output);
}

// ---- --config and --print-config

static char folder[] = "/tmp/test_options.XXXXXX";

static const char *config_path(int number) {
    static char path[2][64];
    snprintf(path[number], sizeof path[number], "%s/%d.flags", folder, number);
    return path[number];
}

static void write_config(int number, const char *text) {
    FILE *file = fopen(config_path(number), "w");
    fputs(text, file);
    fclose(file);
}

// Parses with the file, or both of them, and the words.
static void parse_with(int files, const char *words) {
    char all[512];
    snprintf(all, sizeof all, "%s --config %s%s%s", words, config_path(0), files > 1 ? " --config " : "",
             files > 1 ? config_path(1) : "");
    parse(all);
}

static void test_config(void) {
    check_group("--config");
    write_config(0, "# a run\nbatch = 8\nlr = 3e-3\ntrain-data = 'data/a*.bin'\ndtype = \"bf16\"\nseq-len = [64, 128]\n"
                    "resume = true\nshuffle = false\n");
    parse_with(1, "");
    CHECK(v.batch == 8 && v.lr == 3e-3 && !strcmp(v.data, "data/a*.bin") && v.dtype == 1 && v.resume && !v.shuffle,
          "values of every type");
    CHECK(v.lengths.count == 2 && v.lengths.values[1] == 128 && v.seed == 42,
          "a list; other flags keep their defaults");
    CHECK(options_find(table, ROWS, "lr")->given && !options_find(table, ROWS, "seed")->given, "given");
    parse_with(1, "--batch 2 --shuffle --train-data x --seq-len 8");
    CHECK(v.batch == 2 && v.shuffle && !strcmp(v.data, "x") && v.lengths.count == 1 && v.lr == 3e-3,
          "the command line wins, even before --config");
    write_config(1, "  batch=16\r\ntrain-data = data/b*.bin  # two\nseq-len = [ 32 ] # one\n#lr = 1");
    parse_with(2, "");
    CHECK(v.batch == 16 && !strcmp(v.data, "data/b*.bin") && v.lengths.values[0] == 32 && v.lr == 3e-3,
          "of two files the second wins");
    write_config(1,
                 " {\"arguments\": {\"batch\": 16, \"lr\": 0.003, \"seed\": 42, \"train-data\": \"c\", \"out\": null, "
                 "\"zero\": 1, \"seq-len\": [8, 16], \"resume\": false}, \"ranks\": 2}");
    parse_with(2, "");
    CHECK(v.batch == 16 && v.lr == 3e-3 && !strcmp(v.data, "c") && v.lengths.count == 2 && !v.resume,
          "a run's run.json");
    CHECK(!options_find(table, ROWS, "seed")->given, "a run's defaults do not count as given");
}

// The child's work of refused_config().
static void parse_file(void *words) {
    parse_with(1, words);
}

static void refused_config(const char *text, int code, const char *part) {
    char output[4096], expected[512];
    check_case();
    write_config(0, text);
    snprintf(expected, sizeof expected, "test_options: %s: %s", config_path(0), part);
    int found = check_fork(parse_file, "", output, sizeof output);
    CHECK(found == code && strstr(output, expected), "%s: expected code %d and \"%s\", found %d and: %s", text, code,
          expected, found, output);
}

static void test_config_errors(void) {
    check_group("errors in a --config file");
    refused_config("\nbach = 4", EXIT_USAGE, "line 2: bach: unknown flag. Did you mean batch? Run `--help`");
    refused_config("config = 'x'", EXIT_USAGE, "line 1: config: a file of flags cannot name another.");
    refused_config("\nprint-config = true", EXIT_USAGE, "line 2: print-config: belongs on the command line");
    refused_config("help = true", EXIT_USAGE, "line 1: help: belongs on the command line");
    refused_config("zero = 1", EXIT_USAGE,
                   "line 1: zero is only supported by test_cu, the GPU program, not by test_options.");
    refused_config("batch = 4\n\nbatch = 4", EXIT_USAGE, "line 3: batch: is set twice; the first time is on line 1.");
    refused_config("batch = 0", EXIT_USAGE, "line 1: batch: expected a whole number from 1 to 4096, found \"0\".");
    refused_config("out = \"caf\xe9\"", EXIT_USAGE, "line 1: out: expected text in UTF-8, found \"caf\\xe9\".");
    refused_config("dtype = \"bf61\"", EXIT_USAGE,
                   "line 1: dtype: expected one of fp32|bf16, found \"bf61\". Did you mean bf16?");
    refused_config("seq-len = [64, 0]", EXIT_USAGE,
                   "line 1: seq-len: expected 1 to 16 comma-separated whole numbers from 1 to 65536, found \"64,0\".");
    refused_config("seq-len = []", EXIT_USAGE, "line 1: seq-len: expected 1 to 16 comma-separated whole numbers");
    refused_config("batch = 4\nlr", EXIT_INPUT, "line 2: expected flag = value, found lr.");
    refused_config("lr =", EXIT_INPUT, "line 1: expected a value, found the end of the line.");
    refused_config("out = 'x' y", EXIT_INPUT, "line 1: expected the end of the line after a value, found y.");
    refused_config("out = \"x", EXIT_INPUT,
                   "line 1: expected a closing quote on this line, found the end of the line.");
    refused_config("out = \"\\x\"", EXIT_INPUT, "line 1: expected one of the escapes");
    refused_config("seq-len = [1 2", EXIT_INPUT, "line 1: expected a comma or ], found the end of the line.");
    refused_config("seq-len = ['1' 2]", EXIT_INPUT, "line 1: expected a comma or ], found 2].");
    refused_config("out = [\"a\", \"b\"]", EXIT_USAGE, "line 1: out: expected a single value, found a list.");
    refused_config("{\"arguments\": {}", EXIT_INPUT, "expected JSON, found the end of the text");
    refused_config("{\"a\": 1}", EXIT_INPUT, "expected lines flag = value, or a run's run.json, found other JSON.");
    refused_config("{\"arguments\": {\"batch\": \"x\"}}", EXIT_USAGE,
                   "\"batch\" has a value that --batch cannot take.");
    unlink(config_path(0));
    char output[4096];
    CHECK(check_fork(parse_file, "", output, sizeof output) == EXIT_INPUT && strstr(output, "No such file"), "%s",
          output);
}

// Runs --print-config and stores its output as the file.
static void print_config(const char *words, char *output, size_t size) {
    char all[512];
    snprintf(all, sizeof all, "%s --print-config", words);
    CHECK(check_fork(parse, all, output, size) == 0, "exit code: %s", output);
    write_config(0, output);
}

static void test_print_config(void) {
    check_group("--print-config prints a file that sets the same flags, and no others");
    const char *words =
        "--batch 8 --lr 1.23456789012345e-05 --train-data it\"s\\n\x7f\x01 --seq-len 64,128 --shuffle 0 --dtype bf16 "
        "--seed 999999999999999";
    char first[8192], second[8192], again[128];
    print_config(words, first, sizeof first);
    parse_with(1, "");
    CHECK(v.batch == 8 && v.lr == 1.23456789012345e-05 && !strcmp(v.data, "it\"s\\n\x7f\x01") && v.dtype == 1 &&
              !v.shuffle && v.seed == 999999999999999 && v.lengths.count == 2 && v.lengths.values[0] == 64,
          "%s", first);
    CHECK(!options_find(table, ROWS, "out")->given && !options_find(table, ROWS, "resume")->given, "%s", first);
    CHECK(strstr(first, "\n# Run\n# out = \"log\"\n# resume = false\n") && !strstr(first, "zero"), "%s", first);
    snprintf(again, sizeof again, "--config %s", config_path(0));
    print_config(again, second, sizeof second);
    CHECK(!strcmp(first, second), "%s\n%s", first, second);
    unlink(config_path(0));
    unlink(config_path(1));
    rmdir(folder);
}

static void test_resume(void) {
    check_group("run.json and --resume");
    Error error = {0};
    parse("--batch 8 --lr 0.1 --train-data it\"s --dtype bf16 --seq-len 64,128 --shuffle 0 --seed 999999999999999");
    char *json = options_json(table, ROWS);
    parse("--resume --batch 2");
    CHECK(options_resume(table, ROWS, json, &error), "%s", error.text);
    CHECK(v.batch == 2 && v.resume, "flags that are given and may change keep their values");
    CHECK(v.lr == 0.1 && !strcmp(v.data, "it\"s") && v.dtype == 1 && v.lengths.count == 2 &&
              v.lengths.values[1] == 128 && !v.shuffle && v.seed == 999999999999999,
          "flags that are not given take the run's values: %s", json);
    parse("--resume --seed 999999999999999 --dtype bf16 --seq-len 64,128 --train-data it\"s");
    CHECK(options_resume(table, ROWS, json, &error), "repeating the run's values: %s", error.text);
    const char *differing[][2] = {{"--seed 7", "--seed is 7, but the run started with 999999999999999"},
                                  {"--dtype fp32", "--dtype is fp32, but the run started with bf16"},
                                  {"--shuffle", "--shuffle is 1, but the run started with 0"},
                                  {"--seq-len 64", "--seq-len is 64, but the run started with 64,128"},
                                  {"--train-data x", "--train-data is x, but the run"}};
    for (size_t i = 0; i < sizeof differing / sizeof *differing; i++) {
        check_case();
        parse((void *)differing[i][0]);
        CHECK(!options_resume(table, ROWS, json, &error) && error.code == EXIT_USAGE &&
                  strstr(error.text, differing[i][1]),
              "%s: %s", differing[i][0], error.text);
        CHECK(v.batch == 4, "a rejected resume changes nothing");
    }
    parse("");
    CHECK(options_resume(table, ROWS, "{}", &error) && v.batch == 4, "flags that did not exist when the run began");
    CHECK(options_resume(table, ROWS, "{\"shuffle\": 0}", &error) && !v.shuffle, "a switch that was a number: %s",
          error.text);
    const char *damaged[] = {"{\"batch\": \"x\"}",
                             "{\"other\": 1}",
                             "{\"batch\": 0}",
                             "{\"batch\": 1.5}",
                             "{\"dtype\": \"fp8\"}",
                             "{\"seq-len\": [0]}",
                             "{\"seq-len\": 4}",
                             "{\"shuffle\": 2}",
                             "{\"out\": 3}",
                             "[1]",
                             "{",
                             ""};
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++)
        CHECK(!options_resume(table, ROWS, damaged[i], &error) && error.code == EXIT_INPUT, "%s passed", damaged[i]);
    CHECK(!options_resume(table, ROWS, "{\"batch\": 0}", &error) &&
              strstr(error.text, "run.json in --out: the saved flag batch") && strstr(error.text, "\n  Restore it"),
          "%s", error.text);
    free(json);
    parse("--lr 0.00061234567890123456789");
    double lr = v.lr;
    char *digits = options_json(table, ROWS);
    cJSON *object = cJSON_Parse(digits);
    char *again = cJSON_Print(object);
    cJSON_Delete(object);
    parse("--resume");
    CHECK(options_resume(table, ROWS, again, &error) && v.lr == lr && lr != 6e-4,
          "a number with too many digits is restored with the same bits");
    free(digits);
    free(again);
}

int main(void) {
    program_name = "test_options";
    if (!mkdtemp(folder)) return 1;
    test_values();
    test_refusals();
    test_help();
    test_config();
    test_config_errors();
    test_print_config();
    test_resume();
    return check_verdict();
}
