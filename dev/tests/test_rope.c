// RoPE's scalings: the text of --rope-scaling.
//
// test_rope HS THETA L T SCALING prints the amplitude and the frequencies, then cos and sin at the last position, a
// line each, for comparison with transformers (dev/tests/test_rope.py).
#include <math.h>

#include "dev/tests/check.h"
#include "model/rope.h"

static RopeAngles angles(const char *text, size_t HS, size_t L) {
    RopeAngles a = {.theta = 10000, .HS = HS, .L = L};
    char message[512] = "";
    bool right = rope_scaling_parse(&a.scaling, text, message, sizeof message);
    CHECK(right, "%s: %s", text, message);
    return a;
}

static int print(char **words) {
    RopeAngles a = angles(words[5], strtoull(words[1], NULL, 10), strtoull(words[3], NULL, 10));
    size_t T = strtoull(words[4], NULL, 10), half = a.HS / 2;
    a.theta = strtod(words[2], NULL);
    float *cosines = malloc(T * half * sizeof *cosines), *sines = malloc(T * half * sizeof *sines);
    double *frequency = rope_frequencies(&a, T);
    rope_table(cosines, sines, T, a);
    printf("%.17g\n", rope_amplitude(&a.scaling));
    for (size_t i = 0; i < half; i++) printf("%.17g ", frequency[i]);
    printf("\n");
    for (size_t i = 0; i < half; i++) printf("%.9g ", (double)cosines[(T - 1) * half + i]);
    printf("\n");
    for (size_t i = 0; i < half; i++) printf("%.9g ", (double)sines[(T - 1) * half + i]);
    printf("\n");
    free(cosines);
    free(sines);
    free(frequency);
    return case_failures > 0;
}

static void test_text(void) {
    static const char *const same[] = {"none", "linear:4", "linear:1.5", "ntk", "llama3:8:1:4:8192", "yarn:4:32768"};
    static const struct {
        const char *text, *shortest;
    } equal[] = {{"linear:4.0", "linear:4"},
                 {"yarn:40e-1:1e3", "yarn:4:1000"},
                 {"linear:1.2345678901234567", "linear:1.23456789012346"}};
    char text[ROPE_TEXT];
    check_group("texts and back");
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        check_case();
        RopeScaling scaling = angles(same[i], 8, 8).scaling;
        rope_scaling_text(&scaling, text, sizeof text);
        CHECK(!strcmp(text, same[i]), "%s became %s", same[i], text);
    }
    for (size_t i = 0; i < sizeof equal / sizeof *equal; i++) {
        check_case();
        RopeScaling scaling = angles(equal[i].text, 8, 8).scaling, again;
        rope_scaling_text(&scaling, text, sizeof text);
        CHECK(!strcmp(text, equal[i].shortest), "%s became %s", equal[i].text, text);
        again = angles(text, 8, 8).scaling;
        CHECK(rope_scaling_equal(&scaling, &again), "%s is not equal to %s", text, equal[i].text);
    }
    check_case();
    RopeScaling a = angles("llama3:8:1:4:8192", 8, 8).scaling;
    static const char *const others[] = {"llama3:9:1:4:8192", "llama3:8:2:4:8192", "llama3:8:1:5:8192",
                                         "llama3:8:1:4:8193", "yarn:8:8192"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        RopeScaling b = angles(others[i], 8, 8).scaling;
        CHECK(!rope_scaling_equal(&a, &b), "%s is equal to llama3:8:1:4:8192", others[i]);
    }
}

static void test_messages(void) {
    static const char *const all =
        "Expected none, linear:FACTOR, ntk, llama3:FACTOR:LOW:HIGH:ORIGINAL or yarn:FACTOR:ORIGINAL";
    static const struct {
        const char *text, *message;
    } wrong[] = {
        {"", "unknown scaling."},
        {"yran:4:8", "unknown scaling. Did you mean yarn? Expected none"},
        {"dynamic", "unknown scaling. Did you mean ntk? Expected none"},
        {"default", "Did you mean none?"},
        {"longrope", "unknown scaling. Expected none"},
        {"linear", "expected linear:FACTOR"},
        {"linear:2:3", "expected linear:FACTOR"},
        {"ntk:2", "expected ntk"},
        {"none:", "expected none"},
        {"yarn:4", "expected yarn:FACTOR:ORIGINAL"},
        {"llama3:8:1:4", "expected llama3:FACTOR:LOW:HIGH:ORIGINAL"},
        {"linear:", "FACTOR is ''; expected a number from 1 to 1000000"},
        {"linear:0.5", "FACTOR is '0.5'; expected a number from 1 to 1000000"},
        {"linear:1e7", "FACTOR is '1e7'"},
        {"linear:nan", "FACTOR is 'nan'"},
        {"linear:2x", "FACTOR is '2x'"},
        {"yarn:4:0", "ORIGINAL is '0'; expected a whole number from 1 to 2147483647"},
        {"yarn:4:10.5", "ORIGINAL is '10.5'; expected a whole number"},
        {"llama3:8:0:4:8192", "LOW is '0'; expected a number from 1e-06"},
        {"llama3:8:4:4:8192", "HIGH (high_freq_factor) must be above LOW"},
        {"llama3:8:4:1:8192", "HIGH (high_freq_factor) must be above LOW"},
    };
    check_group("messages");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        RopeScaling scaling;
        char message[512] = "";
        check_case();
        CHECK(!rope_scaling_parse(&scaling, wrong[i].text, message, sizeof message), "'%s' was accepted",
              wrong[i].text);
        CHECK(strstr(message, wrong[i].message), "'%s': %s", wrong[i].text, message);
        if (strstr(message, "unknown")) CHECK(strstr(message, all), "'%s': %s", wrong[i].text, message);
    }
}

int main(int argc, char **argv) {
    if (argc == 6) return print(argv);
    test_text();
    test_messages();
    return check_verdict();
}
