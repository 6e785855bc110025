// The version of attn.c. It is kept only here; --version, --help and run.json print it. CHANGELOG.md and CITATION.cff
// name the latest release, and dev/tests/test_readme.py checks that all of them agree.
#ifndef RUNTIME_VERSION_H
#define RUNTIME_VERSION_H

#include <cjson/cJSON.h>

#define ATTN_C_VERSION "0.3.0"

// Adds what writes a file: "program", "version" and "commit".
void version_add(cJSON *json);

// The commit, the compiler, and a checksum of its flags and the instruction sets that they imply. The ranks of a run
// need the same, because each updates its weights by itself.
const char *version_build(void);

#endif
