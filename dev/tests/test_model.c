// model: the sizes that --model names.
#include "dev/tests/check.h"
#include "model/model.h"

int main(void) {
    static const struct {
        const char *name;
        uint64_t parameters;
    } SIZES[] = {{"15M", 15191712},   {"124M", 123551232}, {"162M", 162148608},
                 {"350M", 359794688}, {"760M", 756747264}, {"1.3B", 1336152064}};
    check_group("sizes");
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        ModelConfig config = {.seq_len = 1024};
        Error error;
        char message[256];
        CHECK(model_parse(&config, SIZES[i].name, &error), "%s: %s", SIZES[i].name, error.text);
        CHECK(attention_parse(&config.attn, "softmax", config.layers, message, sizeof message), "%s", message);
        uint64_t found = model_parameters(&config);
        CHECK(found == SIZES[i].parameters, "%s: %llu parameters, expected %llu", SIZES[i].name,
              (unsigned long long)found, (unsigned long long)SIZES[i].parameters);
    }
    return check_verdict();
}
