// safetensors: files that are written read back unchanged; files that break the format's rules are rejected with a
// message that names them. test_safetensors.py compares values, and rounding to bf16, with the official package.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dev/tests/check.h"
#include "runtime/file.h"
#include "model/safetensors.h"

static char folder[] = "/tmp/test_safetensors.XXXXXX";

static const char *in_folder(const char *name) {
    static char path[4][200];
    static int next;
    char *out = path[next++ % 4];
    snprintf(out, sizeof path[0], "%s/%s", folder, name);
    return out;
}

// A file with this header text and `data_size` bytes of data (zeros if data is NULL).
static const char *make_file(const char *name, const char *header, size_t header_size, const void *data,
                             size_t data_size) {
    const char *path = in_folder(name);
    FILE *out = fopen(path, "wb");
    fwrite(&(uint64_t){header_size}, 8, 1, out);
    fwrite(header, header_size, 1, out);
    for (size_t i = 0; i < data_size; i++) fputc(data ? ((const char *)data)[i] : 0, out);
    fclose(out);
    return path;
}

// True if opening fails as bad input, with a message that names the file and contains `part`.
static bool refused(const char *path, const char *part) {
    Error error = {0};
    Safetensors *s = safetensors_open(path, &error);
    bool ok = !s && error.code == EXIT_INPUT && strstr(error.text, part) && strstr(error.text, folder) &&
              strstr(error.text, "\n  ");
    if (!ok) printf("  expected a message with \"%s\", found %d %s\n", part, error.code, s ? "no error" : error.text);
    safetensors_close(s);
    return ok;
}

static void test_round_trip(void) {
    check_group("round trip of float32 and bf16");
    enum { N = 3000017 };    // longer than two of the reader's pieces, and odd
    float *values = malloc(N * sizeof *values), *read = malloc(N * sizeof *read);
    Error error = {0};
    uint64_t random = 1;
    for (size_t i = 0; i < N; i++) {
        uint32_t bits;
        do {
            random = random * 6364136223846793005u + 1442695040888963407u;
            bits = (uint32_t)(random >> 32);
            if (i % 2) bits &= 0xFFFF0000;    // a bf16
        } while ((bits & 0x7F800000) == 0x7F800000 || (bits & 0x7FFF0000) == 0x7F7F0000);
        memcpy(&values[i], &bits, 4);
    }
    TensorRow rows[] = {
        {"a half", DTYPE_BF16, 1, {N}, values},
        {"b full", DTYPE_F32, 2, {1, N}, values},
    };
    const char *path = in_folder("round.safetensors");
    CHECK(safetensors_write(AT_FDCWD, path, rows, 2, NULL, NULL, &error), "%s", error.text);
    Safetensors *s = safetensors_open(path, &error);
    CHECK(s, "%s", error.text);
    for (size_t i = 0; i < 2; i++) {
        const TensorInfo *info = safetensors_at(s, i);
        CHECK(info->offset % dtype_size(info->dtype) == 0, "%s is at offset %zu", info->name, (size_t)info->offset);
    }
    CHECK(safetensors_read(s, "b full", 2, (size_t[]){1, N}, read, &error), "%s", error.text);
    CHECK(!memcmp(read, values, N * sizeof *read), "float32 bits changed");
    CHECK(safetensors_read(s, "a half", 1, (size_t[]){N}, read, &error), "%s", error.text);
    size_t wrong = 0;
    for (size_t i = 1; i < N; i += 2) wrong += memcmp(&read[i], &values[i], 4) != 0;
    CHECK(wrong == 0, "%zu of %d bf16 changed", wrong, N / 2);
    safetensors_close(s);
    free(values);
    free(read);
}

static void test_wide(void) {
    check_group("float64 that is too large, and integers");
    struct {
        double f64[2];
        int64_t i64[2];
    } data = {{0.1, -1e300}, {-5, 1ll << 52}};
    const char *header = "{\"f\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,16]},"
                         "\"l\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[16,32]}}";
    size_t two = 2;
    float out[2];
    Error error = {0};
    Safetensors *s = safetensors_open(make_file("wide", header, strlen(header), &data, sizeof data), &error);
    CHECK(s && !safetensors_read(s, "f", 1, &two, out, &error) && strstr(error.text, "element 1 of 2"),
          "1e300 as float32: %s", error.text);
    CHECK(s && !safetensors_read(s, "l", 1, &two, out, &error) && strstr(error.text, "found I64"), "I64 as float32: %s",
          error.text);
    safetensors_close(s);
}

