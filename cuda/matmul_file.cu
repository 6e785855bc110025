#include "cuda/matmul_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/file.h"
#include "runtime/own.h"

static const char FIRST[] = "attn.c matmuls 1\n", LAST[] = "end\n";    // lines of a file
enum { MOST_BYTES = 64 << 20 };                                        // of a file

// ---- text

static const char *type_name(cudaDataType type) {
    return type == CUDA_R_16BF ? "bf16" : "fp32";
}

// The line of a choice, which ends with the hash of what precedes it. It has at most 930 bytes.
static std::string text_of(const MatmulChoice &c) {
    char line[1024];
    const MatmulShape &s = c.shape;
    const uint64_t *a = c.algorithm.data;
    int length = snprintf(
        line, sizeof line,
        "\"%.255s\" %zu m=%zu n=%zu k=%zu %c%c %s to %s, aligned %u %u %u %u, workspace %zu: %.4f ms, "
        "algorithm %" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64 ";",
        c.device.c_str(), c.version, s.m, s.n, s.k, "NT"[s.ta], "NT"[s.tb], type_name(s.type), type_name(s.out_type),
        s.alignment[0], s.alignment[1], s.alignment[2], s.alignment[3], c.workspace, c.ms, a[0], a[1], a[2], a[3], a[4],
        a[5], a[6], a[7]);
    size_t size = (size_t)length;
    snprintf(line + size, sizeof line - size, " %08x\n", (unsigned)XXH32(line, size, 0));
    return line;
}

// What sscanf() reads too leniently, or from a damaged line, does not give the same line again.
static bool parse_line(MatmulChoice *c, const std::string &line) {
    char device[256], ta, tb, type[5], out_type[5];
    MatmulShape &s = c->shape;
    uint64_t *a = c->algorithm.data;
    int fields =
        sscanf(line.c_str(),
               "\"%255[^\"]\" %zu m=%zu n=%zu k=%zu %c%c %4s to %4[a-z0-9], aligned %u %u %u %u, workspace %zu: "
               "%lf ms, algorithm %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64
               " %" SCNx64,
               device, &c->version, &s.m, &s.n, &s.k, &ta, &tb, type, out_type, &s.alignment[0], &s.alignment[1],
               &s.alignment[2], &s.alignment[3], &c->workspace, &c->ms, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6],
               &a[7]);
    if (fields != 23) return false;
    c->device = device;
    s.ta = ta == 'T';
    s.tb = tb == 'T';
    s.type = strcmp(type, "bf16") == 0 ? CUDA_R_16BF : CUDA_R_32F;
    s.out_type = strcmp(out_type, "bf16") == 0 ? CUDA_R_16BF : CUDA_R_32F;
    size_t least = std::min({s.m, s.n, s.k}), most = std::max({s.m, s.n, s.k});
    return least >= 1 && most <= INT32_MAX && text_of(*c) == line;
}

std::string matmul_file_text(const std::vector<MatmulChoice> &choices) {
    std::string text = FIRST;
    for (const MatmulChoice &choice : choices) text += text_of(choice);
    return text + LAST;
}

bool matmul_file_parse(std::vector<MatmulChoice> *choices, const char *path, const std::string &text, Error *error) {
    size_t at = strlen(FIRST);
    choices->clear();
    if (text.compare(0, at, FIRST) != 0)
        return error_set(
            error, EXIT_INPUT,
            "%s, line 1: expected \"%.*s\".\n"
            "  Either this is not a file of --matmuls, or another version of attn.c wrote it. Choose another path.",
            path, (int)at - 1, FIRST);
    for (int line = 2; text.compare(at, std::string::npos, LAST) != 0; line++) {
        MatmulChoice choice = {};
        size_t next = text.find('\n', at) + 1;
        if (next == 0)
            return error_set(error, EXIT_INPUT,
                             "%s, line %d: the file is truncated: its last line should be \"%.*s\".\n"
                             "  Copy it again, or delete it and measure again with --deterministic 0.",
                             path, line, (int)strlen(LAST) - 1, LAST);
        if (!parse_line(&choice, text.substr(at, next - at)))
            return error_set(error, EXIT_INPUT,
                             "%s, line %d: the line was damaged or edited.\n"
                             "  Delete this line. A run with --deterministic 0 measures its matmul again.",
                             path, line);
        choice.line = line;
        choices->push_back(choice);
        at = next;
    }
    return true;
}

// ---- choices

