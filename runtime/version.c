#include "runtime/version.h"

#include "runtime/error.h"

#ifndef COMMIT
#define COMMIT "unknown"
#endif

#ifndef FLAGS_SUM
#define FLAGS_SUM "unknown"
#endif

const char *version_build(void) {
    return "of commit " COMMIT ", by compiler " __VERSION__ " with flags " FLAGS_SUM;
}

void version_add(cJSON *json) {
    cJSON_AddStringToObject(json, "program", program_name);
    cJSON_AddStringToObject(json, "version", ATTN_C_VERSION);
    cJSON_AddStringToObject(json, "commit", COMMIT);
}