static void test_wrong_requests(void) {
    check_group("wrong requests, and values that are not finite");
    float values[6] = {1, 2, 3, 4, NAN, 6}, out[6];
    TensorRow rows[] = {
        {"a", DTYPE_F32, 2, {2, 2}, values}, {"b", DTYPE_F32, 1, {6}, values}, {"c", DTYPE_BF16, 1, {6}, values}};
    Error error = {0};
    const char *path = in_folder("requests");
    CHECK(safetensors_write(AT_FDCWD, path, rows, 3, NULL, NULL, &error), "%s", error.text);
    Safetensors *s = safetensors_open(path, &error);
    CHECK(!safetensors_read(s, "z", 1, (size_t[]){4}, out, &error) && error.code == EXIT_INPUT &&
              strstr(error.text, path) && strstr(error.text, "expected a tensor z [4]"),
          "missing: %s", error.text);
    CHECK(!safetensors_read(s, "a", 2, (size_t[]){2, 3}, out, &error) && strstr(error.text, path) &&
              strstr(error.text, "tensor a: expected the shape [2, 3], found [2, 2]"),
          "shape: %s", error.text);
    CHECK(!safetensors_read(s, "a", 1, (size_t[]){4}, out, &error) &&
              strstr(error.text, "expected the shape [4], found [2, 2]"),
          "rank: %s", error.text);
    CHECK(!safetensors_read(s, "b", 1, (size_t[]){6}, out, &error) && strstr(error.text, "tensor b") &&
              strstr(error.text, "element 4 of 6"),
          "NaN in float32: %s", error.text);
    CHECK(!safetensors_read(s, "c", 1, (size_t[]){6}, out, &error) && strstr(error.text, "element 4 of 6"),
          "NaN in bf16: %s", error.text);
    safetensors_close(s);
    values[4] = -INFINITY;
    CHECK(safetensors_write(AT_FDCWD, path, rows, 3, NULL, NULL, &error), "%s", error.text);
    s = safetensors_open(path, &error);
    CHECK(!safetensors_read(s, "b", 1, (size_t[]){6}, out, &error) && strstr(error.text, "-inf"), "infinity: %s",
          error.text);
    safetensors_close(s);
    CHECK(refused(in_folder("nothing"), "No such file"), "no such file");
    CHECK(refused(folder, "found neither"), "a folder without a model");
    FILE *file = fopen(in_folder("pytorch_model.bin"), "w");
    CHECK(file && fclose(file) == 0 && refused(folder, "save_pretrained"), "a folder with a pickled model");
}