bool matmul_file_applies(const MatmulFile *file, const MatmulChoice &choice) {
    return choice.device == file->device && choice.version == cublasLtGetVersion() &&
           choice.workspace == file->workspace;
}

size_t matmul_file_applying(const MatmulFile *file) {
    auto applies = [file](const MatmulChoice &choice) { return matmul_file_applies(file, choice); };
    return (size_t)std::count_if(file->choices.begin(), file->choices.end(), applies);
}

const MatmulChoice *matmul_file_find(const MatmulFile *file, const MatmulShape &shape) {
    for (const MatmulChoice &choice : file->choices)
        if (matmul_same_shape(choice.shape, shape) && matmul_file_applies(file, choice)) return &choice;
    return NULL;
}

void matmul_file_add(MatmulFile *file, const MatmulShape &shape, const cublasLtMatmulAlgo_t &algorithm, double ms) {
    file->choices.push_back({file->device, cublasLtGetVersion(), file->workspace, shape, algorithm, ms, 0});
    file->unsaved = true;
}

// ---- files

// Reads the whole file as *text, which is empty if there is no file.
static bool read_text(const char *path, std::string *text, Error *error) {
    size_t size = 0;
    text->clear();
    if (access(path, F_OK) != 0 && errno == ENOENT) return true;
    char *bytes = file_read(path, MOST_BYTES, &size, error);
    if (bytes) text->assign(bytes, size);
    free(bytes);
    return bytes != NULL;
}

static bool read_choices(std::vector<MatmulChoice> *choices, const char *path, const std::string &text, bool measure,
                         Error *error) {
    choices->clear();
    if (!text.empty()) return matmul_file_parse(choices, path, text, error);
    return measure || error_set(error, EXIT_INPUT,
                                "%s: there is no such file, or it is empty.\n"
                                "  A few steps with --deterministic 0 --matmuls %s write it.",
                                path, shell_word(path).text);
}

static bool check_choices(const MatmulFile *file, Error *error) {
    const MatmulChoice *rejected = matmul_rejected(file);
    return !rejected || error_set(error, EXIT_INPUT,
                                  "%s, line %d: cuBLASLt rejects this algorithm for this matmul on this GPU.\n"
                                  "  Delete this line. A run with --deterministic 0 measures its matmul again.",
                                  file->path, rejected->line);
}

void matmul_file_open(MatmulFile *file, const char *path, const char *device, size_t workspace, bool measure) {
    Error error;
    std::string text;
    *file = {path, device, workspace, {}, false};
    rank0_try(read_text(path, &text, &error), &error);
    size_t size = text.size();
    process_broadcast(&size, sizeof size);
    text.resize(size);
    process_broadcast(&text[0], size);
    process_agree(read_choices(&file->choices, path, text, measure, &error) && check_choices(file, &error), &error);
}

// The file behind a link, which stays a link: whatever its names, all runs lock and replace the same file.
static std::string target_of(const char *path) {
    char *real = realpath(path, NULL);
    std::string target = real ? real : path;
    free(real);
    return target;
}

// Adds this run's choices to what the file has now.
static bool merge(const MatmulFile *file, Error *error) {
    std::string text;
    MatmulFile there = {file->path, file->device, file->workspace, {}, false};
    if (!read_text(file->path, &text, error) || !read_choices(&there.choices, file->path, text, true, error))
        return false;
    for (const MatmulChoice &choice : file->choices)
        if (choice.line == 0 && !matmul_file_find(&there, choice.shape)) there.choices.push_back(choice);
    return file_replace_text(target_of(file->path).c_str(), matmul_file_text(there.choices).c_str(), error);
}

static bool merge_alone(const MatmulFile *file, Error *error) {
    std::string path = target_of(file->path) + ".lock";
    const char *reason = NULL;
    int lock = own_open(path.c_str(), O_RDWR | O_CREAT, &reason);
    bool done = lock >= 0 && flock(lock, LOCK_EX) == 0;
    if (!done)
        error_set(error, EXIT_RESOURCE, "%s: cannot lock it: %s.\n  %s", path.c_str(),
                  reason ? reason : strerror(errno),
                  file_remedy(errno, "Choose a folder that you can write to, on a file system with locks."));
    done = done && merge(file, error);
    if (lock >= 0) close(lock);
    return done;
}

void matmul_file_save(MatmulFile *file) {
    Error error;
    if (!file->path || !file->unsaved || process.rank != 0) return;
    file->unsaved = false;
    if (!merge_alone(file, &error))
        warn("%s\n  The algorithms that this run measured are not stored. The run continues.", error.text);
}
