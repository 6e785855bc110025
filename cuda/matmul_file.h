// The file of --matmuls: for each matmul, the algorithm of cuBLASLt that was measured as the fastest. A run that only
// reads it needs no measurements, and its bits depend on this file, the GPU, the library and the shapes alone.
//
//   attn.c matmuls 1
//   "NVIDIA H100 80GB HBM3" 130100 m=8192 n=768 k=2048 NT bf16 to bf16, aligned 256 256 256 256, workspace 33554432:
//     0.0421 ms, algorithm 43 0 14 2 1 0 0 0; 8f3c21aa
//   end
//
// An entry is one line: the GPU's name, the library's version, a MatmulShape, the bytes of workspace, the measured
// time, the cublasLtMatmulAlgo_t, which only that version of the library can read, and the XXH32 of the line up to the
// semicolon. Because of this and of the last line, no damaged or truncated file is taken for a whole one. Lines may be
// deleted.
//
// An entry never changes: a run adds those that are missing and keeps all others. Tests: dev/tests/test_matmul.cu,
// dev/tests/test_cuda.py.
#ifndef CUDA_MATMUL_FILE_H
#define CUDA_MATMUL_FILE_H

#include <string>
#include <vector>

#include "cuda/matmul.h"

struct MatmulChoice {
    std::string device;    // the GPU's name
    size_t version;        // cublasLtGetVersion()
    size_t workspace;      // bytes that the algorithm may use
    MatmulShape shape;
    cublasLtMatmulAlgo_t algorithm;
    double ms;
    int line;    // in the file; 0: measured in this run
};

// Without a path, what is measured is only kept for this run.
struct MatmulFile {
    const char *path;
    std::string device;    // a choice applies if it is for this GPU and workspace, and for this version of cuBLASLt
    size_t workspace;
    std::vector<MatmulChoice> choices;
    bool unsaved;    // some have been measured since the last attempt to write the file
};

// Reads the file on rank 0, for all ranks, and checks that cuBLASLt accepts every algorithm that applies. `device` and
// `workspace` are this rank's. If the run measures, the file may be missing or empty; otherwise that is an error. All
// errors end the program, with EXIT_INPUT. Collective.
void matmul_file_open(MatmulFile *file, const char *path, const char *device, size_t workspace, bool measure);

// Returns the choice for this shape that applies, or NULL.
const MatmulChoice *matmul_file_find(const MatmulFile *file, const MatmulShape &shape);
bool matmul_file_applies(const MatmulFile *file, const MatmulChoice &choice);
size_t matmul_file_applying(const MatmulFile *file);    // the number of choices that apply

// Adds what was measured for a shape that has no choice yet.
void matmul_file_add(MatmulFile *file, const MatmulShape &shape, const cublasLtMatmulAlgo_t &algorithm, double ms);

// Writes what was measured since the last call, atomically, on rank 0; other ranks do nothing. Entries that another run
// has written in the meantime stay. Several runs may share a file: they take turns by a lock on PATH.lock. If this
// fails, a warning names the file, and the run continues.
void matmul_file_save(MatmulFile *file);

// The text of a file, and its inverse, which accepts only what matmul_file_text() returns. `path` is for the error,
// which also names the line.
std::string matmul_file_text(const std::vector<MatmulChoice> &choices);
bool matmul_file_parse(std::vector<MatmulChoice> *choices, const char *path, const std::string &text, Error *error);

#endif