#define T(name, dtype, shape, offsets) "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_broken_headers(void) {
    check_group("broken headers");
    // clang-format off
    static const struct { const char *header, *part; size_t data; } cases[] = {
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[2]", "[4,12]") "}", "an overlap", 12},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[2]", "[0,8]") "}", "an overlap", 8},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[1]", "[12,16]") "}", "a hole", 16},
        {"{" T("a", "F32", "[2]", "[4,12]") "}", "a hole", 12},
        {"{" T("a", "F32", "[2]", "[0,8]") "}", "expected 8 bytes after the header", 9},
        {"{" T("a", "F32", "[2]", "[0,8]") "}", "within the 7 bytes", 7},
        {"{" T("a", "F32", "[2]", "[0,4]") "}", "expected 8 bytes", 8},
        {"{" T("a", "F32", "[2]", "[8,0]") "}", "expected 8 bytes", 8},
        {"{" T("a", "F32", "[2]", "[0]") "}", "data_offsets", 8},
        {"{" T("a", "F32", "[2]", "[0,8,9]") "}", "data_offsets", 8},
        {"{" T("a", "F32", "[2]", "[-8,0]") "}", "data_offsets", 8},
        {"{" T("a", "F32", "[2]", "[0.5,8.5]") "}", "data_offsets", 8},
        {"{" T("a", "F32", "[2]", "[0,1e30]") "}", "data_offsets", 8},
        {"{" T("a", "F32", "[2]", "{\"x\":0,\"y\":8}") "}", "data_offsets", 8},
        {"{" T("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", "2^64 elements", 0},
        {"{" T("a", "F32", "[4503599627370496,1024]", "[0,0]") "}", "2^64 bytes", 0},
        {"{" T("a", "F32", "[-2]", "[0,8]") "}", "whole numbers", 8},
        {"{" T("a", "F32", "[2.5]", "[0,8]") "}", "whole numbers", 8},
        {"{" T("a", "F32", "[\"2\"]", "[0,8]") "}", "whole numbers", 8},
        {"{" T("a", "F32", "2", "[0,8]") "}", "a list", 8},
        {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", "8 dimensions", 8},
        {"{" T("a", "F33", "[2]", "[0,8]") "}", "\"F33\"", 8},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", "found none", 8},
        {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", "found none", 8},
        {"{\"a\":7}", "found none", 0},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("a", "F32", "[2]", "[8,16]") "}", "occurs twice", 16},
        {"{\"__metadata__\":{\"a\":1}}", "only strings", 0},
        {"{\"__metadata__\":7}", "only strings", 0},
        {"{" T("a\\u0000b", "F32", "[2]", "[0,8]") "}", "a NUL", 8},
        {"{" T("a\nb", "F32", "[2]", "[0,8]") "}", "control character", 8},
        {"{" T("a\xFF", "F32", "[2]", "[0,8]") "}", "not UTF-8", 8},
        {"{" T("a\xED\xA0\x80", "F32", "[2]", "[0,8]") "}", "not UTF-8", 8},
        {"{" T("a\xC0\xAF", "F32", "[2]", "[0,8]") "}", "not UTF-8", 8},
        {"{" T("a", "F32", "[02]", "[0,8]") "}", "malformed number", 8},
        {"{" T("a", "F32", "[2]", "[0,8]"), "the end of the text", 8},
        {"{" T("a", "F32", "[2]", "[0,8]") "}}", "more text after its end", 8},
        {"{" T("a", "F32", "[2]", "[0,8]") ",}", "found something else", 8},
        {"{\"a", "in a string", 8},
        {"[]", "starts with {", 0},
        {" {}", "starts with {", 0},
        {"7", "starts with {", 0},
        {"", "the end of the text", 0},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_case();
        const char *path = make_file("broken", cases[i].header, strlen(cases[i].header), NULL, cases[i].data);
        CHECK(refused(path, cases[i].part), "%s", cases[i].header);
    }
    CHECK(refused(make_file("broken", "{}\0", 3, NULL, 0), "a stray byte"), "a NUL after the header");
}

static void test_large_headers(void) {
    check_group("headers with too much in them");
    char deep[20002] = "";
    memset(deep, '[', 10000);
    memset(deep + 10000, ']', 10000);
    CHECK(refused(make_file("broken", deep, 20000, NULL, 0), "levels of nesting"), "10,000 levels");
    size_t size = 2 * 10000003;
    char *many = malloc(size);
    for (size_t i = 0; i < size; i += 2) memcpy(many + i, "0,", 2);
    many[0] = '[';
    many[1] = ' ';
    many[size - 1] = ']';
    CHECK(refused(make_file("broken", many, size, NULL, 0), "10,000,000 values"), "10,000,001 values");
    free(many);
}

static void write_bytes(const char *path, const void *data, size_t size) {
    FILE *out = fopen(path, "wb");
    fwrite(data, size, 1, out);
    fclose(out);
}

