// toml: every kind of value, and every kind of error with its line.
#include "dev/tests/check.h"
#include "runtime/toml.h"

// Reads a text and writes its entries as "line key kind text;", followed by the error, if any.
static const char *entries(const char *text) {
    static char copy[4096], out[4096];
    TomlEntry entry;
    snprintf(copy, sizeof copy, "%s", text);
    TomlReader reader = toml_start("f.toml", copy);
    out[0] = 0;
    while (toml_next(&reader, &entry)) {
        size_t n = strlen(out);
        snprintf(out + n, sizeof out - n, "%d %s %c", entry.line, entry.key, "snblt"[entry.kind]);
        const char *text = entry.text;
        for (size_t i = 0; i < entry.count; i++, text += strlen(text) + 1)
            snprintf(out + strlen(out), sizeof out - strlen(out), " %s", text);
        strcat(out, ";");
    }
    strcat(out, reader.error.text);
    return out;
}

static void reads(const char *text, const char *expected) {
    check_case();
    const char *found = entries(text);
    CHECK(strcmp(found, expected) == 0, "%s\nexpected %s\nfound    %s", text, expected, found);
}

static void test_values(void) {
    check_group("values");
    reads("", "");
    reads("\n  # nothing\n\t\n", "");
    reads("a = 1", "1 a n 1;");
    reads("\xEF\xBB\xBF"
          "a = 1",
          "1 a n 1;");
    reads("a=1#x\nb-c_D9 = -2.5e-3 # y\r\n\r\n  d\t=\ttrue\ne = false",
          "1 a n 1;2 b-c_D9 n -2.5e-3;4 d b true;5 e b false;");
    reads("a = \"x # y\" # z\nb = ''\nc = 'C:\\n'", "1 a s x # y;2 b s ;3 c s C:\\n;");
    reads("a = \"\\\"\\\\\\t\\n\\u00e9\\u20AC\\U0001F600 é\"", "1 a s \"\\\t\né€😀 é;");
    reads("a = [64,128 , 256]\nb = []\nc = [ 7 ] # x", "1 a l 64,128,256;2 b l ;3 c l 7;");
    reads("a = [ # lengths\n  64, # short\n\n  128,\n]\nb = 1", "1 a l 64,128;6 b n 1;");
    reads("a = ['x, y', # one\n \"]\\n\" , '',]\nb = [''] # z", "1 a t x, y ]\n ;3 b t ;");
    reads("a = +1_000\nb = -0.5E+1_0", "1 a n +1_000;2 b n -0.5E+1_0;");
}

static void test_errors(void) {
    check_group("errors name the line, what was expected and what was found");
    reads("a = 1\n\nb 2", "1 a n 1;f.toml: line 3: expected = after the key, found 2.");
    reads("a = 1 2", "f.toml: line 1: expected the end of the line after a value, found 2.");
    reads("a = 1, b = 2", "f.toml: line 1: expected the end of the line after a value, found ,.");
    reads("a = \"x\" \"", "f.toml: line 1: expected the end of the line after a value, found \".");
    reads("a =\nb = 1",
          "f.toml: line 1: expected text in quotes, a number, true, false, or [a list], found the end of the line.");
    reads("a = ", "f.toml: line 1: expected text in quotes, a number, true, false, or [a list], found the end "
                  "of the file.");
    reads("a = ssmax", "f.toml: line 1: expected text in quotes, a number, true, false, or [a list], found "
                       "ssmax.");
    reads("a = True", "f.toml: line 1: expected text in quotes, a number, true, false, or [a list], found True.");
    reads("a = {b = 1}", "f.toml: line 1: expected text in quotes, a number, true, false, or [a list], found {.");
    reads("[run]\na = 1", "f.toml: line 1: expected key = value (tables are not supported), found [.");
    reads("a.b = 1", "f.toml: line 1: expected = after the key, found .b.");
    reads("\"a\" = 1", "f.toml: line 1: expected a key without quotes, found \".");
    reads("a = 1\n'b' = 1", "1 a n 1;f.toml: line 2: expected a key without quotes, found '.");
    static const char *const NUMBERS[] = {".5",   "05", "-05", "0_1",  "1.", "1.e5",
                                          "1__0", "1_", "1e",  "0x10", "+",  "4x"};
    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; i++) {
        char text[32], expected[128];
        snprintf(expected, sizeof expected,
                 "f.toml: line 1: expected a number such as 5, 0.5, 1_000 or 6e-4, found %s.", NUMBERS[i]);
        snprintf(text, sizeof text, "a = %s", NUMBERS[i]);
        reads(text, expected);
        snprintf(text, sizeof text, "a = [%s]", NUMBERS[i]);
        reads(text, expected);
    }
    reads("a = ['x', 1]", "f.toml: line 1: expected text in quotes or ], found 1.");
    reads("a = [1, 'x']", "f.toml: line 1: expected a number or ], found '.");
    reads("a = ['x' 'y']", "f.toml: line 1: expected a comma or ], found '.");
    reads("a = ['x", "f.toml: line 1: expected a closing ' on this line, found the end of the file.");
    reads("= 1", "f.toml: line 1: expected key = value, found =.");
    reads("a = \"x\nb = 1", "f.toml: line 1: expected a closing \" on this line, found the end of the line.");
    reads("a = 'x", "f.toml: line 1: expected a closing ' on this line, found the end of the file.");
    reads("a = \"\x01\"", "f.toml: line 1: expected a closing \" on this line, found the control character 1.");
    reads("a = \"\\q\"", "f.toml: line 1: expected an escape such as \\\\, \\\", \\n or \\u00e9, found q.");
    reads("a = \"\\u12\"", "f.toml: line 1: expected an escape such as \\\\, \\\", \\n or \\u00e9, found 12.");
    reads("a = \"\\uD800\"", "f.toml: line 1: expected an escape such as \\\\, \\\", \\n or \\u00e9, found D800.");
    reads("a = \"\\u0000\"", "f.toml: line 1: expected an escape such as \\\\, \\\", \\n or \\u00e9, found 0000.");
    reads("a = \"\\",
          "f.toml: line 1: expected an escape such as \\\\, \\\", \\n or \\u00e9, found the end of the file.");
    reads("a = [1,\n2\n", "f.toml: line 3: expected a comma or ], found the end of the file.");
    reads("a = [1 2]", "f.toml: line 1: expected a comma or ], found 2.");
    reads("a = [,]", "f.toml: line 1: expected a number or ], found ,.");
    reads("a = 1\rb = 2",
          "f.toml: line 1: expected the end of the line after a value, found the control character 13.");
    reads("a = '\x7f'", "f.toml: line 1: expected a closing ' on this line, found the control character 127.");
    reads("# \x01", "f.toml: line 1: expected key = value, found the control character 1.");
    reads("\x02", "f.toml: line 1: expected key = value, found the control character 2.");
}

int main(void) {
    program_name = "test_toml";
    test_values();
    test_errors();
    return check_verdict();
}
