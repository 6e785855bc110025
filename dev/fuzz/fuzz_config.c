// Reads a hostile config.json: either it is rejected with a message that names it, or the model that was read writes
// the same config.json again.
#include <stdlib.h>
#include <string.h>

#include "dev/fuzz/folder.h"
#include "model/model.h"

// The scaling that was read is also one of --rope-scaling.
static void check_rope(const ModelConfig *config) {
    RopeScaling again;
    char text[ROPE_TEXT], message[512];
    rope_scaling_text(&config->rope_scaling, text, sizeof text);
    if (!rope_scaling_parse(&again, text, message, sizeof message)) abort();
    if (!rope_scaling_equal(&config->rope_scaling, &again)) abort();
    double *frequency = rope_frequencies(&(RopeAngles){config->rope_theta, again, config->head_dim, 64}, 65);
    for (size_t i = 0; i < config->head_dim / 2; i++)
        if (!(frequency[i] >= 0 && frequency[i] <= 1)) abort();
    free(frequency);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Error error = {0};
    ModelConfig config, again;
    const char *folder = fuzz_folder(NULL);
    fuzz_file("config.json", bytes, size);
    if (!model_config_read(&config, folder, NULL, &error)) {
        if (error.code != EXIT_INPUT || !strstr(error.text, folder)) abort();
        return 0;
    }
    if (config.heads % config.kv_heads || config.head_dim % 2 || !(config.norm_eps > 0) ||
        (size_t)config.end_of_text >= config.vocab || model_parameters(&config) == 0)
        abort();
    check_rope(&config);
    char *text = model_config_json(&config, false);
    fuzz_file("config.json", (const uint8_t *)text, strlen(text));
    if (!model_config_read(&again, folder, NULL, &error)) abort();
    char *text_again = model_config_json(&again, false);
    if (strcmp(text, text_again)) abort();
    free(text);
    free(text_again);
    return 0;
}