static void test_broken_lengths(void) {
    check_group("broken header lengths");
    const char *path = in_folder("lengths");
    char bytes[16] = "";
    write_bytes(path, bytes, 0);
    CHECK(refused(path, "at least 8 bytes"), "an empty file");
    write_bytes(path, bytes, 7);
    CHECK(refused(path, "at least 8 bytes"), "7 bytes");
    memcpy(bytes, &(uint64_t){9}, 8);
    write_bytes(path, bytes, 16);
    CHECK(refused(path, "at most 8 bytes, found 9"), "a header past the end");
    memcpy(bytes, &(uint64_t){UINT64_MAX}, 8);
    write_bytes(path, bytes, 16);
    CHECK(refused(path, "found 18446744073709551615"), "a length of 2^64 - 1");
    memcpy(bytes, &(uint64_t){100000001}, 8);
    write_bytes(path, bytes, 16);
    CHECK(truncate(path, 200000000) == 0 && refused(path, "at most 100000000 bytes"), "a header over 100 MB");
}

// Tensors that are read in several pieces: a value that is not finite in the second, and a comparison that ends there.
static void test_pieces(void) {
    check_group("tensors of more than a piece");
    enum { N = (1 << 20) + 3 };
    size_t shape = N;
    float *values = calloc(N, sizeof *values), *read = malloc(N * sizeof *read);
    TensorRow rows[] = {{"a", DTYPE_F32, 1, {N}, values}, {"b", DTYPE_BF16, 1, {N}, values}};
    Error error = {0};
    bool same = false;
    CHECK(safetensors_write(AT_FDCWD, in_folder("zeros"), rows, 2, NULL, NULL, &error), "%s", error.text);
    values[N - 1] = INFINITY;
    CHECK(safetensors_write(AT_FDCWD, in_folder("pieces"), rows, 2, NULL, NULL, &error), "%s", error.text);
    Safetensors *zeros = safetensors_open(in_folder("zeros"), &error),
                *s = safetensors_open(in_folder("pieces"), &error);
    for (int i = 0; s && i < 2; i++) {
        CHECK(!safetensors_read(s, rows[i].name, 1, &shape, read, &error) &&
                  strstr(error.text, "inf in element 1048578 of 1048579"),
              "%s: %s", rows[i].name, error.text);
    }
    for (int i = 0; s && zeros && i < 2; i++) {
        const TensorInfo *one = safetensors_find(s, rows[i].name), *other = safetensors_find(zeros, rows[i].name);
        CHECK(safetensors_same(one, one, &same, &error) && same, "%s and itself: %s", rows[i].name, error.text);
        CHECK(safetensors_same(one, other, &same, &error) && !same, "%s, the last of which differs", rows[i].name);
    }
    safetensors_close(zeros);
    safetensors_close(s);
    free(values);
    free(read);
}

// A tensor that begins past 4 GiB, in a sparse file.
static void test_large(void) {
    check_group("a tensor past 4 GiB");
    const char *header =
        "{" T("big", "U8", "[5368709120]", "[0,5368709120]") "," T("far", "F32", "[2]", "[5368709120,5368709128]") "}";
    const char *path = make_file("large", header, strlen(header), NULL, 0);
    off_t at = 8 + (off_t)strlen(header) + 5368709120;
    FILE *out = fopen(path, "r+b");
    float values[2] = {1.5f, -2.5f}, read[2];
    size_t two = 2;
    Error error = {0};
    fseeko(out, at, SEEK_SET);
    fwrite(values, 8, 1, out);
    fclose(out);
    Safetensors *s = safetensors_open(path, &error);
    CHECK(s && safetensors_read(s, "far", 1, &two, read, &error) && !memcmp(values, read, 8), "%s", error.text);
    if (s) CHECK(safetensors_find(s, "far")->offset == (uint64_t)at, "offset");
    // Truncated after it was opened, which only the read can notice.
    CHECK(truncate(path, at + 5) == 0 && !safetensors_read(s, "far", 1, &two, read, &error) &&
              strstr(error.text, "truncated"),
          "%s", error.text);
    safetensors_close(s);
    unlink(path);
}

