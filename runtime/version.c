#include "runtime/version.h"

#include "runtime/error.h"

#ifndef COMMIT
#define COMMIT "unknown"
#endif

void version_add(cJSON *json) {
    cJSON_AddStringToObject(json, "program", program_name);
    cJSON_AddStringToObject(json, "version", ATTN_C_VERSION);
    cJSON_AddStringToObject(json, "commit", COMMIT);
}