static void test_sharded(void) {
    check_group("sharded folders");
    float a[4] = {1, 2, 3, 4}, b[2] = {5, 6}, out[4];
    TensorRow row_a = {"a", DTYPE_F32, 1, {4}, a}, row_b = {"b", DTYPE_BF16, 1, {2}, b};
    Error error = {0};
    const char *index = in_folder("model.safetensors.index.json"), *first = in_folder("m-1.safetensors"),
               *second = in_folder("m-2.safetensors");
    CHECK(safetensors_write(AT_FDCWD, first, &row_a, 1, NULL, NULL, &error) &&
              safetensors_write(AT_FDCWD, second, &row_b, 1, NULL, NULL, &error),
          "%s", error.text);
    file_write_text(
        AT_FDCWD, index,
        "{\"metadata\":{\"total_size\":20},\"weight_map\":{\"b\":\"m-2.safetensors\",\"a\":\"m-1.safetensors\"}}",
        &error);
    Safetensors *s = safetensors_open(folder, &error);
    CHECK(s, "%s", error.text);
    CHECK(s && safetensors_read(s, "a", 1, (size_t[]){4}, out, &error) && !memcmp(out, a, sizeof a), "a: %s",
          error.text);
    CHECK(s && safetensors_read(s, "b", 1, (size_t[]){2}, out, &error) && !memcmp(out, b, sizeof b), "b: %s",
          error.text);
    safetensors_close(s);
    // clang-format off
    static const char *const wrong[][2] = {
        {"{\"weight_map\":{\"b\":\"m-1.safetensors\",\"a\":\"m-2.safetensors\"}}", "expected tensor b in m-1.safetensors"},
        {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"c\":\"m-2.safetensors\"}}", "found it nowhere"},
        {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"m-3.safetensors\"}}", "needs all of them"},
        {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"../m-2.safetensors\"}}", "a file in the same folder"},
        {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"/etc/passwd\"}}", "a file in the same folder"},
        {"{\"weight_map\":{\"a\":7}}", "a file in the same folder"},
        {"{\"weight_map\":[]}", "weight_map"},
        {"{", "the end of the text"},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        check_case();
        file_write_text(AT_FDCWD, index, wrong[i][0], &error);
        CHECK(refused(folder, wrong[i][1]), "%s", wrong[i][0]);
    }
    row_b.name = "a";
    row_a.name = "b";
    TensorRow both[] = {row_a, row_b};
    CHECK(safetensors_write(AT_FDCWD, first, both, 2, NULL, NULL, &error), "%s", error.text);
    file_write_text(AT_FDCWD, index, "{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"m-1.safetensors\"}}", &error);
    s = safetensors_open(folder, &error);
    CHECK(s, "two tensors in one file: %s", error.text);
    safetensors_close(s);
    file_write_text(AT_FDCWD, index, "{\"weight_map\":{\"a\":\"m-1.safetensors\"}}", &error);
    CHECK(refused(folder, "it lists 1 tensors, but its files contain 2"), "a tensor that the index lacks");
    file_write_text(AT_FDCWD, index, "{\"weight_map\":{\"a\":\"m-2.safetensors\",\"b\":\"m-1.safetensors\"}}", &error);
    CHECK(refused(folder, "is also in"), "one tensor in two files");
    unlink(index);
}

static void test_write_failures(void) {
    check_group("writes that fail");
    Error error = {0};
    float value = 1;
    TensorRow row = {"a", DTYPE_F32, 0, {0}, &value};
    CHECK(!safetensors_write(AT_FDCWD, in_folder("none/x"), &row, 1, NULL, NULL, &error) &&
              error.code == EXIT_RESOURCE && strstr(error.text, "none/x"),
          "no such folder: %s", error.text);
    row.dtype = DTYPE_F16;
    CHECK(!safetensors_write(AT_FDCWD, in_folder("x"), &row, 1, NULL, NULL, &error) &&
              strstr(error.text, "F32 or BF16"),
          "F16: %s", error.text);
    CHECK(access(in_folder("x"), F_OK) != 0, "a rejected file was created");
}

int main(void) {
    Error error;
    if (!mkdtemp(folder)) fail(EXIT_RESOURCE, "%s: mkdtemp failed.", folder);
    test_round_trip();
    test_wide();
    test_wrong_requests();
    test_broken_headers();
    test_large_headers();
    test_broken_lengths();
    test_pieces();
    test_large();
    test_sharded();
    test_write_failures();
    file_remove_tree(AT_FDCWD, folder, &error);
    return check_verdict();
}
